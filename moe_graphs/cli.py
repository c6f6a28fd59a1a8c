"""The command line. ``main`` is the entry point ``moe-graphs``.

Only what describes the commands is in here: what they run comes with torch, when they run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moe_graphs import __version__
from moe_graphs.bench.command import bench_app
from moe_graphs.terminal import options_are_of

# Options of several commands.
Preset = Annotated[
    str | None, typer.Option(help="tiny (CPU) or small (one GPU); by default, by the device.")
]
OptimizerInGraph = Annotated[
    bool,
    typer.Option("--optimizer-in-graph", help="With full_iteration: clipping and update, too."),
]
BatchSize = Annotated[int | None, typer.Option(help="Sequences per optimizer step.")]
Microbatches = Annotated[int | None, typer.Option(help="Parts of a step's batch.", min=1)]
SequenceLength = Annotated[int | None, typer.Option(help="Tokens of a sequence.")]
Optimizer = Annotated[
    str | None,
    typer.Option(help="adamw (ours), torch_adamw, or muon for matrices.  [default: adamw]"),
]
OptimizerState = Annotated[
    str | None,
    typer.Option(
        help="Dtype of AdamW's states: parameter (the parameter's), float32, bfloat16, 8bit.  "
        "[default: parameter]"
    ),
]
EmaDecay = Annotated[
    float | None,
    typer.Option("--ema", help="Decay of averaged weights, which evaluation then uses."),
]
Seed = Annotated[int, typer.Option(help="Seed of weights, dropout and the order of the text.")]
Device = Annotated[str | None, typer.Option(help="By default cuda if there is one.")]
Dtype = Annotated[str, typer.Option(help="Dtype of the parameters: float32, bfloat16.")]
Deterministic = Annotated[bool, typer.Option(help="Deterministic kernels on the GPU.")]
AsJson = Annotated[
    bool, typer.Option("--json", help="One JSON document on stdout, all else on stderr.")
]
DpReplicate = Annotated[int | None, typer.Option(help="Copies of the sharded model (HSDP).")]
DpShard = Annotated[
    int | None,
    typer.Option(help="Ranks that FSDP2 shards over; by default all that are left."),
]
Tp = Annotated[int | None, typer.Option(help="Tensor-parallel ranks.")]
Cp = Annotated[int | None, typer.Option(help="Ranks that share every sequence.")]
Ep = Annotated[int | None, typer.Option(help="Ranks that share the experts, out of dp-shard x cp.")]
Pp = Annotated[int | None, typer.Option(help="Pipeline-parallel ranks.")]
MixedPrecision = Annotated[
    bool,
    typer.Option(
        "--mixed-precision",
        help="FSDP2 gathers bf16 to compute in and reduces fp32; otherwise autocast.",
    ),
]
ScheduleName = Annotated[str, typer.Option(help="Of a pipeline: 1f1b, gpipe, interleaved_1f1b.")]
StagesPerRank = Annotated[
    int | None, typer.Option(help="Of a pipeline.  [default: 1, interleaved_1f1b: 2]")
]
LayersPerGroup = Annotated[
    int | None, typer.Option(help="Layers that FSDP2 gathers and reduces together.  [default: 1]")
]


def build_app() -> typer.Typer:
    app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)

    @app.callback()
    def moe_graphs(
        version: Annotated[
            bool,
            typer.Option(
                "--version", callback=_print_version, is_eager=True, help="Prints the version."
            ),
        ] = False,
    ) -> None:
        """MoE training on PyTorch with partial CUDA graphs."""

    app.command()(train)
    app.command()(export)
    app.command()(profile)
    app.command()(plan)
    app.add_typer(bench_app(), name="bench")
    return app


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"moe-graphs {__version__}")
        raise typer.Exit


def main() -> None:
    build_app()()


def train(
    context: typer.Context,
    preset: Preset = None,
    init: Annotated[
        Path | None, typer.Option(help="Goes on with the Hugging Face checkpoint in a directory.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Directory of its tokenizer.json, if it is another.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="A folder or a file of text or .jsonl; by default Python's own library."),
    ] = None,
    impl: Annotated[
        str | None,
        typer.Option(
            help="local captures scopes (as Megatron's transformer_engine does), full_iteration "
            "whole steps, none trains eagerly.  [default: the fastest that is legal, which the run "
            "prints]"
        ),
    ] = None,
    scopes: Annotated[
        str | None,
        typer.Option(help="What to capture; it implies --impl local.  [default: all that can be]"),
    ] = None,
    optimizer_in_graph: Annotated[
        bool | None,
        typer.Option(
            "--optimizer-in-graph/--update-outside",
            help="Whole steps with clipping and update, or without.  [default: with]",
        ),
    ] = None,
    dispatcher: Annotated[
        str | None,
        typer.Option(
            help="local, padded, all_to_all, all_gather or symmetric.  [default: local, with --ep: "
            "symmetric where GPUs reach each other's memory, else all_gather]"
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    batch_size: BatchSize = None,
    microbatches: Microbatches = None,
    sequence_length: SequenceLength = None,
    learning_rate: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    warmup_steps: Annotated[int | None, typer.Option(help="Steps to the peak.")] = None,
    optimizer: Optimizer = None,
    optimizer_state: OptimizerState = None,
    stochastic_rounding: Annotated[
        bool,
        typer.Option(
            "--stochastic-rounding",
            help="Rounds bf16 parameters and states up or down at random: right on the average.",
        ),
    ] = False,
    ema_decay: EmaDecay = None,
    seed: Seed = 0,
    device: Device = None,
    dtype: Dtype = "float32",
    mixed_precision: MixedPrecision = False,
    experts: Annotated[
        str,
        typer.Option(help="Kernels of the experts: moe_graphs, transformer_engine, megablocks."),
    ] = "moe_graphs",
    linear: Annotated[
        str, typer.Option(help="Kernels of the projections: torch, transformer_engine.")
    ] = "torch",
    fp8: Annotated[
        str,
        typer.Option(
            help="Recipe of Transformer Engine's parts in training: none, delayed, current, block."
        ),
    ] = "none",
    resume: Annotated[
        Path | None,
        typer.Option(
            help="A run's directory, or one of its checkpoints; its settings are kept where none "
            "are given."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Directory of the run. By default a new one in runs/, with --resume, too."
        ),
    ] = None,
    checkpoint_every: Annotated[
        int, typer.Option(help="Steps between checkpoints; 0 for one at the end.")
    ] = 0,
    save: Annotated[bool, typer.Option(help="Whether to write checkpoints.")] = True,
    deterministic: Deterministic = True,
    compare_: Annotated[
        bool, typer.Option("--compare", help="Run eager and graphed, and compare.")
    ] = False,
    json_: AsJson = False,
    nproc: Annotated[
        int | None, typer.Option(help="Ranks on this host, started as torchrun does.")
    ] = None,
    dp_replicate: DpReplicate = None,
    dp_shard: DpShard = None,
    tp: Tp = None,
    cp: Cp = None,
    ep: Ep = None,
    pp: Pp = None,
    layers_per_group: LayersPerGroup = None,
    fsdp: Annotated[
        bool,
        typer.Option(
            help="Shards weights over data-parallel ranks; or all have them, but shared experts: "
            "faster for small models, and legal with scopes."
        ),
    ] = True,
    schedule: ScheduleName = "1f1b",
    stages_per_rank: StagesPerRank = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds after which a rank gives up to wait for the others.")
    ] = 600.0,
) -> None:
    """Trains a byte-level MoE language model, or a Hugging Face checkpoint, on text: on one
    process, on torchrun's workers, or with --nproc on workers that it starts itself."""
    options = dict(locals())
    del options["context"]
    from moe_graphs.lm.start import start

    sources = {name: context.get_parameter_source(name) for name in options}
    given = {name for name, source in sources.items() if source and source.name == "COMMANDLINE"}
    start(given=given, **options)


def export(
    run: Annotated[Path, typer.Argument(help="A run's directory, or one of its checkpoints.")],
    out: Annotated[Path, typer.Option(help="The file to write, new.")],
) -> None:
    """Writes the model of a checkpoint to one safetensors file, on however many ranks it was
    trained, with the names of one process."""
    from moe_graphs.lm.exporting import export_model

    export_model(run, out)


def profile(
    impl: Annotated[
        str,
        typer.Option(
            help="Ways to run the step, comma-separated: none, local, full_iteration, or scopes "
            "joined by +, such as attn+moe."
        ),
    ] = "none,attn+moe,full_iteration",
    preset: Preset = None,
    data: Annotated[
        Path | None, typer.Option(help="Text as for train; by default Python's own library.")
    ] = None,
    optimizer_in_graph: OptimizerInGraph = False,
    dispatcher: Annotated[
        str, typer.Option(help="local, padded, all_to_all or all_gather.")
    ] = "local",
    batch_size: BatchSize = None,
    microbatches: Microbatches = None,
    sequence_length: SequenceLength = None,
    optimizer: Optimizer = None,
    seed: Seed = 0,
    device: Device = None,
    dtype: Dtype = "float32",
    experts: Annotated[str, typer.Option(help="Kernels of the experts, as for train.")] = (
        "moe_graphs"
    ),
    linear: Annotated[str, typer.Option(help="Kernels of the projections, as for train.")] = (
        "torch"
    ),
    fp8: Annotated[str, typer.Option(help="none, delayed, current, block.")] = "none",
    deterministic: Deterministic = True,
    trace: Annotated[
        Path | None,
        typer.Option(help="A Chrome trace for Perfetto, .json or .json.gz; one for each impl."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A picture (.png, .svg).")] = None,
    json_: AsJson = False,
) -> None:
    """Where the time of a training step goes: kernels by group, gaps and floors, side by side."""
    options = dict(locals())
    from moe_graphs.lm import profile_command

    profile_command.profile(**options)


def plan(
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "--preset",
            help="A published architecture (qwen3-235b-a22b, llama3.1-405b, ...), a preset of "
            "train, or a directory with a Hugging Face config.json.",
        ),
    ],
    gpus: Annotated[int, typer.Option(help="Ranks.", min=1)],
    dp_replicate: DpReplicate = None,
    dp_shard: DpShard = None,
    tp: Tp = None,
    cp: Cp = None,
    ep: Ep = None,
    pp: Pp = None,
    schedule: ScheduleName = "1f1b",
    stages_per_rank: StagesPerRank = None,
    layers_per_group: LayersPerGroup = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            help="Sequences per step of all ranks.  [default: one a microbatch and rank]", min=1
        ),
    ] = None,
    microbatches: Microbatches = None,
    sequence_length: Annotated[
        int | None,
        typer.Option(help="Tokens of a sequence.  [default: 4096, or the preset's]", min=1),
    ] = None,
    dtype: Dtype = "float32",
    optimizer: Optimizer = None,
    optimizer_state: OptimizerState = None,
    ema_decay: EmaDecay = None,
    mixed_precision: MixedPrecision = False,
    reshard_after_forward: Annotated[
        bool, typer.Option(help="Whether FSDP2 frees gathered weights until the backward.")
    ] = True,
    dispatcher: Annotated[
        str | None,
        typer.Option(help="With --ep: all_to_all, all_gather or symmetric.  [default: all_to_all]"),
    ] = None,
    rows_factor: Annotated[
        float | None,
        typer.Option(
            help="Room for rows of experts, in those of a balanced routing.  [default: the worst]"
        ),
    ] = None,
    json_: AsJson = False,
) -> None:
    """A layout's memory of a rank and bytes on the wire, computed on the CPU without any of it."""
    options = dict(locals())
    from moe_graphs.lm import plan_command

    plan_command.plan(**options)


options_are_of(build_app)


if __name__ == "__main__":
    main()
