"""Whole-step graphs under DistributedDataParallel: gloo on the CPU recorder, NCCL on two GPUs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_scripts import TRAINING
from distributed import RANKS, run_distributed
from full_iterations import batches, optimizer_of
from grids import by_turns, longer
from moe_graphs import CaptureError, GraphError
from moe_graphs.engine.whole_step import fsdp
from moe_graphs.engine.whole_step.capture_step import StepVerification
from moe_graphs.engine.whole_step.full_iteration import FullIteration
from training_runs import Trace, loss_of, tiny_model

BACKENDS = ["gloo", pytest.param("nccl", marks=pytest.mark.multigpu)]


def device_of(backend: str) -> str:
    return "cuda" if backend == "nccl" else "cpu"


def replicas(device: str, stream: torch.cuda.Stream | None, **options) -> nn.Module:
    """DDP models, built on the stream of the captures."""
    context = torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext()
    with context:
        return DistributedDataParallel(tiny_model(device, "moe", count=1), **options)


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer, inside: bool = True):
    def step(batch):
        losses = []
        for tokens in batch["tokens"]:
            loss = loss_of(model, tokens)[0]
            loss.backward()
            losses.append(loss)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if inside:
            optimizer.step()
            optimizer.zero_grad()
        return losses, norm

    return step


def train(rank: int, device: str, graphed: bool, steps: int, inside: bool, **options) -> Trace:
    stream = torch.cuda.Stream() if device == "cuda" else None
    model = replicas(device, stream, **options)
    optimizer = optimizer_of(model, device)
    step = make_step(model, optimizer, inside)
    if graphed:
        inner = {"optimizer": optimizer} if inside else {}
        step = FullIteration(step, model=model, stream=stream, **inner)
    torch.manual_seed(rank)
    trace = Trace()
    for index, batch in enumerate(batches(device, steps, 2, seed=10 + rank)):
        losses, norm = step(batch)
        if index % max(1, steps // 10) == 0 or index > steps - 5:
            trace.note(f"norm {index}", norm)
            for loss in losses:
                trace.note(f"loss {index}", loss)
        if not inside:
            trace.note(f"grad {index}", next(model.parameters()).grad)
            optimizer.step()
            optimizer.zero_grad()
    trace.note_state(model, "end")
    if graphed:
        assert step.report().matched == steps - 3, step.report()
        step.release()
    return trace


def compare(rank: int, world_size: int, device: str, steps: int, inside: bool, options: dict):
    expected = train(rank, device, False, steps, inside, **options)
    train(rank, device, True, steps, inside, **options).assert_equal(expected)
    return [v.double().sum().item() for name, v in expected.values if "end" in name and "w" in name]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("inside", "as_view"),
    [
        (True, True),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in [(True, False), (False, True), (False, False)]
        ),
    ],
)
def test_ranks_are_bitwise_eager(backend, inside, as_view):
    arguments = (device_of(backend), 8, inside, {"gradient_as_bucket_view": as_view})
    ends = run_distributed(compare, RANKS, backend, arguments=arguments)
    assert ends == [ends[0]] * RANKS
    assert len(ends[0]) > 10


def audit(rank: int, world_size: int, device: str, options: dict, every: int) -> dict:
    """Trains with audits; after step 20 rank 1 alone evaluates. Returns the audited steps."""
    stream = torch.cuda.Stream() if device == "cuda" else None
    found: dict[bool, list[float]] = {}
    audited = []
    for graphed in (False, True):
        model = replicas(device, stream, **options)
        optimizer = optimizer_of(model, device)
        step = make_step(model, optimizer)
        if graphed:
            audits = {"audit_every": every, "on_audit": "error", "on_mismatch": "error"}
            step = FullIteration(step, model=model, optimizer=optimizer, stream=stream, **audits)
        found[graphed] = []
        for index, batch in enumerate(batches(device, 40, 2, seed=10 + rank)):
            losses, norm = step(batch)
            found[graphed] += [norm.item(), *(loss.item() for loss in losses)]
            if index == 20 and rank == 1:
                model.eval()
                model.train()
            if graphed and step.report().audited > len(audited):
                audited.append(index + 1)
                assert step.report().last_audited_step == index + 1
        if graphed:
            step.release()
    assert found[False] == found[True]
    return {"steps": audited, "skipped": step.report().audits_skipped}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("every", "as_view"),
    [
        (10_000, False),
        *longer(by_turns([10_000, 5, 1], [True, False])),
    ],
)
def test_ranks_audit_the_same_steps_and_find_nothing(backend, every, as_view):
    options = {"gradient_as_bucket_view": as_view}
    first, *others = run_distributed(
        audit, RANKS, backend, arguments=(device_of(backend), options, every)
    )
    assert all(each == first for each in others)
    assert first["skipped"] == {}
    if every == 10_000:  # what rank 1 did alone is found where the ranks meet
        assert first["steps"] == [32]
    else:
        assert len(first["steps"]) > 30 // every


@pytest.mark.multigpu
def test_a_thousand_replays():
    arguments = ("cuda", 1003, True, {})
    run_distributed(compare, RANKS, "nccl", arguments=arguments, timeout_seconds=240)


def refuse_settings(rank: int, world_size: int, device: str) -> list[str]:
    found = []
    stream = torch.cuda.Stream() if device == "cuda" else None
    model = replicas(device, stream, find_unused_parameters=True)
    optimizer = optimizer_of(model, device)
    step = FullIteration(
        make_step(model, optimizer), model=model, optimizer=optimizer, stream=stream
    )
    try:
        step.capture(next(batches(device, 1)))
    except CaptureError as error:
        found.append(str(error))
    if device == "cuda":  # built on the default stream
        model = replicas(device, None)
        optimizer = optimizer_of(model, device)
        step = FullIteration(make_step(model, optimizer), model=model, optimizer=optimizer)
        try:
            step.capture(next(batches(device, 1)))
        except CaptureError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_settings_that_cannot_be_captured_are_refused(backend):
    for found in run_distributed(refuse_settings, RANKS, backend, arguments=(device_of(backend),)):
        assert "pass find_unused_parameters=False" in found[0]
        if backend == "nccl":
            assert "was built on another stream" in found[1]
            assert "stream=stream" in found[1]


def fail_on_one_rank(rank: int, world_size: int, device: str, policy: str) -> list[str]:
    """The capture fails on rank 1 only, after the trial runs; no rank keeps a graph."""
    stream = torch.cuda.Stream() if device == "cuda" else None
    model = replicas(device, stream)
    optimizer = optimizer_of(model, device)
    step = FullIteration(
        make_step(model, optimizer),
        model=model,
        optimizer=optimizer,
        stream=stream,
        on_capture_error=policy,
    )
    if rank == 1:
        backend = step._definition.backend
        backend.new_pool = _raise
    found = []
    for batch in batches(device, 6, 2, seed=rank):
        try:
            losses, _ = step(batch)
        except CaptureError as error:
            found.append(str(error))
            losses, _ = step(batch)
        assert losses[0].isfinite()
    if policy == "eager":
        assert not found
        found.append(step.report().off_because)
    found.append(step.report().state)
    return found


def _raise(nbytes: int) -> None:
    raise OSError("disk on fire")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("policy", ["error", "eager"])
def test_all_ranks_capture_or_none(backend, policy):
    arguments = (device_of(backend), policy)
    found = run_distributed(fail_on_one_rank, RANKS, backend, arguments=arguments)
    assert "it failed on another rank" in found[0][0]
    assert "OSError: disk on fire" in found[1][0]
    assert [each[1:] for each in found] == [["capture_failed"]] * RANKS


def differ_once(rank: int, world_size: int, device: str, policy: str) -> list:
    """The sixth batch of rank 0 has another length; afterwards all ranks go on."""

    def run(graphed: bool) -> tuple[Trace, list]:
        stream = torch.cuda.Stream() if device == "cuda" else None
        model = replicas(device, stream)
        optimizer = optimizer_of(model, device)
        plain = step = make_step(model, optimizer)
        if graphed:
            step = FullIteration(
                plain, model=model, optimizer=optimizer, stream=stream, on_mismatch=policy
            )
        trace, errors = Trace(), []
        for index, batch in enumerate(batches(device, 9, seed=rank)):
            if rank == 0 and index == 5:
                batch["tokens"] = [tokens[:, :-2] for tokens in batch["tokens"]]
            try:
                losses, norm = step(batch)
            except GraphError as error:
                errors.append((index, str(error)))
                losses, norm = plain(batch)
            trace.note(f"loss {index}", losses[0])
            trace.note(f"norm {index}", norm)
        trace.note_state(model, "end")
        if not graphed:
            return trace, []
        step.release()
        report = step.report()
        return trace, [errors, report.captures, report.matched, report.eager_calls]

    expected, _ = run(False)
    found, told = run(True)
    found.assert_equal(expected)
    return told


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.long
def test_ranks_agree_when_the_batch_of_one_differs(backend):
    """A rank that decided by itself would leave the other one waiting for ever."""
    arguments = (device_of(backend),)
    first, *others = run_distributed(differ_once, RANKS, backend, arguments=(*arguments, "error"))
    assert first[0][0][0] == 5
    assert "full iteration" in first[0][0][1]
    assert first[1:] == [1, 5, {"warmup": 3}]
    for other in others:
        assert other[0][0][0] == 5
        assert "the call of another rank differs" in other[0][0][1]
        assert other[1:] == first[1:]

    found = run_distributed(differ_once, RANKS, backend, arguments=(*arguments, "recapture"))
    assert found == [[[], 3, 6, {"warmup": 3}]] * RANKS

    first, *others = run_distributed(differ_once, RANKS, backend, arguments=(*arguments, "eager"))
    assert first == [[], 1, 5, {"warmup": 3, "shape": 1}]
    assert others == [[[], 1, 6, {"warmup": 3}]] * (RANKS - 1)


def differ_in_the_verification(rank: int, world_size: int, device: str, policy: str) -> list:
    """A replay differs on rank 1 only: no rank replays, and none waits for another."""
    stream = torch.cuda.Stream() if device == "cuda" else None
    model = replicas(device, stream)
    optimizer = optimizer_of(model, device)
    step = FullIteration(
        make_step(model, optimizer),
        model=model,
        optimizer=optimizer,
        stream=stream,
        on_mismatch=policy,
    )
    if rank == 1:
        replay = StepVerification._replay
        StepVerification._replay = lambda self, *args: (
            replay(self, *args) | {"output 0": "another value"}
        )
    errors = 0
    for batch in batches(device, 6, 2, seed=rank):
        try:
            losses, _ = step(batch)
        except CaptureError:
            errors += 1
            losses, _ = step(batch)
        assert losses[0].isfinite()
    return [step.report().state, errors]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("policy", ["error", pytest.param("recapture", marks=pytest.mark.long)])
def test_no_rank_replays_what_differs_on_another(backend, policy):
    found = run_distributed(
        differ_in_the_verification, RANKS, backend, arguments=(device_of(backend), policy)
    )
    assert found == [["differs_from_eager", int(policy == "error")]] * RANKS


def test_expandable_segments_with_graph_registration(monkeypatch):
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [{"is_expandable": True}])
    monkeypatch.delenv("NCCL_GRAPH_REGISTER", raising=False)
    with pytest.raises(CaptureError, match="NCCL_GRAPH_REGISTER=0 before init_process_group"):
        fsdp.check_memory(object())
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")
    fsdp.check_memory(object())


# Each ending has two ranks, which are forked after the slow imports and end as interpreters do.
SCRIPT = """
    import contextlib, json, os, sys
    import torch, torch.distributed as dist
    import torch._dynamo  # DistributedDataParallel does
    from moe_graphs.engine.whole_step.full_iteration import FullIteration

    def fork():
        for ending in {endings!r}:
            children = []
            for rank in range(2):
                children.append(os.fork())
                if not children[-1]:
                    return ending, rank
            codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
            print(json.dumps([ending, codes]), flush=True)
        sys.exit()

    ending, rank = fork()
    os.dup2(os.open(f"{folder}/{{ending}} {{rank}}", os.O_WRONLY | os.O_CREAT), sys.stderr.fileno())
    device = "cuda" if "{backend}" == "nccl" else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank)
    store = f"file://{folder}/store of {{ending}}"
    dist.init_process_group("{backend}", init_method=store, rank=rank, world_size=2)
"""
SCRIPT += TRAINING
SCRIPT += """
    step = FullIteration(
        train, model=model, optimizer=optimizer, stream=stream, on_mismatch="recapture"
    )
    for _ in range(6):
        step(torch.randn(4, 8, device=device))
    assert step.report().matched == 3
    if ending == "raises":
        raise ArithmeticError("in the script")
    if ending == "destroys first":
        dist.destroy_process_group()
    step.release()
    if ending == "releases":
        dist.destroy_process_group()
"""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.long
def test_scripts_end_without_hanging(backend, tmp_path):
    """Scripts end even if they raise while graphs that hold collectives are alive."""
    endings = ["raises", "releases", "destroys first"]
    if backend == "nccl":
        endings.pop()  # NCCL waits for the graphs: the docstring of release() says so
    text = SCRIPT.format(backend=backend, folder=tmp_path, endings=endings)
    (tmp_path / "script.py").write_text(textwrap.dedent(text))
    command = [sys.executable, str(tmp_path / "script.py")]
    script = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        said = script.communicate(timeout=240)[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(script.pid, signal.SIGKILL)
    ended = dict(map(json.loads, said.splitlines()))
    errors = {path.name: path.read_text() for path in tmp_path.glob("* [01]")}
    assert ended == {ending: [int(ending == "raises")] * 2 for ending in endings}, errors
    for name, text in errors.items():
        assert ("ArithmeticError" in text) == name.startswith("raises"), text
