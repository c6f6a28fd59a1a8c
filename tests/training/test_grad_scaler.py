"""The scaler on the device: APEX's and Megatron's hysteresis, torch's scaler, checkpoints."""

from __future__ import annotations

import pytest
import torch
from torch import distributed as dist

from distributed import run_distributed
from moe_graphs.training.grad_scaler import GradScaler
from training_runs import DEVICES, device_backend

# Steps in a row, "." finite and "x" not, and the scale after each of them, starting from 8. The
# scales were derived from APEX's update_scale_hysteresis: an infinite step takes one from the
# tracker; the scale backs off if the tracker is at 0 or below; a finite step refills the tracker.
SEQUENCES = {
    "hysteresis 1": (1, 100, ".xx.x.", [8, 4, 2, 2, 1, 1]),
    "hysteresis 2": (2, 100, ".x.xxx.x", [8, 8, 8, 8, 4, 2, 2, 2]),
    "hysteresis 3": (3, 100, "xx.xxxxx.xx", [8, 8, 8, 8, 8, 4, 2, 1, 1, 1, 1]),
    "growth": (1, 3, "...x......", [8, 8, 16, 8, 8, 8, 16, 16, 16, 32]),
    "growth starts again after a tolerated step": (2, 3, "..x.....", [8, 8, 8, 8, 8, 16, 16, 16]),
    "growth of a run that crosses a back-off": (2, 2, ".xx...", [8, 8, 4, 4, 8, 8]),
}


# The same for Megatron-LM's DynamicGradScaler: only a step that lets the scale grow refills the
# tracker, and the scale backs off down to the minimum, here 2.
MEGATRON = {
    "tolerates one, in a row or not": (2, 100, ".x.x.x.", [8, 8, 8, 4, 4, 2, 2]),
    "tolerates two": (3, 100, "x.x.x.x", [8, 8, 8, 8, 4, 4, 2]),
    "growth forgives": (2, 2, "x..x.x..", [8, 8, 16, 16, 16, 8, 8, 16]),
    "the least scale": (1, 100, "xxxx.x", [4, 2, 2, 2, 2, 2]),
    "growth starts again": (2, 3, "..x..xx", [8, 8, 8, 8, 8, 4, 2]),
}
EVERY_SEQUENCE = {
    **{f"apex, {name}": (*row, {}) for name, row in SEQUENCES.items()},
    **{
        f"megatron, {name}": (*row, {"hysteresis_rule": "megatron", "min_scale": 2.0})
        for name, row in MEGATRON.items()
    },
    "apex, the least scale": (2, 100, "xxxx.xx", [8, 4, 3, 3, 3, 3, 3], {"min_scale": 3.0}),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", EVERY_SEQUENCE)
def test_the_scale_follows_the_table(name, device):
    hysteresis, interval, steps, expected, more = EVERY_SEQUENCE[name]
    constants = {"init_scale": 8.0, "growth_interval": interval, "hysteresis": hysteresis, **more}
    eager, replayed = (GradScaler(device, **constants) for _ in range(2))
    found_inf = torch.zeros((), device=device)
    start, backend = replayed.state_dict(), device_backend(device)
    with backend.record(backend.new_pool()) as graphs:
        replayed.update(found_inf)
    replayed.load_state_dict(start)
    for step, scale in zip(steps, expected, strict=True):
        found_inf.fill_(float(step == "x"))
        eager.update(found_inf)
        graphs[0].replay()
        assert eager.scale_factor.item() == scale
        assert eager.state_dict() == replayed.state_dict()


def test_a_state_says_its_rule_where_it_is_not_torchs():
    plain, megatron = (
        GradScaler("cpu", hysteresis=2, **more)
        for more in ({}, {"hysteresis_rule": "megatron", "min_scale": 1.0})
    )
    theirs = torch.amp.GradScaler("cpu").state_dict()
    assert plain.state_dict().keys() - theirs.keys() == {"hysteresis", "_hysteresis_tracker"}
    state = megatron.state_dict()
    assert (state["hysteresis_rule"], state["min_scale"]) == ("megatron", 1.0)
    megatron.load_state_dict(state)
    megatron.load_state_dict(theirs)
    for scaler, other in ((plain, state), (megatron, plain.state_dict())):
        before = scaler.state_dict()
        with pytest.raises(ValueError, match=r"hysteresis_rule: \w+ in the state, \w+ in this"):
            scaler.load_state_dict({**other, "scale": 2.0})
        assert scaler.state_dict() == before


def test_a_state_without_a_scale_is_refused():
    disabled = torch.amp.GradScaler("cpu", enabled=False).state_dict()
    of_megatron = {"scale": torch.ones(1), "growth_tracker": 0, "hysteresis_tracker": 1}
    for state, name in ((disabled, "scale"), (of_megatron, "_growth_tracker")):
        scaler = GradScaler("cpu")
        with pytest.raises(ValueError, match=f"state: has no '{name}'"):
            scaler.load_state_dict(state)
        assert scaler.scale_factor == 2.0**16


@pytest.mark.parametrize("device", DEVICES)
def test_the_scale_never_grows_to_infinity(device):
    scaler = GradScaler(device, init_scale=2.0**127, growth_interval=1)
    scaler.update(torch.zeros((), device=device))
    assert scaler.scale_factor.item() == 2.0**127


@pytest.mark.parametrize("device", DEVICES)
def test_unscaling_finds_inf_and_nan_in_every_dtype(device):
    scaler = GradScaler(device, init_scale=4.0)
    for dtype in (torch.float32, torch.bfloat16):
        for bad in (float("inf"), float("-inf"), float("nan")):
            gradients = [torch.full((3,), 8.0, device=device) for _ in range(2)]
            gradients += [torch.full((2, 2), 8.0, dtype=dtype, device=device)]
            assert scaler.unscale_(gradients).item() == 0.0
            assert all(g.eq(2.0).all() for g in gradients)
            gradients[-1][1, 1] = bad
            assert scaler.unscale_(gradients).item() == 1.0
    with pytest.raises(ValueError, match="float16, which unscaling would underflow"):
        scaler.unscale_([torch.ones(2, dtype=torch.float16, device=device)])


def test_a_state_fills_the_tensors_in_place_and_torch_states_load():
    scaler = GradScaler("cpu", init_scale=8.0, hysteresis=3)
    tensors = [scaler.scale_factor, scaler.growth_tracker, scaler.hysteresis_tracker]
    for found in (0.0, 1.0):
        scaler.update(torch.tensor(found))
    state = scaler.state_dict()
    assert [state[f"_{name}_tracker"] for name in ("growth", "hysteresis")] == [0, 2]
    scaler.update(torch.tensor(0.0))
    scaler.load_state_dict(state)
    assert scaler.state_dict() == state
    theirs = torch.amp.GradScaler("cpu", init_scale=512.0)
    scaler.load_state_dict(theirs.state_dict())
    assert scaler.state_dict() == {**state, "scale": 512.0, "_hysteresis_tracker": 3}
    assert tensors[0] is scaler.scale_factor
    assert [t.item() for t in tensors] == [512.0, 0, 3]
    with pytest.raises(ValueError, match="growth_interval: 5 in the state, 2000 in this scaler"):
        scaler.load_state_dict({**state, "growth_interval": 5})
    theirs.load_state_dict(state)


@pytest.mark.parametrize(
    "constants",
    [
        {"init_scale": 0.0},
        {"growth_factor": 0.5},
        {"backoff_factor": 2.0},
        {"growth_interval": 0},
        {"hysteresis": 0},
        {"hysteresis": 1.5},
        {"growth_interval": 2.5},
        {"hysteresis_rule": "Megatron"},
        {"min_scale": -1.0},
        {"min_scale": 2.0**17},
        {"min_scale": float("nan")},
        {"init_scale": float("inf")},
        {"growth_factor": float("nan")},
    ],
    ids=str,
)
def test_constants_are_checked(constants):
    (name,) = constants
    with pytest.raises(ValueError, match=f"{name}: .* must be"):
        GradScaler("cpu", **constants)


def unscale_together(rank: int, world_size: int, device: str) -> list[float]:
    scaler = GradScaler(device, init_scale=2.0)
    found = []
    for bad_rank in (None, 0, 1):
        gradients = [torch.full((2,), float("nan") if rank == bad_rank else 1.0, device=device)]
        found.append(scaler.unscale_(gradients, dist.group.WORLD).item())
    return found


@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=pytest.mark.multigpu)])
def test_every_rank_learns_of_every_other_ranks_inf(backend):
    device = "cuda" if backend == "nccl" else "cpu"
    assert run_distributed(unscale_together, 2, backend, arguments=(device,)) == [[0, 1, 1]] * 2
