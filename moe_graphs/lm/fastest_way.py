"""The fastest legal way to train in a layout: whole steps, scopes or eager, and which dispatcher.

``docs/performance.md`` has the measurements. In every layout whole steps with the update in the
graph are the fastest way, and scopes are the next one. Options that the command line names are
never changed.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from moe_graphs.config import IMPLS, FullIterationConfig, GraphConfig
from moe_graphs.dispatch.peer_memory import peer_memory
from moe_graphs.layers import TransformerConfig
from moe_graphs.lm.options import GraphOptions
from moe_graphs.lm.workers import Workers
from moe_graphs.parallel import ParallelConfig
from moe_graphs.parallel.mesh import expert_mesh, shard_mesh
from moe_graphs.registry import DISPATCHERS

_IN_ONE_PROCESS = ParallelConfig()
_IMPLS = (*IMPLS, "full_iteration")
_WORDS = {"full_iteration": "whole steps", "local": "scopes"}


@dataclass(frozen=True, kw_only=True)
class Situation:
    """The facts that decide which ways are legal.

    Attributes:
        fsdp: whether FSDP2 shards weights wherever several ranks have the same ones.
        no_peers: the reason why ranks cannot use each other's memory; empty if they can.
    """

    model: TransformerConfig
    layout: ParallelConfig = _IN_ONE_PROCESS
    fsdp: bool = True
    no_peers: str = ""

    @property
    def shares_gradients(self) -> bool:
        layout = self.layout
        return layout.data_parallel * layout.cp * layout.tp > 1

    @property
    def gathers_parameters(self) -> bool:
        return self.fsdp and self.layout.data_parallel * self.layout.cp > 1


@dataclass(frozen=True)
class Way:
    """The chosen way; ``graph_config`` None trains eagerly.

    Attributes:
        why, why_dispatcher: the reasons of both choices, in words.
        problems: every named option that does not fit the others, in words.
    """

    graph_config: GraphConfig | FullIterationConfig | None
    dispatcher: str
    why: str
    why_dispatcher: str
    problems: tuple[str, ...] = ()

    def __str__(self) -> str:
        graphs = self.graph_config or "none, eager"
        return (
            f"graphs: {graphs} ({self.why}); dispatcher {self.dispatcher} ({self.why_dispatcher})"
        )


@dataclass(frozen=True)
class Obstacle:
    """A reason why a way is not legal, and the options that make it legal."""

    reason: str
    remedy: str


def against_whole_steps(
    situation: Situation, dispatcher: str, *, optimizer_in_graph: bool
) -> list[Obstacle]:
    found = []
    kind = DISPATCHERS[dispatcher]
    if kind.host_sync and situation.model.moe is not None:
        shared = situation.layout.ep > 1
        others = DISPATCHERS.words(lambda e: not e.host_sync and e.between_ranks == shared)
        reason = f"dispatcher {dispatcher} reads sizes on the host"
        found.append(Obstacle(reason, f"use --dispatcher {others}"))
    if (experts := _experts_on_the_host(situation.model)) is not None:
        reason = f"experts {experts} take their sizes from the host"
        found.append(Obstacle(reason, "use --experts moe_graphs"))
    if situation.shares_gradients and not optimizer_in_graph:
        found.append(
            Obstacle(
                "the update of sharded gradients (DTensor) is a part of the graph",
                "add --optimizer-in-graph",
            )
        )
    return found


def against_scopes(situation: Situation) -> list[Obstacle]:
    if not situation.gathers_parameters:
        return []
    return [
        Obstacle(
            "FSDP2 gathers parameters at other addresses in every step, and a graph of a scope "
            "reads those it was captured with",
            "use --no-fsdp, --impl full_iteration, or none, or share by --tp and --pp alone",
        )
    ]


def choose(asked: GraphOptions, situation: Situation) -> Way:
    """Chooses the fastest legal way among those that the named options leave."""
    dispatcher, why_dispatcher = _dispatcher(asked, situation)
    in_graph = asked.optimizer_in_graph is not False
    against: tuple[tuple[str, list[Obstacle]], ...] = (
        ("full_iteration", against_whole_steps(situation, dispatcher, optimizer_in_graph=in_graph)),
        ("local", against_scopes(situation)),
        ("none", []),
    )  # the fastest way first
    impl, why = _named(asked)
    if impl is None:
        impl = next(way for way, obstacles in against if not obstacles)
        passed = [
            f"{_WORDS[way]} are not, since {' and '.join(each.reason for each in obstacles)}"
            for way, obstacles in itertools.takewhile(lambda row: row[0] != impl, against)
        ]
        why = f"the fastest legal way: {'; '.join(passed)}" if passed else "the fastest way"
    config, problems = _config(impl, asked, situation, dispatcher, in_graph)
    return Way(config, dispatcher, why, why_dispatcher, tuple(problems))


def default_scopes(model: TransformerConfig, dispatcher: str) -> str:
    """Names all scopes that can be captured of these layers, comma-separated."""
    kinds = {model.is_moe_layer(index) for index in range(model.num_layers)}
    on_the_host = DISPATCHERS[dispatcher].host_sync or _experts_on_the_host(model) is not None
    of_moe = "moe_router,moe_preprocess" if on_the_host else "moe"
    return ",".join(["attn", *(["mlp"] if False in kinds else []), *([of_moe] * (True in kinds))])


def no_peers(workers: Workers | None, model: TransformerConfig, dtype: torch.dtype) -> str:
    """Tries whether ranks that share experts can use each other's memory. All ranks call it.

    Returns:
        The reason why some rank cannot, the same one on all ranks; empty if all can.
    """
    if workers is None or workers.layout.ep == 1:
        return "no ranks share experts"
    return "it is for GPUs" if workers.device.type == "cpu" else tried_peers(workers, model, dtype)


def tried_peers(workers: Workers, model: TransformerConfig, dtype: torch.dtype) -> str:
    """Makes a little memory that ranks share, and returns the reason why it failed, or ""."""
    mesh = workers.data
    if workers.fsdp:
        mesh = expert_mesh(workers.layout, shard_mesh(workers.mesh))["ep"]
    said = ""
    try:
        peer_memory(mesh.get_group(), 1, model.hidden_size, 1, dtype, workers.device)
    except ValueError as error:
        said = str(error).removesuffix(": take 'all_gather'").removeprefix("symmetric ")
    return next(filter(None, workers.gather(said)), "")


def _experts_on_the_host(model: TransformerConfig) -> str | None:
    """The kernels of the experts if they read sizes on the host, else None."""
    kind = "moe_graphs" if model.moe is None else model.moe.experts
    return None if kind == "moe_graphs" else kind


def _dispatcher(asked: GraphOptions, situation: Situation) -> tuple[str, str]:
    if asked.dispatcher is not None:
        return asked.dispatcher, "as named"
    shared = situation.layout.ep > 1
    fit = [name for name, kind in DISPATCHERS.items() if kind.between_ranks == shared]
    legal = [name for name in fit if not (DISPATCHERS[name].needs_peers and situation.no_peers)]
    if not shared:
        return legal[0], "every rank has all experts"
    if fit[0] != legal[0]:
        return legal[0], f"the fastest one here: {fit[0]} is not legal, {situation.no_peers}"
    how = ": ranks use each other's memory" if DISPATCHERS[legal[0]].needs_peers else ""
    return legal[0], f"the fastest one{how}"


def _named(asked: GraphOptions) -> tuple[str | None, str]:
    """The impl that the named options say, with the reason in words; None if they leave it open."""
    if asked.impl is not None:
        return asked.impl, "as named by --impl"
    if asked.scopes is not None:
        return "local", "as named by --scopes"
    if asked.optimizer_in_graph:
        return "full_iteration", "as named by --optimizer-in-graph"
    return None, ""


def _config(
    impl: str, asked: GraphOptions, situation: Situation, dispatcher: str, in_graph: bool
) -> tuple[GraphConfig | FullIterationConfig | None, list[str]]:
    problems = []
    if impl not in _IMPLS:
        problems.append(f"impl: {impl!r}: accepted are {', '.join(_IMPLS)}")
    if asked.scopes is not None and impl == "full_iteration":
        problems.append(
            f"scopes: {asked.scopes!r} with --impl full_iteration, which captures the whole step: "
            f"drop --scopes, or use --impl local"
        )
    if asked.scopes is not None and impl == "none":
        problems.append(
            f"scopes: {asked.scopes!r} with --impl none, which captures nothing: drop --scopes, or "
            f"use --impl local"
        )
    if asked.optimizer_in_graph and impl != "full_iteration" and impl in _IMPLS:
        drop = "--scopes" if asked.impl is None else f"--impl {impl}"
        problems.append(
            f"optimizer_in_graph: {drop} makes no graph of a step to put the update in: use --impl "
            f"full_iteration, or drop --optimizer-in-graph"
        )
    if impl == "full_iteration":
        return FullIterationConfig(in_graph), problems
    if impl == "none" or impl not in _IMPLS:
        return None, problems
    scopes = default_scopes(situation.model, dispatcher) if asked.scopes is None else asked.scopes
    if not scopes.replace(",", "").strip():
        return None, [*problems, f"scopes: {scopes!r} names none: name scopes, or use --impl none"]
    try:
        return GraphConfig(scopes, impl), problems
    except ValueError as error:
        return None, [*problems, f"scopes: {error}"]
