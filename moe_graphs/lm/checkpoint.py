"""Checkpoints of a run: everything that a step depends on, by torch.distributed.checkpoint (DCP).

Every rank writes and reads its share, and a run in another layout, or of one process, reads what it
needs of it. A resumed run is, bit by bit, the run that was not interrupted. A directory holds DCP's
files, ``settings.json``, and ``manifest.json``, written last, with sizes and checksums of all the
others. Graphs leave no trace in it.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import warnings
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from moe_graphs.layers import LanguageModel, TransformerConfig
from moe_graphs.lm.run_directory import (
    MANIFEST,
    METADATA,
    RUN,
    SETTINGS,
    check_same_model,
    check_step,
    differences_of,
    load_settings,
    make_partial,
    name_of,
    not_written,
    publish,
    read_part,
    settings_of,
)
from moe_graphs.lm.run_state import (
    FP8,
    MODEL,
    described,
    fp8_memory,
    fused_parts,
    history_state,
    model_state,
    model_tensors,
    optimizer_state,
    random_state,
    set_fp8_memory,
    set_random_state,
    states_as_saved,
    take_states,
    without_new_averages,
)
from moe_graphs.lm.trainer import Trainer
from moe_graphs.lm.workers import Workers, is_first, on_first
from moe_graphs.optim import AdamW
from moe_graphs.parallel.tensor_parallel import global_fqn
from moe_graphs.parallel.whole_rows import PartsByName, WholeRowsLoadPlanner, WholeRowsSavePlanner

_AT_ONCE = 1 << 24  # bytes of a file in memory
_ALONE = "torch.distributed is disabled"  # a warning of DCP: one process is all there is


class Checkpoints:
    """Writes checkpoints while training goes on, one at a time. All ranks call its methods alike.

    ``save`` copies to the host and returns. A thread writes the files to ``checkpoints/partial``.
    The directory gets the name of its step only when all ranks are done.
    """

    def __init__(self, run_directory: Path, trainer: Trainer, *, keep: int = 2) -> None:
        self._directory, self._trainer, self._keep = run_directory, trainer, keep
        self._workers, self._group = trainer.workers, None
        if self._workers is not None:
            # This group is separate, because the thread communicates while training does, too. One
            # rank's files may take longer than another's and nobody waits for them, so --timeout
            # does not limit it.
            unlimited = dist.constants.default_pg_timeout
            self._group = dist.new_group(backend="gloo", timeout=unlimited)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: tuple[int, Future[Path]] | None = None

    def save(self) -> Path:
        """Begins a checkpoint of the trainer's state, and returns where it is going to be.

        Raises:
            ValueError: if checkpoints of another run are there.
            OSError: if the checkpoint before could not be written.
        """
        self.finish()
        trainer = self._trainer
        trainer.settle()
        run_id, step = trainer.run_id, trainer.step
        partial: Path = on_first(self._workers, lambda: make_partial(self._directory, run_id))
        state = {
            **model_state(trainer),
            **optimizer_state(trainer),
            **history_state(trainer, step),
            **random_state(trainer),
            **fp8_memory(trainer),
        }
        # This filter stays: DCP warns in its thread, and filters are not a thread's own.
        warnings.filterwarnings("ignore", _ALONE)
        written = async_save(
            state,
            storage_writer=FileSystemWriter(partial),
            planner=WholeRowsSavePlanner(fused_parts(trainer)),
            process_group=self._group,
            no_dist=self._group is None,
        )
        assert isinstance(written, Future)
        job = self._thread.submit(self._publish, written, partial, step, settings_of(trainer))
        self._pending = step, job
        return partial.with_name(name_of(step))

    def finish(self) -> Path | None:
        """Waits for the checkpoint that is being written, and returns its path.

        Raises:
            OSError: if it could not be written. Earlier checkpoints are as they were.
        """
        if self._pending is None:
            return None
        (step, job), self._pending = self._pending, None
        try:
            return job.result()
        except (CheckpointException, OSError) as error:
            if is_first(self._workers):
                shutil.rmtree(self._directory / "checkpoints" / "partial", ignore_errors=True)
            of_ranks = getattr(error, "failures", {})  # with what each has raised
            first = next((raised for raised, _ in of_ranks.values()), error)
            raise not_written(self._directory, step, first) from error

    def _publish(
        self, written: Future[Metadata], partial: Path, step: int, settings: Mapping[str, Any]
    ) -> Path:
        """Sums up the files and renames their directory, on the thread, after all have written."""
        written.result()
        rank = 0 if self._workers is None else self._workers.rank
        mine = {path.name: _checksum(path) for path in partial.glob(f"__{rank}_*")}
        every = self._gather(mine)
        outcome: Path | OSError | None = None
        if rank == 0:
            files = {name: sums for each in every for name, sums in each.items()}
            try:
                _write_manifest(partial, files, step, len(every), settings)
                outcome = publish(partial, settings[RUN], step, self._keep)
            except OSError as error:
                outcome = error
        outcome = self._gather(outcome)[0]
        if isinstance(outcome, OSError):
            raise outcome
        return outcome

    def _gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in order."""
        if self._group is None:
            return [value]
        every: list[Any] = [None] * self._group.size()
        dist.all_gather_object(every, value, group=self._group)
        return every


@contextlib.contextmanager
def checkpoints_of(run_directory: Path, trainer: Trainer) -> Iterator[Callable[[], Path]]:
    """Context that gives a function which saves a checkpoint and says where it will be.

    At the end of the context the checkpoint is written, in one process also after an error.
    """
    checkpoints = Checkpoints(run_directory, trainer)
    try:
        yield checkpoints.save
    except BaseException:
        if trainer.workers is None:  # other ranks might never come
            with contextlib.suppress(OSError):
                checkpoints.finish()
        raise
    checkpoints.finish()


def _write_manifest(
    partial: Path,
    files: Mapping[str, Any],
    step: int,
    ranks: int,
    settings: Mapping[str, Any],
) -> None:
    (partial / SETTINGS).write_text(json.dumps(settings, indent=1) + "\n")
    others = {name: _checksum(partial / name) for name in (SETTINGS, METADATA)}
    manifest = {"step": step, "ranks": ranks, "files": {**files, **others}}
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def _checksum(path: Path) -> dict[str, int]:
    size = checksum = 0
    with path.open("rb") as file:
        while part := file.read(_AT_ONCE):
            checksum = zlib.crc32(part, checksum)
            size += len(part)
    return {"bytes": size, "crc32": checksum}


def read_manifest(path: Path, workers: Workers | None = None) -> dict[str, Any]:
    """The manifest, if all files are as it says. Ranks share the work, and all of them call it.

    Raises:
        ValueError: on every rank, if a file is missing or damaged; the message names it.
    """
    rank, count = (0, 1) if workers is None else (workers.rank, workers.count)
    problems: list[str] = []
    manifest: dict[str, Any] = {}
    try:
        manifest = read_part(path / MANIFEST, _load_manifest)
        for name in sorted(manifest["files"])[rank::count]:
            _check_file(path / name, manifest["files"][name])
    except ValueError as error:
        problems = [str(error)]
    if workers is not None:
        problems = [problem for each in workers.gather(problems) for problem in each]
    if problems:
        raise ValueError(problems[0])
    return manifest


def _load_manifest(path: Path) -> dict[str, Any]:
    found = load_settings(path)
    missing = {"step", "ranks", "files"} - found.keys()
    if missing:
        raise ValueError(f"no {', '.join(sorted(missing))} in it")
    return found


def _check_file(path: Path, wanted: Mapping[str, int]) -> None:
    found = read_part(path, _checksum)
    if found != wanted:
        raise ValueError(
            f"resume: {path} is damaged: {found['bytes']} bytes with checksum {found['crc32']:08x},"
            f" written were {wanted['bytes']} with {wanted['crc32']:08x}: take another checkpoint"
        )


def load_checkpoint(path: Path, trainer: Trainer) -> list[str]:
    """Puts the trainer where the run was when ``path`` was saved, in whatever layout.

    Files are checked before anything is loaded. All tensors keep their addresses.

    Returns:
        One line per setting that differs from the checkpoint's, also for the text and the
        dispatcher. Such a run is allowed, but it is not the same run.

    Raises:
        ValueError: if the checkpoint is of another model, beyond this run's last step, or not to be
            read. The trainer is as it was then.
    """
    manifest = read_manifest(path, trainer.workers)
    step, ranks = manifest["step"], manifest["ranks"]
    saved = read_part(path / SETTINGS, load_settings)
    check_step(path, step, trainer)
    reader = FileSystemReader(path)
    kept = described_by(reader.read_metadata())
    model = model_state(trainer)
    check_same_model(path, _of(kept, MODEL), _described(trainer))
    as_saved = _states_as_saved(path, trainer, kept)
    state = {**model, **optimizer_state(trainer, as_saved), **history_state(trainer, step)}
    state = without_new_averages(trainer, state, kept)
    _check_keys(path, state, kept)
    same = ranks == (1 if trainer.workers is None else trainer.workers.count)
    random = {key: value for key, value in random_state(trainer).items() if same and key in kept}
    fp8 = _empty(reader.read_metadata(), FP8)
    everything = {**state, **random, **fp8}
    _read(everything, reader, fused_parts(trainer), alone=trainer.workers is None)
    take_states(trainer, as_saved)
    set_fp8_memory(trainer, fp8)
    _set_random(trainer, random, step)
    return _goes_on(trainer, step, saved, ranks)


def _states_as_saved(
    path: Path, trainer: Trainer, saved: Collection[str]
) -> dict[nn.Parameter, dict[str, Tensor]]:
    found = states_as_saved(trainer, saved)
    if found and not isinstance(trainer.optimizer, AdamW):
        raise ValueError(
            f"optimizer: {trainer.settings.optimizer} cannot read the states of 8 bits in {path}: "
            f"use adamw, which reads them into any --optimizer-state"
        )
    return found


def _read(
    state: dict[str, Tensor],
    reader: FileSystemReader,
    parts: PartsByName,
    *,
    alone: bool,
) -> None:
    """Reads into ``state``. With ``alone``, other ranks (if any) read nothing at this moment."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", _ALONE)
        planner = WholeRowsLoadPlanner(parts)
        load(state, storage_reader=reader, planner=planner, no_dist=alone)


def _check_keys(path: Path, wanted: Collection[str], saved: Collection[str]) -> None:
    if missing := sorted(set(wanted) - set(saved)):
        raise ValueError(
            f"resume: {path} has no {missing[0]!r}: take another checkpoint, or its "
            f"--optimizer; with states of 8 bits also its --optimizer-state and --tp"
        )


def _set_random(trainer: Trainer, state: Mapping[str, Tensor], step: int) -> None:
    """Sets random numbers to ``state`` or, if the number of ranks differs, to unused ones."""
    if state:
        set_random_state(state, trainer.device)
    elif trainer.workers is not None:
        trainer.workers.seed(trainer.settings.seed, step)
    else:
        torch.manual_seed(trainer.settings.seed + step)


def _goes_on(trainer: Trainer, step: int, saved: Mapping[str, Any], ranks: int) -> list[str]:
    trainer.step = trainer.first_unlogged_step = trainer.settled_step = step
    trainer.run_id = saved.get(RUN, "")
    if trainer.updates is not None and step:
        trainer.updates.load_state_dict({"grad_norm": trainer.history.grad_norm[step - 1]})
    now = 1 if trainer.workers is None else trainer.workers.count
    anew = [f"random numbers: of {ranks} ranks in the checkpoint, drawn anew for {now} now"]
    return differences_of(saved, settings_of(trainer)) + (anew if ranks != now else [])


def _described(trainer: Trainer) -> dict[str, str]:
    """Description of the whole model."""
    tensors = model_tensors(trainer.whole)
    return described({global_fqn(name): value for name, value in tensors.items()})


def described_by(metadata: Metadata) -> dict[str, str]:
    """Description, as by ``described``, of the tensors in a checkpoint's files."""
    return {
        key: f"{list(kept.size)} {kept.properties.dtype}"
        for key, kept in metadata.state_dict_metadata.items()
        if isinstance(kept, TensorStorageMetadata)
    }


def _of(found: Mapping[str, str], part: str) -> dict[str, str]:
    """The entries of a part, under the names without it."""
    start = f"{part}."
    return {key.removeprefix(start): v for key, v in found.items() if key.startswith(start)}


def read_model(path: Path) -> dict[str, Tensor]:
    """All of the model's tensors in a checkpoint, on the CPU, by their names on one GPU.

    Raises:
        ValueError: if its files are missing or damaged; they are checked first.
    """
    read_manifest(path)
    reader = FileSystemReader(path)
    state = _empty(reader.read_metadata(), MODEL)
    _read(state, reader, {}, alone=True)
    return {key.removeprefix(f"{MODEL}."): value for key, value in state.items()}


def _empty(metadata: Metadata, part: str) -> dict[str, Tensor]:
    """Memory on the CPU for the tensors of a part, whole."""
    return {
        key: torch.empty(kept.size, dtype=kept.properties.dtype, device="cpu")
        for key, kept in metadata.state_dict_metadata.items()
        if key.startswith(f"{part}.") and isinstance(kept, TensorStorageMetadata)
    }


def model_of(
    path: Path, config: TransformerConfig, hf_values: dict[str, Any] | None
) -> LanguageModel:
    """The whole model of a checkpoint, on the CPU."""
    tensors = read_model(path)
    dtype = tensors["embedding.weight"].dtype
    model = LanguageModel(config, device="meta", dtype=dtype)
    model.load_state_dict(tensors, assign=True)
    model.rope.to_empty(device="cpu")
    model.rope.reset_tables()
    model.hf_values = hf_values
    return model
