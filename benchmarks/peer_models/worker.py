"""Measures one contender on one case, in a process of its own, and writes what it found."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import os
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from contenders import free_memory, fullest, learning_rate, synchronize
from measure import Turns, counters, trace
from moe_graphs.profiling.profiler import keep_profiler_ready
from peer_models.cases import Case, initial_model
from peer_models.entries import ENTRIES
from peer_models.peer import PeerRun
from timed_replays import check_replayed

Record = dict[str, Any]
IMPORTED = ".imported"
ERROR_LINES = 120
COMPILING = 6  # SonicMoE and Liger-Kernel take a core each, for minutes


def write_record(
    name: str,
    case: Case,
    device: torch.device,
    record: Path,
    gate: Path | None = None,
    compiling: int = COMPILING,
) -> None:
    """A failure is part of what was found: the last lines of its traceback, under ``error``.

    Args:
        gate: a file that one process at a time may hold. Imports and the compiling of a library's
            kernels come before it, everything else on the GPU after.
        compiling: processes at the same gate that may compile at once.
    """
    found: Record = {"error": None}
    try:
        library = importlib.import_module(f"peer_models.{ENTRIES[name].module}")
        if gate is not None and hasattr(library, "prepare"):
            slot = take_slot(gate, compiling)
            library.prepare(case, device, torch.bfloat16, **ENTRIES[name].options)
            free_memory(device)
            del slot
        record.with_suffix(IMPORTED).touch()
        held = take_turn(gate) if gate is not None else None
        started_file(record).touch()
        measure(library, name, case, device, found)
        del held
    except Exception:
        found["error"] = last_lines(traceback.format_exc())
        traceback.print_exc()
    written = record.with_suffix(".partial")
    written.write_text(json.dumps(found))
    written.rename(record)  # whole, or not there


def last_lines(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-ERROR_LINES:])[-12000:]


def take_turn(gate: Path) -> Any:
    """Waits; what is returned holds the gate until it or the process is gone."""
    held = gate.open("w")
    fcntl.flock(held, fcntl.LOCK_EX)
    return held


def take_slot(gate: Path, count: int) -> Any:
    """Waits for one of ``count`` slots beside the gate, and holds it as `take_turn` does."""
    while True:
        for index in range(count):
            held = gate.with_name(f"{gate.name}.slot{index}").open("w")
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return held
            held.close()
        time.sleep(0.1)


def started_file(record: Path) -> Path:
    """Is there once a process is past its gate: its time limit counts from then on."""
    return record.with_suffix(".started")


def measure(library: Any, name: str, case: Case, device: torch.device, found: Record) -> None:
    """Fills ``found`` as it goes, so that what came before a failure is kept.

    Keys: ``load`` (the fullest expert's, of the first batch), ``step_samples_ms`` and
    ``host_samples_ms`` of every step, ``first_losses`` and ``last_loss``, ``first_step_s`` and
    ``capture_s``, memory, and a trace's ``timeline``.
    """
    started = time.perf_counter()
    run = build(library, name, case, device)
    found["settings"], found["load"] = run.peer.settings, run.load
    found["build_s"] = time.perf_counter() - started
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    run.warm_up()
    found["first_losses"] = run.first_losses
    found["first_step_s"] = run.first_step_seconds
    found["graphs"] = counters(run)
    found["capture_s"] = run.capture_seconds
    if found["graphs"]:
        found["capture_s"] = found["graphs"]["capture_seconds"]
    turns = Turns(run, case)
    for _ in range(case.rounds):
        turns.take()
    check_replayed(run.report())
    found["step_samples_ms"] = [ms for times in turns.rounds for ms in times]
    found["host_samples_ms"] = turns.host_ms
    found["last_loss"] = float(run.step())
    found |= memory(device)
    if case.trace:
        timeline = trace(run)
        found["timeline"] = asdict(timeline) if timeline else None
    synchronize(device)


def build(library: Any, name: str, case: Case, device: torch.device) -> PeerRun:
    """``library``: the file of this folder that builds it."""
    entry = ENTRIES[name]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    batches, model = case.batches(device), initial_model(case, device, dtype)
    load, state = fullest(model, batches[0, :, :-1]), dict(model.state_dict())
    del model
    synchronize(device)  # Megatron's local graphs change the stream
    peer = library.build(case, state, device, dtype, **entry.options)
    del state
    free_memory(device)
    run = PeerRun(peer, entry.contender, batches, learning_rate(case.routing))
    run.load = load
    return run


def memory(device: torch.device) -> Record:
    """The most that was reserved and allocated since the model was built: with capture."""
    if device.type != "cuda":
        return {"reserved_bytes": None, "max_allocated_bytes": None}
    return {
        "reserved_bytes": torch.cuda.max_memory_reserved(device),
        "max_allocated_bytes": torch.cuda.max_memory_allocated(device),
    }


def prepare() -> None:
    """Set what the profiler and torch.compile read from the environment before a library starts."""
    keep_profiler_ready()
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")  # several compile side by side
