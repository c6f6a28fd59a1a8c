"""Draw one training step of two MoE layers: eager, with graphs of scopes, as a whole step.

    python docs/pictures/one_step.py    # writes docs/pictures/one_step.png

The picture is a drawing, not a measurement: widths show who waits for whom.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

LAUNCH, KERNEL, GRAPH, DISPATCH = "#b8c4d0", "#4878a8", "#5a9e6f", "#d08770"
PARTS = (
    "attention",
    "router, sort",
    "dispatch, experts",
    "attention",
    "router, sort",
    "dispatch, experts",
)
SMALL, LARGE = 3, 2  # kernels of a part whose sizes are fixed, and of dispatch and experts


def main() -> None:
    figure, axes = pyplot.subplots(3, 1, figsize=(6.6, 4.0), sharex=True)
    for axis, (title, draw) in zip(axes, STEPS.items(), strict=True):
        end = draw(axis)
        axis.set_yticks([1.35, 0.35], ["host", "GPU"])
        axis.set_ylim(-0.1, 2.0)
        axis.set_xlim(0, 31)
        axis.set_xticks([])
        axis.set_title(title, loc="left", fontsize=9)
        axis.annotate("", (end, -0.05), (0, -0.05), arrowprops={"arrowstyle": "->"})
        for side in ("top", "right", "bottom", "left"):
            axis.spines[side].set_visible(False)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=c) for c in (LAUNCH, KERNEL, GRAPH, DISPATCH)]
    names = ["launch by the host", "kernel", "replayed graph", "kernel of the eager dispatch"]
    figure.legend(handles, names, ncols=4, loc="lower center", fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=150)


def box(axis, row: float, start: float, width: float, color: str) -> float:
    axis.add_patch(pyplot.Rectangle((start, row), width, 0.7, color=color, linewidth=0))
    return start + width + 0.08


def eager(axis) -> float:
    """Every kernel waits for its own launch."""
    host = gpu = 0.0
    for part in PARTS:
        is_large = part.startswith("dispatch")
        for _ in range(LARGE if is_large else SMALL):
            host = box(axis, 1, host, 1.5, LAUNCH)
            gpu = box(axis, 0, max(host, gpu), 0.9 if is_large else 0.35, KERNEL)
    return gpu


def scopes(axis) -> float:
    """A launch per graph; the dispatch between graphs stays eager."""
    host = gpu = 0.0
    for part in PARTS:
        if part.startswith("dispatch"):
            for _ in range(LARGE):
                host = box(axis, 1, host, 1.5, LAUNCH)
                gpu = box(axis, 0, max(host, gpu), 0.9, DISPATCH)
        elif part == "attention":
            host = box(axis, 1, host, 0.6, LAUNCH)
            gpu = box(axis, 0, max(host, gpu), 2 * SMALL * 0.35, GRAPH)
    return gpu


def whole_step(axis) -> float:
    """One launch; sizes of the dispatch stay on the GPU."""
    host = box(axis, 1, 0.0, 0.6, LAUNCH)
    return box(axis, 0, host, 4 * SMALL * 0.35 + 2 * LARGE * 0.9, GRAPH)


STEPS = {
    "eager: one launch for each kernel, the GPU waits for the host": eager,
    'graphs of scopes ("attn,moe_router,moe_preprocess"): one launch for each graph': scopes,
    "whole step (FullIteration): one launch": whole_step,
}

if __name__ == "__main__":
    main()
