"""Our AdamW with 8-bit states."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

pytest.importorskip("triton")

from moe_graphs.engine.whole_step.full_iteration import FullIteration
from moe_graphs.kernels.adamw.reference import adamw_update_reference, random_bits
from moe_graphs.kernels.adamw.state_codes import NEAREST, decode, encode
from moe_graphs.optim import AdamW, UpdateOptions, adamw
from moe_graphs.training.capturable import load_optimizer_state
from moe_graphs.training.device_step import DeviceStep
from moe_graphs.training.grad_scaler import GradScaler

BF16, FP32, FP64, UINT8 = torch.bfloat16, torch.float32, torch.float64, torch.uint8
KINDS = pytest.mark.parametrize("signed", [True, False])
STATES = ("exp_avg", "exp_avg_sq")
CODES = {f"{name}_{part}" for name in STATES for part in ("code", "scale")}
SHAPES = [(32, 128), (3, 24, 64), (128,), (20, 10)]  # two with codes


def numbers(count: int, octaves: float, signed: bool) -> Tensor:
    """Random numbers whose blocks differ in size, and that span ``octaves`` within a block."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.rand(count // 64, 64, generator=generator) * octaves
    x = torch.exp2(torch.linspace(-40, 40, count // 64)[:, None] - spread).flatten()
    return torch.where(torch.rand(count, generator=generator) < 0.5, x, -x) if signed else x


def parameters(dtype: torch.dtype = FP32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return [nn.Parameter((x.bfloat16() if dtype == BF16 else x).to(dtype)) for x in made]


def made(dtype: torch.dtype = FP32, **options: Any) -> AdamW:
    return AdamW(parameters(dtype), **{"lr": 1e-2, "state_dtype": UINT8} | options)


def train(optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> list[Tensor]:
    """Train some steps; return parameters and their states."""
    held = optimizer.param_groups[0]["params"]
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        for p in held:
            p.grad = (torch.randn(p.shape, generator=generator) + 0.1).to(p.dtype)
        optimizer.step()
    return [*held, *(v for p in held for _, v in sorted(optimizer.state[p].items()))]


def averages(optimizer: AdamW, name: str) -> Tensor:
    """Averages of the first parameter, in fp32."""
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    return decode(state[f"{name}_code"], state[f"{name}_scale"], signed=name == "exp_avg")


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


# Codes


@KINDS
def test_the_nearest_code_is_near_and_stays(signed):
    x = numbers(6400, 13.9, signed)
    codes, scales = encode(x, NEAREST, signed=signed)
    values = decode(codes, scales, signed=signed)
    assert (codes.dtype, scales.dtype, scales.shape) == (UINT8, UINT8, (100,))
    assert ((values - x) / x).abs().max() <= (1 / 16 if signed else 1 / 32)
    for bits in (NEAREST, 0, 0xFFFFFFFF):
        assert torch.equal(decode(*encode(values, bits, signed=signed), signed=signed), values)
    shaped = encode(x.view(10, 10, 64), NEAREST, signed=signed)
    assert same([each.flatten() for each in shaped], [codes, scales])


@KINDS
def test_rounding_is_right_on_the_average(signed):
    """The mean of many roundings is the number.

    This holds where the block's largest number crosses an octave, where codes are evenly spaced,
    and for averages of gradients also below the least code.
    """
    rows = 1 << 14
    block = torch.ones(64)
    block[0], block[1], block[2], block[3] = 1.9999, 2**-9, 1.03, 2**-13.5
    block[4], block[5] = -(2**-19) if signed else 1.0, 2**-15.3
    x = block.repeat(rows, 1).flatten()
    bits = random_bits(7, torch.ones(()), len(x))
    values = decode(*encode(x, bits, signed=signed), signed=signed).view(rows, 64).double()
    assert values[:, 0].max() > 1.9999 > values[:, 0].min()
    for place in range(7):
        error = 5 * values[:, place].std() / math.sqrt(rows) + 2.0**-16 * block[place].abs()
        assert (values[:, place].mean() - block[place]).abs() <= error


def test_squares_are_never_rounded_to_zero():
    x = torch.full((64,), 1e-30)
    x[0], x[1] = 1.0, 0.0
    values = decode(*encode(x, 0, signed=False), signed=False)
    assert values[:2].tolist() == [1.0, 0.0]
    assert set(values[2:].tolist()) == {2**-18}
    assert decode(*encode(torch.full((64,), 1e-44), 0, signed=False), signed=False).min() > 0


@KINDS
def test_what_has_no_code_is_the_largest_number(signed):
    """A state of zeros, which first steps start from, has codes of zeros."""
    x = torch.tensor([math.inf, math.nan, 3.4e38, 1e30] * 16)
    values = decode(*encode(x, 0xFFFFFFFF, signed=signed), signed=signed)
    assert values.isfinite().all()
    assert set(values[:3].tolist()) == {values.max().item()}
    zeros = [torch.zeros(64, dtype=UINT8), torch.zeros(1, dtype=UINT8)]
    assert not decode(*zeros, signed=signed).any()
    assert same(list(encode(torch.zeros(64), 0xFFFFFFFF, signed=signed)), zeros)


# The kernel against the plain path


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy: inf / inf
@pytest.mark.parametrize("found_inf", [None, 0.0, 1.0])
@pytest.mark.parametrize(("dtype", "rounded"), [(FP32, False), (BF16, True)])
def test_the_kernel_is_the_plain_path_bit_for_bit(
    interpreted, monkeypatch, dtype, rounded, found_inf
):
    from moe_graphs.kernels.adamw import triton_kernels as adamw_triton

    monkeypatch.setattr(adamw_triton, "BLOCK", 128)
    inf = None if found_inf is None else torch.tensor(found_inf)
    scaling = (torch.tensor(8.0), inf, torch.tensor(0.3))
    found = []
    for update in (adamw_triton.adamw_update, adamw_update_reference):
        p, g, e = (numbers(5 * 64, octaves, True) for octaves in (3, 6, 9))
        own = [p.to(dtype), g.to(dtype), e]
        p, g, e = (x[: 3 * 64] for x in own)
        m, of_m = encode(numbers(5 * 64, 22, True), NEAREST, signed=True)
        v, of_v = encode(numbers(5 * 64, 22, False), NEAREST, signed=False)
        given = ([p], [g], [m[: 3 * 64]], [v[: 3 * 64]], [torch.tensor(4.0)], 1e-2, None)
        given += (0.9, 0.999, 1e-8, 0.3, True, *scaling, [e], 0.99, [1 << 62 | 3 << 40])
        before = [x.clone() for x in (*own, m, v, of_m, of_v)]
        update(*given, [of_m[:3]], [of_v[:3]], rounded)
        found.append([*own, m, v, of_m, of_v])
    assert same(*found)
    assert same([x[3 * len(x) // 5 :] for x in before], [x[3 * len(x) // 5 :] for x in found[0]])
    changed = [not torch.equal(*x) for x in zip(before, found[0], strict=True)]
    assert changed[:5] == [found_inf != 1.0] * 5
    assert any(changed) == (found_inf != 1.0)


@pytest.mark.parametrize("options", [{}, {"ema_decay": 0.9, "stochastic_rounding": True}])
def test_parameters_of_a_kernel_are_those_of_the_plain_path(interpreted, monkeypatch, options):
    """Sizes that are no multiple of a program's are included."""
    dtype = BF16 if options else FP32
    plain = train(made(dtype, **options), 3)
    from moe_graphs.kernels.adamw import triton_kernels as adamw_triton

    monkeypatch.setattr(adamw_triton, "BLOCK", 1 << 12)
    monkeypatch.setattr(adamw, "has_kernel", lambda x: True)
    assert same(train(made(dtype, **options), 3), plain)


# As an optimizer


def test_many_steps_stay_near_those_of_fp64_without_drifting():
    """The difference grows as noise, with the square root of the steps, and has no mean."""
    ours, exact = made(), torch.optim.AdamW(parameters(FP64), lr=1e-2)
    for steps in (50, 250):
        train(ours, steps, first=steps - 50), train(exact, steps, first=steps - 50)
        made_by = int(ours.state[ours.param_groups[0]["params"][0]]["step"])
        rows = zip(ours.param_groups[0]["params"], exact.param_groups[0]["params"], strict=True)
        for p, x in rows:
            off = (p.double() - x) / 1e-2
            if "exp_avg" in ours.state[p]:
                assert off.abs().max() < 1e-2
                continue
            assert 0.01 < off.std() < 0.3 * math.sqrt(made_by)
            assert off.mean().abs() < 5 * off.std() / math.sqrt(p.numel()) + 0.005 * made_by**0.5
    for name, width in (("exp_avg", 0.2), ("exp_avg_sq", 0.15)):
        right = exact.state[exact.param_groups[0]["params"][0]][name]
        error = averages(ours, name) - right
        assert error.norm() < width * right.norm()
        assert error.mean().abs() < 0.01 * right.abs().mean()


def test_averages_move_by_less_than_a_code():
    """Averages follow those of fp32: down when gradients vanish, and up over octaves."""
    (p, *_) = parameters()
    optimizer = AdamW([nn.Parameter(p.detach().clone())], lr=0.0, state_dtype=UINT8)
    (held,) = optimizer.param_groups[0]["params"]
    held.grad = torch.ones_like(held)
    for _ in range(300):
        optimizer.step()
    grown = averages(optimizer, "exp_avg_sq").mean().item()
    assert grown == pytest.approx(1 - 0.999**300, rel=2e-2)
    assert averages(optimizer, "exp_avg").mean().item() == pytest.approx(1, rel=2e-2)
    held.grad = torch.zeros_like(held)
    for _ in range(300):
        optimizer.step()
    fallen = averages(optimizer, "exp_avg_sq").mean().item()
    assert fallen == pytest.approx(grown * 0.999**300, rel=2e-2)
    assert averages(optimizer, "exp_avg").abs().max() < 1e-8


def test_which_parameters_have_codes():
    options = UpdateOptions(UINT8)
    assert options.has_codes(torch.ones(64, 64))
    assert options.has_codes(torch.ones(2, 32, 64, dtype=BF16))
    others = [torch.ones(63, 64), torch.ones(1 << 14), torch.ones(128, 96), torch.ones(128, 64).T]
    for x in (*others, torch.ones(64, 64, dtype=FP64)):
        assert not options.has_codes(x)
    assert not UpdateOptions().has_codes(torch.ones(64, 64))
    optimizer = made(BF16)
    train(optimizer, 1)
    kinds = [set(optimizer.state[p]) - {"step"} for p in optimizer.param_groups[0]["params"]]
    assert kinds == [CODES, CODES, set(STATES), set(STATES)]
    last = optimizer.state[optimizer.param_groups[0]["params"][-1]]
    assert {last[name].dtype for name in STATES} == {FP32}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy: inf / inf
@pytest.mark.parametrize(
    ("by_kernel", "skipped"),
    [(False, False), (True, True), pytest.param(False, True, marks=pytest.mark.long)],
)
def test_replays_are_eager_steps_with_new_bits_each(request, monkeypatch, by_kernel, skipped):
    """Steps are scaled, clipped and skipped, also the first one."""
    if by_kernel:
        request.getfixturevalue("interpreted")
        from moe_graphs.kernels.adamw import triton_kernels as adamw_triton

        monkeypatch.setattr(adamw_triton, "BLOCK", 1 << 12)
        monkeypatch.setattr(adamw, "has_kernel", lambda x: True)
    found = []
    for graphed in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(64, 64)
        optimizer = AdamW(model.parameters(), lr=1e-2, state_dtype=UINT8)
        step = DeviceStep(optimizer, scaler=GradScaler("cpu"), clip_norm=1e-2)

        def whole(batch: Tensor, model=model, step=step) -> Any:
            step.scale(model(batch).square().mean()).backward()
            return step()

        run: Any = whole
        if graphed:
            options = {"optimizer": optimizer, "state": [step], "warmup_steps": 1}
            run = FullIteration(whole, model=model, **options)
        for index in range(4):
            batch = torch.randn(4, 64, generator=torch.Generator().manual_seed(index))
            batch[0, 0] = math.inf if skipped and index in (0, 2) else 1.0
            before = model.weight.detach().clone()
            run(batch)
            assert torch.equal(model.weight, before) == bool(skipped and index in (0, 2))
        states = [sorted(optimizer.state[p].items()) for p in model.parameters()]
        found.append([*model.parameters(), *(value for state in states for _, value in state)])
        assert not graphed or run.report().matched == 3
    assert same(*found)
    # Clipping bounds the averages: the gradients' norm is at most 0.01.
    assert averages(optimizer, "exp_avg").norm() < 1.1e-2


def test_clipping_multiplies_gradients_on_their_way():
    held = parameters()
    clipped = AdamW(held, lr=1e-2, state_dtype=UINT8)
    clipped.grad_factor = torch.tensor(0.25)
    smaller = made()
    for p, q in zip(held, smaller.param_groups[0]["params"], strict=True):
        p.grad = torch.ones_like(p)
        q.grad = torch.full_like(q, 0.25)
    clipped.step(), smaller.step()
    assert same(held, smaller.param_groups[0]["params"])
    assert torch.equal(averages(clipped, "exp_avg"), averages(smaller, "exp_avg"))


# Saving and loading


@pytest.mark.parametrize("in_place", [False, True])
def test_a_run_goes_on_with_the_same_bits(in_place):
    """The seed of the optimizer that loads does not matter."""
    whole = made(seed=3)
    train(whole, 3)
    buffer = io.BytesIO()
    torch.save(whole.state_dict(), buffer)
    buffer.seek(0)
    part = AdamW([nn.Parameter(p.detach().clone()) for p in whole.param_groups[0]["params"]],
                 lr=1e-2, state_dtype=UINT8)  # fmt: skip
    if in_place:  # in place, as graphs need it
        kept = [p.detach().clone() for p in part.param_groups[0]["params"]]
        train(part, 1)
        with torch.no_grad():
            torch._foreach_copy_(part.param_groups[0]["params"], kept)
        load_optimizer_state(part, torch.load(buffer))
    else:
        part.load_state_dict(torch.load(buffer))
    copied = copy.deepcopy(part)
    expected = train(whole, 2, 3)
    assert same(train(part, 2, 3), expected)
    assert same(train(copied, 2, 3), expected)
    assert not same(train(made(seed=4), 5), expected)


def test_states_of_other_optimizers_become_codes_and_codes_theirs():
    torchs = torch.optim.AdamW(parameters(), lr=1e-2)
    train(torchs, 3)
    ours, plain = made(), AdamW(parameters(), lr=1e-2)
    ours.load_state_dict(torchs.state_dict())
    (p, *_), (q, *_) = ours.param_groups[0]["params"], torchs.param_groups[0]["params"]
    assert set(ours.state[p]) == CODES | {"step"}
    for name, width in zip(STATES, (1 / 16, 1 / 32), strict=True):
        right = torchs.state[q][name]
        off = (averages(ours, name) - right).abs() / right.abs()
        assert off[right.abs() > 1e-3 * right.abs().max()].max() <= width
    plain.load_state_dict(ours.state_dict())
    (r, *_) = plain.param_groups[0]["params"]
    assert set(plain.state[r]) == {*STATES, "step"}
    assert torch.equal(plain.state[r]["exp_avg_sq"], averages(ours, "exp_avg_sq"))
    again = made()
    again.load_state_dict(plain.state_dict())  # nothing is lost on the way
    for name in STATES:
        assert torch.equal(averages(again, name), averages(ours, name))
    torchs.load_state_dict(plain.state_dict())
    train(torchs, 1, 3)


def test_codes_in_torchs_optimizer_are_an_error_and_not_numbers():
    ours, torchs = made(), torch.optim.AdamW(parameters(), lr=1e-2)
    train(ours, 1)
    torchs.load_state_dict(ours.state_dict())
    with pytest.raises(KeyError, match="exp_avg"):
        train(torchs, 1)


def test_the_state_of_another_model_is_refused():
    ours, other = made(), AdamW([nn.Parameter(torch.ones(64, 128))], state_dtype=UINT8)
    train(other, 1)
    one = AdamW(parameters()[:1], state_dtype=UINT8)
    one.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match=r"shape \(32, 128\) has states of shapes \(64, 128\)"):
        train(one, 1)
    train(ours, 1)
    state = ours.state[ours.param_groups[0]["params"][0]]
    state["exp_avg_scale"] = state["exp_avg_scale"][:, :1]
    with pytest.raises(ValueError, match="load the state of this model"):
        train(ours, 1)


# DTensors


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Mesh of two ranks in a fake process group, of which this process is one."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield init_device_mesh("cpu", (2,))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)])
def test_ranks_update_what_they_have(mesh, placement):
    (whole, *_) = parameters()
    local = whole.detach().clone()
    shared = nn.Parameter(DTensor.from_local(local, mesh, [placement]))
    ours = AdamW([shared], lr=1e-2, state_dtype=UINT8)
    alone = AdamW([whole], lr=1e-2, state_dtype=UINT8)
    for _ in range(2):
        whole.grad = torch.ones_like(whole)
        shared.grad = DTensor.from_local(torch.ones_like(whole), mesh, [placement])
        ours.step(), alone.step()
    assert torch.equal(shared.to_local(), whole)
    for name in CODES:
        kept = ours.state[shared][name]
        assert torch.equal(kept.to_local(), alone.state[whole][name])
        assert kept.placements == (placement,)
    assert ours.state[shared]["exp_avg_scale"].shape == (shared.shape[0], shared.shape[1] // 64)
    loaded = AdamW([shared], lr=1e-2, state_dtype=FP32)
    loaded.load_state_dict(ours.state_dict())
    assert loaded.state[shared]["exp_avg"].placements == (placement,)
    back = AdamW([shared], lr=1e-2, state_dtype=UINT8)
    back.load_state_dict(loaded.state_dict())
    code = back.state[shared]["exp_avg_code"]
    assert torch.equal(code.to_local(), ours.state[shared]["exp_avg_code"].to_local())
    # No block crosses the ranks' parts of a row.
    narrow = DTensor.from_local(torch.ones(64, 96), mesh, [Shard(1)])
    assert narrow.shape == (64, 192)
    assert not UpdateOptions(UINT8).has_codes(narrow)
