"""Updates within the backward are those behind it, bit by bit, and what cannot be is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from moe_graphs import GraphConfig, graph
from moe_graphs.dispatch import LocalDispatcher
from moe_graphs.engine.whole_step.full_iteration import FullIteration
from moe_graphs.layers import LanguageModel, MoEConfig, TransformerConfig
from moe_graphs.optim import AdamW, UpdateInBackward, adamw, update_in_backward
from moe_graphs.training.capturable import tensor_hyperparameters
from moe_graphs.training.device_step import DeviceStep

LR = 1e-2
Loss = Callable[[nn.Module, Tensor], Tensor]


class Layers(nn.Module):
    """Layers, one of which comes twice, tied ends, and a parameter that nobody uses."""

    def __init__(self, checkpointed: bool = False, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(width, width, bias=False)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.last = nn.Linear(width, width, bias=False)
        self.last.weight = self.first.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in (*self.layers, self.layers[1]):
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
            x = torch.tanh(x)
        return self.last(x)


def square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def language_model(
    device: str = "cpu", dtype: torch.dtype = torch.float32, **sizes: int
) -> LanguageModel:
    moe = MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=16, aux_loss_coef=0.01)
    given = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 32} | sizes
    config = TransformerConfig(max_sequence_length=8, moe=moe, **given)
    return LanguageModel(config, LocalDispatcher(), device=device, dtype=dtype)


def language_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    output = model(tokens[:, :-1])
    logits = output.logits_BSV.flatten(0, 1)
    return nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()) + output.aux_loss


def behind(model: nn.Module, optimizer: AdamW, loss: Loss) -> Callable[[Tensor], Tensor]:
    def step(batch: Tensor) -> Tensor:
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    return step


def beside(
    model: nn.Module, optimizer: AdamW, loss: Loss, **options: Any
) -> Callable[[Tensor], Tensor]:
    updates = UpdateInBackward(model, optimizer, **options)

    def step(batch: Tensor) -> Tensor:
        value = loss(model, batch)
        updates.backward(value)
        return value.detach()

    return step


def everything(optimizer: AdamW) -> list[Tensor]:
    held = [p for group in optimizer.param_groups for p in group["params"]]
    return [*held, *(v for p in held for _, v in sorted(optimizer.state[p].items()))]


def assert_same(one: AdamW, other: AdamW) -> None:
    pairs = zip(everything(one), everything(other), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    held = [p for group in other.param_groups for p in group["params"]]
    assert all(p.grad is None for p in held)


def both(model: nn.Module, **options: Any) -> tuple[list[nn.Module], list[AdamW]]:
    models = [model, copy.deepcopy(model)]
    optimizers = [AdamW(each.parameters(), lr=LR, **options) for each in models]
    for optimizer in optimizers:
        tensor_hyperparameters(optimizer)
    return models, optimizers


def batches(model: nn.Module, count: int, device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    if isinstance(model, LanguageModel):
        made = torch.randint(32, (count, 3, 9), generator=generator)
    else:
        made = torch.randn(count, 4, 8, generator=generator)
    return list(made.to(device))


MODELS: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "layers": (Layers, square),
    "checkpoints": (lambda: Layers(checkpointed=True), square),
    "moe": (language_model, language_loss),
}


EAGER = [(name, False) for name in MODELS]
GRAPHED = [(name, True) for name in MODELS if name != "checkpoints"]  # which they refuse


@pytest.mark.parametrize(("name", "graphed"), EAGER + GRAPHED)
def test_it_is_the_step_behind_the_backward(name, graphed):
    torch.manual_seed(0)
    make, loss = MODELS[name]
    models, optimizers = both(make())
    one, other = behind(models[0], optimizers[0], loss), beside(models[1], optimizers[1], loss)
    if graphed:
        options = {"optimizer": optimizers[1], "warmup_steps": 1}
        other = FullIteration(other, model=models[1], **options)
    for number, batch in enumerate(batches(models[0], 5)):
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"].fill_(LR / (1 + number))
        assert torch.equal(one(batch), other(batch))
        assert_same(*optimizers)
    if graphed:
        assert other.report().replayed == 4


def test_beside_graphs_of_scopes():
    torch.manual_seed(0)
    models, optimizers = both(language_model())
    one = behind(models[0], optimizers[0], language_loss)
    other = beside(models[1], optimizers[1], language_loss)
    graphs = graph(models[1], GraphConfig("attn,moe", warmup_steps=2))
    for batch in batches(models[0], 6):
        with graphs.step():
            value = other(batch)
        assert torch.equal(one(batch), value)
        assert_same(*optimizers)
    assert graphs.report().replayed > 0
    graphs.release()


def test_the_last_of_several_microbatches_updates():
    torch.manual_seed(0)
    models, optimizers = both(Layers())
    updates = UpdateInBackward(models[1], optimizers[1])
    for first, last in zip(batches(models[0], 3), batches(models[0], 3)[::-1], strict=True):
        for model in models:
            square(model, first).backward()
        square(models[0], last).backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        updates.backward(square(models[1], last))
        assert_same(*optimizers)


def test_layers_are_updated_one_after_the_other_and_their_gradients_freed():
    model = Layers()
    optimizer = AdamW(model.parameters(), lr=LR)
    updates, seen = UpdateInBackward(model, optimizer), []
    names = {p: name for name, p in model.named_parameters()}

    def note(_: Any, args: tuple, kwargs: dict) -> None:
        left = {names[p].rpartition(".")[0] for p in names if p.grad is not None}
        seen.append((names[kwargs["parameters"][0]], kwargs["max_programs"], left))

    optimizer.register_step_pre_hook(note)
    updates.backward(square(model, torch.randn(4, 8)))
    # Layer 1 comes last and second: its gradient is whole after that of layer 2.
    layers = [(f"layers.{i}.weight", 48, {f"layers.{i}"}) for i in (3, 2, 1, 0)]
    assert seen == [*layers, ("first.weight", 48, {"first"}), ("unused", None, set())]


def test_groups_of_ones_own_and_frozen_parameters():
    torch.manual_seed(0)
    models, optimizers = both(Layers())
    for model in models:
        model.layers[0].requires_grad_(False)
    trained = [p for p in models[1].parameters() if p.requires_grad]
    groups = [trained[:3], iter(trained[3:])]
    one = behind(models[0], optimizers[0], square)
    other = beside(models[1], optimizers[1], square, groups=groups, max_programs=None)
    for batch in batches(models[0], 2):
        assert torch.equal(one(batch), other(batch))
        assert_same(*optimizers)


def test_what_autograd_still_needs_makes_it_raise():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    updates = UpdateInBackward(model, AdamW(model.parameters()))
    hidden = model[0](torch.randn(4, 8)) @ model[1].weight.detach()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        updates.backward(model[1](hidden).square().sum())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_a_backward_within_the_backward_is_refused():
    model = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
    updates = UpdateInBackward(model, AdamW(model.parameters()))
    x = torch.randn(4, 8, requires_grad=True)
    hidden = checkpoint(model[0], x, use_reentrant=True)
    before = [p.detach().clone() for p in model[0].parameters()]
    with pytest.raises(RuntimeError, match="pass use_reentrant=False"):
        updates.backward(model[1](hidden).square().sum())
    assert all(map(torch.equal, model[0].parameters(), before))


def test_what_needs_all_gradients_first_is_refused():
    model = Layers()
    optimizer = AdamW(model.parameters())
    UpdateInBackward(model, optimizer)
    model(torch.randn(4, 8)).sum().backward()
    for update in (optimizer.step, DeviceStep(optimizer, clip_norm=1.0)):
        with pytest.raises(RuntimeError, match=r"optimizer.step\(\): UpdateInBackward makes"):
            update()


def given(**changes: Any) -> Sequence[Any]:
    model = changes.pop("model", None) or Layers()
    optimizer = changes.pop("optimizer", AdamW)(model.parameters())
    return model, optimizer, changes


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: given(optimizer=torch.optim.AdamW), "^optimizer: a AdamW: use moe_graphs"),
        (lambda: given(max_programs=0), "^max_programs: 0"),
        (lambda: (nn.Linear(2, 2), *given()[1:]), "^optimizer: it has no parameters .* no module"),
        (lambda: (m := Layers(), AdamW(m.parameters()), {"groups": [m.layers.parameters()]}),
         "^groups: 2 parameters of the optimizer are in none"),
        (lambda: (m := Layers(), AdamW(m.parameters()), {"groups": [[*m.parameters()]] * 2}),
         "^groups: a parameter is in several"),
        (lambda: given(model=type("DistributedDataParallel", (Layers,), {})()),
         "^model: DistributedDataParallel averages"),
    ],
)  # fmt: skip
def test_what_it_cannot_do_is_refused_by_name(make, words):
    model, optimizer, options = make()
    with pytest.raises(ValueError, match=words):
        UpdateInBackward(model, optimizer, **options)


def test_sharded_parameters_are_refused():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh, model = init_device_mesh("cpu", (2,)), nn.Linear(2, 2)
        model.weight = nn.Parameter(DTensor.from_local(model.weight.detach(), mesh, [Replicate()]))
        with pytest.raises(ValueError, match="^model: parameters are sharded"):
            UpdateInBackward(model, AdamW(model.parameters()))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("programs", [1, 3, 100])
def test_few_programs_write_the_same_bits(interpreted, monkeypatch, programs):
    adamw_triton = pytest.importorskip("moe_graphs.kernels.adamw_triton")
    monkeypatch.setattr(adamw_triton, "WIDE_BLOCK", 128)
    monkeypatch.setattr(adamw, "LARGE", 10)
    monkeypatch.setattr(adamw, "has_kernel", lambda x: True)
    torch.manual_seed(0)
    models, optimizers = both(nn.Linear(30, 20))
    for model in models:
        for p, seed in zip(model.parameters(), (1, 2), strict=True):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))
    for _ in range(2):
        optimizers[0].step()
        optimizers[1].step(max_programs=programs)
    pairs = zip(everything(optimizers[0]), everything(optimizers[1]), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_memory_is_kept_until_its_readers_are_waited_for(monkeypatch):
    """The order of streams and gradients, of which the CPU has none: with stand-ins."""
    log: list[str] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name, self.device, self.events = name, "cpu", 0

        def wait_stream(self, other: Stream) -> None:
            log.append(f"{self.name} waits for {other.name}")

        def wait_event(self, event: str) -> None:
            log.append(f"{self.name} waits for {event}")

        def record_event(self) -> str:
            self.events += 1
            return f"update {self.events}"

    caller, side = Stream("caller"), Stream("side")
    cuda = SimpleNamespace(
        current_stream=lambda *_: caller,
        stream=lambda stream: torch.no_grad(),
    )
    monkeypatch.setattr(update_in_backward.torch, "cuda", cuda)
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    updates = UpdateInBackward(model, AdamW(model.parameters()))
    updates._stream = side
    updates.backward(model(torch.randn(3, 2)).sum())
    forks = ["side waits for caller"] * 2
    kept = ["side waits for caller", "caller waits for update 1"]
    kept += ["side waits for caller", "caller waits for update 2"]
    assert log == [*forks, *kept, "caller waits for side"]


@pytest.mark.gpu
@pytest.mark.parametrize("graphed", [False, True])
@pytest.mark.parametrize("max_programs", [3, 48, None])
def test_on_a_gpu_it_is_the_step_behind_the_backward(
    monkeypatch, deterministic, poisoned_memory, graphed, max_programs
):
    """Over memory that would show it if gradients were given away before they are read."""
    monkeypatch.setattr(adamw, "LARGE", 1 << 12)
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "num_layers": 6, "num_heads": 4, "vocab_size": 512}
    models, optimizers = both(language_model("cuda", torch.bfloat16, **sizes))
    steps = [behind(models[0], optimizers[0], language_loss)]
    options = {"max_programs": max_programs}
    steps.append(beside(models[1], optimizers[1], language_loss, **options))
    if graphed:
        steps = [
            FullIteration(step, model=model, optimizer=optimizer)
            for step, model, optimizer in zip(steps, models, optimizers, strict=True)
        ]
    for batch in batches(models[0], 12, "cuda"):
        values = [step(batch) for step in steps]
        assert torch.equal(*values)
        assert_same(*optimizers)
    if graphed:
        for step in steps:
            assert step.report().replayed == 9
            step.release()


@pytest.mark.gpu
def test_on_a_gpu_gradients_are_given_back_while_the_backward_runs():
    """Eagerly and in a graph's pool: a few layers' at a time, not those of all sixteen."""
    layers, width = 16, 1024
    peaks = {}
    for name, make in (("behind", behind), ("beside", beside)):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))).cuda()
        optimizer = AdamW(model.parameters(), lr=LR)
        step, batch = make(model, optimizer, square), torch.randn(8, width, device="cuda")
        step(batch)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(batch)
        torch.cuda.synchronize()
        peaks[name, "eager"] = torch.cuda.max_memory_allocated() - before
        whole = FullIteration(step, model=model, optimizer=optimizer, verify=False)
        whole.capture(batch)
        peaks[name, "graph"] = whole.report().pool_bytes
        whole.release()
    for how in ("eager", "graph"):
        assert peaks["behind", how] - peaks["beside", how] > 4 * width * width * layers // 2, peaks


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("programs", [1, 16, 132, 100_000])
def test_on_a_gpu_few_programs_write_the_same_bits(dtype, programs):
    torch.manual_seed(0)
    start = [torch.randn(shape, device="cuda").to(dtype) for shape in ((300, 700), (70_001,))]
    held = [[nn.Parameter(p.clone()) for p in start] for _ in range(2)]
    plain, capped = (AdamW(each, lr=LR) for each in held)
    for _ in range(3):
        for p, q in zip(*held, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        plain.step()
        capped.step(max_programs=programs)
        assert all(map(torch.equal, everything(plain), everything(capped)))
