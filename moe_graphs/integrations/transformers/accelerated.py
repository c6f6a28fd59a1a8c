"""One call that makes a transformers model train faster, and says what it changed and what not."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moe_graphs.config import GraphConfig
from moe_graphs.engine.partial.graphs import Graphs, graph
from moe_graphs.engine.report import Report
from moe_graphs.integrations.transformers.adapted_experts import multiply_rows
from moe_graphs.integrations.transformers.adapted_projections import adapt_projections
from moe_graphs.integrations.transformers.caching import stop_caching
from moe_graphs.integrations.transformers.changes import Change, Changes, lists_of_layers, trying
from moe_graphs.integrations.transformers.checkpointing import (
    Look,
    Switch,
    pass_by,
    runs_checkpoint,
)
from moe_graphs.integrations.transformers.collected_outputs import collect_outputs
from moe_graphs.integrations.transformers.deferred_logits import DeferredLogits, defer_logits
from moe_graphs.integrations.transformers.experts_interface import NAME, register
from moe_graphs.integrations.transformers.fp8_experts import experts_in_fp8
from moe_graphs.integrations.transformers.fp8_projections import projections_in_fp8
from moe_graphs.integrations.transformers.lengths import SHAPES, Lengths, pad_lengths
from moe_graphs.integrations.transformers.packed_rows import mask_documents
from moe_graphs.integrations.transformers.packing import packing_of
from moe_graphs.integrations.transformers.quantized_experts import (
    adopt_quantized,
    check_adapters_of_packed,
)
from moe_graphs.integrations.transformers.reached_code import host_read
from moe_graphs.integrations.transformers.rms_norms import change_norms, fuse_residuals
from moe_graphs.integrations.transformers.rotary_positions import change_rotary
from moe_graphs.integrations.transformers.static_masks import static_attention
from moe_graphs.integrations.transformers.swapped_layers import swap_moe_layers
from moe_graphs.kernels import cross_entropy, linear_cross_entropy
from moe_graphs.layers.model_config import Precision
from moe_graphs.training.batch_types import know_batches


class NoGraphs:
    """A stand-in for graphs that says why there are none.

    Attributes:
        state: "off".
        reason: why.
    """

    def __init__(self, reason: str) -> None:
        self.state, self.reason = "off", reason

    def step(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def report(self) -> Report:
        """Nothing was captured or replayed; ``off_because`` says why."""
        return Report(
            backend="none",
            state=self.state,
            scopes=(),
            captured=0,
            slots=(),
            replayed=0,
            eager_calls={},
            static_bytes=0,
            predicted_pool_bytes=0,
            pool_bytes=0,
            abandoned=0,
            capture_seconds=0.0,
            off_because=self.reason,
        )

    def release(self) -> None:
        """Releases nothing."""


class Accelerated(Changes):
    """The changes that ``accelerate_model`` made to a model.

    Attributes:
        graphs: of the decoder layers; where there are none, their ``report()`` says why.
        lengths: that batches are padded to, and counts of that.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.lengths = Lengths()
        self.graphs: Graphs | NoGraphs = NoGraphs("accelerate_model was called with graphs=False")

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """A context around the forwards and backwards of one update, as ``Graphs.step``."""
        with self.lengths.step(), self.graphs.step():
            yield

    def no_graphs(self, what: str, reason: str) -> None:
        """Notes why there are none."""
        self.left("graphs", what, 0, reason)
        self.graphs = NoGraphs(reason)


def accelerate_model(
    model: nn.Module,
    *,
    experts: bool = True,
    adapters: bool = True,
    norms: bool = True,
    residuals: bool = True,
    rotary: bool = True,
    loss: bool = True,
    precision: Precision = "weights",
    dense_precision: Precision = "weights",
    graphs: GraphConfig | bool = True,
    lengths: Sequence[int] | bool | None = None,
    whole_steps: bool = False,
) -> Accelerated:
    """Changes a ``PreTrainedModel`` in place, or the one within PEFT's model.

    Its weights, names and checkpoints stay as they are.

    Args:
        experts: whole MoE blocks on our stages (``swap_moe_layers``), the experts of others on our
            grouped GEMMs (``register``).
        adapters: PEFT's LoRA on linear layers as one op in the dtype of the frozen weight. PEFT
            casts the rows to the dtype of its factors instead, which is fp32. PEFT has to be
            applied before.
        norms: RMS norms on our kernels, those that compute just that (each class is tried on
            random numbers).
        rotary: positions of queries and keys turned in one kernel, where attention calls an
            ``apply_rotary_pos_emb`` that computes just that (tried on random numbers).
        residuals: their sums in the kernels of the norms that follow, in decoder layers of the
            usual forward. Wants ``norms``.
        loss: the causal language model's cross entropy from hidden states, chunk by chunk. In
            training the model's ``logits`` are made only where somebody reads them, which ``print``
            of the result counts.
        precision: ``"fp8"`` computes the products of routed experts and all their gradients in FP8,
            ``"fp8_rows"`` all but the gradients of weights, and ``"fp8_powers"`` has scales that
            are powers of two, as ``MoEConfig`` says. Whole MoE blocks on our stages take it, where
            128 divides their sizes, without LoRA beside them and not in few bits; ``print`` of the
            result names what was left. Weights stay as they are.
        dense_precision: the same of linear layers within decoder layers: attention's projections,
            dense layers and shared experts, without LoRA around them. The first and the last
            decoder layer, routers and the head are computed as before.
        graphs: the decoder layers as CUDA graphs: put ``with accelerated.step():`` around the
            forwards and backwards of an update. Worth most where the host's launches take longer
            than the GPU's work; with 16k tokens of a large model it wins nothing. A
            ``GraphConfig`` chooses other scopes and settings. Under gradient checkpointing, which
            may be switched on before or after, graphs of whole layers keep their inputs only and
            recompute the rest. What flags such as ``output_router_logits`` collect leaves the
            graphs of whole layers as outputs.
        lengths: pads batches within ``accelerated.step()`` on the right to a few lengths, so that
            batches of changing length have graphs. Losses, router losses and callers see no
            padding. Numbers are equal to rounding, but for dropout and noise, which draw other
            numbers. True chooses at most four lengths from those of the first eight forwards, which
            run eagerly, and adds some if others come; six shapes have graphs at once. Nothing is
            padded as long as all batches have one length, but a mask that hides padding on the
            right alone is left out then, too. A sequence gives the lengths. None is
            True with graphs of layers (unless a ``GraphConfig`` has ``shapes=1``), else False.
        whole_steps: makes the model ready for ``FullIteration`` instead: transformers builds no
            masks in training any more, and batches that need one are errors (``static_batch``).
            Evaluation and ``generate()`` stay transformers' own. A model whose masks are not known
            to be causal is left. No ``graphs`` of layers then.

    Returns:
        What was done and left; ``print`` it. Losses are equal to rounding, not bitwise: other
        kernels add in another order. With or without ``graphs`` they are bitwise the same.
        Training mode caches no keys and values unless ``use_cache=True`` is given. Documents that
        are packed into a row by ``position_ids`` without a mask do not see one another then, as
        with ``use_cache=False``. Their mask is made on the device, for any number of documents.

    Raises:
        ValueError: the model has graphs already, or is neither transformers' nor PEFT's;
            ``whole_steps`` together with a ``GraphConfig`` or with ``lengths``; no experts take
            ``precision``, or no projections ``dense_precision``; ``lengths``
            together with ``GraphConfig(shapes=1)``; PEFT was to adapt experts that were in few bits
            already (``quantize_experts``).
    """
    if whole_steps and isinstance(graphs, GraphConfig):
        raise ValueError("whole_steps and a GraphConfig of layers: choose one of the two")
    lengths = _checked_lengths(lengths, graphs, whole_steps)
    if not hasattr(model, "set_experts_implementation"):
        raise ValueError(
            f"accelerate_model takes a PreTrainedModel of transformers 5, got a "
            f"{type(model).__name__}: use moe_graphs.graph for other models"
        )
    know_batches()
    done, inner = Accelerated(model), without_wrappers(model)
    try:
        if experts:
            _change_experts(inner, done)
        experts_in_fp8(inner, done, precision)
        projections_in_fp8(inner, done, dense_precision)
        if adapters:
            adapt_projections(inner, done)
        with trying():
            if norms:
                change_norms(model, done)
            if residuals:
                fuse_residuals(model, done)
            if rotary:
                change_rotary(model, done)
        if loss:
            _change_loss(inner, done)
        stop_caching(inner, done)
        if whole_steps or graphs:
            done.on_undo(_write_dtype(inner))
        if whole_steps:
            static_attention(inner, done)
            done.no_graphs("layers", "FullIteration makes one graph of the whole step")
        mask_documents(inner, done)
        if graphs and not whole_steps:
            _graph_layers(model, done, None if graphs is True else graphs, bool(lengths))
        if lengths:
            done.lengths = Lengths(() if lengths is True else lengths)
            done.lengths.graphs = done.graphs if isinstance(done.graphs, Graphs) else None
            pad_lengths(inner, done.lengths, done)
    except BaseException:
        done.undo()
        raise
    return done


def _checked_lengths(
    lengths: Sequence[int] | bool | None, graphs: GraphConfig | bool, whole_steps: bool
) -> Sequence[int] | bool:
    if lengths is None:
        has_shapes = graphs if isinstance(graphs, bool) else graphs.shapes > 1
        return has_shapes and not whole_steps
    if lengths and whole_steps:
        raise ValueError("whole_steps and lengths: pad in the collator, static_batch(lengths=...)")
    if lengths and isinstance(graphs, GraphConfig) and graphs.shapes == 1:
        raise ValueError(f"lengths and GraphConfig(shapes=1): take shapes={SHAPES}, for instance")
    return lengths


def without_wrappers(model: Any) -> Any:
    """The model of transformers inside of PEFT's: its attributes are what the forward reads."""
    while hasattr(model, "get_base_model"):
        model = model.get_base_model()
    return model


def _change_experts(model: Any, done: Accelerated) -> None:
    """Whole blocks where that is known, the experts alone in others."""
    check_adapters_of_packed(model)
    adopt_quantized(model, done)
    done.add(swap_moe_layers(model))
    _change_experts_alone(model, done)
    multiply_rows(model, done)


def _change_experts_alone(model: Any, done: Accelerated) -> None:
    found = [m for m in model.modules() if hasattr(type(m), "_apply_gate")]
    packed = Counter(type(m).__name__ for m in found if packing_of(m) is not None)
    for kind, number in packed.items():
        if kind != "FP8Experts":  # which has its line
            done.left("experts", kind, number, "in few bits, and on our kernels already")
    kinds = Counter(type(m).__name__ for m in found if packing_of(m) is None)
    if not kinds:
        return
    what, count = ", ".join(kinds), kinds.total()
    before = model.config._experts_implementation
    if before == NAME:
        done.left("experts", what, count, "are on our kernels already")
        return
    model.set_experts_implementation(register())
    note = f"{before} -> grouped GEMMs, sizes on the device"
    undo = functools.partial(model.set_experts_implementation, before)
    done.changed("experts", what, count, note, undo)


def _change_loss(model: Any, done: Accelerated) -> None:
    from transformers.loss.loss_utils import ForCausalLMLoss

    what = getattr(model.loss_function, "__name__", "a loss of its own")
    if model.loss_function is not ForCausalLMLoss:
        done.left("loss", what, 1, "only causal language models' is known")
        return
    before = vars(model).get("_loss_function")
    model.loss_function = causal_lm_loss

    def undo() -> None:
        del model._loss_function
        if before is not None:
            model.loss_function = before

    done.changed("loss", what, 1, "fused, chunk by chunk from hidden states", undo)
    defer_logits(model.get_output_embeddings(), done)
    done.watch(functools.partial(_loss_of_trl, model))


def _loss_of_trl(model: nn.Module) -> list[Change]:
    """Whether TRL has set a forward on the model that computes the loss from hidden states."""
    forward = vars(model).get("forward")
    while forward is not None:
        if getattr(forward, "__globals__", {}).get("__name__", "").startswith("trl."):
            note = "TRL's trainers compute theirs by it, from hidden states"
            return [Change("loss", "TRL's fused head", 1, False, note)]
        forward = getattr(forward, "__wrapped__", None)
    return []


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """The mean over targets, or their sum over ``num_items_in_batch``, as in transformers.

    ``ForCausalLMLoss`` computes it there. ``logits [..., S, V]``, ``labels [..., S]``.
    """
    if shift_labels is None:
        if labels is None:
            raise ValueError("causal_lm_loss takes labels or shift_labels: got none of the two")
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets = shift_labels.reshape(-1).to(logits.device)
    reduction = "mean" if num_items_in_batch is None else "sum"
    if isinstance(logits, DeferredLogits) and vocab_size == len(logits.weight):
        rows = logits.hidden.reshape(-1, logits.hidden.shape[-1])
        loss = linear_cross_entropy(
            rows, logits.weight, targets,
            ignore_index=ignore_index, reduction=reduction, rule=logits.rule,
        )  # fmt: skip
    else:
        rows = logits.reshape(-1, vocab_size)
        loss = cross_entropy(rows, targets, ignore_index=ignore_index, reduction=reduction)
    if num_items_in_batch is None:
        return loss
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss / num_items_in_batch


def _write_dtype(model: Any) -> Callable[[], None]:
    """Writes the dtype as ``save_pretrained`` does, and returns the undo.

    A checkpoint then changes no attribute of the configuration, which guards compare.
    """
    config, before = model.config, model.config.dtype
    config.dtype = written = str(model.dtype).removeprefix("torch.")

    def undo() -> None:
        if config.dtype == written:
            config.dtype = before

    return undo


def _graph_layers(
    model: Any, done: Accelerated, config: GraphConfig | None, changing: bool
) -> None:
    lists = lists_of_layers(model)
    layers = {f"{name}.{i}": layer for name, each in lists.items() for i, layer in enumerate(each)}
    reads = {} if config else {n: why for n, layer in layers.items() if (why := host_read(layer))}
    for why, count in Counter(reads.values()).items():
        done.left("graphs", "layers", count, f"{why}: they run eagerly")
    scopes = _scopes_without(lists, reads) if config is None else tuple(config.scopes or ())
    what = ", ".join(scopes) or "none"
    if not scopes:
        why = "; ".join(dict.fromkeys(reads.values())) or "no list of decoder layers found"
        done.no_graphs(what, why)
        return
    inner = without_wrappers(model)
    graphs = done.graphs = graph(
        model, config or GraphConfig(scopes, shapes=SHAPES if changing else 1)
    )
    kept = inner.base_model.register_forward_pre_hook(_keep_no_casts)
    undo_collecting, undo_passing_by = collect_outputs(graphs), pass_by(graphs.scopes)

    looked = inner.base_model.register_forward_pre_hook(Look(graphs.scopes))
    undo_switch = Switch(inner, graphs.scopes).install()

    def undo() -> None:
        graphs.release()
        undo_switch()
        looked.remove()
        undo_passing_by()
        undo_collecting()
        kept.remove()

    note = "captured in the steps after the warm-up: with accelerated.step(): ..."
    done.changed("graphs", what, len(layers) - len(reads), note, undo)
    eager = sum(map(runs_checkpoint, layers.values()))
    if eager:
        note = "gradient checkpointing by a function that is not known: eager while it is on"
        done.left("graphs", what, eager, note)


def _scopes_without(lists: dict[str, Any], left: dict[str, str]) -> tuple[str, ...]:
    """A pattern for each list of layers, or the names of its layers where some are left."""
    scopes: list[str] = []
    for name, layers in lists.items():
        known = [each for i in range(len(layers)) if (each := f"{name}.{i}") not in left]
        scopes += [f"{name}.*"] if len(known) == len(layers) else known
    return tuple(scopes)


def _keep_no_casts(base_model: nn.Module, args: tuple[Any, ...]) -> None:
    """Switches off autocast's cache until the caller's autocast ends: graphs keep old casts."""
    if any(map(torch.is_autocast_enabled, ("cuda", "cpu"))):
        torch.set_autocast_cache_enabled(False)
