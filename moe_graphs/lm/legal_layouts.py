"""Checks of what ``moe-graphs train`` can run on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from moe_graphs.config import FullIterationConfig, GraphConfig
from moe_graphs.layout import OF_FSDP
from moe_graphs.lm.fastest_way import Obstacle, Situation, against_scopes, against_whole_steps
from moe_graphs.lm.optimizers import check_optimizer_layout
from moe_graphs.lm.run import RunOptions
from moe_graphs.lm.workers import Workers
from moe_graphs.parallel import ParallelConfig
from moe_graphs.parallel.degrees import problems_of
from moe_graphs.parallel.pipeline import check_schedule, layers_of_stages
from moe_graphs.registry import DISPATCHERS


def check_options(options: RunOptions, also: Iterable[str] = ()) -> None:
    """Checks that the options can run on several ranks; one process is checked as well.

    Args:
        also: problems that are known already.

    Raises:
        ValueError: if options do not fit the layout, or are not available on several ranks. The
            message names all problems.
    """
    problems = [*also, *_problems(options)]
    if len(problems) == 1:
        raise ValueError(problems[0])
    if problems:
        raise ValueError(f"{len(problems)} things do not fit: {'; '.join(problems)}")


def _problems(options: RunOptions) -> Iterator[str]:
    pp = 1 if options.workers is None else options.workers.layout.pp
    if pp == 1 and (options.asked.pipeline.schedule, options.stages_per_rank) != ("1f1b", 1):
        yield "schedule, stages_per_rank: of a pipeline: add --pp, or drop them"
    yield from _of_mixed_precision(options)
    yield from _of_graphs(options)
    yield from _of_updates(options)
    if options.workers is None:
        return
    if not options.workers.fsdp:
        yield from _of_whole_weights(options.workers)
    settings, model, layout = options.preset.training, options.preset.model, options.workers.layout
    ranks = layout.data_parallel
    yield from _raised(check_optimizer_layout, settings, layout.tp)
    hiding = [name for name, size in layout.degrees("hides_documents").items() if size > 1]
    if options.asked.text.attention_within_documents and hiding:
        yield (
            f"attention_within_documents: with {hiding[0]} a rank does not know the documents of "
            f"its tokens: drop it, or choose another layout"
        )
    if settings.batch_size // settings.microbatches % ranks:
        yield (
            f"batch_size: {settings.batch_size} sequences in {settings.microbatches} "
            f"microbatch(es) cannot be shared equally by {ranks} ranks: choose a multiple of "
            f"{ranks * settings.microbatches}"
        )
    yield from problems_of(layout, model, settings.sequence_length)
    if pp > 1:
        parts = options.asked.pipeline.schedule, pp, options.stages_per_rank, settings.microbatches
        yield from _raised(check_schedule, *parts)
        yield from _raised(layers_of_stages, model.num_layers, pp * options.stages_per_rank)
    yield from _of_experts(options, layout.ep)


def _raised(check: Callable[..., object], *arguments: object) -> Iterator[str]:
    try:
        check(*arguments)
    except ValueError as error:
        yield str(error)


def _of_graphs(options: RunOptions) -> Iterator[str]:
    graphs, workers, model = options.graph_config, options.workers, options.preset.model
    situation = Situation(model=model)
    if workers is not None:
        situation = Situation(model=model, layout=workers.layout, fsdp=workers.fsdp)
    where = "" if workers is None else " on several ranks"
    obstacles: list[Obstacle] = []
    if isinstance(graphs, FullIterationConfig):
        by = {"optimizer_in_graph": graphs.optimizer_in_graph}
        obstacles = against_whole_steps(situation, options.dispatcher, **by)
    elif isinstance(graphs, GraphConfig) and graphs.impl != "none":
        obstacles = against_scopes(situation)
    what = "full_iteration" if isinstance(graphs, FullIterationConfig) else "scopes"
    for obstacle in obstacles:
        yield f"impl: {what}{where}: {obstacle.reason}: {obstacle.remedy}"


def _of_updates(options: RunOptions) -> Iterator[str]:
    if not options.preset.training.update_in_backward:
        return
    if options.workers is not None:
        yield (
            "update_in_backward: gradients of several ranks add up behind the backward, and this "
            "updates within it: use one process"
        )
    graphs = options.graph_config
    if isinstance(graphs, FullIterationConfig) and not graphs.optimizer_in_graph:
        yield (
            "update_in_backward: the graph of a step has the update in it: drop --update-outside"
        )


def _of_experts(options: RunOptions, ep: int) -> Iterator[str]:
    model = options.preset.model
    theirs = {"fp8": options.asked.model.fp8 != "none", "linear": model.linear != "torch"}
    if model.moe is not None:
        theirs["experts"] = model.moe.experts != "moe_graphs"
    for name, chosen in theirs.items():
        if chosen:
            yield f"{name}: other libraries' kernels are for one process: drop --{name}"
    if (ep > 1) != DISPATCHERS[options.dispatcher].between_ranks:
        keeps = "keeps tokens on their rank" if ep > 1 else "sends tokens to other ranks"
        yield (
            f"dispatcher: {options.dispatcher!r} {keeps}, and with ep={ep} experts are "
            f"{'shared by ranks' if ep > 1 else 'all on every rank'}: choose another one"
        )


def _of_whole_weights(workers: Workers) -> Iterator[str]:
    layout = workers.layout
    if layout.dp_shard != workers.count or layout.ep not in (1, workers.count):
        yield (
            f"no-fsdp: the layout is {workers.described()}: without FSDP2 ranks are data-parallel "
            f"(--dp-shard) and share experts all together (--ep {workers.count}) or not at all"
        )
    for name in OF_FSDP:
        if getattr(layout, name) != getattr(ParallelConfig, name):
            yield f"{name}: of FSDP2: drop it, or --no-fsdp"


def _of_mixed_precision(options: RunOptions) -> Iterator[str]:
    workers = options.workers
    sharded = workers is not None and workers.fsdp and workers.layout.with_tokens > 1
    if options.mixed_precision and not sharded:
        yield (
            "mixed_precision: it is FSDP2's, which shards nothing on one process, with --no-fsdp, "
            "or by --tp or --pp alone: drop it, GPUs compute in bfloat16 by autocast without it"
        )
