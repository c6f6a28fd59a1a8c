"""Muon computes what torch's Muon does, for experts too, and shares groups with our AdamW."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from captured_updates import captured_update
from moe_graphs.engine.whole_step.full_iteration import FullIteration
from moe_graphs.optim import AdamW, Muon
from moe_graphs.training.capturable import (
    check_capturable_optimizer,
    load_optimizer_state,
    tensor_hyperparameters,
)
from moe_graphs.training.device_step import DeviceStep
from moe_graphs.training.grad_scaler import GradScaler

RATIOS = (None, "original", "match_rms_adamw")
needs_torchs = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has none")


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(len(shapes))
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def set_gradients(held: Sequence[Tensor], seed: int, factor: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in held:
        p.grad = factor * torch.randn(p.shape, generator=generator).to(p.dtype)


def mixed(lr: float = 1e-2, **options: Any) -> Muon:
    """Optimizer with experts and a matrix by Muon, a matrix and a vector by AdamW."""
    experts, matrix, table, vector = parameters((3, 6, 8), (12, 5), (9, 4), (7,))
    groups = [
        {"params": [experts], "split": (4, 4)},
        {"params": [matrix]},
        {"params": [table, vector], "muon": False, "weight_decay": 0.0},
    ]
    return Muon(groups, lr=lr, **options)


def held_by(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def everything(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    held = held_by(optimizer)
    return [*held, *(v for p in held for _, v in sorted(optimizer.state[p].items()))]


def train(optimizer: torch.optim.Optimizer, steps: range) -> list[Tensor]:
    for step in steps:
        set_gradients(held_by(optimizer), step)
        optimizer.step()
    return everything(optimizer)


def assert_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    torch.testing.assert_close(list(found), list(expected), rtol=0, atol=0)


@needs_torchs
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize(
    ("dtype", "nesterov"),
    # torch (2.13) normalises a bf16 momentum in place if nesterov is False.
    [(torch.float32, True), (torch.float32, False), (torch.bfloat16, True)],
)
def test_matrices_are_torchs(ratio, dtype, nesterov):
    ours, torchs = (parameters((24, 16), (16, 40), (8, 8), dtype=dtype) for _ in range(2))
    options = {"lr": 0.02, "weight_decay": 0.3, "momentum": 0.8, "nesterov": nesterov}
    options["adjust_lr_fn"] = ratio
    found, expected = (
        train(each, range(5))
        for each in (Muon(ours, **options), torch.optim.Muon(torchs, **options))
    )
    # The last bit of a bf16 product may differ; an update changes a number by 2e-3 and more.
    bits = {"atol": 2e-4, "rtol": 0.0 if dtype == torch.float32 else 1e-2}
    torch.testing.assert_close(found, expected, **bits)


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("shape", [(3, 6, 10), (3, 10, 6), (2, 7, 7)])
def test_experts_are_matrices_one_by_one(ratio, shape):
    """Experts are multiplied from the left, ``[in, out]``."""
    (experts,) = parameters(shape)
    alone = [nn.Parameter(matrix.t().clone()) for matrix in experts.detach()]
    ours, loop = (Muon(p, lr=0.02, adjust_lr_fn=ratio) for p in ([experts], alone))
    for step in range(4):
        set_gradients([experts], step)
        for matrix, gradient in zip(alone, experts.grad, strict=True):
            matrix.grad = gradient.t().clone()
        ours.step()
        loop.step()
    together = torch.stack([matrix.t() for matrix in alone])
    torch.testing.assert_close(experts.detach(), together.detach(), rtol=0, atol=2e-3)
    update = (experts - parameters(shape)[0]).abs().max()
    assert update > 0.03  # so the tolerance is small beside the update


@pytest.mark.parametrize(("shape", "dim"), [((3, 6, 10), 2), ((10, 6), 0)])
def test_what_lies_side_by_side_is_orthogonal_by_itself(shape, dim):
    together = parameters(shape)
    parts = [nn.Parameter(p.clone()) for p in together[0].detach().split((3, 7), dim)]
    optimizers = Muon(together, split=(3, 7), lr=0.1), Muon(parts, lr=0.1)
    for step in range(3):
        set_gradients(together, step)
        for part, gradient in zip(parts, together[0].grad.split((3, 7), dim), strict=True):
            part.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(together[0], torch.cat(list(parts), dim), rtol=0, atol=2e-3)
    whole = parameters(shape)
    train(Muon(whole, lr=0.1), range(3))
    assert (whole[0] - together[0]).abs().max() > 0.02


def test_an_update_is_orthogonal():
    (experts,) = parameters((4, 16, 32))
    before = experts.detach().clone()
    optimizer = Muon([experts], lr=1.0, weight_decay=0.0)
    set_gradients([experts], 0)
    optimizer.step()
    values = torch.linalg.svdvals(before - experts.detach()) / math.sqrt(2)
    assert values.min() > 0.5
    assert values.max() < 1.4


def test_the_rest_is_our_adamw():
    optimizer = mixed()
    copies = [nn.Parameter(p.detach().clone()) for p in held_by(optimizer)[2:]]
    other = AdamW(copies, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(3):
        set_gradients(held_by(optimizer), step)
        for p, q in zip(copies, held_by(optimizer)[2:], strict=True):
            p.grad = q.grad.clone()
        optimizer.step()
        other.step()
    assert_equal(held_by(optimizer)[2:], copies)


def test_one_state_goes_on_where_it_was():
    whole, buffer = mixed(), io.BytesIO()
    train(whole, range(3))
    saved, copied = {"p": held_by(whole), "o": whole.state_dict()}, copy.deepcopy(whole)
    torch.save(saved, buffer)
    buffer.seek(0)
    saved, resumed = torch.load(buffer, weights_only=True), mixed(lr=0.5)
    with torch.no_grad():
        torch._foreach_copy_(held_by(resumed), saved["p"])
    load_optimizer_state(resumed, saved["o"])
    expected = train(whole, range(3, 6))
    assert_equal(train(resumed, range(3, 6)), expected)
    assert_equal(train(copied, range(3, 6)), expected)
    assert sorted(whole.state[held_by(whole)[0]]) == ["momentum_buffer"]
    copied.add_param_group({"params": parameters((2, 2))})


def test_a_tensor_rate_is_read_at_every_step():
    numbers, tensors = mixed(lr=0.5), mixed(lr=0.5)
    tensor_hyperparameters(tensors)
    for step, rate in enumerate((0.5, 0.25, 0.0)):
        for group, other in zip(numbers.param_groups, tensors.param_groups, strict=True):
            group["lr"] = rate
            other["lr"].fill_(rate)
        before = [p.detach().clone() for p in held_by(tensors)]
        for optimizer in (numbers, tensors):
            train(optimizer, range(step, step + 1))
        torch.testing.assert_close(everything(tensors), everything(numbers), rtol=1e-5, atol=1e-6)
    assert_equal(held_by(tensors), [nn.Parameter(p) for p in before])


def test_found_inf_leaves_everything_as_it_was():
    scaled, plain = mixed(), mixed()
    before = [x.detach().clone() for x in train(scaled, range(2))]
    set_gradients(held_by(scaled), 2, math.inf)
    scaled.grad_scale, scaled.found_inf = torch.tensor(8.0), torch.ones(())
    scaled.step()
    assert_equal([x.detach() for x in everything(scaled)], before)
    train(plain, range(3))
    set_gradients(held_by(scaled), 2, 8.0)
    scaled.found_inf.zero_()
    scaled.step()
    torch.testing.assert_close(everything(scaled), everything(plain), rtol=1e-5, atol=1e-6)


def test_clipping_is_done_on_the_way():
    ours, clipped = mixed(), mixed()
    step = DeviceStep(ours, clip_norm=0.5)
    for number in range(3):
        for optimizer in (ours, clipped):
            set_gradients(held_by(optimizer), number)
        norm = torch.nn.utils.clip_grad_norm_(held_by(clipped), 0.5)
        torch.testing.assert_close(step().grad_norm, norm)
        clipped.step()
    # A gradient that is rounded in another place changes the last bits of the bf16 products.
    torch.testing.assert_close(held_by(ours), held_by(clipped), rtol=0, atol=2e-3)


@pytest.mark.parametrize("skipped", [False, True])
def test_whole_steps_hold_it(skipped):
    """Replays compute what eager steps do, with and without a skipped first step."""
    found = []
    for graphed in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
        by_adamw = [model[0].bias, model[1].bias]
        groups = [
            {"params": [model[0].weight], "split": (3, 5)},
            {"params": [model[1].weight]},
            {"params": by_adamw, "muon": False},
        ]
        optimizer = Muon(groups, lr=1e-2, adjust_lr_fn="match_rms_adamw")
        tensor_hyperparameters(optimizer, weight_decay=True)
        step = DeviceStep(optimizer, scaler=GradScaler("cpu"), clip_norm=1.0)

        def whole(batch: Tensor, model=model, step=step) -> Any:
            step.scale(model(batch).square().mean()).backward()
            return step()

        run: Any = whole
        if graphed:
            options = {"optimizer": optimizer, "state": [step], "warmup_steps": 1}
            run = FullIteration(whole, model=model, **options)
        results = []
        for index in range(5):
            for group in optimizer.param_groups:
                group["lr"].fill_(0.1 / (1 + index))
            batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(index))
            batch[0, 0] = math.inf if skipped and index in (0, 3) else 1.0
            results += [x.clone() for x in run(batch) if x is not None]
        found.append([x.detach() for x in (*results, *everything(optimizer))])
        assert not graphed or run.report().matched == 4
    torch.testing.assert_close(*found, rtol=0, atol=0, equal_nan=True)
    assert all(x.isfinite().all() for x in found[0][-12:])


@pytest.mark.parametrize(
    ("shape", "options", "words"),
    [
        ((5,), {}, r"parameter 0 of group 0, torch.float32 \(5,\), is neither a matrix"),
        ((2, 2, 3, 3), {}, r"\(2, 2, 3, 3\), is neither a matrix"),
        ((6, 4), {"split": (2, 3)}, r"split: \(2, 3\) is not the 6 of parameter 0"),
        ((2, 6, 4), {"split": (3, 3)}, r"split: \(3, 3\) is not the 4 of parameter 0"),
        ((6, 4), {"adjust_lr_fn": "other"}, "adjust_lr_fn: 'other'"),
        ((6, 4), {"foreach": True}, "^foreach: "),
        ((6, 4), {"momentum": -1}, "^momentum: -1 must be a number from 0 to below 1"),
        ((6, 4), {"momentum": 1.0}, "^momentum: 1.0"),
        ((6, 4), {"ns_steps": 0}, "^ns_steps: 0 must be a whole number from 1 to 99"),
        ((6, 4), {"ns_eps": 0.0}, "^ns_eps: 0.0 must be above 0"),
        ((6, 4), {"ns_coefficients": (1.0, 2.0)}, "^ns_coefficients: .* three numbers"),
        ((6, 4), {"lr": -1.0}, "^lr: -1.0 must be at least 0"),
        ((6, 4), {"weight_decay": math.nan}, "^weight_decay: nan must be at least 0"),
    ],
)
def test_what_it_has_not_is_refused_by_name(shape, options, words):
    optimizer = Muon(parameters((3, 3)))
    with pytest.raises(ValueError, match=words.replace("group 0", "group 1")):
        optimizer.add_param_group({"params": parameters(shape), **options})
    assert len(optimizer.param_groups) == 1


def test_numbers_of_the_constructor_are_checked_as_those_of_a_group():
    with pytest.raises(ValueError, match="^momentum: -1 must be"):
        Muon(parameters((3, 3)), momentum=-1)


@pytest.mark.parametrize("by_group", [False, True])
@pytest.mark.parametrize("muon", [False, True])
def test_maximize_is_a_step_along_the_gradient(muon, by_group):
    """Maximizing is minimizing with the negative gradient, bit for bit."""
    found = []
    for sign in (1, -1):
        weights = parameters((4, 3))
        option = {"maximize": True} if sign == 1 else {}
        groups = [{"params": weights, "muon": muon, **(option if by_group else {})}]
        optimizer = Muon(groups, lr=0.1, **({} if by_group else option))
        for step in range(3):
            set_gradients(weights, step)
            weights[0].grad *= sign
            optimizer.step()
        found.append(weights[0].detach())
    assert torch.equal(*found)


def test_a_state_of_another_optimizer_is_refused():
    other = AdamW(parameters((4, 3)))
    with pytest.raises(ValueError, match="^state: it is of another optimizer"):
        Muon(parameters((4, 3))).load_state_dict(other.state_dict())
    saver, loader = Muon(parameters((4, 3))), Muon(parameters((8, 3)))
    train(saver, range(1))
    loader.load_state_dict(saver.state_dict())
    with pytest.raises(ValueError, match=r"shape \(8, 3\) has a momentum of shape \(4, 3\)"):
        train(loader, range(1))


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A mesh of two ranks; this process is rank 0, and no other process exists."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield init_device_mesh("cpu", (2,))
    finally:
        dist.destroy_process_group()


def test_experts_that_ranks_share_are_whole_matrices(mesh):
    (plain,) = parameters((2, 6, 4))
    shared = nn.Parameter(DTensor.from_local(plain.detach().clone(), mesh, [Shard(0)]))
    assert shared.shape == (4, 6, 4)
    alone, ours = Muon([plain], lr=0.1), Muon([shared], lr=0.1)
    for step in range(2):
        set_gradients([plain], step)
        shared.grad = DTensor.from_local(plain.grad.clone(), mesh, [Shard(0)])
        alone.step()
        ours.step()
    assert torch.equal(shared.to_local(), plain)
    assert isinstance(ours.state[shared]["momentum_buffer"], DTensor)
    shared.grad = DTensor.from_local(torch.ones(4, 6, 4), mesh, [Replicate()])
    with pytest.raises(ValueError, match="divided among ranks in another way"):
        ours.step()
    for shape, placement in (((2, 6, 4), Shard(1)), ((6, 4), Shard(1))):
        (local,) = parameters(shape)
        parameter = nn.Parameter(DTensor.from_local(local.detach(), mesh, [placement]))
        with pytest.raises(ValueError, match="over ranks: Muon needs whole matrices"):
            Muon([parameter])
    Muon([nn.Parameter(DTensor.from_local(plain.detach()[0], mesh, [Replicate()]))])


@pytest.mark.gpu
def test_a_captured_step_is_an_eager_step_and_waits_for_nothing():
    def on_gpu() -> Muon:
        shapes = ((4, 96, 256), (256, 96), (300,))
        held = [nn.Parameter(p.detach().cuda().bfloat16()) for p in parameters(*shapes)]
        groups = [
            {"params": held[:1], "split": (128, 128)},
            {"params": held[1:2]},
            {"params": held[2:], "muon": False},
        ]
        optimizer = Muon(groups, lr=1e-2, adjust_lr_fn="match_rms_adamw")
        tensor_hyperparameters(optimizer)
        check_capturable_optimizer(optimizer)
        return optimizer

    def gradients(optimizer: Muon, seed: int) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        for p in held_by(optimizer):
            p.grad = torch.empty_like(p) if p.grad is None else p.grad
            p.grad.normal_(generator=generator)

    eager, graphed = on_gpu(), on_gpu()
    for optimizer in (eager, graphed):
        gradients(optimizer, 0)
        optimizer.step()
    graph = captured_update(eager, graphed)
    for step in range(1, 5):
        for optimizer in (eager, graphed):
            gradients(optimizer, step)
            for group in optimizer.param_groups:
                group["lr"].fill_(1e-2 / step)
        eager.step()
        graph.replay()
        assert all(map(torch.equal, everything(eager), everything(graphed)))


@pytest.mark.gpu
@needs_torchs
def test_matrices_are_torchs_on_a_gpu():
    ours, torchs = (
        [nn.Parameter(p.detach().cuda()) for p in parameters((256, 128), (96, 320))]
        for _ in range(2)
    )
    optimizers = Muon(ours, lr=0.02), torch.optim.Muon(torchs, lr=0.02)
    for step in range(5):
        for p, q in zip(ours, torchs, strict=True):
            generator = torch.Generator("cuda").manual_seed(step)
            p.grad = torch.randn(p.shape, generator=generator, device="cuda")
            q.grad = p.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours, torchs, rtol=0, atol=2e-3)
