"""Many exchanges back to back through peers' memory, on ranks that wait at random; values checked.

On GPUs graphs of one, two and three exchanges are replayed in an order that all ranks share, with
eager exchanges between them.

Shapes: T tokens of a rank, D model, K top-k, E experts.
"""

from __future__ import annotations

import random
import time

import pytest
import torch
from torch import Tensor

from distributed import RANKS, run_distributed
from moe_graphs.dispatch import SymmetricDispatcher
from moe_graphs.dispatch.dispatcher import DispatchPlan
from stand_in_experts import unchanged

T, D, K, E = 64, 64, 2, 8
ROUNDS = {"cpu": 60, "cuda": 2000}
# Actions of each program: "s" sends tokens, "r" brings back sums of the tokens that were sent last.
PROGRAMS = ("s", "r", "ss", "sr", "srr", "ssr")


class _Exchanges:
    """Static inputs of one rank, and the results of its last exchanges."""

    def __init__(self, device: str) -> None:
        self.dispatcher = SymmetricDispatcher()
        self.hidden_TD = torch.zeros(T, D, device=device)
        self.experts_TK = torch.zeros(T, K, dtype=torch.int64, device=device)
        self.weights_TK = torch.zeros(T, K, device=device)
        self.sums_TD = torch.zeros(T, D, device=device)
        self.plan: DispatchPlan | None = None
        self.kept: list[Tensor] = []

    def run(self, program: str) -> None:
        for letter in program:
            if letter == "s":
                self._keep(self._send())
            plan = self._kept_plan()
            dispatched = self.dispatcher.dispatch(plan)
            if letter == "r":
                self.sums_TD.copy_(self.dispatcher.combine(unchanged(dispatched), dispatched, plan))

    def _send(self) -> DispatchPlan:
        given = (self.hidden_TD, self.weights_TK, self.experts_TK)
        return self.dispatcher.preprocess(*given, E)

    def _keep(self, plan: DispatchPlan) -> None:
        """Copy the plan to fixed memory, whose addresses graphs know."""
        found = [plan.tokens, plan.weights_TK, plan.order.order_R, plan.order.inverse_R]
        found += [plan.order.offsets_E, plan.handle]
        if self.plan is None:
            self.plan, self.kept = plan, [each.clone() for each in found]
        for kept, each in zip(self.kept, found, strict=True):
            kept.copy_(each)

    def _kept_plan(self) -> DispatchPlan:
        assert self.plan is not None
        rows_RD, weights_GK, order_R, inverse_R, offsets_e, handle = self.kept
        order = type(self.plan.order)(order_R, inverse_R, offsets_e, has_gaps=True)
        return DispatchPlan(rows_RD, weights_GK, order, self.plan.dropped, None, handle=handle)


def _captured(exchanges: _Exchanges) -> dict[str, torch.cuda.CUDAGraph]:
    graphs = {}
    for program in PROGRAMS:
        graphs[program] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[program], capture_error_mode="thread_local"):
            exchanges.run(program)
    return graphs


def _dawdle(own: random.Random, device: str) -> None:
    """Wait for a random time, on the device between kernels or on the host."""
    if own.random() > 0.2:
        return
    if device == "cuda":
        torch.cuda._sleep(own.randrange(1_000_000))  # up to half a millisecond
    else:
        time.sleep(own.random() * 0.002)


def _stress(rank: int, world_size: int, device: str) -> int:
    """Run random programs; return the number of wrong sums."""
    exchanges = _Exchanges(device)
    generator = torch.Generator(device).manual_seed(rank)
    shared, own = random.Random(7), random.Random(rank)
    exchanges.run("sr")  # the first call makes the memory
    graphs = _captured(exchanges) if device == "cuda" else {}
    wanted_TD, mistakes = exchanges.sums_TD.clone(), torch.zeros((), device=device)
    for _ in range(ROUNDS[device]):
        program = shared.choice(PROGRAMS)
        if "s" in program:
            exchanges.hidden_TD.normal_(generator=generator)
            exchanges.weights_TK.uniform_(generator=generator)
            order_TE = torch.rand(T, E, device=device, generator=generator)
            exchanges.experts_TK.copy_(order_TE.topk(K).indices)
            wanted_TD = exchanges.hidden_TD * exchanges.weights_TK.sum(1, keepdim=True)
        exchanges.sums_TD.fill_(torch.nan)
        _dawdle(own, device)
        if graphs and shared.random() < 0.7:
            graphs[program].replay()
        else:
            exchanges.run(program)
        if "r" in program:  # compared on the device, without a host sync
            mistakes += ~torch.isclose(exchanges.sums_TD, wanted_TD, atol=1e-5).all()
    return int(mistakes)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.multigpu)])
def test_exchanges_back_to_back(device):
    backend = "nccl" if device == "cuda" else "gloo"
    found = run_distributed(_stress, RANKS, backend, arguments=(device,))
    assert found == [0] * RANKS
