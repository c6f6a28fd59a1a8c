"""Mutations that are silently different today: the name, and the engines in which they are.

s: scopes, c: callables, f: whole steps. ``test_mutations.py`` fails for a silent mutation that is
not here, and for a name here that is not silent any more. A name has the kind of state
(``mutable_states.py``), behind bars what is not plain about the way it is read or installed
(``mutable_sources.py``), and the kind of mutation (``mutations.py``).
``python tests/programs/run_mutations.py --table --known`` prints the lines.
"""

from __future__ import annotations

KNOWN: dict[str, str] = {}
