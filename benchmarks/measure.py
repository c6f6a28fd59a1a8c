"""The measurements: bitwise gate, time in shuffled rounds, memory and trace of a run by itself."""

from __future__ import annotations

import contextlib
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from contenders import EAGER, WARMUP_STEPS, Contender, Run, Setting, free_memory, synchronize
from moe_graphs.engine.whole_step.full_iteration import FullIterationReport
from moe_graphs.lm.run import deterministic
from moe_graphs.profiling.profiler import traced_events
from moe_graphs.profiling.timeline import Timeline, read_timeline
from timed_replays import check_replayed

GATE_STEPS = WARMUP_STEPS + 5
TRACED_STEPS = 3
# How far losses by other kernels may be from eager's: a compiled model fuses and rounds otherwise.
ROUNDING_TOLERANCE = 1e-2


@dataclass(frozen=True)
class Spread:
    """Median, 10th and 90th percentile of ``count`` samples."""

    median: float
    p10: float
    p90: float
    count: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        shares = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
        p10, median, p90 = torch.tensor(samples, dtype=torch.float64).quantile(shares).tolist()
        return cls(median, p10, p90, len(samples))


class Laps:
    """Times between laps, by CUDA events on a GPU and by the host's clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def lap(self) -> None:
        if self._cuda:
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
        else:
            mark = time.perf_counter()
        self._marks.append(mark)

    def milliseconds(self) -> list[float]:
        """One time fewer than laps. Waits for the last lap."""
        if self._cuda:
            self._marks[-1].synchronize()
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return [a.elapsed_time(b) if self._cuda else 1e3 * (b - a) for a, b in pairs]


# ---- correctness


@dataclass(frozen=True)
class Gate:
    """Whether a contender computes what eager computes; ``message`` says how it was seen."""

    passed: bool
    message: str


def first_losses(
    setting: Setting, contender: Contender, dispatcher: str, device: torch.device
) -> torch.Tensor:
    """The losses of the first ``GATE_STEPS`` steps, on the CPU.

    With deterministic kernels: the backward of flash attention differs from run to run otherwise,
    in eager as in graphs.

    Raises:
        RuntimeError: the contender has graphs, and did not replay one per observed call and step.
    """
    with deterministic(device.type == "cuda"):
        run = setting.run(contender, dispatcher, device)
        calls = GATE_STEPS - WARMUP_STEPS
        calls *= run.microbatches if run.graphs is not None else 1
        try:
            losses = gate_losses(run)
            counted = counters(run)
        finally:
            run.release()
    if counted is not None:
        captured, replayed = counted["captured"], counted["replayed"]
        expected = captured * calls
        if not captured or replayed != expected:
            raise RuntimeError(
                f"{captured} captured, {replayed} replayed instead of {expected}; "
                f"eager calls {counted['eager_calls']}"
            )
    return losses


def gate_losses(run: Run) -> torch.Tensor:
    return torch.stack([run.step() for _ in range(GATE_STEPS)]).cpu()


def judge(contender: Contender, losses: torch.Tensor, reference: torch.Tensor) -> Gate:
    """Compares first losses with eager's: bitwise, or closely for a compiled model."""
    if not losses.isfinite().all():
        return Gate(False, f"losses are not finite: {losses.tolist()}")
    if torch.equal(losses, reference):
        return Gate(True, f"losses of {len(losses)} steps bitwise equal to eager")
    step = int((losses != reference).nonzero()[0])
    pair = f"{losses[step].item()!r} and {reference[step].item()!r}"
    difference = float(((losses - reference) / reference).abs().max())
    message = f"losses differ from eager, first in step {step + 1}: {pair}"
    if contender == EAGER:
        message = f"eager does not reproduce itself, first in step {step + 1}: {pair}"
    passed = contender.rounds_otherwise and difference < ROUNDING_TOLERANCE
    return Gate(passed, f"{message} (at most {difference:.1e} apart)")


# ---- time


@dataclass(frozen=True)
class Timing:
    """Times of a contender.

    Attributes:
        step_ms: time of whole steps, by CUDA events.
        host_ms: time until the step's Python returns, with nothing queued before it.
        speedup: eager's median divided by this one's, round by round.
    """

    step_ms: Spread
    host_ms: Spread
    speedup: Spread


class Turns:
    """The samples of one place in the rounds."""

    def __init__(self, run: Run, setting: Setting) -> None:
        self.run, self.setting = run, setting
        self.rounds: list[list[float]] = []
        self.host_ms: list[float] = []

    def take(self) -> None:
        run, laps = self.run, Laps(self.run.device)
        run.step()  # the turn before has left other memory cached, and the GPU idle
        laps.lap()
        for _ in range(self.setting.steps):
            run.step()
            laps.lap()
        self.rounds.append(laps.milliseconds())
        for _ in range(self.setting.host_steps):
            synchronize(run.device)
            started = time.perf_counter()
            loss = run.step()
            self.host_ms.append(1e3 * (time.perf_counter() - started))
        synchronize(run.device)
        if not loss.isfinite():
            raise RuntimeError(f"the loss is {loss.item()}")

    def timing(self, eager: Turns) -> Timing:
        medians = [statistics.median(times) for times in self.rounds]
        references = [statistics.median(times) for times in eager.rounds]
        ratios = [e / own for e, own in zip(references, medians, strict=True)]
        samples = [ms for times in self.rounds for ms in times]
        return Timing(Spread.of(samples), Spread.of(self.host_ms), Spread.of(ratios))


REPEATED = "eager again"


def time_together(
    setting: Setting, names: Sequence[str], runs: dict[str, Run]
) -> dict[str, Timing | str]:
    """Times runs that live side by side, in shuffled rounds; a text is the error of one.

    Eager has two turns in a round: the ratio of the two (``REPEATED``) is the noise.
    """
    places = {name: Turns(runs[name], setting) for name in names}
    places[REPEATED] = Turns(runs[EAGER.name], setting)
    failed: dict[str, Timing | str] = {}
    shuffle = random.Random(setting.seed).shuffle
    for _ in range(setting.rounds):
        order = list(places)
        shuffle(order)
        for name in order:
            _, error = attempt(places[name].take)
            if error is not None:
                failed[name] = error
                del places[name]
    for name in list(places):
        _, error = attempt(lambda run: check_replayed(run.report()), places[name].run)
        if error is not None:
            failed[name] = error
            del places[name]
    eager = places.get(EAGER.name)
    if eager is None:
        return failed | dict.fromkeys(places, "eager failed, nothing to compare with")
    return failed | {name: turns.timing(eager) for name, turns in places.items()}


# ---- memory and trace


@dataclass(frozen=True)
class Alone:
    """Measurements with one contender in memory.

    Attributes:
        reserved_bytes: the most the allocator reserved, over building, capture and steps; on top
            of ``reserved_before_bytes``, what was reserved before. None on the CPU.
        reserved_steady_bytes: reserved after the steps.
        max_allocated_bytes: the most that live tensors took; counts no memory of a graph's pool
            that is free between replays, so it flatters graphs.
        graphs: counters of ``report()``; None without graphs.
        graph_replay_ms: all graphs of scopes of a step replayed back to back, without the rest of
            the step and without a profiler.
    """

    reserved_bytes: int | None
    reserved_steady_bytes: int | None
    reserved_before_bytes: int | None
    max_allocated_bytes: int | None
    graphs: dict[str, Any] | None
    graph_replay_ms: float | None
    timeline: Timeline | None


def measure_alone(
    setting: Setting, contender: Contender, dispatcher: str, device: torch.device
) -> Alone:
    """Builds the contender by itself and measures it. Profiling comes last."""
    free_memory(device)
    cuda = device.type == "cuda"
    before = torch.cuda.memory_reserved(device) if cuda else None
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    run = setting.run(contender, dispatcher, device)
    try:
        run.warm_up()
        for _ in range(TRACED_STEPS):
            run.step()
        synchronize(device)
        return Alone(
            reserved_bytes=torch.cuda.max_memory_reserved(device) if cuda else None,
            reserved_steady_bytes=torch.cuda.memory_reserved(device) if cuda else None,
            reserved_before_bytes=before,
            max_allocated_bytes=torch.cuda.max_memory_allocated(device) if cuda else None,
            graphs=counters(run),
            graph_replay_ms=_replay_ms(run),
            timeline=trace(run),
        )
    finally:
        run.release()


def counters(run: Run) -> dict[str, Any] | None:
    report = run.report()
    if report is None:
        return None
    if isinstance(report, FullIterationReport):
        return {**asdict(report), "captured": report.captures}
    report = report.to_dict()
    scopes = report.pop("scopes")
    kernels = [scope["kernels"] for scope in scopes]
    report["kernels"] = None if None in kernels else sum(kernels)
    for key in ("forward_graphs", "backward_graphs", "boundary_bytes"):
        report[key] = sum(scope[key] for scope in scopes)
    return report


def _replay_ms(run: Run, repeats: int = 20) -> float | None:
    """Milliseconds of replays in the order of capture, on the data of the last step."""
    if run.graphs is None:
        return None
    places = [place for place in run.graphs.captured.sites if place.has_forward]
    recorded = [p.forward for p in places] + [p.backward for p in reversed(places)]
    graphs = [each.graph for each in recorded if each is not None and each.graph is not None]
    laps = Laps(run.device)
    for _ in range(repeats + 1):
        for graph in graphs:
            graph.replay()
        laps.lap()
    return statistics.median(laps.milliseconds())


def trace(run: Run) -> Timeline | None:
    """Profiles a few steps back to back; None where there is no GPU.

    Only the GPU's side is recorded: recording every operator would slow the host down much more.
    """
    if run.device.type != "cuda":
        return None
    for steps in (1, TRACED_STEPS):  # the first trace pays for starting the profiler
        events = traced_events(run.step, run.device, steps, [ProfilerActivity.CUDA])
    return read_timeline(events, TRACED_STEPS)


# ---- failures


def attempt(action: Callable[..., Any], *arguments: Any) -> tuple[Any, str | None]:
    """The result and None, or None and what went wrong in a line.

    The exception is gone when this returns, and with its frames the memory they held.
    """
    try:
        return action(*arguments), None
    except Exception as error:
        return None, f"{type(error).__name__}: {' '.join(str(error).split())}"[:600]


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises ``TimeoutError`` in the main thread once ``seconds`` have passed in the block."""

    def expire(*_: Any) -> None:
        raise TimeoutError(f"took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
