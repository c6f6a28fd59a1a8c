"""Table of profiles of one step, side by side, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from moe_graphs.profiling.kernel_groups import COMMUNICATION
from moe_graphs.profiling.step_profile import GroupTimes, StepProfile


def profile_table(profiles: Sequence[StepProfile]) -> Table:
    """Table with a row per group, then rows of the whole step; three columns per profile."""
    first = profiles[0]
    calls = "kernels" if first.device == "cuda" else "operators"
    table = Table(title="where the time of a step goes", title_justify="left")
    table.add_column("ms")
    table.add_column("floor", justify="right")
    for profile in profiles:
        for heading in (profile.name, "reached", calls):
            table.add_column(heading, justify="right", no_wrap=True)
    for name in group_order(profiles):
        found = [_group(profile, name) for profile in profiles]
        floors = [group.floor_ms for group in found if group is not None]
        cells = [cell for group in found for cell in _cells(group)]
        table.add_row(name, _milliseconds(floors[0]), *cells)
    table.add_section()
    for label, values, counts in _totals(profiles):
        cells = []
        for value, count in zip(values, counts, strict=True):
            cells += [_milliseconds(value), "", "" if count is None else f"{count:,.0f}"]
        table.add_row(label, "", *cells)
    table.caption = _caption(profiles)
    table.caption_justify = "left"
    return table


def group_order(profiles: Sequence[StepProfile]) -> list[str]:
    """Groups of all profiles, sorted by their longest time in any profile."""
    longest: dict[str, float] = {}
    for profile in profiles:
        for group in profile.traced.groups:
            longest[group.name] = max(longest.get(group.name, 0.0), group.share_ms)
    return sorted(longest, key=lambda name: -longest[name])


def _group(profile: StepProfile, name: str) -> GroupTimes | None:
    return next((group for group in profile.traced.groups if group.name == name), None)


def _cells(group: GroupTimes | None) -> tuple[str, str, str]:
    if group is None:
        return "-", "-", "-"
    reached = "-" if group.reached is None else f"{group.reached:.0%}"
    return _milliseconds(group.busy_ms), reached, f"{group.calls:,.0f}"


Row = tuple[str, list[float | None], Sequence[float | None]]


def _totals(profiles: Sequence[StepProfile]) -> list[Row]:
    none: list[float | None] = [None] * len(profiles)
    traced = [profile.traced for profile in profiles]
    calls = [sum(group.calls for group in each.groups) for each in traced]
    rows: list[Row] = [("busy", [each.busy_ms for each in traced], calls)]
    if any(each.overlapped_ms > 1e-3 for each in traced):
        rows.append(("saved by overlap", [each.overlapped_ms for each in traced], none))
    if COMMUNICATION in group_order(profiles):
        hidden = [each.communication_hidden_ms for each in traced]
        exposed = [each.communication_exposed_ms for each in traced]
        rows.append(("communication exposed", list(exposed), none))
        rows.append(("communication hidden", list(hidden), none))
    gaps = [each.gaps for each in traced]
    rows.append(("gaps, under the profiler", [each.gaps_ms for each in traced], gaps))
    rows.append(("longest gap", [each.longest_gap_ms for each in traced], none))
    rows.append(("step, without a profiler", [profile.step_ms for profile in profiles], none))
    rows.append(("idle (step less busy)", [profile.idle_ms for profile in profiles], none))
    inside = [
        None
        if p.timeline is None or p.timeline.graph_span_ms is None
        else p.timeline.graph_span_ms - (p.timeline.graph_busy_ms or 0.0)
        for p in profiles
    ]
    if any(value is not None for value in inside):
        rows.append(("idle inside graphs", inside, none))
    launches = [
        None if p.timeline is None else p.timeline.kernel_launches + p.timeline.graph_launches
        for p in profiles
    ]
    rows.append(("host, launches", [profile.host_ms for profile in profiles], launches))
    return rows


def _caption(profiles: Sequence[StepProfile]) -> str:
    lines = [
        f"means of {profiles[0].steps} traced steps; floor: bytes or FLOPs at the rates of "
        f"{profiles[0].rates.describe()}; reached: its share of the time; - : not known"
    ]
    for profile in profiles:
        other = _group(profile, "other")
        if other is not None:
            names = ", ".join(f"{name[:60]} {ms:.3f}" for name, ms in other.longest)
            lines.append(f"other in {profile.name}: {names}")
    return "\n".join(lines)


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:,.3f}"
