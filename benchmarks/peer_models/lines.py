"""One line of results from the processes of a contender, and a table of the lines."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.table import Table

from measure import Spread
from peer_models.cases import Case
from peer_models.entries import ENTRIES

Line = dict[str, Any]
# Measured once per process and the same but for noise: the largest is told.
MOST = ("reserved_bytes", "max_allocated_bytes", "capture_s", "first_step_s", "build_s")
SAME = ("settings", "load", "graphs", "timeline", "first_losses", "last_loss")


def line(name: str, case: Case, records: Sequence[Mapping[str, Any]], stamp: Any) -> Line:
    """Line with the samples of all processes; ``round_ms`` has the median of each process.

    If a process failed, the line has ``error`` besides the other processes' measurements.
    """
    entry = ENTRIES[name]
    good = [record for record in records if record["error"] is None]
    errors = [record["error"] for record in records if record["error"] is not None]
    made: Line = {
        "benchmark": "peers",
        "model": case.name,
        "routing": case.routing,
        "setting": case.describe(),
        "contender": name,
        "title": entry.title,
        "optimizer": "moe_graphs AdamW" if entry.contender.our_adamw else "torch fused AdamW",
        "error": errors[-1] if errors else None,
        "environment": stamp,
    }
    kept = good or records[:1]
    made |= {key: kept[0].get(key) for key in SAME}
    for key in MOST:
        values = [record[key] for record in kept if record.get(key) is not None]
        made[key] = max(values) if values else None
    if good:
        rounds = [record["step_samples_ms"] for record in good]
        made["round_ms"] = [statistics.median(samples) for samples in rounds]
        made["step_ms"] = asdict(Spread.of([ms for samples in rounds for ms in samples]))
        host = [ms for record in good for ms in record["host_samples_ms"]]
        made["host_ms"] = asdict(Spread.of(host))
    return made


def table(case: Case, lines: Sequence[Line]) -> Table:
    """The fastest first, those that failed last with the last line of their error."""
    drawn = Table(
        title=f"{case.name}: {case.describe()}",
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
    )
    headings = (
        "contender", "step ms", "p10 to p90", "x best of ours", "host ms", "GPU busy ms",
        "reserved", "allocated", "capture s", "first loss", "apart", "last loss",
    )  # fmt: skip
    for heading in headings:
        drawn.add_column(heading, justify="left" if heading == "contender" else "right")
    timed = sorted((x for x in lines if "step_ms" in x), key=lambda x: x["step_ms"]["median"])
    ours = [x for x in timed if x["contender"].startswith("ours")]
    first = next((x["first_losses"] for x in lines if x.get("first_losses")), None)
    for each in timed:
        drawn.add_row(each["title"], *_cells(each, ours[0] if ours else None, first))
    failed = [x for x in lines if x["error"]]
    notes = [f"{x['title']}: {x['error'].splitlines()[-1][:160]}" for x in failed]
    drawn.caption = "\n".join([*_summary(timed, ours), *notes])
    return drawn


def apart(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Largest difference of the first steps' losses from those of another contender."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True))


def _cells(each: Line, ours: Line | None, losses: Sequence[float] | None) -> list[str]:
    step = each["step_ms"]
    ratio = step["median"] / ours["step_ms"]["median"] if ours else None
    return [
        f"{step['median']:.2f}",
        f"{step['p10']:.2f} to {step['p90']:.2f}",
        _number(ratio, ".2f"),
        f"{each['host_ms']['median']:.2f}",
        _number((each["timeline"] or {}).get("busy_ms"), ".2f"),
        _gib(each["reserved_bytes"]),
        _gib(each["max_allocated_bytes"]),
        _number(each["capture_s"], ".2f"),
        f"{each['first_losses'][0]:.4f}",
        _number(apart(each["first_losses"], losses) if losses else None, ".1e"),
        f"{each['last_loss']:.4f}",
    ]


def _summary(timed: Sequence[Line], ours: Sequence[Line]) -> list[str]:
    """Sentences about the contenders ahead of our fastest one, and the next behind it."""
    if not ours:
        return []
    best = ours[0]["step_ms"]["median"]
    others = [x for x in timed if x not in ours]
    ahead = [f"{x['title']} ({best / x['step_ms']['median']:.2f}x)" for x in others
             if x["step_ms"]["median"] < best]  # fmt: skip
    behind = [f"{x['title']} ({x['step_ms']['median'] / best:.2f}x)" for x in others
              if x["step_ms"]["median"] >= best]  # fmt: skip
    return [
        f"ahead of {ours[0]['title']}: {', '.join(ahead) or 'nobody'}",
        f"behind it: {', '.join(behind) or 'nobody'}",
    ]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _gib(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**30:.1f} GiB"
