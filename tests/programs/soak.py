"""A long training run with everything that happens to one, bit for bit beside an eager run.

    python tests/programs/soak.py --engine scopes --steps 20000 --record docs/development/soak.jsonl
    python tests/programs/soak.py --engine steps --device cuda --seconds 600

Evaluations, checkpoints, an adapter that is switched, shapes that come and go, new captures, and
memory that runs out in a capture and in an audit. Every loss has to be eager's. A line of JSON per
twentieth of the run has memory, open files, objects and the processor's time of the fastest tenth
of the steps (replays), which have to stay flat.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import io
import json
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor, nn

import moe_graphs
from moe_graphs import FullIteration, GraphConfig, GraphWarning
from moe_graphs.bench.environment import stamp
from moe_graphs.engine.audit import Comparison
from moe_graphs.training.capturable import load_optimizer_state

WIDTH, ROWS = 16, 4
ENGINES = ("scopes", "callables", "steps")


class Block(nn.Module):
    """Attention-free layer with dropout, a buffer that counts, and an adapter that is switched."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down, self.dropout = nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.1)
        self.adapter, self.uses_adapter = nn.Linear(WIDTH, WIDTH), True
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1.0)
        h = self.norm(x)
        y = self.dropout(self.down(nn.functional.gelu(self.up(h))))
        return x + y + self.adapter(h) if self.uses_adapter else x + y


class Training:
    """One of the two runs; ``engine`` is None for the eager one."""

    def __init__(self, engine: str | None, device: str) -> None:
        torch.manual_seed(0)
        self.engine, self.device = engine, device
        self.model = nn.Sequential(Block(), Block(), Block()).to(device)
        rate = torch.tensor(1e-3, device=device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=rate, fused=True, capturable=device == "cuda"
        )
        self.handle: Any = None
        self._call: Callable[[Tensor], Tensor] = self._train
        self._step: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        if engine == "scopes":
            self.handle = moe_graphs.graph(self.model, GraphConfig("*"))
            self._step = self.handle.step
        elif engine == "steps":
            given = {"model": self.model, "optimizer": self.optimizer}
            self._call = self.handle = FullIteration(self._train, **given)
        elif engine == "callables":
            self.capture()

    def capture(self) -> None:
        """Captures anew."""
        if self.engine == "scopes":
            self.handle.recapture()
        elif self.engine == "steps":
            self.handle.capture(torch.zeros(ROWS, WIDTH, device=self.device))
        elif self.engine == "callables":
            if self.handle is not None:
                self.handle.release()
            sample = torch.zeros(ROWS, WIDTH, device=self.device, requires_grad=True)
            blocks = tuple(self.model)
            moe_graphs.make_graphed_callables(blocks, tuple((sample,) for _ in blocks))
            self.handle = blocks[0].graphs

    def _train(self, x: Tensor) -> Tensor:
        loss = self.model(x.detach().requires_grad_()).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def step(self, x: Tensor) -> float:
        with self._step():
            loss = self._call(x)
        return loss.item()

    def evaluate(self, x: Tensor) -> float:
        self.model.eval()
        with torch.no_grad():
            loss = self.model(x).square().mean().item()
        self.model.train()
        return loss

    def saved(self) -> io.BytesIO:
        file = io.BytesIO()
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(state, file)
        file.seek(0)
        return file

    def load(self, file: io.BytesIO) -> None:
        state = torch.load(file, map_location=self.device)
        self.model.load_state_dict(state["model"])
        load_optimizer_state(self.optimizer, state["optimizer"])

    def switch_adapter(self) -> None:
        block = self.model[1]
        block.uses_adapter = not block.uses_adapter

    def backend(self) -> Any:
        return self.handle._definition.backend if self.engine == "steps" else self.handle.backend


class Soak:
    """The run with graphs and the eager run, step by step with the same numbers.

    Attributes:
        times: the processor's seconds in each step with graphs in which nothing else happened.
        provoked: how often memory ran out, and where.
    """

    def __init__(self, engine: str, device: str, *, shorter: int = 1) -> None:
        self.device, self._shorter, self.number = device, shorter, 0
        self.eager, self.graphed = Training(None, device), Training(engine, device)
        self.times: list[float] = []
        self.provoked: Counter[str] = Counter()
        self._random: Any = torch.cuda if device == "cuda" else torch.random
        self._data = torch.Generator().manual_seed(1)

    def step(self) -> None:
        """One step of both runs, and what else happens at its number."""
        self.number += 1
        quiet = True
        for every, event in self._events():
            if self.number % max(1, every // self._shorter) == 0:
                event()
                quiet = False
        rows = ROWS - 1 if self.number % 37 == 0 else ROWS
        self._both(
            "losses", lambda run: run.step(x), x := self._batch(rows), quiet and rows == ROWS
        )

    def _events(self) -> Iterator[tuple[int, Callable[[], None]]]:
        yield 50, self._evaluate
        yield 160, self._switch_adapters
        yield 1000, self._load
        yield 1500, self.graphed.capture
        yield 4000, self._run_out_in_a_capture
        yield 2500, self._run_out_in_an_audit

    def _batch(self, rows: int) -> Tensor:
        return torch.randn(rows, WIDTH, generator=self._data).to(self.device)

    def _both(
        self, what: str, run: Callable[[Training], float], x: Tensor, is_timed: bool = False
    ) -> None:
        before = self._random.get_rng_state()
        expected = run(self.eager)
        after = self._random.get_rng_state()
        self._random.set_rng_state(before)
        started = time.process_time()
        found = run(self.graphed)
        if is_timed:
            self.times.append(time.process_time() - started)
        assert found == expected, (what, self.number, found, expected)
        assert torch.equal(self._random.get_rng_state(), after), (what, self.number)

    def _evaluate(self) -> None:
        x = self._batch(ROWS)
        self._both("evaluation", lambda run: run.evaluate(x), x)

    def _switch_adapters(self) -> None:
        self.eager.switch_adapter()
        self.graphed.switch_adapter()

    def _load(self) -> None:
        """Both runs load the checkpoint of the run with graphs, which is the eager run's, too."""
        saved, own = self.graphed.saved(), self.eager.saved()
        states = [torch.load(copy.copy(f), map_location="cpu")["model"] for f in (saved, own)]
        assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
        self.graphed.load(saved)
        self.eager.load(own)

    def _run_out_in_a_capture(self) -> None:
        """Training goes on eagerly after it, and is captured again later."""
        error = torch.OutOfMemoryError("out of memory")
        with mock.patch.object(self.graphed.backend(), "record", side_effect=error):
            try:
                self.graphed.capture()
                for _ in range(6):
                    x = self._batch(ROWS)
                    self._both("losses", lambda run, x=x: run.step(x), x)
            except moe_graphs.CaptureError:
                pass  # a capture that was asked for raises
        self.provoked["capture"] += 1
        self.graphed.capture()

    def _run_out_in_an_audit(self) -> None:
        """The audit fails at one of its operations; the step is as without it."""
        see, left = Comparison.see, self.number % 29

        def failing(comparison: Comparison, *given: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                raise torch.OutOfMemoryError("out of memory")
            return see(comparison, *given)

        counted = self.graphed.handle.report().audits_skipped.get("memory", 0)
        self.graphed.handle.audit_soon()
        with mock.patch.object(Comparison, "see", failing):
            self._both("losses", lambda run: run.step(x), x := self._batch(ROWS))
        now = self.graphed.handle.report().audits_skipped.get("memory", 0)
        self.provoked["audit"] += now - counted


def measured(soak: Soak) -> dict[str, Any]:
    """Numbers that have to stay flat, and times since the last measurement."""
    gc.collect()
    times, soak.times = soak.times or [0.0], []
    report = soak.graphed.handle.report()
    found = {
        "step": soak.number,
        "resident_mib": int(Path("/proc/self/statm").read_text().split()[1]) * 4 // 1024,
        "files": len(os.listdir("/proc/self/fd")),
        "objects": len(gc.get_objects()),
        "fast_us": round(sorted(times)[len(times) // 10] * 1e6, 1),
        "audit_seconds": round(report.audit_seconds, 3),
        "seconds": round(sum(times), 3),
        "replayed": report.replayed,
        "audits_passed": report.audits_passed,
        "skipped": report.audits_skipped,
        "state": report.state,
    }
    if soak.device == "cuda":
        found["reserved_mib"] = torch.cuda.memory_reserved() >> 20
    return found


def run(
    engine: str, device: str, steps: int, seconds: float = float("inf"), *, shorter: int = 1
) -> tuple[list[dict[str, Any]], Soak]:
    """Runs so many steps, or so many seconds; returns the measurements, twenty in both cases."""
    soak, lines, started = Soak(engine, device, shorter=shorter), [], time.time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphWarning)
        for number in range(1, steps + 1):
            soak.step()
            of_time = 20 * (time.time() - started) / seconds
            if number % max(1, steps // 20) == 0 or of_time >= len(lines) + 1:
                lines.append(measured(soak))
                print(json.dumps(lines[-1]), flush=True)
            if time.time() - started > seconds:
                break
    return lines, soak


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=ENGINES, default="scopes")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--record", type=Path, help="a file that gets a line about the whole run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines, soak = run(options.engine, options.device, options.steps, options.seconds)
    if options.record is not None:
        told = {"engine": options.engine, "steps": soak.number, "provoked": dict(soak.provoked)}
        with options.record.open("a") as file:
            file.write(json.dumps({**stamp(), **told, "measured": lines}) + "\n")
