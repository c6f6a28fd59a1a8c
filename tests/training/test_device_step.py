"""Device steps: eager ones against recorded and replayed ones, bit by bit."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim import SGD, Adagrad, Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

from distributed import run_distributed
from moe_graphs import optim
from moe_graphs.engine.tracing import Trace
from moe_graphs.engine.whole_step.full_iteration import FullIteration
from moe_graphs.training.capturable import load_optimizer_state, tensor_hyperparameters
from moe_graphs.training.device_step import DeviceStep, StepResult
from moe_graphs.training.ema import ExponentialMovingAverage
from moe_graphs.training.grad_norm import total_norm
from moe_graphs.training.grad_scaler import GradScaler
from training_runs import DEVICES, device_backend

ADAM = {"fused": True, "capturable": True, "lr": 1e-2}
OPTIMIZERS: dict[str, Callable[[list], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: AdamW(parameters, **ADAM, weight_decay=0.1),
    "our AdamW": lambda parameters: optim.AdamW(parameters, lr=1e-2, weight_decay=0.1),
    "Adam": lambda parameters: Adam(parameters, **ADAM, weight_decay=0.1, amsgrad=True),
    "SGD": lambda parameters: SGD(parameters, lr=1e-2, momentum=0.9, fused=True),
    "plain SGD": lambda parameters: SGD(parameters, lr=1e-2, fused=True),
    "Adagrad": lambda parameters: Adagrad(parameters, lr=1e-2, fused=True),
}
EVERY_OPTIMIZER = pytest.mark.parametrize(
    ("name", "device"),
    [
        pytest.param(name, device, marks=pytest.mark.gpu if device == "cuda" else ())
        for name in OPTIMIZERS
        for device in ("cpu", "cuda")
        # Torch 2.11 has no fused Adagrad on CUDA.
        if (name, device) != ("Adagrad", "cuda")
    ],
)
INFINITE_STEPS = (0, 4, 5, 9)


@dataclass
class Training:
    """A model of two dtypes with all tensors of its step, at fixed addresses."""

    device: str
    optimizer_name: str = "AdamW"
    parts: tuple[str, ...] = ("scaler", "clip", "ema", "decay")
    trace: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3)).to(self.device)
        groups = [{"params": [*m.parameters()]} for m in (self.model[0], self.model[2])]
        self.optimizer = OPTIMIZERS[self.optimizer_name](groups)
        decoupled = self.optimizer_name.endswith("AdamW")
        tensor_hyperparameters(self.optimizer, weight_decay="decay" in self.parts and decoupled)
        self.scheduler = LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        scaler = GradScaler(self.device, init_scale=64.0, growth_interval=3, hysteresis=2)
        self.scaler = scaler if "scaler" in self.parts else None
        ema = ExponentialMovingAverage(self.model.parameters(), 0.9)
        self.ema = ema if "ema" in self.parts else None
        clip_norm = 0.5 if "clip" in self.parts else None
        self.step = DeviceStep(
            self.optimizer, scaler=self.scaler, clip_norm=clip_norm, ema=self.ema
        )
        self.input, self.target = (torch.zeros(4, n, device=self.device) for n in (6, 3))

    def load_batch(self, index: int) -> None:
        generator = torch.Generator().manual_seed(index)
        batch = torch.randn(4, 9, generator=generator)
        if self.scaler is not None and index in INFINITE_STEPS:
            batch[1, 2] = math.inf
        self.input.copy_(batch[:, :6])
        self.target.copy_(batch[:, 6:])

    def whole_step(self) -> StepResult:
        loss = (self.model(self.input) - self.target).square().mean()
        self.step.scale(loss).backward()
        return self.step()

    def state(self) -> list[Tensor]:
        tensors = [*self.model.parameters(), *(p.grad for p in self.model.parameters())]
        tensors += [v for s in self.optimizer.state.values() for v in s.values() if v is not None]
        tensors += [group["lr"] for group in self.optimizer.param_groups]
        tensors += [] if self.ema is None else self.ema.averages
        return [t.detach().clone() for t in tensors]

    def scaler_state(self) -> dict:
        return {} if self.scaler is None else self.scaler.state_dict()

    def note(self, result: StepResult) -> None:
        values = (result.grad_norm, result.found_inf, result.scale)
        self.trace += [value.clone() for value in values if value is not None] + self.state()
        self.scheduler.step()

    def run_eagerly(self, start: int, end: int) -> None:
        for index in range(start, end):
            self.load_batch(index)
            self.note(self.whole_step())

    def record(self) -> tuple[Callable[[], None], StepResult]:
        """Record one step; recording also performs the step, as the CPU recorder always does."""
        backend = device_backend(self.device)
        with backend.record(backend.new_pool()) as graphs:
            result = self.whole_step()
        if self.device == "cuda":
            graphs[0].replay()
        return graphs[0].replay, result

    def run_recorded(self, start: int, end: int) -> None:
        self.load_batch(start)
        replay, result = self.record()
        self.note(result)
        for index in range(start + 1, end):
            self.load_batch(index)
            replay()
            self.note(result)


def assert_same(left: list[Tensor], right: list[Tensor]) -> None:
    """Compare bit by bit; the norm of an infinite step is NaN on both sides."""
    torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)


PARTS = [(), ("clip",), ("scaler",), ("scaler", "clip", "ema", "decay"), ("clip", "ema", "decay")]


@EVERY_OPTIMIZER
@pytest.mark.parametrize("parts", PARTS, ids="+".join)
def test_replayed_steps_are_eager_steps(name, parts, device):
    eager, recorded = (Training(device, name, parts) for _ in range(2))
    eager.run_eagerly(0, 12)
    recorded.run_eagerly(0, 3)
    recorded.run_recorded(3, 12)
    assert_same(eager.trace, recorded.trace)
    assert eager.scaler_state() == recorded.scaler_state()
    assert not torch.equal(eager.trace[0], eager.trace[-1])


@EVERY_OPTIMIZER
def test_full_iteration_takes_it_in(name, device):
    """Whole steps are captured with skipped steps before and after the capture."""
    eager, graphed = (Training(device, name) for _ in range(2))
    eager.run_eagerly(0, 12)

    def step(batch: tuple[Tensor, Tensor]) -> StepResult:
        before = graphed.input, graphed.target
        graphed.input, graphed.target = batch
        result = graphed.whole_step()
        graphed.input, graphed.target = before  # a replay runs no Python that would set these
        return result

    whole = FullIteration(
        step, model=graphed.model, optimizer=graphed.optimizer, state=[graphed.step]
    )
    for index in range(12):
        graphed.input, graphed.target = (torch.zeros(4, n, device=device) for n in (6, 3))
        graphed.load_batch(index)
        graphed.note(whole((graphed.input, graphed.target)))
    assert whole.report().matched == 9
    assert_same(eager.trace, graphed.trace)
    assert eager.scaler_state() == graphed.scaler_state()
    whole.release()


@EVERY_OPTIMIZER
def test_a_skipped_step_moves_nothing_but_the_scaler(name, device):
    training = Training(device, name)
    training.run_eagerly(0, 3)  # the very first step is skipped
    for index, scale_after in ((3, 128.0), (4, 128.0), (5, 64.0), (6, 64.0)):
        before = training.state()
        training.load_batch(index)
        result = training.whole_step()
        skipped = index in INFINITE_STEPS
        assert result.found_inf.item() == skipped
        same = [torch.equal(a, b) for a, b in zip(before, training.state(), strict=True)]
        assert all(same) == skipped
        assert training.scaler.scale_factor.item() == scale_after
    assert all(p.isfinite().all() for p in training.model.parameters())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_a_skipped_step_is_not_counted(name, device):
    training = Training(device, name)
    training.run_eagerly(0, 10)
    steps = {state["step"].item() for state in training.optimizer.state.values()}
    assert steps == {10 - len(INFINITE_STEPS)}


@EVERY_OPTIMIZER
def test_it_is_torchs_scaler_clipping_and_step(name, device):
    ours, theirs = (Training(device, name, ("scaler", "clip")) for _ in range(2))
    # Torch leaves the momentum of fused SGD uninitialised if the first step is skipped.
    first = 1
    ours.scaler.hysteresis = 1
    ours.scaler.hysteresis_tracker.fill_(1)
    scaler = torch.amp.GradScaler(device, init_scale=64.0, growth_interval=3)
    ours.run_eagerly(first, 12)
    for index in range(first, 12):
        theirs.load_batch(index)
        loss = (theirs.model(theirs.input) - theirs.target).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(theirs.optimizer)
        nn.utils.clip_grad_norm_(theirs.model.parameters(), 0.5)
        scaler.step(theirs.optimizer)
        scaler.update()
        theirs.optimizer.zero_grad(set_to_none=False)
        theirs.scheduler.step()
    assert_same(ours.state(), theirs.state())
    their_state = scaler.state_dict()
    assert {k: v for k, v in ours.scaler_state().items() if k in their_state} == their_state


def test_the_first_step_skipped_leaves_momentum_at_zero():
    training = Training("cpu", "SGD")
    training.load_batch(0)
    training.whole_step()
    assert all(s["momentum_buffer"].eq(0).all() for s in training.optimizer.state.values())


@pytest.mark.parametrize("device", DEVICES)
def test_a_checkpoint_goes_on_in_the_same_graph(device):
    whole, resumed = Training(device), Training(device)
    whole.run_eagerly(0, 6)
    saved = {
        "model": {name: value.clone() for name, value in whole.model.state_dict().items()},
        "optimizer": whole.optimizer.state_dict(),
        "scheduler": whole.scheduler.state_dict(),
        "scaler": whole.scaler.state_dict(),
        "ema": whole.ema.state_dict(),
    }
    saved = torch.load(save(saved), map_location="cpu", weights_only=False)
    resumed.run_eagerly(20, 22)
    replay, result = resumed.record()
    resumed.model.load_state_dict(saved["model"])
    resumed.scheduler.load_state_dict(saved["scheduler"])
    load_optimizer_state(resumed.optimizer, saved["optimizer"])
    resumed.scaler.load_state_dict(saved["scaler"])
    resumed.ema.load_state_dict(saved["ema"])
    whole.trace, resumed.trace = [], []
    whole.run_eagerly(6, 12)
    for index in range(6, 12):
        resumed.load_batch(index)
        replay()
        resumed.note(result)
    assert_same(whole.trace, resumed.trace)
    assert whole.scaler_state() == resumed.scaler_state()


def save(saved: dict) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    buffer.seek(0)
    return buffer


def test_no_part_reads_a_value_on_the_host():
    training = Training("cpu")
    training.run_eagerly(1, 3)
    with Trace(torch.device("cpu"), strict=False):
        training.whole_step()
        training.scheduler.step()


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "Adagrad"])
def test_no_part_waits_for_the_gpu(name):
    training = Training("cuda", name)
    cosine = CosineAnnealingLR(training.optimizer, 10)
    training.run_eagerly(1, 3)
    torch.cuda.set_sync_debug_mode("error")
    try:
        training.whole_step()
        training.scheduler.step()
        cosine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("device", DEVICES)
def test_the_norm_is_fp32_whatever_the_gradients_are(device):
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(100, generator=generator).to(device, torch.bfloat16) for _ in range(5)]
    mixed = [*values, torch.randn(7, generator=generator).to(device)]
    norm = total_norm(mixed)
    assert norm.dtype == torch.float32
    exact = torch.cat([g.double() for g in mixed]).norm()
    torch.testing.assert_close(norm.double(), exact, rtol=1e-6, atol=0)
    fp32 = [g.float() for g in mixed]
    assert torch.equal(total_norm(fp32), nn.utils.get_total_norm(fp32))
    assert total_norm([]).item() == 0


@pytest.mark.parametrize("device", DEVICES)
def test_clipping_bf16_gradients(device):
    parameters = [nn.Parameter(torch.ones(4, dtype=torch.bfloat16, device=device))]
    parameters += [nn.Parameter(torch.ones(5, device=device))]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    step = DeviceStep(SGD(parameters, lr=1.0, fused=True), clip_norm=1.5)
    assert step().grad_norm.item() == 3.0
    for parameter in parameters:
        torch.testing.assert_close(parameter.float(), torch.full_like(parameter, 0.5).float())
        assert parameter.grad.eq(0).all()


def test_an_infinite_clip_norm_measures_only_and_none_does_not():
    for clip_norm, measured in ((math.inf, 5.0), (None, None)):
        parameter = nn.Parameter(torch.zeros(2))
        parameter.grad = torch.tensor([3.0, 4.0])
        result = DeviceStep(SGD([parameter], lr=1.0, fused=True), clip_norm=clip_norm)()
        assert (None if result.grad_norm is None else result.grad_norm.item()) == measured
        assert parameter.tolist() == [-3.0, -4.0]


def test_gradients_may_be_dropped_instead_of_zeroed():
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    DeviceStep(SGD([parameter], lr=1.0, fused=True), set_to_none=True)()
    assert parameter.grad is None


def test_weight_decay_as_a_tensor_is_adamws_and_can_change():
    plain, tensors = (Training("cpu", parts=()) for _ in range(2))
    tensor_hyperparameters(tensors.optimizer, weight_decay=True)
    for index in range(4):
        for group, other in zip(
            plain.optimizer.param_groups, tensors.optimizer.param_groups, strict=True
        ):
            group["weight_decay"] = 0.1 * index
            other["tensor_weight_decay"].fill_(0.1 * index)
        for training in (plain, tensors):
            training.run_eagerly(index, index + 1)
    assert tensors.optimizer.param_groups[0]["weight_decay"] == 0.0
    for left, right in zip(plain.state(), tensors.state(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-7)


def step_together(rank: int, world_size: int, device: str) -> list:
    """Train two parameters, one on each rank; the second gradient is infinite at first."""
    parameter = nn.Parameter(torch.zeros(1, device=device))
    world = dist.group.WORLD
    step = DeviceStep(
        SGD([parameter], lr=1.0, fused=True),
        scaler=GradScaler(device, init_scale=1.0, backoff_factor=1.0),
        clip_norm=math.inf,
        process_group=world,
        shard_group=world,
    )
    seen = []
    for bad in (True, False):
        gradient = (3.0, math.inf if bad else 4.0)[rank]
        parameter.grad = torch.full((1,), gradient, device=device)
        result = step()
        seen.append((result.found_inf.item(), result.grad_norm.item(), parameter.item()))
    return seen


@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=pytest.mark.multigpu)])
@pytest.mark.long
def test_ranks_skip_together_and_share_the_norm_of_their_shards(backend):
    device = "cuda" if backend == "nccl" else "cpu"
    results = run_distributed(step_together, 2, backend, arguments=(device,))
    assert results == [[(1.0, math.inf, 0.0), (0.0, 5.0, -gradient)] for gradient in (3.0, 4.0)]
