"""Mutations that are silently different today, by name, with the engines (s, c, f) that they are in.

``test_mutations.py`` fails for a name that is silent and not here, and for one that is here and is
not silent any more. s: scopes, c: callables, f: whole steps.
"""

from __future__ import annotations

KNOWN: dict[str, str] = {}
