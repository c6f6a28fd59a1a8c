"""Tables of markdown, and numbers as they stand in their cells."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from result_lines import Line


def table(header: str, rows: Iterable[Sequence[str]]) -> str:
    columns = header.count("|") + 1
    lines = [f"| {header} |", "|" + "---|" * columns]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines)


def times(ratio: float) -> str:
    return f"{ratio:.1f}x" if ratio >= 2 else f"{ratio:.2f}x"


def milliseconds(line: Line, key: str = "step_ms") -> str:
    return f"{line[key]['median']:.1f} ms"


def gibibytes(line: Line) -> str:
    found = line.get("reserved_bytes")  # none where a run ended before the phase that measures it
    return "-" if found is None else f"{found / 2**30:.1f} GiB"


def idle(line: Line) -> str:
    share = line.get("idle_share")
    return "-" if share is None else f"{max(0, round(100 * share))} %"  # a trace is another run


def span(shares: Sequence[float]) -> str:
    """Range of shares in percent, such as "1 to 2 %"."""
    low, high = (f"{100 * share:.0f}" for share in (min(shares), max(shares)))
    return f"{low} %" if low == high else f"{low} to {high} %"


def geometric_mean(ratios: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))
