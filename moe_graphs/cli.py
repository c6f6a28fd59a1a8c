"""The command line. ``main`` is the entry point ``moe-graphs``.

This file only describes the commands. The code that they run imports torch, so a command imports
it when it runs.
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
    str | None,
    typer.Option(help="tiny (for a CPU) or small (for one GPU). (default: by the device)"),
]
OptimizerInGraph = Annotated[
    bool,
    typer.Option(
        "--optimizer-in-graph", help="With full_iteration, the graph has clipping and update, too."
    ),
]
BatchSize = Annotated[int | None, typer.Option(help="Number of sequences per optimizer step.")]
Microbatches = Annotated[int | None, typer.Option(help="Number of parts of a step's batch.", min=1)]
SequenceLength = Annotated[int | None, typer.Option(help="Number of tokens of a sequence.")]
Optimizer = Annotated[
    str | None,
    typer.Option(help="adamw (ours), torch_adamw, or muon for matrices. (default: adamw)"),
]
OptimizerState = Annotated[
    str | None,
    typer.Option(
        help="Dtype of AdamW's states: parameter (the parameter's), float32, bfloat16 or 8bit. "
        "(default: parameter)"
    ),
]
EmaDecay = Annotated[
    float | None,
    typer.Option("--ema", help="Decay of averaged weights, which evaluations then use."),
]
Seed = Annotated[int, typer.Option(help="Seed of weights, dropout and the order of the text.")]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda, cuda:1 and so on. (default: cuda if there is one)")
]
Dtype = Annotated[str, typer.Option(help="Dtype of the parameters: float32 or bfloat16.")]
Deterministic = Annotated[bool, typer.Option(help="Use deterministic kernels on the GPU.")]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout, and all else on stderr.")
]
DpReplicate = Annotated[
    int | None, typer.Option(help="Number of copies of the sharded model (HSDP).")
]
DpShard = Annotated[
    int | None,
    typer.Option(help="Number of ranks that FSDP2 shards over. (default: all that are left)"),
]
Tp = Annotated[int | None, typer.Option(help="Number of tensor-parallel ranks.")]
Cp = Annotated[int | None, typer.Option(help="Number of ranks that share every sequence.")]
Ep = Annotated[
    int | None,
    typer.Option(help="Number of ranks that share the experts, out of dp-shard x cp."),
]
Pp = Annotated[int | None, typer.Option(help="Number of pipeline-parallel ranks.")]
MixedPrecision = Annotated[
    bool,
    typer.Option(
        "--mixed-precision",
        help="FSDP2 gathers parameters in bf16 and reduces in fp32; without it, autocast is used.",
    ),
]
ScheduleName = Annotated[
    str, typer.Option(help="Schedule of a pipeline: 1f1b, gpipe or interleaved_1f1b.")
]
StagesPerRank = Annotated[
    int | None,
    typer.Option(help="Stages of a pipeline per rank. (default: 1, interleaved_1f1b: 2)"),
]
LayersPerGroup = Annotated[
    int | None,
    typer.Option(help="Number of layers that FSDP2 gathers and reduces together. (default: 1)"),
]


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
        Path | None, typer.Option(help="Start from the Hugging Face checkpoint in a directory.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Directory of tokenizer.json, if it is not that of --init.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="A directory of text or .jsonl files, or one file. (default: Python's library)"
        ),
    ] = None,
    impl: Annotated[
        str | None,
        typer.Option(
            help="local captures scopes (as Megatron's transformer_engine does), full_iteration "
            "captures whole steps, none trains eagerly. (default: the fastest that is legal, "
            "which the run prints)"
        ),
    ] = None,
    scopes: Annotated[
        str | None,
        typer.Option(
            help="Scopes to capture; implies --impl local. (default: all that can be captured)"
        ),
    ] = None,
    optimizer_in_graph: Annotated[
        bool | None,
        typer.Option(
            "--optimizer-in-graph/--update-outside",
            help="Whole steps include clipping and update, or leave them out. (default: include)",
        ),
    ] = None,
    dispatcher: Annotated[
        str | None,
        typer.Option(
            help="local, padded, all_to_all, all_gather or symmetric. (default: local; with --ep "
            "symmetric if GPUs reach each other's memory, else all_gather)"
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Number of optimizer steps.")] = None,
    batch_size: BatchSize = None,
    microbatches: Microbatches = None,
    sequence_length: SequenceLength = None,
    learning_rate: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    warmup_steps: Annotated[
        int | None, typer.Option(help="Number of steps to the peak learning rate.")
    ] = None,
    optimizer: Optimizer = None,
    optimizer_state: OptimizerState = None,
    stochastic_rounding: Annotated[
        bool,
        typer.Option(
            "--stochastic-rounding",
            help="Round bf16 parameters and states stochastically, which is right on average.",
        ),
    ] = False,
    ema_decay: EmaDecay = None,
    seed: Seed = 0,
    device: Device = None,
    dtype: Dtype = "float32",
    mixed_precision: MixedPrecision = False,
    experts: Annotated[
        str,
        typer.Option(help="Kernels of the experts: moe_graphs, transformer_engine or megablocks."),
    ] = "moe_graphs",
    linear: Annotated[
        str, typer.Option(help="Kernels of the projections: torch or transformer_engine.")
    ] = "torch",
    fp8: Annotated[
        str,
        typer.Option(
            help="FP8 recipe of Transformer Engine's modules: none, delayed, current or block."
        ),
    ] = "none",
    resume: Annotated[
        Path | None,
        typer.Option(
            help="A run's directory, or one of its checkpoints, to go on from. Options that are "
            "not given are kept from that run."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The run's directory. (default: a new one in runs/, also with --resume)"),
    ] = None,
    checkpoint_every: Annotated[
        int, typer.Option(help="Steps between checkpoints; 0 writes one at the end.")
    ] = 0,
    save: Annotated[bool, typer.Option(help="Write checkpoints.")] = True,
    find_nan: Annotated[
        bool,
        typer.Option(
            "--find-nan",
            help="When a step gives a NaN or infinity, run it again eagerly and name the first "
            "operation of it. Each step takes longer: its state is copied to the host.",
        ),
    ] = False,
    deterministic: Deterministic = True,
    compare_: Annotated[
        bool, typer.Option("--compare", help="Run eagerly and graphed, and compare both runs.")
    ] = False,
    json_: AsJson = False,
    nproc: Annotated[
        int | None,
        typer.Option(
            help="Number of ranks on this host, which the command starts as torchrun does."
        ),
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
            help="FSDP2 shards weights over data-parallel ranks. Without it every rank has all "
            "weights, and only experts may be shared: faster for small models, and legal with "
            "scopes."
        ),
    ] = True,
    schedule: ScheduleName = "1f1b",
    stages_per_rank: StagesPerRank = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds that a rank waits for the others before it gives up.")
    ] = 600.0,
) -> None:
    """Trains a byte-level MoE language model, or a Hugging Face checkpoint, on text.

    The command runs on one process, on torchrun's workers, or with --nproc on workers that it
    starts itself.
    """
    options = dict(locals())
    del options["context"]
    from moe_graphs.lm.start import start

    sources = {name: context.get_parameter_source(name) for name in options}
    given = {name for name, source in sources.items() if source and source.name == "COMMANDLINE"}
    start(given=given, **options)


def export(
    run: Annotated[Path, typer.Argument(help="A run's directory, or one of its checkpoints.")],
    out: Annotated[Path, typer.Option(help="The file to write; it must not exist yet.")],
) -> None:
    """Writes the model of a checkpoint to one safetensors file.

    The checkpoint may be of any number of ranks; the file has the names of one process.
    """
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
        Path | None, typer.Option(help="Text as for train. (default: Python's library)")
    ] = None,
    optimizer_in_graph: OptimizerInGraph = False,
    dispatcher: Annotated[
        str, typer.Option(help="Dispatcher: local, padded, all_to_all or all_gather.")
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
    fp8: Annotated[str, typer.Option(help="FP8 recipe, as for train.")] = "none",
    deterministic: Deterministic = True,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="File of a Chrome trace for Perfetto, .json or .json.gz; one for each way."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File of a picture (.png, .svg).")] = None,
    json_: AsJson = False,
) -> None:
    """Shows where the time of a training step goes: kernels by group, gaps and floors."""
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
    gpus: Annotated[int, typer.Option(help="Number of ranks.", min=1)],
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
            help="Sequences per step of all ranks. (default: one per microbatch and rank)", min=1
        ),
    ] = None,
    microbatches: Microbatches = None,
    sequence_length: Annotated[
        int | None,
        typer.Option(
            help="Number of tokens of a sequence. (default: 4096, or the preset's)", min=1
        ),
    ] = None,
    dtype: Dtype = "float32",
    optimizer: Optimizer = None,
    optimizer_state: OptimizerState = None,
    ema_decay: EmaDecay = None,
    mixed_precision: MixedPrecision = False,
    reshard_after_forward: Annotated[
        bool, typer.Option(help="FSDP2 frees gathered weights until the backward.")
    ] = True,
    dispatcher: Annotated[
        str | None,
        typer.Option(
            help="Dispatcher with --ep: all_to_all, all_gather or symmetric. (default: all_to_all)"
        ),
    ] = None,
    rows_factor: Annotated[
        float | None,
        typer.Option(
            help="Room for expert rows, as a multiple of balanced routing. (default: worst case)"
        ),
    ] = None,
    json_: AsJson = False,
) -> None:
    """Predicts a layout's memory per rank and bytes on the wire, on the CPU, without its GPUs."""
    options = dict(locals())
    from moe_graphs.lm import plan_command

    plan_command.plan(**options)


options_are_of(build_app)


if __name__ == "__main__":
    main()
