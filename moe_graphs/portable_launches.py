"""Counter of launches that others would be faster than: kernels count, reports print."""

from __future__ import annotations

from collections import Counter

_launches: Counter[str] = Counter()


def count(kernel: str) -> None:
    """Count a launch of ``kernel``.

    The GPU's architecture has no row in the kernels' table, or another kernel would be faster.
    """
    _launches[kernel] += 1


def portable_launches() -> dict[str, int]:
    """Number of launches in this process, by kernel and architecture.

    Launches recorded into a graph count once; replays are not counted.
    """
    return dict(_launches)
