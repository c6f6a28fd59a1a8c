"""The loss picture of a run: what the model has learned, compared with compressors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path


def draw_losses(
    path: Path,
    *,
    title: str,
    train_nats: Sequence[float],
    held_out_bits: Sequence[tuple[int, float]],
    compressors: Mapping[str, float],
) -> str | None:
    """Writes a PNG; returns the reason if it could not be drawn.

    Args:
        train_nats: the loss of every step in nats per byte; NaN for steps without a known loss.
        held_out_bits: pairs of step and held-out bits per byte.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no picture: matplotlib is not installed (pip install 'moe_graphs[plot]')"
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.subplots()
    bits = [nats / math.log(2) for nats in train_nats]
    axes.plot(range(1, len(bits) + 1), bits, color="0.75", linewidth=0.6, label="train, each step")
    axes.plot(*_smoothed(bits), color="tab:blue", label="train, mean of recent steps")
    if held_out_bits:
        steps, values = zip(*held_out_bits, strict=True)
        axes.plot(
            steps, values, "o-", color="tab:red", markersize=4, label="held out (last: all of it)"
        )
    for (name, value), style in zip(compressors.items(), ("--", "-.", ":"), strict=False):
        axes.axhline(value, color="0.3", linewidth=1, linestyle=style, label=f"{name} {value:.3f}")
    finite = [value for value in (*bits, *compressors.values()) if math.isfinite(value)]
    axes.set(xlabel="step", ylabel="bits per byte", ylim=(0.8 * min(finite), 5))
    axes.set_title(title, fontsize=10, wrap=True, parse_math=False)
    axes.legend(frameon=False, loc="upper right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    return None


def _smoothed(values: Sequence[float]) -> tuple[list[int], list[float]]:
    """Means over the last 2 % of the steps (at least 10), if all of them are known."""
    span = max(10, len(values) // 50)
    steps, means = [], []
    for end in range(span, len(values) + 1, max(1, span // 10)):
        mean = sum(values[end - span : end]) / span
        if math.isfinite(mean):
            steps.append(end)
            means.append(mean)
    return steps, means
