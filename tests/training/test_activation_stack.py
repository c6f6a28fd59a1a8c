"""Layers that keep on a stack what they keep: the same training, in memory that follows the rows.

Shapes: R rows that there is room for, D model, F ffn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import moe_graphs
from distributed import run_distributed
from full_iterations import optimizer_of
from moe_graphs import GraphConfig
from moe_graphs.dispatch import make_dispatcher
from moe_graphs.engine.backends.cpu import StorageMeter
from moe_graphs.engine.preserve import RandomState
from moe_graphs.engine.whole_step.full_iteration import FullIteration
from moe_graphs.layers import LanguageModel
from moe_graphs.layers.activation_stack import ActivationStack
from moe_graphs.training.activation_memory import other_activation_stack, use_activation_stack
from moe_graphs.training.device_step import DeviceStep
from routed_ranks import ONE_BARRIER, dispatcher_named
from some_experts import SomeExperts
from training_runs import DEVICES, SEQUENCE, Trace, loss_of, microbatches, tiny_model

STEPS, SKEWED = 7, (1, 4, 5)  # in these all tokens go to experts of one rank
LAYERS, PAIRS = 2, 2 * SEQUENCE * 2
BALANCED = 2 * LAYERS * PAIRS  # rows of a rank, of two microbatches
LARGE, SMALL = 2 * BALANCED, BALANCED + BALANCED // 4


def _skew(model: LanguageModel, index: int) -> None:
    for layer in model.layers:
        bias = layer.moe.router.expert_bias
        bias.zero_()
        if index in SKEWED:
            first = 0 if index % 2 else 2
            bias[first : first + 2] = 10.0


def _make_step(model: LanguageModel, step: DeviceStep, in_flight: bool) -> Callable[[dict], tuple]:
    group = dist.group.WORLD if dist.is_initialized() else None

    def train(batch: dict) -> tuple:
        losses, dropped = [], 0
        for tokens in batch["tokens"]:
            loss, output = loss_of(model, tokens)
            losses.append(loss)
            dropped = dropped + output.dropped_tokens
            if not in_flight:
                loss.backward()
        for loss in losses if in_flight else ():  # the first one's first: not the order of a stack
            loss.backward()
        if group is not None:
            for name, parameter in model.named_parameters():
                if ".experts." not in name:
                    dist.all_reduce(parameter.grad)
        result = step(overflow=dropped)
        model.update_expert_bias(group, skipped=result.overflowed)
        return torch.stack([loss.detach() for loss in losses]), dropped, result

    return train


def _train(
    device: str,
    dispatcher: object,
    rows: int | None,
    scopes: str | None,
    in_flight: bool = True,
    again: bool = False,
) -> tuple[Trace, list, object, ActivationStack | None]:
    """What the runs that counted left; per step whether it was skipped; the report; the stack."""
    model = tiny_model(device, "moe", dispatcher=dispatcher, count=LAYERS)
    stack = None
    if rows is not None:
        stack = use_activation_stack(model, rows, recompute_dispatch=again)
    step = DeviceStep(
        optimizer_of(model, device),
        clip_norm=1.0,
        process_group=dist.group.WORLD if dist.is_initialized() else None,
        activation_stack=stack,
    )
    train = _make_step(model, step, in_flight)
    config = GraphConfig(impl="none")
    if scopes == "whole step":
        train = FullIteration(train, model=model, optimizer=step.optimizer, state=[step])
    elif scopes:
        config = GraphConfig(scopes, warmup_steps=3)
    graphs = moe_graphs.graph(model, config)
    trace, skipped = Trace(), []
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(rank)
    for index, tokens in enumerate(microbatches(device, STEPS, seed=10 + rank)):
        _skew(model, index)
        batch, random = {"tokens": tokens}, RandomState(torch.device(device))
        with graphs.step():
            losses, _, result = train(batch)
        skipped.append(bool(result.overflowed))
        if result.overflowed:
            random.put_back()
            larger = None  # none at all, or one with more room
            if dispatcher.name == "all_gather":
                larger = ActivationStack(LARGE, stack.width, stack.ffn_hidden_size, device=device)
            with other_activation_stack(model, larger), graphs.step():
                losses, lost, result = train(batch)
            assert not lost
            assert not result.overflowed
        trace.note(f"step {index} losses", losses)
        trace.note(f"step {index} norm", result.grad_norm)
        trace.note(f"step {index} counts", model.layers[0].moe.router.tokens_per_expert)
        for which, parameter in model.named_parameters():
            trace.note(f"step {index} {which}", parameter)
    report = train.report() if scopes == "whole step" else graphs.report()
    for made in (train, graphs) if scopes == "whole step" else (graphs,):
        made.release()
    return trace, skipped, report, stack


def _check_runs(device: str, dispatcher: object, *kinds: str | None) -> list[list[bool]]:
    expected, skipped, _, _ = _train(device, dispatcher, None, None)
    assert skipped == [False] * STEPS
    found = []
    for scopes in kinds:
        trace, skipped, report, stack = _train(device, dispatcher, SMALL, scopes, again=True)
        trace.assert_equal(expected)
        assert not stack.state[:4].any()  # all that was taken was given back
        assert (stack.most_rows > SMALL) <= any(skipped)
        found.append(skipped)
        if scopes:  # warming up takes three calls, of every scope and microbatch
            calls = 1 if scopes == "whole step" else 2 * LAYERS
            again = sum(skipped[2:])
            reason = "moved" if dispatcher.name == "all_gather" else "attribute"
            assert report.eager_calls == {"warmup": 3 * calls, reason: again * calls}
            assert report.replayed == (STEPS - 2) * calls
    return found


def _runs(rank: int, world_size: int, device: str, name: str) -> list[list[bool]]:
    kind = "full" if name == "all_gather" else "whole step"
    return _check_runs(device, dispatcher_named(name, rows_factor=2.0), kind)


@pytest.mark.long
@pytest.mark.parametrize(
    ("backend", "device", "name"),
    [
        ("gloo", "cpu", "all_gather"),
        ("gloo", "cpu", "symmetric"),
        ("gloo", "cpu", ONE_BARRIER),
        pytest.param("nccl", "cuda", "symmetric", marks=pytest.mark.multigpu),
        pytest.param("nccl", "cuda", ONE_BARRIER, marks=pytest.mark.multigpu),
    ],
)
def test_ranks_train_as_without_a_stack(backend, device, name):
    first, last = run_distributed(_runs, 2, backend, arguments=(device, name))
    assert first == last  # skipped by both, though one of them had room
    assert first == [first[0]] * len(first)
    assert {index for index in range(STEPS) if first[0][index]} >= set(SKEWED)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.long
def test_one_rank_trains_as_without_a_stack(device):
    dispatcher = SomeExperts()
    expected, *_ = _train(device, dispatcher, None, None, in_flight=False)
    for scopes, again in [
        *((None, False), ("whole step", False), ("full", False)),
        *(("moe", True), ("attn,moe_router,moe_preprocess", True)),
    ]:
        trace, skipped, report, stack = _train(
            device, dispatcher, LARGE // 2, scopes, in_flight=False, again=again
        )
        trace.assert_equal(expected)
        assert not any(skipped)
        assert not stack.state[:4].any()
        assert LAYERS <= stack.most_rows <= LAYERS * PAIRS  # of one microbatch
        layer = "layers.1.moe"  # the stack is the first one's, and all others'
        occupied = report.occupation
        assert occupied.keys() == {"layers.0.moe", "layers.0.moe.activation_stack", layer}
        assert occupied["layers.0.moe.activation_stack"] == (stack.most_rows, LARGE // 2)
        assert 0 < occupied[layer][0] <= occupied[layer][1] == PAIRS
        if scopes:
            assert set(report.eager_calls) == {"warmup"}


def _model(rows: int | None = LARGE) -> tuple[LanguageModel, ActivationStack | None]:
    model = tiny_model("cpu", "moe", dispatcher=SomeExperts(), dropout=0.0)
    return model, None if rows is None else use_activation_stack(model, rows)


def _tokens() -> torch.Tensor:
    return next(iter(microbatches("cpu", 1)))[0]


def test_layers_keep_what_there_is():
    """Bytes that a forward leaves, without a stack and with one."""
    kept = []
    for rows in (None, LARGE):
        model, stack = _model(rows)
        for _ in range(2):  # the first forward fills caches
            with StorageMeter() as meter:
                loss, _ = loss_of(model, _tokens())
                kept.append(meter.alive())
            loss.backward()
    room, width, ffn = PAIRS, 32, 16
    frames = LAYERS * 5 * 8
    assert kept[1] - kept[3] == LAYERS * room * (2 * width + 3 * ffn) * 4 - frames
    needed = sum(layer.moe.most_rows.item() for layer in model.layers)
    assert 0 < stack.most_rows == needed < LAYERS * room
    assert stack.nbytes == LARGE * (2 * width + 2 * ffn) * 4
    again = ActivationStack(LARGE, width, ffn, recompute_dispatch=True)
    assert again.nbytes == LARGE * (width + 2 * ffn) * 4


def test_evaluation_and_checkpoints_push_nothing():
    model, stack = _model()
    with torch.no_grad():
        loss_of(model, _tokens())
    assert not stack.state.any()
    loss_of(model, _tokens())[0].backward()
    pushed = stack.state[4].item()
    assert pushed == LAYERS
    for reentrant in (False, True):
        hidden_BSD = model.embedding(_tokens()[:, :-1])
        for layer in model.layers:
            hidden_BSD = checkpoint(
                lambda hidden_BSD, layer=layer: layer(hidden_BSD).hidden_BSD,
                hidden_BSD,
                use_reentrant=reentrant,
            )
        hidden_BSD.sum().backward()
        # Reentrant ones run a layer again with gradients, and its backward at once.
        assert stack.state[4] == pushed + (LAYERS if reentrant else 0)
        assert not stack.state[:4].any()


def test_a_second_backward_is_refused():
    model, stack = _model()
    loss, _ = loss_of(model, _tokens())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="this backward has run before"):
        loss.backward()
    assert not stack.state[:4].any()


def test_a_backward_that_no_graph_serves_is_right():
    """Its forward is computed anew, in a frame of its own; the first one waits for ``empty``."""
    found = []
    for rows in (None, LARGE):
        model, stack = _model(rows)
        graphs, gradients = moe_graphs.graph(model, GraphConfig("moe")), []
        torch.manual_seed(1)
        for index, (tokens, _) in enumerate(microbatches("cpu", STEPS)):
            with graphs.step():
                first = model.layers[0](model.embedding(tokens[:, :-1]))
                last = model.layers[1](first.hidden_BSD)
                loss = last.hidden_BSD.square().mean() + last.aux_loss
                (loss if index == 5 else loss + first.aux_loss).backward()
            gradients += [p.grad.clone() for p in model.layers.parameters()]
            model.zero_grad()
        assert graphs.report().eager_calls == {"warmup": 6, "backward: other_outputs": 1}
        graphs.release()
        found.append(gradients)
    assert all(map(torch.equal, *found))
    assert stack.state[3] - stack.state[2] >= 1
    stack.empty()
    assert not stack.state[:4].any()


def test_gradients_of_weights_apart_are_refused():
    model, _ = _model()
    graphs = moe_graphs.graph(model, GraphConfig("moe", warmup_steps=1, split_backward=True))
    with pytest.raises(RuntimeError, match="for inputs and weights together, or train without"):
        for tokens, _ in microbatches("cpu", 3):
            with graphs.step():
                loss_of(model, tokens)[0].backward()
    graphs.release()


def test_what_a_lost_backward_has_left_goes_with_the_update():
    model, stack = _model(rows=PAIRS * LAYERS)
    step = DeviceStep(optimizer_of(model, "cpu"), activation_stack=stack)
    for _ in range(3):
        with contextlib.suppress(KeyError):
            loss_of(model, _tokens())
            raise KeyError  # its backward never comes
        assert stack.state[:4].any()
        loss, output = loss_of(model, _tokens())
        loss.backward()
        result = step(overflow=output.dropped_tokens)
        assert not stack.state[:4].any()
        assert not result.overflowed or output.dropped_tokens > 0


def test_gradients_of_a_part_are_right():
    model, stack = _model()
    plain, _ = _model(None)
    found = []
    for each in (model, plain):
        torch.manual_seed(0)
        loss, _ = loss_of(each, _tokens())
        found.append(torch.autograd.grad(loss, [each.layers[1].moe.experts.w1, each.head.weight]))
    assert all(map(torch.equal, *found))
    loss, _ = loss_of(model, _tokens())
    loss.backward()
    stack.empty()  # the first layer's experts were not asked
    loss, output = loss_of(model, _tokens())
    assert not output.dropped_tokens


def test_what_has_no_use_for_a_stack_is_refused():
    local = tiny_model("cpu", "moe", dispatcher=make_dispatcher("local"))
    with pytest.raises(ValueError, match="a stack is for 'all_gather' and 'symmetric'"):
        use_activation_stack(local, LARGE)
    with pytest.raises(ValueError, match="it has no MoE layer"):
        use_activation_stack(tiny_model("cpu", "dense"), LARGE)
    model, _ = _model(None)
    with pytest.raises(ValueError, match="rows must be at least 1"):
        use_activation_stack(model, 0)
    with pytest.raises(ValueError, match="made for hidden and ffn sizes 8 and 16"):
        model.layers[0].moe.use_activation_stack(ActivationStack(4, 8, 16))
    use_activation_stack(model, LARGE, dtype=torch.bfloat16)
    layer = model.layers[0].moe
    with pytest.raises(ValueError, match="a stack is for 'all_gather' and 'symmetric'"):
        layer.use_dispatcher(make_dispatcher("local"), layer.experts)
    with pytest.raises(ValueError, match="make it with the dtype that the experts compute in"):
        loss_of(model, _tokens())
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        loss_of(model, _tokens())[0].backward()
