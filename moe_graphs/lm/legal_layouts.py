"""What ``moe-graphs train`` does and does not do on several ranks."""

from __future__ import annotations

from moe_graphs.config import GraphConfig
from moe_graphs.lm.run import RunOptions
from moe_graphs.lm.workers import Workers

_IN_THIS_PROCESS = ("local", "padded")  # dispatchers


def default_dispatcher(workers: Workers | None) -> str:
    return "local" if workers is None or workers.layout.ep == 1 else "all_to_all"


def check_options(options: RunOptions) -> None:
    """Returns if several ranks can run it, or there is one process.

    Raises:
        ValueError: what does not fit the layout, or is not there on several ranks.
    """
    if options.workers is None:
        return
    settings, model, layout = options.preset.training, options.preset.model, options.workers.layout
    ranks = layout.data_parallel
    if settings.batch_size // settings.microbatches % ranks:
        raise ValueError(
            f"batch_size: {settings.batch_size} sequences in {settings.microbatches} "
            f"microbatch(es) cannot be shared equally by {ranks} ranks: choose a multiple of "
            f"{ranks * settings.microbatches}"
        )
    if isinstance(options.graph_config, GraphConfig):
        raise ValueError(
            "impl: scopes on several ranks: FSDP2 gathers parameters at other addresses in every "
            "step, and a graph of a scope reads those it was captured with: use --impl "
            "full_iteration, or none"
        )
    if options.graph_config is not None and not options.graph_config.optimizer_in_graph:
        raise ValueError(
            "impl: full_iteration on several ranks: FSDP2 makes its gradients anew in every step, "
            "so a graph has to use them itself: add --optimizer-in-graph"
        )
    theirs = {"fp8": options.fp8 != "none", "linear": model.linear != "torch"}
    experts = 0
    if model.moe is not None:
        experts = model.moe.num_experts
        theirs["experts"] = model.moe.experts != "moe_graphs"
    for name, chosen in theirs.items():
        if chosen:
            raise ValueError(f"{name}: other libraries' kernels are for one process: drop --{name}")
    if layout.ep > 1 and (experts == 0 or experts % layout.ep):
        raise ValueError(f"ep: {layout.ep} ranks cannot share {experts} experts: choose a divisor")
    if (layout.ep > 1) == (options.dispatcher in _IN_THIS_PROCESS):
        keeps = "keeps tokens on their rank" if layout.ep > 1 else "sends tokens to other ranks"
        raise ValueError(
            f"dispatcher: {options.dispatcher!r} {keeps}, and with ep={layout.ep} experts are "
            f"{'shared by ranks' if layout.ep > 1 else 'all on every rank'}: choose another one"
        )
