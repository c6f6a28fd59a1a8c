"""Sessions: the training steps of a world under each engine, with one interface."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import moe_graphs
from moe_graphs import FullIteration, GraphConfig, GraphError, make_graphed_callables
from programs.bodies_python import GLOBALS
from programs.stepping import Outputs, train_step
from programs.world import World

WARMUP = 2


class Eager:
    """The eager session; ``errors`` are named errors after which the step was complete."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.errors: list[Exception] = []

    def step(self, batch: list[torch.Tensor]) -> Outputs:
        return train_step(self.world, batch)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which everything is eager."""
        yield

    def counts(self) -> tuple[int, Counter[str]]:
        """Number of replays, and eager calls by reason without the warm-up."""
        return 0, Counter()

    def release(self) -> None: ...


class Scopes(Eager):
    def __init__(self, world: World) -> None:
        super().__init__(world)
        program = world.program
        config = GraphConfig(
            program.own_layers or patterns(world),
            warmup_steps=WARMUP,
            on_mismatch=program.on_mismatch,
            on_capture_error="error",
        )
        self.graphs = moe_graphs.graph(world.model, config, generators(world))

    def step(self, batch):
        outputs = None
        try:
            with self.graphs.step():
                outputs = train_step(self.world, batch)
        except GraphError as error:
            if outputs is None:
                raise
            self.errors.append(error)
        return outputs

    @contextlib.contextmanager
    def paused(self):
        with self.graphs.paused():
            yield
        if self.world.program.seed % 2:
            self.graphs.release()

    def counts(self):
        report = self.graphs.report()
        eager = Counter(report.eager_calls)
        del eager["warmup"], eager["outside_step"], eager["paused"]
        return report.matched, eager

    def release(self):
        self.graphs.release()


class Callables(Eager):
    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.modules: tuple[nn.Module, ...] = ()
        samples = sample_calls(world)
        self._replays = 0
        make_graphed_callables(
            tuple(samples),
            tuple(args for args, _ in samples.values()),
            warmup_steps=1,
            allow_unused_input=True,
            sample_kwargs=tuple(kwargs for _, kwargs in samples.values()),
            on_mismatch=world.program.on_mismatch,
            generators=generators(world),
        )
        self.modules = tuple(samples)

    @contextlib.contextmanager
    def paused(self):
        self.release()
        yield

    def counts(self):
        graphs = getattr(self.modules[0], "graphs", None) if self.modules else None
        if graphs is None:
            return 0, Counter({"reset": 1})
        eager = Counter(graphs.eager_calls)
        del eager["no_grad"]
        return replays_of(graphs), eager

    def release(self):
        if self.modules and "reset" in vars(self.modules[0]):
            self.modules[0].reset()


def replays_of(graphs: Any) -> int:
    """Report of graphed callables, which have none themselves."""
    if hasattr(graphs, "replayed"):
        return graphs.replayed
    recordings = graphs.captured.sites if graphs.captured is not None else []
    return sum(recording.replayed for recording in recordings)


class EagerWithSamples(Eager):
    """The eager session for callables, which runs the forward for sample arguments, too."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        sample_calls(world)


class WholeStep(Eager):
    def __init__(self, world: World) -> None:
        super().__init__(world)
        program = world.program
        self.full: Any = FullIteration(
            lambda batch: train_step(world, batch),
            model=world.model,
            optimizer=world.optimizer if program.optimizer_inside else None,
            warmup_steps=WARMUP,
            on_mismatch=program.on_mismatch,
            on_capture_error="error",
            generators=generators(world),
        )
        self._is_paused = False

    def step(self, batch):
        if self._is_paused and self.full.state != "capture_failed":
            return train_step(self.world, batch)
        return self.full(batch)

    @contextlib.contextmanager
    def paused(self):
        """Context in which a step runs eagerly, except to repeat a step whose capture failed."""
        self._is_paused = True
        yield
        self._is_paused = False
        if self.world.program.seed % 2:
            self.full.release()

    def counts(self):
        report = self.full.report()
        eager = Counter(report.eager_calls)
        del eager["warmup"]
        return report.matched, eager

    def release(self):
        self.full.release()


ENGINES = {"scopes": Scopes, "callables": Callables, "step": WholeStep}
REFERENCES = {"scopes": Eager, "callables": EagerWithSamples, "step": Eager}


def generators(world: World) -> list[torch.Generator]:
    return [GLOBALS["generator"]] if world.program.declares_generator else []


def scopes_of(world: World) -> dict[str, nn.Module]:
    """Scopes by name, in order; a module that is used for two blocks is one scope."""
    found: dict[str, nn.Module] = {}
    for number, spec in enumerate(world.program.blocks):
        name = {"block": f"b{number}", "part": f"b{number}.part", "none": None}[spec.scope]
        if name is not None:
            module = world.model.get_submodule(name)
            if all(module is not other for other in found.values()):
                found[name] = module
    return found


def patterns(world: World) -> list[str]:
    """The patterns of scopes; plain names would be taken for names of stages."""
    return [f"b[{name[1]}]{name[2:]}" for name in scopes_of(world)]


def sample_calls(world: World) -> dict[nn.Module, tuple[tuple, dict[str, Any]]]:
    """Run one forward of the model, and return the arguments of each scope's first call."""
    samples: dict[nn.Module, tuple[tuple, dict[str, Any]]] = {}

    def note(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        samples.setdefault(module, pytree.tree_map_only(torch.Tensor, _sample, (args, kwargs)))

    handles = [
        module.register_forward_pre_hook(note, with_kwargs=True)
        for module in scopes_of(world).values()
    ]
    try:
        world.model(world.batch()[0])
    finally:
        for handle in handles:
            handle.remove()
    return samples


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
