"""Picture of profiles of one step: a bar per profile, with groups, floors and gaps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moe_graphs.profiling.kernel_groups import NAMES
from moe_graphs.profiling.profile_table import group_order
from moe_graphs.profiling.step_profile import StepProfile

_SMALL = 0.005  # Groups below this share of the longest step are drawn as one.


def draw_profiles(path: Path, profiles: Sequence[StepProfile], *, title: str) -> str | None:
    """Write the picture; return the reason if it could not be drawn, else None.

    A bar is as long as the step without a profiler, so that its end is idle time. The dark part of
    a group is its floor.
    """
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError:
        return "no picture: matplotlib is not installed (pip install 'moe_graphs[plot]')"
    figure = Figure(figsize=(10, 2.6 + 0.7 * len(profiles)), layout="constrained")
    axes = figure.subplots()
    colours = colormaps["tab20"]
    longest = max(max(p.step_ms, p.traced.busy_ms) for p in profiles)
    drawn: set[str] = set()
    for row, profile in enumerate(profiles):
        shares = {group.name: group for group in profile.traced.groups}
        left = small = 0.0
        for name in group_order(profiles):
            group = shares.get(name)
            if group is None or group.share_ms < _SMALL * longest:
                small += 0.0 if group is None else group.share_ms
                continue
            number = NAMES.index(name)  # so that a group has the same colour in every picture
            # Even colours of the map are strong, odd ones are their pale versions.
            strong = colours(2 * (number % 10))
            pale = colours(2 * (number % 10) + 1)
            floor = min(group.floor_ms or 0.0, group.share_ms)
            label = None if name in drawn else name
            hatch = None if number < 10 else "///"
            axes.barh(row, group.share_ms, left=left, color=pale, edgecolor="white", hatch=hatch)
            axes.barh(row, floor, left=left, color=strong, edgecolor="white")
            axes.barh(row, 0, color=strong if group.floor_ms else pale, hatch=hatch, label=label)
            drawn.add(name)
            left += group.share_ms
        axes.barh(
            row, small, left=left, color="0.92", edgecolor="0.6",
            label=None if row else "small groups",
        )  # fmt: skip
        idle = max(0.0, profile.step_ms - left - small)
        axes.barh(
            row, idle, left=left + small, color="white", edgecolor="0.5", linestyle=":",
            label=None if row else "idle",
        )  # fmt: skip
        axes.text(left + small + idle, row, f" {profile.step_ms:.2f} ms", va="center")
    axes.set_yticks(range(len(profiles)), [profile.name for profile in profiles])
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds of a step; dark: the group's floor", xlim=(0, 1.12 * longest))
    axes.set_title(title, fontsize=10, wrap=True, parse_math=False)
    axes.legend(frameon=False, ncols=6, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.25))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    return None
