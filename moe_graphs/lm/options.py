"""The options of ``moe-graphs train``, ``plan`` and ``profile``, each written once.

The command line, its help, the files of ``--config`` and the records of runs are derived from these
classes (``option_tree``). This module imports no torch.

An option is ``of`` one "start" of the command, of the "run" that goes on with it (``--resume``), of
the "layout" over ranks, or of "ranks": right for one number of ranks only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_graphs.layout import ParallelConfig
from moe_graphs.option_tree import changes, option, section
from moe_graphs.registry import (
    DISPATCHERS,
    EXPERTS,
    FP8_RECIPES,
    MODELS,
    OPTIMIZERS,
    PRESETS,
    PROJECTIONS,
)

if TYPE_CHECKING:
    from moe_graphs.kernels.cross_entropy.loss_rule import LossRule
    from moe_graphs.optim.update_options import UpdateOptions

# Names of torch's dtypes; None is the parameter's.
STATE_DTYPES = {
    "parameter": None,
    "float32": "float32",
    "bfloat16": "bfloat16",
    "8bit": "uint8",
}


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    preset: str | None = option(
        None,
        f"{PRESETS.words()}, or module:function of your own. (default: tiny on a CPU, small on a "
        "GPU)",
    )
    init: Path | None = option(None, "Start from the Hugging Face checkpoint in a directory.")
    experts: str = option(
        "moe_graphs",
        f"Kernels of the experts: {EXPERTS.words()}, or module:Class of your own.",
    )
    precision: str = option(
        "weights",
        "Precision of the routed experts' products: weights (that of the weights), fp8 (blocks of "
        "128; on Hopper GPUs, and slowly on a CPU), fp8_powers (scales are powers "
        "of two), or fp8_rows (without the gradients of weights). --dense-precision has other "
        "layers.",
    )
    dense_precision: str = option(
        "weights",
        "Precision of the products of attention's projections, dense layers and shared experts, as "
        "--precision has it for routed experts; the first and the last layer are left out.",
    )
    linear: str = option(
        "torch",
        f"Kernels of the projections: {PROJECTIONS.words()}, or module:Class of your own.",
    )
    fp8: str = option(
        "none",
        f"FP8 recipe of Transformer Engine's modules: none, {FP8_RECIPES.words()}, or "
        "module:Class of another one.",
    )


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    data: Path | None = option(
        None, "A directory of text or .jsonl files, or one file. (default: Python's library)"
    )
    tokenizer: Path | None = option(
        None, "Directory of tokenizer.json, if it is not that of --init."
    )
    attention_within_documents: bool = option(
        False,
        "Tokens see their own document only, not others in their sequence (block-causal attention, "
        "Megatron's --reset-attention-mask).",
    )


@dataclass(frozen=True, kw_only=True)
class GraphOptions:
    """The way in which steps are captured; None leaves the choice to ``fastest_way``."""

    impl: str | None = option(
        None,
        "local captures scopes (as Megatron's transformer_engine does), full_iteration captures "
        "whole steps, none trains eagerly. (default: the fastest that is legal, which the run "
        "prints)",
    )
    scopes: str | None = option(
        None, "Scopes to capture; implies --impl local. (default: all that can be captured)"
    )
    optimizer_in_graph: bool | None = option(
        None,
        "Whole steps include clipping and update, or leave them out. (default: include)",
        flags="--optimizer-in-graph/--update-outside",
    )
    dispatcher: str | None = option(
        None,
        f"{DISPATCHERS.words()}, or module:Class of your own. (default: the fastest that is legal, "
        "which the run prints; all_to_all in plans)",
        of="ranks",
    )


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """One run of the training loop."""

    steps: int = option(help="Number of optimizer steps.")
    batch_size: int = option(
        help="Number of sequences per optimizer step, all microbatches and ranks together. "
        "(default: the preset's; in plans of other models one per microbatch and rank)",
        least=1,
    )
    sequence_length: int = option(
        help="Number of tokens of a sequence. (default: the preset's; in plans of other models "
        "4096)",
        least=1,
    )
    learning_rate: float = option(help="Peak learning rate.")
    microbatches: int = option(
        1, "Number of parts of a step's batch. (default: the preset's)", least=1
    )
    warmup_steps: int = option(
        20, "Number of steps to the peak learning rate. (default: the preset's)"
    )
    final_fraction: float = option(
        0.1, "Part of the peak to which a cosine lowers the learning rate by the last step."
    )
    beta1: float = option(0.9, "Decay of AdamW's first moment.")
    beta2: float = option(0.95, "Decay of AdamW's second moment. (default: the preset's)")
    weight_decay: float = option(0.1, "Weight decay of matrices.")
    clip_norm: float = option(1.0, "Norm that all gradients together are clipped to.")
    label_smoothing: float = option(
        0.0, "Share of the training loss that all tokens of the vocabulary have alike."
    )
    z_loss: float = option(
        0.0, "Coefficient of the squared logsumexp of the logits in the training loss (PaLM: 1e-4)."
    )
    seed: int = option(0, "Seed of weights, dropout and the order of the text.")
    optimizer: str = option(
        "adamw",
        f"{OPTIMIZERS.words()} (for matrices, adamw for the rest), or module:Class of your own.",
    )
    optimizer_state: str = option(
        "parameter",
        "Dtype of AdamW's states: parameter (the parameter's), float32, bfloat16 or 8bit.",
    )
    stochastic_rounding: bool = option(
        False,
        "Round bf16 parameters and states stochastically, which is right on average.",
        flags="--stochastic-rounding",
    )
    ema_decay: float | None = option(
        None, "Decay of averaged weights, which evaluations then use.", flags="--ema"
    )
    update_in_backward: bool = option(
        False,
        "Update each weight within the backward and free its gradient. Clips by the norm of the "
        "step before.",
        flags="--update-in-backward",
    )

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "sequence_length", "microbatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} must be at least 1")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps: {self.warmup_steps} must not be negative")
        if not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"seed: {self.seed} must be from -2**63 to 2**64 - 1, as torch's are")
        assert self.loss_rule  # or is told what is wrong with it
        choice = OPTIMIZERS[self.optimizer]
        if self.optimizer_state not in STATE_DTYPES:
            raise ValueError(
                f"optimizer_state: {self.optimizer_state!r} is not one of {', '.join(STATE_DTYPES)}"
            )
        is_default = self.update_options.is_default  # or is told what is wrong with one
        if not getattr(choice, "takes_update_options", False) and not is_default:
            raise ValueError(
                f"optimizer: {self.optimizer} has no optimizer_state, stochastic_rounding or "
                f"ema_decay: use adamw, or drop them"
            )
        if self.update_in_backward and not getattr(choice, "updates_in_backward", False):
            raise ValueError(
                f"update_in_backward: {self.optimizer} updates all weights together: use adamw"
            )
        if self.update_in_backward and self.microbatches > 1:
            raise ValueError(
                f"update_in_backward: gradients of {self.microbatches} microbatches cannot add up "
                f"where each backward updates: use --microbatches 1"
            )
        if self.batch_size % self.microbatches:
            raise ValueError(
                f"microbatches: {self.microbatches} does not divide the batch of "
                f"{self.batch_size} sequences: choose a divisor"
            )

    @property
    def update_options(self) -> UpdateOptions:
        import torch

        from moe_graphs.optim.update_options import UpdateOptions

        name = STATE_DTYPES[self.optimizer_state]
        dtype = None if name is None else getattr(torch, name)
        return UpdateOptions(dtype, self.stochastic_rounding, self.ema_decay)

    @property
    def loss_rule(self) -> LossRule:
        from moe_graphs.kernels.cross_entropy.loss_rule import LossRule

        return LossRule(label_smoothing=self.label_smoothing, z_loss=self.z_loss)

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.sequence_length

    def learning_rate_at(self, step: int) -> float:
        """The learning rate at a step: linear warm-up, then a cosine.

        It is a function of the step, so there is no state to save.
        """
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / (self.warmup_steps + 1)
        span = max(1, self.steps - self.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, (step - self.warmup_steps) / span)))
        return self.learning_rate * (self.final_fraction + (1 - self.final_fraction) * cosine)


@dataclass(frozen=True, kw_only=True)
class NumericsOptions:
    device: str | None = option(
        None, "cpu, cuda, cuda:1 and so on. (default: cuda if there is one)"
    )
    dtype: str = option("float32", "Dtype of the parameters: float32 or bfloat16.")
    mixed_precision: bool = option(
        False,
        "FSDP2 gathers parameters in bf16 and reduces in fp32; without it, autocast is used.",
        of="ranks",
    )
    deterministic: bool = option(True, "Use deterministic kernels on the GPU.")
    find_nan: bool = option(
        False,
        "When a step gives a NaN or infinity, run it again eagerly and name the first operation "
        "of it. Each step takes longer: its state is copied to the host.",
        of="start",
    )


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    schedule: str = option(
        "1f1b", "Schedule of a pipeline: 1f1b, gpipe or interleaved_1f1b.", of="ranks"
    )
    stages_per_rank: int | None = option(
        None, "Stages of a pipeline per rank. (default: 1, interleaved_1f1b: 2)", of="ranks"
    )


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    nproc: int | None = option(
        None, "Number of ranks on this host, which the command starts as torchrun does.", of="start"
    )
    fsdp: bool = option(
        True,
        "FSDP2 shards weights over data-parallel ranks. Without it every rank has all weights, "
        "and only experts may be shared: faster for small models, and legal with scopes.",
        of="layout",
    )
    timeout: float = option(
        600.0, "Seconds that a rank waits for the others before it gives up.", of="start"
    )


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    resume: Path | None = option(
        None,
        "A run's directory, or one of its checkpoints, to go on from. Options that are not given "
        "are kept from that run.",
        of="start",
    )
    out: Path | None = option(
        None, "The run's directory. (default: a new one in runs/, also with --resume)", of="start"
    )
    checkpoint_every: int = option(0, "Steps between checkpoints; 0 writes one at the end.")
    evaluate_every: int | None = option(
        None,
        "Steps between evaluations on a sample of held-out text. (default: the preset's)",
        least=1,
    )
    save: bool = option(True, "Write checkpoints.")
    compare: bool = option(False, "Run eagerly and graphed, and compare both runs.", of="start")
    json: bool = option(
        False, "Print one JSON document on stdout, and all else on stderr.", of="start"
    )


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of ``moe-graphs train``, with the names of sections in a ``--config`` file."""

    model: ModelOptions = section(ModelOptions)
    text: TextOptions = section(TextOptions)
    graphs: GraphOptions = section(GraphOptions)
    training: dict[str, Any] = changes(TrainSettings)
    numerics: NumericsOptions = section(NumericsOptions)
    layout: dict[str, Any] = changes(ParallelConfig)
    pipeline: PipelineOptions = section(PipelineOptions)
    ranks: RankOptions = section(RankOptions)
    output: OutputOptions = section(OutputOptions)


@dataclass(frozen=True, kw_only=True)
class ProfiledModel(ModelOptions):
    impl: str = option(
        "none,attn+moe,full_iteration",
        "Ways to run the step, comma-separated: none, local, full_iteration, or scopes joined by "
        "+, such as attn+moe.",
    )
    optimizer_in_graph: bool = option(
        False, "With full_iteration, the graph has clipping and update, too."
    )


@dataclass(frozen=True, kw_only=True)
class ProfileOutput(OutputOptions):
    trace: Path | None = option(
        None, "File of a Chrome trace for Perfetto, .json or .json.gz; one for each way."
    )
    out: Path | None = option(None, "File of a picture (.png, .svg).")


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    model: ProfiledModel = section(
        ProfiledModel,
        (
            "impl",
            "preset",
            "optimizer_in_graph",
            "experts",
            "precision",
            "dense_precision",
            "linear",
            "fp8",
        ),
    )
    text: TextOptions = section(TextOptions, ("data", "attention_within_documents"))
    graphs: GraphOptions = section(GraphOptions, ("dispatcher",))
    training: dict[str, Any] = changes(
        TrainSettings, ("batch_size", "microbatches", "sequence_length", "optimizer", "seed")
    )
    numerics: NumericsOptions = section(NumericsOptions, ("device", "dtype", "deterministic"))
    output: ProfileOutput = section(ProfileOutput, ("trace", "out", "json"))


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    model: str = option(
        help=f"A published architecture ({MODELS.words()}), a preset of train, a directory with a "
        "Hugging Face config.json, or module:function of your own.",
        flags="--model --preset",
    )
    gpus: int = option(help="Number of ranks.", least=1)


@dataclass(frozen=True, kw_only=True)
class PlannedStepOptions:
    rows_factor: float | None = option(
        None, "Room for expert rows, as a multiple of balanced routing. (default: worst case)"
    )


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    model: PlannedModel = section(PlannedModel)
    layout: dict[str, Any] = changes(ParallelConfig)
    pipeline: PipelineOptions = section(PipelineOptions)
    graphs: GraphOptions = section(GraphOptions, ("dispatcher",))
    step: PlannedStepOptions = section(PlannedStepOptions)
    training: dict[str, Any] = changes(
        TrainSettings,
        (
            "batch_size",
            "sequence_length",
            "microbatches",
            "optimizer",
            "optimizer_state",
            "ema_decay",
        ),
    )
    numerics: NumericsOptions = section(NumericsOptions, ("dtype", "mixed_precision"))
    output: OutputOptions = section(OutputOptions, ("json",))
