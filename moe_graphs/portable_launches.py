"""Launches of portable kernels: kernels count them, reports say them."""

from __future__ import annotations

from collections import Counter

_launches: Counter[str] = Counter()


def count(kernel: str) -> None:
    """One launch of this kernel on a GPU whose architecture has no row in the table of kernels."""
    _launches[kernel] += 1


def portable_launches() -> dict[str, int]:
    """Kernel and architecture -> launches in this process, those recorded into graphs included.
    Replays launch nothing by themselves."""
    return dict(_launches)
