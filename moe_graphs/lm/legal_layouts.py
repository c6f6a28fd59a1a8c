"""What ``moe-graphs train`` does and does not do on several ranks."""

from __future__ import annotations

from moe_graphs.config import FullIterationConfig, GraphConfig
from moe_graphs.lm.run import RunOptions
from moe_graphs.lm.settings import check_optimizer_layout
from moe_graphs.lm.workers import Workers
from moe_graphs.parallel import check_schedule, check_tensor_parallel, layers_of_stages

_IN_THIS_PROCESS = ("local", "padded")  # dispatchers


def default_dispatcher(workers: Workers | None) -> str:
    return "local" if workers is None or workers.layout.ep == 1 else "all_to_all"


def check_options(options: RunOptions) -> None:
    """Returns if several ranks can run it, or there is one process.

    Raises:
        ValueError: what does not fit the layout, or is not there on several ranks.
    """
    pp = 1 if options.workers is None else options.workers.layout.pp
    if pp == 1 and (options.schedule, options.stages_per_rank) != ("1f1b", 1):
        raise ValueError("schedule, stages_per_rank: of a pipeline: add --pp, or drop them")
    _check_mixed_precision(options)
    if options.workers is None:
        return
    if not options.workers.fsdp:
        _check_whole_weights(options.workers)
    settings, model, layout = options.preset.training, options.preset.model, options.workers.layout
    ranks = layout.data_parallel
    check_optimizer_layout(settings, layout.tp)
    if settings.batch_size // settings.microbatches % ranks:
        raise ValueError(
            f"batch_size: {settings.batch_size} sequences in {settings.microbatches} "
            f"microbatch(es) cannot be shared equally by {ranks} ranks: choose a multiple of "
            f"{ranks * settings.microbatches}"
        )
    check_tensor_parallel(model, layout.tp)
    heads = model.num_heads // layout.tp
    if settings.sequence_length % layout.cp or heads % layout.cp:
        of_tp = f" (of {model.num_heads}, shared by tp {layout.tp})" if layout.tp > 1 else ""
        raise ValueError(
            f"cp: {layout.cp} ranks cannot share sequences of {settings.sequence_length} tokens "
            f"and {heads} heads{of_tp} equally: choose a divisor of both"
        )
    if pp > 1:
        check_schedule(options.schedule, pp, options.stages_per_rank, settings.microbatches)
        layers_of_stages(model.num_layers, pp * options.stages_per_rank)
    graphs, sharded = options.graph_config, ranks * layout.cp > 1
    if isinstance(graphs, GraphConfig) and sharded and options.workers.fsdp:
        raise ValueError(
            "impl: scopes on several ranks: FSDP2 gathers parameters at other addresses in every "
            "step, and a graph of a scope reads those it was captured with: use --no-fsdp, --impl "
            "full_iteration, or none, or share by --tp and --pp alone"
        )
    shared = sharded or layout.tp > 1
    if isinstance(graphs, FullIterationConfig) and shared and not graphs.optimizer_in_graph:
        raise ValueError(
            "impl: full_iteration on several ranks: the update of sharded gradients (DTensor) is "
            "a part of the graph: add --optimizer-in-graph"
        )
    _check_experts(options, layout.ep)


def _check_experts(options: RunOptions, ep: int) -> None:
    model = options.preset.model
    theirs = {"fp8": options.fp8 != "none", "linear": model.linear != "torch"}
    experts = 0
    if model.moe is not None:
        experts = model.moe.num_experts
        theirs["experts"] = model.moe.experts != "moe_graphs"
    for name, chosen in theirs.items():
        if chosen:
            raise ValueError(f"{name}: other libraries' kernels are for one process: drop --{name}")
    if ep > 1 and (experts == 0 or experts % ep):
        raise ValueError(f"ep: {ep} ranks cannot share {experts} experts: choose a divisor")
    if (ep > 1) == (options.dispatcher in _IN_THIS_PROCESS):
        keeps = "keeps tokens on their rank" if ep > 1 else "sends tokens to other ranks"
        raise ValueError(
            f"dispatcher: {options.dispatcher!r} {keeps}, and with ep={ep} experts are "
            f"{'shared by ranks' if ep > 1 else 'all on every rank'}: choose another one"
        )


def _check_whole_weights(workers: Workers) -> None:
    layout = workers.layout
    if layout.dp_shard != workers.count or layout.ep not in (1, workers.count):
        raise ValueError(
            f"no-fsdp: the layout is {workers.described()}: without FSDP2 ranks are data-parallel "
            f"(--dp-shard) and share experts all together (--ep {workers.count}) or not at all"
        )
    if layout.layers_per_group > 1:
        raise ValueError("layers_per_group: of FSDP2: drop it, or --no-fsdp")


def _check_mixed_precision(options: RunOptions) -> None:
    workers = options.workers
    sharded = workers is not None and workers.fsdp and workers.layout.with_tokens > 1
    if options.mixed_precision and not sharded:
        raise ValueError(
            "mixed_precision: it is FSDP2's, which shards nothing on one process, with --no-fsdp, "
            "or by --tp or --pp alone: drop it, GPUs compute in bfloat16 by autocast without it"
        )
