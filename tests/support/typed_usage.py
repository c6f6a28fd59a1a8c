"""The public API as the README uses it, and the types that a user's checker finds there.

``make lint`` checks this file with mypy: what comes out as ``Any`` is an error of ``assert_type``.
``tests/test_typed_usage.py`` runs it, so that what it says is also true.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, assert_type

import torch
from torch import Tensor, nn

import moe_graphs
from moe_graphs import routing
from moe_graphs.checkpoints.hf_config import hf_config, transformer_config
from moe_graphs.dispatch import Dispatched, Dispatcher, DispatchPlan, make_dispatcher
from moe_graphs.engine.callables.order import Action
from moe_graphs.engine.report import Report
from moe_graphs.engine.whole_step.full_iteration import FullIterationReport
from moe_graphs.integrations.transformers import (
    Accelerated,
    Change,
    Changes,
    QuantizedExperts,
    accelerate_model,
    quantize_experts,
    static_batch,
    swap_moe_layers,
)
from moe_graphs.kernels import (
    RowOrder,
    add_rms_norm,
    apply_rotary,
    grouped_gemm,
    permute,
    route_rows,
    routed_experts,
    swiglu_linear,
    unpermute,
)
from moe_graphs.layers import (
    HeadExchange,
    LanguageModel,
    LayerOutput,
    ModelOutput,
    MoEConfig,
    MoELayer,
    MoEOutput,
    Routing,
    TransformerConfig,
    TransformerLayer,
    mixtral_8x7b,
)
from moe_graphs.parallel import ParallelConfig, Pipeline, make_mesh, parallelize, pipeline_stages
from moe_graphs.parallel.context_parallel import part_of_sequences
from moe_graphs.parallel.mesh import data_mesh, loss_mesh
from moe_graphs.parallel.model_stage import ModelStage
from moe_graphs.pipelines.builders import one_f_one_b
from moe_graphs.pipelines.schedule import Schedule
from moe_graphs.profiling.profiler import profile_graphs, profile_step
from moe_graphs.profiling.step_profile import StepProfile
from moe_graphs.staged import Stage, record
from moe_graphs.training.capturable import tensor_hyperparameters
from moe_graphs.training.device_step import StepResult
from moe_graphs.training.grad_norm import clip_grad_norm
from moe_graphs.training.overflow import other_rows_factor
from moe_graphs.training.static_loader import StaticBatches

MOE = MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=16)
CONFIG = TransformerConfig(
    hidden_size=16, num_layers=1, num_heads=2, vocab_size=32, max_sequence_length=8, moe=MOE
)


def scopes() -> None:
    model = LanguageModel(CONFIG, make_dispatcher("local"))
    graphs = moe_graphs.graph(model, moe_graphs.GraphConfig(scopes="attn,moe", warmup_steps=1))
    assert_type(graphs, moe_graphs.Graphs)

    def step() -> None:
        with graphs.step():
            output = model(torch.randint(32, (2, 8)))
            assert_type(output, ModelOutput)
            (output.logits_BSV.float().logsumexp(-1).mean() + output.aux_loss).backward()

    for _ in range(3):
        step()
    eager, _ = profile_graphs(graphs, step)
    assert_type(eager, StepProfile)
    assert_type(eager.traced.groups[0].reached, float | None)
    assert_type(profile_step(step, steps=1, rates=eager.rates), StepProfile)
    report = graphs.report()
    assert_type(report, Report)
    assert_type(report.scopes[0].eager_calls, dict[str, int])
    assert_type(graphs.plan().total_bytes, int)
    assert_type(model.num_parameters(active=True), int)
    assert report.replayed
    assert_type(report.matched, int)
    assert_type(report.last_audited_step, int | None)
    graphs.audit_soon()
    graphs.release()


def layers() -> None:
    hidden_BSD = torch.randn(2, 8, 16)
    moe = MoELayer(MOE, 16)
    assert_type(moe(hidden_BSD), MoEOutput)
    assert_type(moe(hidden_BSD).aux_loss, Tensor)
    assert_type(moe.dispatcher, Dispatcher)
    bounded = LanguageModel(CONFIG, make_dispatcher("symmetric", rows_factor=1.5))
    with other_rows_factor(bounded, None):
        assert_type(bounded(torch.randint(32, (2, 8))).dropped_tokens, Tensor)
    assert_type(moe.router(hidden_BSD[0]), Routing)
    layer = TransformerLayer(CONFIG, 0)
    assert_type(layer(hidden_BSD=hidden_BSD), LayerOutput)
    assert_type(layer.moe, MoELayer | None)
    assert_type(mixtral_8x7b(num_layers=2), TransformerConfig)


def kernels_with_two_results() -> None:
    query_BHSQ, key_BGSQ = torch.randn(2, 4, 8, 16), torch.randn(2, 2, 8, 16)
    table_BSR = torch.ones(1, 8, 16)
    turned = apply_rotary(query_BHSQ, key_BGSQ, table_BSR, table_BSR)
    assert_type(turned, tuple[Tensor, Tensor])
    added = add_rms_norm(query_BHSQ, None, torch.ones(16), 1e-6)
    assert_type(added, tuple[Tensor, Tensor])


def sharded() -> None:
    config = ParallelConfig(dp_shard=4, ep=2)
    assert_type(config.world_size, int)
    mesh = make_mesh(config, "cuda")
    assert_type(data_mesh(mesh).get_local_rank(), int)
    group = loss_mesh(mesh).get_group()
    assert_type(HeadExchange.over(group).ranks, int)
    assert_type(part_of_sequences(torch.zeros(2, 33), group, overlap=1), Tensor)
    model = parallelize(LanguageModel(CONFIG), config, mesh, dispatcher="all_gather")
    assert_type(model, LanguageModel)
    assert_type(clip_grad_norm(model.parameters(), 1.0), Tensor)
    stages = pipeline_stages(LanguageModel(CONFIG), config, mesh)
    assert_type(parallelize(stages[0], config, mesh), ModelStage)
    pipeline = Pipeline(stages, mesh, torch.add, microbatches=4, microbatch_shape=(2, 16))
    found = pipeline.forward_backward(torch.ones(8, 16), torch.ones(8, 16))
    assert_type(found, tuple[Tensor, Tensor])
    assert_type(pipeline.evaluate(torch.ones(8, 16), torch.ones(8, 16)), Tensor)


class OwnModel(LanguageModel):
    """A subclass, of which ``from_pretrained`` makes an instance."""


def checkpoints(directory: Path) -> None:
    LanguageModel(CONFIG).save_pretrained(directory)
    assert_type(LanguageModel.from_pretrained(directory), LanguageModel)
    own = OwnModel.from_pretrained(str(directory), dtype=torch.bfloat16)
    assert_type(own, OwnModel)
    assert isinstance(own, OwnModel)
    assert_type(own.hf_values, dict[str, Any] | None)
    assert transformer_config(assert_type(hf_config(CONFIG), dict[str, Any])) == own.config


def dispatcher() -> None:
    dispatcher = make_dispatcher("padded", capacity_factor=2.0)
    experts_TK = torch.tensor([[0, 1], [1, 2]])
    plan = dispatcher.preprocess(torch.randn(2, 4), torch.ones(2, 2), experts_TK, 4)
    assert_type(plan, DispatchPlan)
    assert_type(dispatcher.dispatch(plan), Dispatched)
    assert_type(dispatcher.combine(plan.tokens, dispatcher.dispatch(plan), plan), Tensor)
    order = route_rows(experts_TK, 4)
    assert_type(order, RowOrder)
    rows_RD = permute(torch.randn(2, 4), order)
    rows_RD = assert_type(grouped_gemm(rows_RD, torch.randn(4, 4, 4), order.offsets_E), Tensor)
    weights = torch.randn(4, 4, 8), torch.randn(4, 4, 4)
    assert_type(routed_experts(torch.randn(2, 4), order, torch.ones(2, 2), *weights), Tensor)
    assert_type(swiglu_linear(rows_RD, torch.randn(4, 2)), Tensor)
    assert_type(unpermute(rows_RD, order, torch.ones(2, 2)), Tensor)


@record
class Halves:
    """A record of one's own: made with positional and named fields, and frozen."""

    left: Tensor
    right: Tensor


class Own(moe_graphs.Staged):
    def stages(self) -> tuple[Stage, ...]:
        return Stage("halve", self.halve), Stage("join", self.join)

    def forward(self, x: Tensor) -> Tensor:
        return assert_type(self.run_stages(x), Any)  # whatever the last stage returns

    def halve(self, x: Tensor) -> Halves:
        return Halves(x / 2, right=x / 2)

    def join(self, halves: Halves) -> Tensor:
        return assert_type(halves.left, Tensor) + halves.right


def own_stages() -> None:
    x = torch.randn(3)
    assert torch.equal(Own()(x), x)


def whole_step() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, capturable=True)
    tensor_hyperparameters(optimizer)
    update = moe_graphs.DeviceStep(optimizer, clip_norm=1.0)

    def train_step(batch: dict[str, Tensor]) -> tuple[Tensor, StepResult]:
        loss = assert_type(update.scale(model(batch["x"]).square().mean()), Tensor)
        loss.backward()
        return loss, update()

    step = moe_graphs.FullIteration(
        train_step, model=model, optimizer=optimizer, state=[update], warmup_steps=1
    )
    loader = moe_graphs.StaticLoader([{"x": torch.randn(2, 4)} for _ in range(3)], "cpu")
    assert_type(iter(loader), StaticBatches[dict[str, Tensor]])
    for batch in loader:
        loss, result = step(batch)
        assert_type(loss, Tensor)
        assert_type(result, StepResult)
        assert_type(result.grad_norm, Tensor | None)
    assert_type(step.report(), FullIterationReport)
    assert step.report().replayed
    step.audit_soon()
    step.release()


def callables() -> None:
    x = torch.randn(2, 4, requires_grad=True)
    first, second = moe_graphs.make_graphed_callables(
        (nn.Linear(4, 4), nn.ReLU()), ((x,), (x,)), schedule=one_f_one_b(2, 4).local_order(1)
    )
    assert_type(first, nn.Linear)
    assert_type(second, nn.ReLU)

    def twice(x: Tensor) -> Tensor:
        return x * 2

    assert_type(moe_graphs.make_graphed_callables(twice, (x,))(x), Tensor)
    ordered = moe_graphs.make_graphed_callables((nn.Linear(4, 4),), ((x,),), _order=[1, -1])
    assert_type(ordered, tuple[Callable[..., Any], ...])
    assert len(ordered) == 1


def schedules() -> None:
    schedule = one_f_one_b(2, 4)
    assert_type(schedule, Schedule)
    assert_type(schedule.local_order(0), tuple[Action, ...])
    assert_type(Action.parse("0F3").microbatch, int)


def chosen_experts() -> None:
    layer = MoELayer(MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=8), 8)
    hidden_TD, watch = torch.randn(6, 8), routing.watch(layer)
    assert_type(watch, routing.Watch)
    with routing.record(layer) as choices:
        layer(hidden_TD)
    assert_type(choices, list[Tensor])
    with routing.replay(layer, choices):
        layer(hidden_TD)
    assert_type(watch.report(), routing.LoadReport)
    assert_type(watch.report().layers[0].pairs, tuple[int, ...])
    assert_type(watch.report().scalars(), dict[str, float])
    watch.close()


def hugging_face(model: nn.Module) -> None:
    swapped = swap_moe_layers(model)
    assert_type(swapped, Changes)
    assert all(change.done for change in swapped.changes)
    swapped.undo()
    packing: Callable[[nn.Module], QuantizedExperts] = quantize_experts
    assert callable(packing)
    tokens_BS = torch.ones(2, 8, dtype=torch.int64)
    batch = static_batch({"input_ids": tokens_BS, "attention_mask": tokens_BS})
    assert_type(batch, dict[str, Tensor])
    assert batch.keys() == {"input_ids"}
    accelerated = accelerate_model(model, graphs=moe_graphs.GraphConfig(scopes="model.layers.*"))
    assert_type(accelerated, Accelerated)
    assert_type(accelerated.changes, list[Change])
    assert_type(accelerated.graphs.report(), Report)
    with accelerated.step():
        pass
    accelerated.undo()
