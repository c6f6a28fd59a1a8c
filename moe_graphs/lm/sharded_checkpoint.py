"""Checkpoints of a run on several ranks.

Every rank writes and reads its share, by torch.distributed.checkpoint (DCP), and a run in another
layout reads what it needs of it. A directory holds DCP's files, ``settings.json`` as in a
checkpoint of one process, and ``manifest.json``, written last, with sizes and checksums of all the
others.
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
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from moe_graphs.layers import LanguageModel, TransformerConfig
from moe_graphs.lm.checkpoint import (
    MANIFEST,
    RUN,
    SETTINGS,
    check_same_model,
    check_step,
    described,
    differences_of,
    load_checkpoint,
    load_settings,
    make_partial,
    model_tensors,
    name_of,
    not_written,
    publish,
    read_part,
    save_checkpoint,
    settings_of,
)
from moe_graphs.lm.one_process_files import check_shapes, read_by_name
from moe_graphs.lm.sharded_state import (
    MODEL,
    fused_parts,
    history_state,
    model_state,
    optimizer_state,
    random_state,
    set_random_state,
    without_new_averages,
)
from moe_graphs.lm.trainer import Trainer
from moe_graphs.lm.workers import Workers
from moe_graphs.parallel import (
    PartsByName,
    WholeRowsLoadPlanner,
    WholeRowsSavePlanner,
    global_fqn,
    shares,
)

_METADATA = ".metadata"
_AT_ONCE = 1 << 24  # bytes of a file in memory


class ShardedCheckpoints:
    """Writes checkpoints while training goes on, one at a time. All ranks call its methods alike.

    ``save`` copies to the host and returns. A thread writes the files to ``checkpoints/partial``.
    The directory gets the name of its step only when all ranks are done.
    """

    def __init__(self, run_directory: Path, trainer: Trainer, *, keep: int = 2) -> None:
        assert trainer.workers is not None
        self._directory, self._trainer, self._keep = run_directory, trainer, keep
        self._workers: Workers = trainer.workers
        # This group is separate, because the thread communicates while training does, too. One
        # rank's files may take longer than another's and nobody waits for them, so --timeout does
        # not limit it.
        self._group = dist.new_group(backend="gloo", timeout=dist.constants.default_pg_timeout)
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
        partial = self._workers.on_first(lambda: make_partial(self._directory, run_id))
        state = {
            **model_state(trainer),
            **optimizer_state(trainer),
            **history_state(trainer, step),
            **random_state(trainer),
        }
        writer = dcp.FileSystemWriter(partial)
        settings = settings_of(trainer)
        planner = WholeRowsSavePlanner(fused_parts(trainer))
        written = dcp.async_save(
            state, storage_writer=writer, planner=planner, process_group=self._group
        )
        job = self._thread.submit(self._publish, written, partial, step, settings)
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
            if self._workers.rank == 0:
                shutil.rmtree(self._directory / "checkpoints" / "partial", ignore_errors=True)
            of_ranks = getattr(error, "failures", {})  # with what each has raised
            first = next((raised for raised, _ in of_ranks.values()), error)
            raise not_written(self._directory, step, first) from error

    def _publish(
        self, written: Future[Metadata], partial: Path, step: int, settings: Mapping[str, Any]
    ) -> Path:
        """Sums up the files and renames their directory, on the thread, after all have written."""
        written.result()
        rank = self._workers.rank
        mine = {path.name: _checksum(path) for path in partial.glob(f"__{rank}_*")}
        every: list[Any] = [None] * self._workers.count
        dist.all_gather_object(every, mine, group=self._group)
        outcome: list[Any] = [None]
        if rank == 0:
            files = {name: sums for each in every for name, sums in each.items()}
            try:
                _write_manifest(partial, files, step, self._workers.count, settings)
                outcome = [publish(partial, settings[RUN], step, self._keep)]
            except OSError as error:
                outcome = [error]
        dist.broadcast_object_list(outcome, 0, group=self._group)
        if isinstance(outcome[0], OSError):
            raise outcome[0]
        return outcome[0]


@contextlib.contextmanager
def checkpoints_of(run_directory: Path, trainer: Trainer) -> Iterator[Callable[[], Path]]:
    """Context that gives a function which saves a checkpoint and says where it is or will be.

    It serves one process or several ranks. At the end of the context the checkpoint is written.
    """
    if trainer.workers is None:
        yield lambda: save_checkpoint(run_directory, trainer)
        return
    checkpoints = ShardedCheckpoints(run_directory, trainer)
    yield checkpoints.save
    checkpoints.finish()


def _write_manifest(
    partial: Path,
    files: Mapping[str, Any],
    step: int,
    ranks: int,
    settings: Mapping[str, Any],
) -> None:
    (partial / SETTINGS).write_text(json.dumps(settings, indent=1) + "\n")
    others = {name: _checksum(partial / name) for name in (SETTINGS, _METADATA)}
    manifest = {"step": step, "ranks": ranks, "files": {**files, **others}}
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def _checksum(path: Path) -> dict[str, int]:
    size = checksum = 0
    with path.open("rb") as file:
        while part := file.read(_AT_ONCE):
            checksum = zlib.crc32(part, checksum)
            size += len(part)
    return {"bytes": size, "crc32": checksum}


def is_sharded(path: Path) -> bool:
    """Whether the checkpoint is one of several ranks, complete or not."""
    return (path / MANIFEST).exists() or any(path.glob("*.distcp"))


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


def resume(path: Path, trainer: Trainer) -> list[str]:
    """Loads a checkpoint of either kind, on one process or on several in any layout.

    Raises:
        ValueError: as ``load_checkpoint``. Files are checked before anything is loaded.
    """
    if is_sharded(path):
        return _load_sharded(path, trainer)
    return load_checkpoint(path, trainer) if trainer.workers is None else _share(path, trainer)


def _load_sharded(path: Path, trainer: Trainer) -> list[str]:
    manifest = read_manifest(path, trainer.workers)
    step = manifest["step"]
    saved = read_part(path / SETTINGS, load_settings)
    check_step(path, step, trainer)
    reader = dcp.FileSystemReader(path)
    kept = described_by(reader.read_metadata())
    model = model_state(trainer)
    check_same_model(path, _of(kept, MODEL), _described(trainer))
    state = {**model, **optimizer_state(trainer), **history_state(trainer, step)}
    state = without_new_averages(trainer, state, kept)
    _check_keys(path, state, kept)
    same = manifest["ranks"] == (1 if trainer.workers is None else trainer.workers.count)
    random = {key: value for key, value in random_state(trainer).items() if same and key in kept}
    parts = fused_parts(trainer)
    _read({**state, **random}, reader, parts, alone=trainer.workers is None)
    _set_random(trainer, random, step)
    return _goes_on(trainer, step, saved, manifest["ranks"])


def _read(
    state: dict[str, Tensor],
    reader: dcp.FileSystemReader,
    parts: PartsByName,
    *,
    alone: bool,
) -> None:
    """Reads into ``state``. With ``alone``, other ranks (if any) read nothing at this moment."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        planner = WholeRowsLoadPlanner(parts)
        dcp.load(state, storage_reader=reader, planner=planner, no_dist=alone)


def _share(path: Path, trainer: Trainer) -> list[str]:
    """Loads a checkpoint of one process: every rank reads its own part of the files."""
    saved = read_by_name(path, trainer)
    state = {**model_state(trainer), **optimizer_state(trainer)}
    state |= history_state(trainer, saved.step)
    state = without_new_averages(trainer, state, saved.tensors)
    _check_keys(path, state, saved.tensors)
    check_shapes(path, state, saved.tensors)
    parts = fused_parts(trainer)
    for key, target in state.items():
        for where, piece in shares(target.detach(), parts.get(key)):
            piece.copy_(saved.tensors[key][where])
    _set_random(trainer, {}, saved.step)
    return _goes_on(trainer, saved.step, saved.settings, 1)


def _check_keys(path: Path, wanted: Collection[str], saved: Collection[str]) -> None:
    if missing := sorted(set(wanted) - set(saved)):
        raise ValueError(
            f"resume: {path} has no {missing[0]!r}: take another checkpoint, or its "
            f"--optimizer; to or from 8bit also its --optimizer-state and --tp"
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
    """All of the model's tensors in a sharded checkpoint, on the CPU, by their names on one GPU.

    Raises:
        ValueError: if its files are missing or damaged; they are checked first.
    """
    read_manifest(path)
    reader = dcp.FileSystemReader(path)
    state = {
        key: torch.empty(kept.size, dtype=kept.properties.dtype, device="cpu")
        for key, kept in reader.read_metadata().state_dict_metadata.items()
        if key.startswith(f"{MODEL}.") and isinstance(kept, TensorStorageMetadata)
    }
    _read(state, reader, {}, alone=True)
    return {key.removeprefix(f"{MODEL}."): value for key, value in state.items()}


def model_of(
    path: Path, config: TransformerConfig, hf_values: dict[str, Any] | None
) -> LanguageModel:
    """The whole model of a sharded checkpoint, on the CPU."""
    tensors = read_model(path)
    dtype = tensors["embedding.weight"].dtype
    model = LanguageModel(config, device="meta", dtype=dtype)
    model.load_state_dict(tensors, assign=True)
    model.rope.to_empty(device="cpu")
    model.rope.reset_tables()
    model.hf_values = hf_values
    return model
