"""Draw the pictures of `docs/concepts.md`.

    python docs/pictures/concepts.py    # writes docs/pictures/{interrupt,static_memory,...}.png

The pictures are drawings, not measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

GRAPH, EAGER, MEMORY, PLAIN = "#5a9e6f", "#d08770", "#4878a8", "#b8c4d0"
WIDTH = 6.2  # inches: small, so that text can be read on a phone, too
EXPERTS = ("#4878a8", "#5a9e6f", "#d08770", "#9b7fb5")


def main() -> None:
    for name, (height, draw) in PICTURES.items():
        figure, axis = pyplot.subplots(figsize=(WIDTH, WIDTH * height / 100))
        axis.set_axis_off()
        axis.set_xlim(0, 100)
        axis.set_ylim(0, height)
        draw(axis)
        figure.subplots_adjust(0, 0, 1, 1)
        figure.savefig(Path(__file__).with_name(f"{name}.png"), dpi=160)
        pyplot.close(figure)


def box(axis, at: tuple[float, float], size: tuple[float, float], color: str, text: str = "",
        *, font: float = 10) -> None:  # fmt: skip
    axis.add_patch(pyplot.Rectangle(at, *size, color=color, linewidth=0))
    middle = at[0] + size[0] / 2, at[1] + size[1] / 2
    ink = "#303840" if color == PLAIN else "white"
    axis.text(*middle, text, ha="center", va="center", fontsize=font, color=ink, weight="bold")


def write(axis, at: tuple[float, float], text: str, *, to: str = "left", font: float = 10) -> None:
    axis.text(*at, text, ha=to, va="center", fontsize=font)


def arrow(axis, start: tuple[float, float], end: tuple[float, float]) -> None:
    axis.annotate("", end, start, arrowprops={"arrowstyle": "-|>"})


def row(axis, y: float, parts: Sequence[tuple[str, float, str]], *, x: float = 2.0) -> float:
    """Boxes beside one another: text, width and color of each. Returns where they end."""
    for text, width, color in parts:
        box(axis, (x, y), (width - 0.6, 8), color, text, font=9)
        x += width
    return x


def interrupt(axis) -> None:
    """A layer in its capture, which the interrupt ends, and in a replay."""
    stages = [("attention", 18), ("router", 13), ("sort", 11), ("dispatch", 15), ("experts", 15),
              ("combine", 15)]  # fmt: skip
    write(axis, (2, 44), 'capture of the scope "attn,moe_router,moe_preprocess"')
    row(axis, 32, [(*each, GRAPH) for each in stages[:3]])
    box(axis, (44.6, 30.5), (0.9, 11), "#b03a2e")
    write(axis, (47, 38), "the interrupt ends the forward here;", font=9)
    write(axis, (47, 34), "attention's result, rows and their order are kept", font=9)
    write(axis, (2, 22), "replay")
    row(axis, 10, [("one graph", 42, GRAPH)])
    row(axis, 10, [(*each, EAGER) for each in stages[3:]], x=47)
    arrow(axis, (43.5, 14), (47, 14))
    write(
        axis,
        (2, 4),
        "the forward is entered again at the boundary, with what the graph left",
        font=9,
    )


def static_memory(axis) -> None:
    """The memory that a replay reads and writes, and who may hold it."""
    box(axis, (2, 28), (17, 9), PLAIN, "your input")
    box(axis, (27, 28), (17, 9), MEMORY, "static input")
    box(axis, (50, 24), (20, 17), GRAPH, "graph and\nits pool")
    box(axis, (76, 28), (20, 9), MEMORY, "static output")
    for start, end in ((19, 27), (44, 50), (70, 76)):
        arrow(axis, (start, 32.5), (end, 32.5))
    write(axis, (23, 40), "copy", to="center", font=9)
    write(axis, (86, 40), "lent to you", to="center", font=9)
    write(
        axis, (2, 17), "before the next replay writes there, the engine looks who holds the output:"
    )
    held = (("nobody", "replay"), ("you, the tensor", "your tensor gets\nmemory of its own"),
            ("you, a view of it", "this call runs eagerly,\nlater ones get copies"))  # fmt: skip
    for number, (who, what) in enumerate(held):
        write(axis, (3 + 32 * number, 10.5), who, font=9)
        write(axis, (3 + 32 * number, 4.5), what, font=9)


def in_flight(axis) -> None:
    """A pipeline stage under 1F1B: two microbatches in flight take turns in two slots."""
    steps = (("F0", 0), ("F1", 1), ("B0", 0), ("F2", 0), ("B1", 1), ("F3", 1), ("B2", 0), ("B3", 1))
    write(axis, (2, 38), "one stage of a pipeline, four microbatches, at most two in flight")
    for number, (text, slot) in enumerate(steps):
        box(axis, (2 + 12 * number, 25), (11, 8), (GRAPH, MEMORY)[slot], text)
    write(axis, (2, 18), "time", font=9)
    arrow(axis, (8, 18), (97, 18))
    for number, color in enumerate((GRAPH, MEMORY)):
        box(axis, (2 + 48 * number, 4), (5, 7), color)
        text = f"slot {number}: graphs and a pool of its own"
        write(axis, (9 + 48 * number, 7.5), text, font=9)


def promise(axis) -> None:
    """The calls of one scope in a run, and what is compared in each."""
    calls = [PLAIN] * 3 + [MEMORY, EAGER, GRAPH, EAGER, GRAPH, GRAPH, GRAPH, EAGER]
    write(axis, (2, 50), "calls of one scope, from left to right")
    for number, color in enumerate(calls):
        box(axis, (2 + 8.2 * number, 38), (7.4, 7), color)
    write(axis, (93, 41.5), "...")
    lines = (
        (PLAIN, "observed: eager; the engine notes what the Python of the scope can read"),
        (MEMORY, "the first replay: compared with eager, bit for bit (the proof)"),
        (GRAPH, "every replay: values that Python can read are compared before it (guards)"),
        (EAGER, "now and then: eager in place of the replay, its operations compared (audits)"),
    )
    for number, (color, text) in enumerate(lines):
        y = 28.5 - 7.5 * number
        box(axis, (2, y - 2), (4, 4), color)
        write(axis, (8, y), text, font=9.5)


def dropless(axis) -> None:
    """Tokens, their rows by expert, and blocks of a grouped GEMM, which reads the sizes."""
    chosen = ((0, 2), (2, 3), (0, 2), (1, 2))
    write(axis, (10, 47), "tokens", to="center")
    write(axis, (43, 47), "rows, sorted by expert", to="center")
    write(axis, (80, 47), "grouped GEMM", to="center")
    rows = sorted((expert, token) for token, both in enumerate(chosen) for expert in both)
    for token in range(len(chosen)):
        box(axis, (5, 36 - 9 * token), (10, 6), PLAIN, f"t{token}")
    for number, (expert, token) in enumerate(rows):
        y = 39 - 5 * number
        box(axis, (38, y), (10, 4), EXPERTS[expert], f"t{token}", font=9)
        arrow(axis, (15, 39 - 9 * token), (38, y + 2))
    first = 0
    for expert in range(len(EXPERTS)):
        size = sum(each == expert for each, _ in rows)
        bottom = 39 - 5 * (first + size - 1)
        box(axis, (70, bottom), (20, 5 * size - 1), EXPERTS[expert],
            f"expert {expert}: {size} row{'s' * (size > 1)}", font=9)  # fmt: skip
        arrow(axis, (48.5, bottom + (5 * size - 1) / 2), (69.5, bottom + (5 * size - 1) / 2))
        first += size


# Height in hundredths of the width, and the function that draws.
PICTURES: dict[str, tuple[float, Callable[..., None]]] = {
    "interrupt": (49, interrupt),
    "static_memory": (44, static_memory),
    "in_flight": (43, in_flight),
    "promise": (56, promise),
    "dropless": (51, dropless),
}

if __name__ == "__main__":
    main()
