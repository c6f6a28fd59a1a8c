"""Options of our AdamW beyond torch's: dtype of states, stochastic rounding, averages."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from moe_graphs.engine.whole_step.full_iteration import FullIteration
from moe_graphs.kernels.adamw.reference import (
    adamw_update_reference,
    random_bits,
    round_stochastically,
)
from moe_graphs.optim import AdamW, adamw
from moe_graphs.optim.rounding_key import rounding_key
from moe_graphs.training.device_step import DeviceStep
from moe_graphs.training.grad_scaler import GradScaler

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
STATES = ("exp_avg", "exp_avg_sq")
ALL = {"state_dtype": BF16, "stochastic_rounding": True, "ema_decay": 0.9}


def parameters(dtype: torch.dtype = BF16) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(40, 7), (3,), (130,)]
    return [nn.Parameter(torch.randn(s, generator=generator).bfloat16().to(dtype)) for s in shapes]


def train(optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> list[Tensor]:
    """Train with gradients that bf16 holds exactly; return parameters and their states."""
    held = optimizer.param_groups[0]["params"]
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        for p in held:
            p.grad = torch.randn(p.shape, generator=generator).bfloat16().to(p.dtype)
        optimizer.step()
    return [*held, *(v for p in held for _, v in sorted(optimizer.state[p].items()))]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def dtypes(optimizer: AdamW) -> set[torch.dtype]:
    return {state[name].dtype for state in optimizer.state.values() for name in STATES}


# The kernel against the plain path


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy: inf / inf
@pytest.mark.parametrize("found_inf", [None, 0.0, 1.0])
@pytest.mark.parametrize(
    ("dtype", "states", "rounded"),
    # Without random bits Triton's interpreter rounds to bf16 by cutting bits off.
    [(FP32, FP32, False), (FP16, FP32, False), (FP32, BF16, True), (BF16, FP32, True),
     (BF16, BF16, True)],
)  # fmt: skip
def test_the_kernel_is_the_plain_path_bit_for_bit(
    interpreted, monkeypatch, dtype, states, rounded, found_inf
):
    """Memory past the end is not written, neither with random bits nor without."""
    from moe_graphs.kernels.adamw import triton_kernels as adamw_triton

    monkeypatch.setattr(adamw_triton, "BLOCK", 64)
    generator = torch.Generator().manual_seed(0)
    columns = [[torch.rand(n + 9, generator=generator) for n in (5, 201)] for _ in range(5)]
    kinds = (dtype, dtype, states, states, FP32)
    inf = None if found_inf is None else torch.tensor(found_inf)
    options: tuple[Any, ...] = (
        1e-2, None, 0.9, 0.999, 1e-8, 0.3, True, torch.tensor(8.0), inf, torch.tensor(0.3),
    )  # fmt: skip
    steps = [torch.tensor(1.0), torch.tensor(4.0)]
    found = []
    for update in (adamw_triton.adamw_update, adamw_update_reference):
        made = [[x.to(kind, copy=True) for x in c] for c, kind in zip(columns, kinds, strict=True)]
        p, g, m, v, e = ([x[:-9] for x in column] for column in made)
        keys = [1 << 62 | 3 << 40, 5] if rounded else []
        update(p, g, m, v, steps, *options, e, 0.99, keys, [], [], rounded)
        found.append([x for column in made for x in column])
    assert same(*found)
    assert torch.equal(found[0][0][-9:], columns[0][0][-9:].to(dtype))
    assert torch.equal(found[0][0], columns[0][0].to(dtype)) == (found_inf == 1.0)


def test_parameters_of_a_kernel_are_those_of_the_plain_path(interpreted, monkeypatch):
    """Small parameters get the same numbers as well, whatever updates them."""
    plain = train(AdamW(parameters(), lr=1e-2, **ALL), 3)
    from moe_graphs.kernels.adamw import triton_kernels as adamw_triton

    monkeypatch.setattr(adamw_triton, "BLOCK", 64)
    monkeypatch.setattr(adamw, "has_kernel", lambda x: True)
    assert same(train(AdamW(parameters(), lr=1e-2, **ALL), 3), plain)


# States


def test_states_have_their_own_dtype():
    """An update of bf16 parameters with fp32 states is that of fp32 parameters, rounded."""
    for dtype in (FP32, BF16):
        optimizer = AdamW(parameters(), lr=1e-2, state_dtype=dtype)
        found = train(optimizer, 1)
        assert dtypes(optimizer) == {dtype}
        assert found[0].dtype == BF16
    narrow, wide = AdamW(parameters(), state_dtype=FP32), AdamW(parameters(FP32), state_dtype=FP32)
    train(narrow, 1), train(wide, 1)
    for p, q in zip(narrow._parameters(), wide._parameters(), strict=True):
        assert torch.equal(p, q.bfloat16())
        assert torch.equal(narrow.state[p]["exp_avg_sq"], wide.state[q]["exp_avg_sq"])


def test_fp32_states_decay_where_bf16_ones_do_not():
    (p, *_) = parameters()
    left = {}
    for name, options in {
        "bf16": {},
        "fp32": {"state_dtype": FP32},
        "rounded": {"stochastic_rounding": True},
    }.items():
        optimizer = AdamW([nn.Parameter(p.detach().clone())], lr=0.0, **options)
        (held,) = optimizer._parameters()
        held.grad = torch.ones_like(held)
        optimizer.step()
        for _ in range(300):
            held.grad = torch.zeros_like(held)
            optimizer.step()
        left[name] = optimizer.state[held]["exp_avg_sq"].float().mean().item() / 1e-3
    assert left["bf16"] == pytest.approx(1, rel=1e-2)
    assert left["fp32"] == pytest.approx(0.999**300, rel=1e-4)
    assert left["rounded"] == pytest.approx(0.999**300, rel=2e-2)


@pytest.mark.parametrize("options", [{}, {"maximize": True, "betas": (0.0, 0.0), "eps": 1e-3}])
def test_the_plain_path_is_as_right_as_torchs(options):
    exact = torch.optim.AdamW(parameters(FP64), lr=1e-2, **options)
    theirs = AdamW(parameters(FP32), lr=1e-2, **options)
    ours = AdamW(parameters(FP32), lr=torch.tensor(1e-2), **options, ema_decay=0.5)
    of_fp64 = AdamW(parameters(FP64), lr=1e-2, **options, ema_decay=0.5)
    expected, *results = (train(each, 20) for each in (exact, theirs, ours, of_fp64))
    for number, p in enumerate(expected[:3]):
        torchs, found, wide = ((r[number] - p).norm() / p.norm() for r in results)
        assert found <= 2 * torchs + 2e-7
        assert wide < 1e-12


def test_memory_in_another_order_is_rounded_as_it_lies():
    base, gradient = torch.randn(20, 30).bfloat16(), torch.randn(20, 30).bfloat16()
    found = []
    for turned in (False, True):
        p = nn.Parameter(base.clone().t() if turned else base.clone())
        p.grad = gradient.t() if turned else gradient
        optimizer = AdamW([p], lr=1e-2, **ALL)
        optimizer.step()
        values = [p, *(optimizer.state[p][name] for name in (*STATES, "ema"))]
        found.append([x.detach().t() if turned else x.detach() for x in values])
    assert same(*found)


# Stochastic rounding


def test_philox_is_that_of_the_papers_authors():
    """The paper has the answer for a key and a counter of zeros."""
    words = random_bits(0, torch.zeros(()), 16)
    assert [hex(x) for x in words[::4].tolist()] == [
        "0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8",
    ]  # fmt: skip


def test_rounding_is_right_on_the_average_and_to_a_neighbour():
    count = 1 << 16
    for value in (1.001, -3.3e-5, 1e38, 1e-40):
        x = torch.full((count,), value)
        rounded = round_stochastically(x, random_bits(7, torch.ones(()), count))
        assert torch.equal(rounded.bfloat16().float(), rounded)
        low, high = sorted(set(rounded.tolist()))
        assert low < x[0] < high
        share = ((x[0].double() - low) / (high - low)).item()
        found = (rounded == high).double().mean().item()
        assert abs(found - share) < 5 * math.sqrt(share * (1 - share) / count)
    exact = torch.tensor([1.0, -2.5, 0.0, math.inf, -math.inf])
    assert torch.equal(round_stochastically(exact, torch.full((5,), 0xFFFF)), exact)
    # The random bits would make a zero of this NaN.
    nan = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(FP32)
    assert round_stochastically(nan, torch.tensor([0xFFFF])).isnan().all()
    assert round_stochastically(torch.tensor([3.4e38]), torch.tensor([0xFFFF])).isinf().all()


def test_rounded_parameters_follow_those_of_fp32():
    """Updates are below half of the last bit, so rounding to the nearest would lose them all."""
    ends = {}
    for name, options in {"nearest": {"state_dtype": FP32}, "random": {**ALL}}.items():
        optimizer = AdamW([nn.Parameter(torch.ones(4096).bfloat16())], lr=1e-4, **options)
        (p,) = optimizer._parameters()
        for _ in range(100):
            p.grad = torch.ones_like(p)
            optimizer.step()
        ends[name] = p.float().mean().item()
    assert ends["nearest"] == 1.0
    assert ends["random"] == pytest.approx(1 - 100 * 1e-4, abs=5e-4)


def test_bits_are_of_seed_parameter_part_and_step():
    def once(seed: int, steps: int = 1) -> list[Tensor]:
        return train(AdamW(parameters(), lr=1e-2, stochastic_rounding=True, seed=seed), steps)

    assert same(once(0), once(0))
    assert not same(once(0), once(1))
    keys = {rounding_key(seed, n, torch.ones(1)) for seed in (0, 1, 1 << 63) for n in range(50)}
    assert len(keys) == 150
    assert all(1 << 62 < key < 1 << 63 and key % 2 for key in keys)
    words = [random_bits(5, torch.tensor(float(t)), 128) for t in (1, 2)]
    assert len(set(torch.cat(words).tolist())) == 256
    # Parameters with the same values are rounded by different random bits.
    twins = [nn.Parameter(torch.linspace(1, 2, 500).bfloat16()) for _ in range(2)]
    one, other, *_ = train_alike(AdamW(twins, lr=1e-3, stochastic_rounding=True))
    assert not torch.equal(one, other)


def train_alike(optimizer: AdamW) -> list[Tensor]:
    for p in optimizer._parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer._parameters()


# Averages


def test_the_average_is_that_of_the_parameters():
    """The average begins with the first step's result, as in torch's AveragedModel."""
    optimizer = AdamW(parameters(), lr=1e-1, **ALL)
    with optimizer.averaged():  # no step has been made
        pass
    expected: list[Tensor] = []
    for step in range(5):
        held = train(optimizer, 1, step)[:3]
        expected = [
            p.detach().float() if not expected else torch.lerp(expected[n], p.float(), 0.1)
            for n, p in enumerate(held)
        ]
    trained, addresses = [p.detach().clone() for p in held], [p.data_ptr() for p in held]
    for p, average in zip(held, expected, strict=True):
        torch.testing.assert_close(optimizer.state[p]["ema"], average, rtol=1e-6, atol=1e-6)
    with pytest.raises(ArithmeticError), optimizer.averaged():
        for p, average in zip(held, expected, strict=True):
            torch.testing.assert_close(p.float(), average, rtol=2**-7, atol=1e-6)
            assert not torch.equal(p, trained[0]) or p is not held[0]
        raise ArithmeticError
    assert same([p.detach() for p in held], trained)
    assert addresses == [p.data_ptr() for p in held]


def test_a_first_step_that_is_skipped_leaves_no_average():
    optimizer = AdamW(parameters(), lr=1e-2, ema_decay=0.5)
    before = [p.detach().clone() for p in optimizer._parameters()]
    optimizer.found_inf, optimizer.grad_scale = torch.ones(()), None
    train(optimizer, 1)
    with optimizer.averaged():
        assert same([p.detach() for p in optimizer._parameters()], before)
    optimizer.found_inf = torch.zeros(())
    train(optimizer, 1)
    for p in optimizer._parameters():
        assert torch.equal(optimizer.state[p]["ema"], p.float())


# Whole steps, saving and loading


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy: inf / inf
@pytest.mark.parametrize(
    ("by_kernel", "skipped"),
    [
        (True, True),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in ((False, False), (False, True), (True, False))
        ),
    ],
)
def test_replays_are_eager_steps_with_new_bits_each(request, monkeypatch, by_kernel, skipped):
    """Replays are eager steps also if the first step is skipped."""
    if by_kernel:
        request.getfixturevalue("interpreted")
        monkeypatch.setattr(adamw, "has_kernel", lambda x: True)
    found = []
    for graphed in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(8, 3, dtype=BF16)
        optimizer = AdamW(model.parameters(), lr=1e-2, **ALL)
        step = DeviceStep(optimizer, scaler=GradScaler("cpu"), clip_norm=1.0)

        def whole(batch: Tensor, model=model, step=step) -> Any:
            step.scale(model(batch).float().square().mean()).backward()
            return step()

        run: Any = whole
        if graphed:
            options = {"optimizer": optimizer, "state": [step], "warmup_steps": 1}
            run = FullIteration(whole, model=model, **options)
        for index in range(5):
            batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(index)).bfloat16()
            batch[0, 0] = math.inf if skipped and index in (0, 3) else 1.0
            run(batch)
        states = [sorted(optimizer.state[p].items()) for p in model.parameters()]
        found.append([*model.parameters(), *(value for state in states for _, value in state)])
        assert not graphed or run.report().matched == 4
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("options", [ALL, {"state_dtype": FP32, "ema_decay": 0.5}])
def test_a_run_goes_on_with_the_same_bits(options):
    """The seed of the optimizer that loads does not matter; torch's hooks are called."""
    seed = {"seed": 3} if "stochastic_rounding" in options else {}
    whole = AdamW(parameters(), lr=1e-2, **options, **seed)
    train(whole, 3)
    buffer = io.BytesIO()
    torch.save(whole.state_dict(), buffer)
    buffer.seek(0)
    held = [nn.Parameter(p.detach().clone()) for p in whole._parameters()]
    part, calls = AdamW(held, lr=1e-2, **options), []
    part.register_load_state_dict_pre_hook(lambda _, state: calls.append(dict(state)) or calls[0])
    part.load_state_dict(torch.load(buffer))
    copied = copy.deepcopy(part)
    expected = train(whole, 2, 3)
    assert same(train(part, 2, 3), expected)
    assert same(train(copied, 2, 3), expected)
    assert len(calls) == 1


def test_states_of_other_optimizers_are_cast():
    """Torch's AdamW and ours load each other's states; missing or dropped states are warned of."""
    torchs = torch.optim.AdamW(parameters(FP32), lr=1e-2)
    train(torchs, 2)
    ours = AdamW(parameters(), lr=1e-2, **{**ALL, "state_dtype": FP32})
    ours.load_state_dict(torchs.state_dict())
    (p, *_), (q, *_) = ours._parameters(), torchs.param_groups[0]["params"]
    assert torch.equal(ours.state[p]["exp_avg_sq"], torchs.state[q]["exp_avg_sq"])  # no rounding
    assert dtypes(ours) == {FP32}
    assert ours.param_groups[0]["seed"] == 0
    train(ours, 1)
    assert ours.state[p]["step"] == 3
    assert "ema" in ours.state[p]
    plain = AdamW(parameters(), lr=1e-2)
    with pytest.warns(UserWarning, match=r"averages \(ema\) of this state are dropped"):
        plain.load_state_dict(ours.state_dict())
    assert "ema" not in plain.state_dict()["state"][0]
    assert dtypes(plain) == {BF16}
    torchs.load_state_dict(ours.state_dict())
    assert torchs.state[q]["exp_avg_sq"].dtype == FP32
    torchs.step()


def test_values_that_it_has_not_are_refused():
    for option, value in (("state_dtype", FP16), ("ema_decay", 1.0), ("seed", -1)):
        with pytest.raises(ValueError, match=f"^{option}: "):
            AdamW(parameters(), **{option: value})
    with pytest.raises(ValueError, match="averaged: there are no averages: pass ema_decay"):
        AdamW(parameters()).averaged()


def test_a_default_one_has_torchs_keys():
    optimizer = AdamW(parameters(), lr=1e-2)
    torchs = torch.optim.AdamW(parameters(), lr=1e-2, fused=True, capturable=True)
    assert sorted(optimizer.state_dict()["param_groups"][0]) == sorted(
        torchs.state_dict()["param_groups"][0]
    )
