"""The command line. ``main`` is the entry point ``moe-graphs``.

This file only names the commands; their options are in ``lm/options.py``. The code that they run
imports torch, so a command imports it when it runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moe_graphs import __version__
from moe_graphs.bench.command import bench_app
from moe_graphs.lm.options import PlanOptions, ProfileOptions, TrainOptions
from moe_graphs.option_tree import command
from moe_graphs.terminal import options_are_of


def build_app() -> typer.Typer:
    app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)

    @app.callback()
    def moe_graphs(
        version: Annotated[
            bool,
            typer.Option(
                "--version", callback=_print_version, is_eager=True, help="Print the version."
            ),
        ] = False,
    ) -> None:
        """MoE training on PyTorch with partial CUDA graphs."""

    app.command()(command(TrainOptions, train, config=True))
    app.command()(export)
    app.command()(command(ProfileOptions, profile))
    app.command()(command(PlanOptions, plan))
    app.add_typer(bench_app(), name="bench")
    return app


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"moe-graphs {__version__}")
        raise typer.Exit


def main() -> None:
    build_app()()


def train(options: TrainOptions, given: set[str]) -> None:
    """Trains a byte-level MoE language model, or a Hugging Face checkpoint, on text.

    The command runs on one process, on torchrun's workers, or with --nproc on workers that it
    starts itself.
    """
    from moe_graphs.lm.start import start

    start(options, given)


def export(
    run: Annotated[Path, typer.Argument(help="A run's directory, or one of its checkpoints.")],
    out: Annotated[
        Path, typer.Option(help="The file or directory to write; it must not exist yet.")
    ],
    format: Annotated[
        str, typer.Option(help="safetensors (a file), or transformers (a directory).")
    ] = "safetensors",
) -> None:
    """Writes the model of a checkpoint to one safetensors file, or as transformers loads it.

    The checkpoint may be of any number of ranks; the file has the names of one process. The
    directory for transformers has a tokenizer of bytes, and train goes on from it by --init.
    """
    from moe_graphs.lm.exporting import export_model

    export_model(run, out, format)


def profile(options: ProfileOptions, given: set[str]) -> None:
    """Shows where the time of a training step goes: kernels by group, gaps and floors."""
    from moe_graphs.lm import profile_command

    profile_command.profile(options)


def plan(options: PlanOptions, given: set[str]) -> None:
    """Predicts a layout's memory per rank and bytes on the wire, on the CPU, without its GPUs."""
    from moe_graphs.lm import plan_command

    plan_command.plan(options)


options_are_of(build_app)


if __name__ == "__main__":
    main()
