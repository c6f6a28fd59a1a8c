"""Counter of portable kernels' launches: kernels count, reports print."""

from __future__ import annotations

from collections import Counter

_launches: Counter[str] = Counter()


def count(kernel: str) -> None:
    """Count a launch of ``kernel`` on a GPU whose architecture has no row in the kernels' table."""
    _launches[kernel] += 1


def portable_launches() -> dict[str, int]:
    """Number of launches in this process, by kernel and architecture.

    Launches recorded into a graph count once; replays are not counted.
    """
    return dict(_launches)
