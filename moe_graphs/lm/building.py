"""A run before its first step: its options, and the trainer that runs it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moe_graphs.config import FullIterationConfig, GraphConfig
from moe_graphs.dispatch import make_dispatcher
from moe_graphs.engine.partial.graphs import graph
from moe_graphs.integrations.transformer_engine import (
    check_fp8_sizes,
    fp8_autocast,
    fp8_recipe,
)
from moe_graphs.layers import LanguageModel, TransformerConfig
from moe_graphs.lm.continued import checkpoint_identity
from moe_graphs.lm.data import Text, TrainingBatches
from moe_graphs.lm.option_values import dtype_of, stages_of
from moe_graphs.lm.options import TrainOptions
from moe_graphs.lm.pipelined import lay_out_stages, pipeline_of, scopes_of_stages
from moe_graphs.lm.run_presets import Preset
from moe_graphs.lm.trainer import Autocast, Trainer, autocast_of
from moe_graphs.lm.workers import Workers
from moe_graphs.parallel import load_pretrained_sharded, parallelize, replicate
from moe_graphs.parallel.model_stage import ModelStage
from moe_graphs.parallel.parallelize import MIXED_PRECISION
from moe_graphs.parallel.sharded_init import init_weights_sharded
from moe_graphs.registry import DISPATCHERS


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of a run. ``graph_config`` None trains eagerly.

    Attributes:
        preset: the model, and its training with the changes that are asked for.
        asked: the options of the command.
        sample_tokens: how much of the held-out text is used while training; the end uses all.
        workers: the ranks that run it together, each with these options; None for one process.
        recorded: options of the command that checkpoints hold, as JSON values by name.
    """

    preset: Preset
    device: torch.device
    graph_config: GraphConfig | FullIterationConfig | None
    dispatcher: str = "local"
    out: Path = Path("runs/run")
    resume: Path | None = None
    asked: TrainOptions = dataclasses.field(default_factory=TrainOptions)
    sample_tokens: int = 1 << 17
    workers: Workers | None = None
    recorded: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        every = self.asked.output.checkpoint_every
        if every < 0:
            raise ValueError(f"checkpoint_every: {every} must not be negative")

    @property
    def init(self) -> Path | None:
        """The Hugging Face checkpoint that the model comes from; None for one from the seed."""
        return self.asked.model.init

    @property
    def tokenizer(self) -> Path | None:
        return self.asked.text.tokenizer or self.init

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameters."""
        return dtype_of(self.asked.numerics.dtype)

    @property
    def mixed_precision(self) -> bool:
        """Whether FSDP2 casts the parameters that it gathers; autocast is off then."""
        return self.asked.numerics.mixed_precision

    @property
    def stages_per_rank(self) -> int:
        return stages_of(self.asked.pipeline)

    @property
    def precision(self) -> str:
        """Dtypes of the run in words, except for FP8."""
        kept = str(self.dtype).removeprefix("torch.")
        always = "norms' statistics, router and loss in float32"
        held = f"parameters, gradients and AdamW's state in {kept}"
        if self.mixed_precision:
            return (
                f"{held}; FSDP2 gathers bfloat16, which all else is computed in, the residual "
                f"stream, too, and reduces float32; {always}"
            )
        if self.device.type == "cuda":
            return (
                f"{held}, gathered and reduced in it, and so is the residual stream; matrix "
                f"products and attention in bfloat16 by autocast; {always}"
            )
        return f"{held}, gathered, reduced and computed in it; {always}"


def build_trainer(options: RunOptions, batches: TrainingBatches) -> Trainer:
    """Makes a trainer with a model from the seed or from ``init``, without graphs yet.

    On several ranks a model from the seed has no values yet if a checkpoint is going to be loaded
    (``options.resume``).
    """
    settings, workers, pipeline = options.preset.training, options.workers, None
    within = options.asked.text.attention_within_documents
    autocast: Autocast = functools.partial(autocast_of, options.device)
    if workers is None:
        model = _in_this_process(options)
    else:
        if options.mixed_precision:
            autocast = contextlib.nullcontext
        model, stages = _on_ranks(options, workers, autocast)
        if stages:
            pipeline = pipeline_of(stages, workers, settings, options.asked.pipeline.schedule)
        workers.seed(settings.seed)
    return Trainer(
        model,
        batches,
        settings,
        drops_tokens=DISPATCHERS[options.dispatcher].drops_tokens,
        surroundings=_surroundings(options, batches),
        options=options.recorded,
        fp8_autocast=_fp8_autocast(options, model),
        autocast=autocast,
        workers=workers,
        pipeline=pipeline,
        find_nan=options.asked.numerics.find_nan,
        separator=batches.documents.separator if within else None,
    )


def _in_this_process(options: RunOptions) -> LanguageModel:
    config, seed = options.preset.model, options.preset.training.seed
    given: dict[str, Any] = {
        "dispatcher": make_dispatcher(options.dispatcher),
        "device": options.device,
        "dtype": options.dtype,
    }
    torch.manual_seed(seed)  # of what parts of a user's own draw when they are made
    if options.init is not None:
        experts = "moe_graphs" if config.moe is None else config.moe.experts
        given |= {"linear": config.linear, "experts": experts} | _precision(config)
        model = LanguageModel.from_pretrained(options.init, **given)
    else:
        model = LanguageModel(config, **given)
    torch.manual_seed(seed)  # not before: ranks draw once
    if options.init is None:
        model.init_weights(_std(config))
    return model


def _on_ranks(
    options: RunOptions, workers: Workers, autocast: Autocast
) -> tuple[LanguageModel, list[ModelStage]]:
    """The model with the same numbers, divided over the ranks, and a pipeline's stages here.

    A rank never has more of the numbers than its own part and one tensor.
    """
    device, stages, layout = options.device, [], workers.layout
    # A model that is divided over ranks gets a dispatcher over the ranks that share its experts.
    dispatcher = make_dispatcher("local" if layout.ep > 1 else options.dispatcher)
    given: dict[str, Any] = {"dispatcher": dispatcher, "device": "meta", "dtype": options.dtype}
    if options.init is not None:
        model = LanguageModel.from_pretrained(
            options.init, **given, **_precision(options.preset.model)
        )
    else:
        model = LanguageModel(options.preset.model, **given)
    policy = MIXED_PRECISION if options.mixed_precision else None
    by: dict[str, Any] = {"mixed_precision": policy}
    if layout.ep > 1:
        by["dispatcher"] = options.dispatcher
    if not workers.fsdp:
        if layout.ep > 1:
            replicate(model, workers.data, dispatcher=options.dispatcher)
    elif layout.pp > 1:
        by |= {"stages_per_rank": options.stages_per_rank, "autocast": autocast}
        stages = lay_out_stages(model, workers, **by)
    else:
        parallelize(model, layout, workers.mesh, **by)
    if options.init is not None:
        load_pretrained_sharded(model, options.init, device)
    elif options.resume is not None:
        model.to_empty(device=device)
        model.reset_buffers()
    else:
        seed = options.preset.training.seed
        init_weights_sharded(model, device, seed=seed, std=_std(model.config))
    return model, stages


def _precision(config: TransformerConfig) -> dict[str, Any]:
    of_experts = {} if config.moe is None else {"precision": config.moe.precision}
    return {"dense_precision": config.precision, **of_experts}


def _std(config: TransformerConfig) -> float:
    """Standard deviation of first weights: GPT-2's 0.02 at width 768, more if narrower."""
    return 0.02 * math.sqrt(768 / config.hidden_size)


def _fp8_autocast(options: RunOptions, model: LanguageModel) -> Autocast:
    """Transformer Engine's context, with one recipe object: it tells recipe objects apart."""
    if options.asked.model.fp8 == "none":
        return contextlib.nullcontext
    settings = options.preset.training
    check_fp8_sizes(model, settings.tokens_per_step // settings.microbatches)
    return functools.partial(fp8_autocast, fp8_recipe(options.asked.model.fp8))


def _surroundings(options: RunOptions, batches: TrainingBatches) -> dict[str, Any]:
    """Facts besides the settings that the bits of a run depend on. Graphs are not among them."""
    on_cpu = options.device.type == "cpu"
    init = {} if options.init is None else {"init": checkpoint_identity(options.init)}
    layout = {} if options.workers is None else {"layout": options.workers.described()}
    if options.mixed_precision:  # by its name only where it is, as checkpoints before it have none
        layout["mixed_precision"] = "bfloat16, reductions in float32"
    if options.asked.text.attention_within_documents:
        layout["attention"] = "within documents"
    if options.workers is not None and options.workers.layout.pp > 1:
        schedule = options.asked.pipeline.schedule
        layout["schedule"] = f"{schedule}, {options.stages_per_rank} stage(s) a rank"
    return {
        **batches.documents.identity,
        **init,
        **layout,
        "dispatcher": options.dispatcher,
        "fp8": options.asked.model.fp8,
        "device": options.device.type,
        "threads": torch.get_num_threads() if on_cpu else None,
        "deterministic": on_cpu or torch.are_deterministic_algorithms_enabled(),
        "torch": str(torch.__version__),
        "model": _described(options.preset.model),
    }


def _described(config: TransformerConfig) -> dict[str, Any]:
    found = dataclasses.asdict(config)
    # Checkpoints before these have no such names.
    if found["precision"] == "weights":
        del found["precision"]
    if found["moe"] is not None and found["moe"]["precision"] == "weights":
        del found["moe"]["precision"]
    return found


def build_batches(options: RunOptions, text: Text) -> TrainingBatches:
    settings = options.preset.training
    return TrainingBatches(
        text.train_documents,
        sequence_length=settings.sequence_length,
        batch_size=settings.batch_size,
        seed=settings.seed,
    )


@contextlib.contextmanager
def with_graphs(
    trainer: Trainer, config: GraphConfig | FullIterationConfig | None
) -> Iterator[None]:
    """Context in which graphs are on the trainer's model, or on its steps."""
    if isinstance(config, FullIterationConfig):
        with trainer.capture_full_iteration(config):
            try:
                yield
            finally:
                trainer.full_iteration, trainer.optimizer_in_graph = None, False
        return
    if config is None or config.impl == "none":
        yield
        return
    if trainer.pipeline is not None:
        config = scopes_of_stages(config, trainer.model, trainer.whole)
    trainer.graphs, trainer.first_graphed_step = graph(trainer.model, config), trainer.step
    try:
        yield
    finally:
        trainer.graphs.release()
        trainer.graphs = None
