"""A run's model on the ranks of a pipeline."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch.distributed.fsdp import MixedPrecisionPolicy

from moe_graphs.config import SCOPE_STAGES, GraphConfig
from moe_graphs.layers import LanguageModel
from moe_graphs.lm.options import TrainSettings
from moe_graphs.lm.trainer import Autocast
from moe_graphs.lm.workers import Workers
from moe_graphs.parallel import Pipeline, parallelize, pipeline_stages
from moe_graphs.parallel.model_stage import ModelStage


def lay_out_stages(
    model: LanguageModel,
    workers: Workers,
    *,
    stages_per_rank: int,
    autocast: Autocast,
    mixed_precision: MixedPrecisionPolicy | None,
    **dispatcher: Any,
) -> list[ModelStage]:
    """Divides ``model`` in place into stages, and shards the stages of this rank."""
    stages = pipeline_stages(
        model,
        workers.layout,
        workers.mesh,
        stages_per_rank=stages_per_rank,
        hidden_dtype=None if mixed_precision is None else mixed_precision.param_dtype,
        autocast=autocast,
    )
    by = {"mixed_precision": mixed_precision, **dispatcher}
    for stage in stages:
        parallelize(stage, workers.layout, workers.mesh, **by)
    return stages


def pipeline_of(
    stages: Sequence[ModelStage], workers: Workers, settings: TrainSettings, schedule: str
) -> Pipeline:
    """The pipeline that runs the stages, once they have their memory."""
    rows = settings.batch_size // settings.microbatches // workers.data.size()
    return Pipeline(
        stages,
        workers.mesh,
        microbatches=settings.microbatches,
        microbatch_shape=(rows, settings.sequence_length // workers.layout.cp),
        schedule=schedule,
        rule=settings.loss_rule,
    )


def scopes_of_stages(config: GraphConfig, here: LanguageModel, whole: LanguageModel) -> GraphConfig:
    """``config`` without scopes that only layers of other ranks have.

    Scopes that no layer has stay, so that they are refused. All scopes stay if none would be left.
    """
    found, all_of_them = _stages_of(here), _stages_of(whole)

    def is_elsewhere(scope: str) -> bool:
        stages = set(SCOPE_STAGES.get(scope, ()))
        return stages <= all_of_them and not stages <= found

    kept = [scope for scope in config.scopes or () if not is_elsewhere(scope)]
    return dataclasses.replace(config, scopes=kept) if kept else config


def _stages_of(model: LanguageModel) -> set[str]:
    layers: list[Any] = list(model.layers)
    return {stage.name for layer in layers for stage in layer.stages()}
