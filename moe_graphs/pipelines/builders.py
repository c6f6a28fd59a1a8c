"""The usual pipeline schedules, for ``pp`` ranks that get the chunks in turn."""

from __future__ import annotations

from collections.abc import Sequence

from moe_graphs.engine.callables.order import Action, Order
from moe_graphs.pipelines.schedule import Schedule


def gpipe(pp: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards (arXiv 1811.06965): every microbatch is in flight."""
    _positive(pp=pp, microbatches=microbatches)
    passes = range(microbatches)
    return Schedule(
        tuple(
            tuple(Action(kind, rank, m) for kind in ("F", "B") for m in passes)
            for rank in range(pp)
        )
    )


def one_f_one_b(pp: int, microbatches: int) -> Schedule:
    """PipeDream-flush (arXiv 2006.09503): rank r has ``pp - r`` microbatches in flight."""
    _positive(pp=pp, microbatches=microbatches)
    return Schedule(
        tuple(
            _alternate([(rank, m) for m in range(microbatches)], warmup=pp - 1 - rank)
            for rank in range(pp)
        )
    )


def interleaved_1f1b(
    pp: int, chunks: int, microbatches: int, group_size: int | None = None
) -> Schedule:
    """1F1B over several chunks per rank (arXiv 2104.04473), in Megatron-LM's order.

    Args:
        chunks: number of chunks per rank (Megatron's virtual pipeline size); 1 gives
            ``one_f_one_b``.
        group_size: number of microbatches that go through a chunk before the next chunk's turn
            (Megatron's ``microbatch_group_size_per_vp_stage``); default ``pp``, the minimum.
    """
    group_size = pp if group_size is None else group_size
    _positive(pp=pp, chunks=chunks, microbatches=microbatches)
    if group_size < pp:
        raise ValueError(
            f"group_size={group_size} with pp={pp}: a smaller group than there are ranks makes "
            f"them wait for each other for ever; take {pp} or more"
        )
    if chunks == 1:
        return one_f_one_b(pp, microbatches)
    local_passes = [
        (local, microbatch)
        for start in range(0, microbatches, group_size)
        for local in range(chunks)
        for microbatch in range(start, min(start + group_size, microbatches))
    ]
    orders = []
    for rank in range(pp):
        forwards = [(local * pp + rank, m) for local, m in local_passes]
        backwards = [((chunks - 1 - local) * pp + rank, m) for local, m in local_passes]
        warmup = 2 * (pp - 1 - rank) + (chunks - 1) * group_size
        orders.append(_alternate(forwards, backwards, warmup=warmup))
    return Schedule(tuple(orders))


def zero_bubble(pp: int, microbatches: int) -> Schedule:
    """1F1B with weight gradients delayed into the bubble: ZB-H1 of arXiv 2401.10241.

    Rank r runs W r microbatches behind B. So every rank has at most ``pp`` microbatches in flight,
    as many as the first rank of 1F1B.
    """
    _positive(pp=pp, microbatches=microbatches)
    orders = []
    for rank in range(pp):
        order = []
        for action in _alternate([(rank, m) for m in range(microbatches)], warmup=pp - 1 - rank):
            order.append(action)
            if action.kind == "B" and action.microbatch >= rank:
                order.append(Action("W", rank, action.microbatch - rank))
        late = range(max(0, microbatches - rank), microbatches)
        orders.append((*order, *(Action("W", rank, m) for m in late)))
    return Schedule(tuple(orders))


def _alternate(
    forwards: Sequence[tuple[int, int]],
    backwards: Sequence[tuple[int, int]] | None = None,
    *,
    warmup: int,
) -> Order:
    """Order of ``warmup`` forwards, then forwards and backwards in turn, then the other backwards.

    Args:
        forwards: pairs of chunk and microbatch.
        backwards: pairs of chunk and microbatch (default: as ``forwards``).
    """
    fs = [Action("F", *one) for one in forwards]
    bs = [Action("B", *one) for one in backwards or forwards]
    warmup = min(warmup, len(fs))
    steady = len(fs) - warmup
    pairs = zip(fs[warmup:], bs[:steady], strict=True)
    return (*fs[:warmup], *(action for pair in pairs for action in pair), *bs[steady:])


def _positive(**numbers: int) -> None:
    for name, value in numbers.items():
        if value < 1:
            raise ValueError(f"{name}={value}: at least 1")
