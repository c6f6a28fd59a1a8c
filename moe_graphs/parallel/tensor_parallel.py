"""Tensor parallelism: ranks that share heads, columns of feed-forward networks and the vocabulary.

The cut is Megatron-LM's (arXiv 1909.08053). Attention and the feed-forward network each begin with
a column-parallel projection, of which a rank has some outputs, and end with a row-parallel
projection, of which the rank has the matching inputs. So each of the two costs one all-reduce of
activations in the forward and one in the backward. The residual stream, norms, routers and routed
experts are on every rank, the same to the bit.

Weights are DTensors of the whole shapes, for FSDP2, gradient norms and checkpoints; activations are
plain tensors. A rank has rows of every part of a fused projection: see ``fused_rows``.

Shapes: D model, M outputs, N rows (tokens), Q head dim, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from moe_graphs.kernels import linear_cross_entropy, swiglu_linear
from moe_graphs.kernels.cross_entropy.loss_rule import PLAIN, LossRule
from moe_graphs.kernels.local_part import local_part
from moe_graphs.kernels.ops import wants_gradient
from moe_graphs.layers import LanguageModel, TransformerConfig
from moe_graphs.layers.attention import Attention
from moe_graphs.layers.linear import is_watched
from moe_graphs.layers.mlp import SwiGLU
from moe_graphs.layout import ParallelConfig
from moe_graphs.parallel.degrees import Degree
from moe_graphs.parallel.model_stage import ModelStage
from moe_graphs.parallel.vocabulary import ColumnsOfGroup

_NAME_OF_RANKS = re.compile(r"\.weight_of_\d+_ranks\b")


class ColumnLinear(nn.Module):
    """Projection of which this rank computes some outputs.

    The input is the same on all ranks. So is its gradient: an all-reduce sums it, while the
    weight's gradient is computed.
    """

    process_group: dist.ProcessGroup
    weight: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        x, weight_MD = _autocast(x), _autocast(local_part(self.weight))
        return _ColumnLinear.apply(x, weight_MD, self.process_group)


class ColumnHead(ColumnLinear):
    """Output head of which this rank has some columns of the vocabulary (``layers.head.Head``)."""

    def forward(
        self,
        x: Tensor,
        targets: Tensor | None = None,
        reduction: str = "mean",
        rule: LossRule = PLAIN,
    ) -> Tensor:
        if targets is None:
            return super().forward(x)
        weight_VD = local_part(self.weight)
        return linear_cross_entropy(
            _SameOnRanks.apply(_autocast(x), self.process_group).flatten(0, -2),
            weight_VD,
            targets.flatten(),
            reduction=reduction,
            rule=rule,
            shared=ColumnsOfGroup(self.process_group, len(weight_VD)),
        )


class FusedColumnLinear(ColumnLinear):
    """Fused column-parallel projection, with some outputs of every part (queries, keys, values).

    The rows of its DTensor are in another order than in the whole weight, and the order depends on
    the number of ranks. So the parameter has a name of its own. Under the whole weight's name, code
    that saves or loads it without ``WholeRowsSavePlanner`` would silently mix up the rows.
    """

    @property
    def weight(self) -> nn.Parameter:  # type: ignore[override]
        (only,) = self._parameters.values()
        assert only is not None
        return only


def global_fqn(name: str) -> str:
    """Name of a model's or an optimizer's tensor on one GPU.

    ``WholeRowsSavePlanner`` and ``WholeRowsLoadPlanner`` need these names as keys.
    """
    return _NAME_OF_RANKS.sub(".weight", name)


class RowLinear(nn.Module):
    """Projection of which this rank has some inputs; an all-reduce sums the outputs."""

    process_group: dist.ProcessGroup
    weight: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        partial = functional.linear(x, local_part(self.weight))
        return _SumOverRanks.apply(partial, self.process_group)


class VocabularyEmbedding(nn.Module):
    """Embedding of which this rank has some rows; an all-reduce sums the results."""

    process_group: dist.ProcessGroup
    weight: nn.Parameter
    first: int

    def forward(self, tokens_BS: Tensor) -> Tensor:
        weight_VD = local_part(self.weight)
        here_BS = tokens_BS - self.first
        elsewhere_BS = (here_BS < 0) | (here_BS >= weight_VD.shape[0])
        rows_BSD = functional.embedding(here_BS.masked_fill(elsewhere_BS, 0), weight_VD)
        rows_BSD.masked_fill_(elsewhere_BS.unsqueeze(-1), 0)
        return _SumOverRanks.apply(rows_BSD, self.process_group)


class AttentionOfHeads(Attention):
    """Attention with the heads of this rank; every rank has the norms' weights."""

    process_group: dist.ProcessGroup

    def _norm_weights(self) -> tuple[Tensor | None, Tensor | None]:
        if self.qk_norm == "none":
            return None, None
        weights = self.query_norm.weight, self.key_norm.weight
        return _SumOfGradients.apply(*weights, self.process_group)


class SwiGLUOfColumns(SwiGLU):
    """Feed-forward network with the columns of this rank."""

    def forward(self, hidden: Tensor) -> Tensor:
        down = cast(RowLinear, self.w2)
        if is_watched(down):
            return super().forward(hidden)
        partial = swiglu_linear(self.w1(hidden), local_part(down.weight))
        return _SumOverRanks.apply(partial, down.process_group)


class TensorParallel(Degree):
    messages = "tensor parallelism"

    @classmethod
    def check(
        cls, layout: ParallelConfig, model: TransformerConfig, sequence_length: int | None = None
    ) -> None:
        check_tensor_parallel(model, layout.tp)

    @classmethod
    def share(cls, model: LanguageModel | ModelStage, ranks: DeviceMesh) -> None:
        apply_tensor_parallel(model, ranks)


def check_tensor_parallel(config: TransformerConfig, tp: int) -> None:
    """Check that ``tp`` ranks can share the tensors of such a model.

    Raises:
        ValueError: a size that ``tp`` does not divide, or a feature without tensor parallelism.
    """
    if tp == 1:
        return
    shared = 0 if config.moe is None else config.moe.shared_ffn_hidden_size
    dense = not all(map(config.is_moe_layer, range(config.num_layers)))
    sizes = {
        "num_heads": config.num_heads,
        "num_kv_heads": config.kv_heads,
        "vocab_size": config.vocab_size,
        "ffn_hidden_size": config.ffn_hidden_size if dense else 0,
        "shared_ffn_hidden_size": shared,
    }
    for name, size in sizes.items():
        if (size or 0) % tp:
            raise ValueError(f"tp: {tp} ranks cannot share {name} {size}: choose a divisor of it")
    refused = {
        "latent attention": config.latent is not None,
        "qk_norm='full', a norm over all heads together,": config.qk_norm == "full",
        f"linear={config.linear!r}": config.linear != "torch",
        f"precision={config.precision!r} of projections": config.precision != "weights",
    }
    for name, found in refused.items():
        if found:
            raise ValueError(f"tp: {name} is not built for several ranks: pass tp=1")


def apply_tensor_parallel(model: LanguageModel | ModelStage, mesh: DeviceMesh) -> None:
    """Divide a model or a stage of a pipeline over the ranks of ``mesh``, in place.

    The model may be on the meta device.

    Raises:
        ValueError: as in ``check_tensor_parallel``.
    """
    check_tensor_parallel(model.config, mesh.size())
    for module in list(model.modules()):
        if isinstance(module, Attention):
            if type(module) is not Attention:  # it would become the attention that it extends
                kind = type(module).__name__
                raise ValueError(f"tp: {kind} is not built for several ranks: pass tp=1")
            _share_heads(module, mesh)
        elif isinstance(module, SwiGLU):
            _share_columns(module, mesh)
    embedding, head = cast(Any, model.embedding), cast(Any, model.head)
    if embedding is not None:
        _become(VocabularyEmbedding, embedding, _rows(embedding.weight, mesh), mesh)
        embedding.first = mesh.get_local_rank() * (model.config.vocab_size // mesh.size())
    if head is not None:
        _become(ColumnHead, head, _rows(head.weight, mesh), mesh)
    for module in list(model.modules()):
        if isinstance(module, (AttentionOfHeads, SwiGLU)):
            _rename(module.qkv if isinstance(module, AttentionOfHeads) else module.w1, mesh)


def _rename(fused: Any, mesh: DeviceMesh) -> None:
    weight = fused.weight
    del fused.weight, fused.bias  # the bias is None, as in all projections of ours
    fused.__class__ = FusedColumnLinear
    fused.register_parameter(f"weight_of_{mesh.size()}_ranks", weight)


def _become(kind: type[nn.Module], module: Any, weight: Tensor, mesh: DeviceMesh) -> None:
    """Change the class and the weight of ``module`` in place.

    A new module would not do, because a stage of a pipeline shares its modules with the model.

    Args:
        weight: this rank's shard.
        mesh: one dimension, with the ranks that share the weight.
    """
    module.__class__, module.process_group = kind, mesh.get_group()
    module.weight = _sharded(weight, mesh, 1 if kind is RowLinear else 0)


def _share_heads(attention: Any, mesh: DeviceMesh) -> None:
    ranks = mesh.size()
    attention.num_heads //= ranks
    attention.kv_heads //= ranks
    qkv_MD = _rows(attention.qkv.weight, mesh, attention.sizes)
    _become(ColumnLinear, attention.qkv, qkv_MD, mesh)
    _become(RowLinear, attention.out, _columns(attention.out.weight, mesh), mesh)
    attention.__class__ = AttentionOfHeads
    attention.process_group = mesh.get_group()


def _share_columns(mlp: Any, mesh: DeviceMesh) -> None:
    w1_MD = _rows(mlp.w1.weight, mesh, _gate_up(mlp.w1.weight))
    _become(ColumnLinear, mlp.w1, w1_MD, mesh)
    _become(RowLinear, mlp.w2, _columns(mlp.w2.weight, mesh), mesh)
    mlp.__class__ = SwiGLUOfColumns


def _rows(weight: Tensor, mesh: DeviceMesh, parts: tuple[int, ...] = ()) -> Tensor:
    """Copy this rank's rows of every part of ``weight``."""
    ranks, rank = mesh.size(), mesh.get_local_rank()
    split = weight.detach().split(parts or (weight.shape[0],))
    mine = torch.cat([part.chunk(ranks)[rank] for part in split])
    return mine.requires_grad_(weight.requires_grad)


def _columns(weight: Tensor, mesh: DeviceMesh) -> Tensor:
    mine = weight.detach().chunk(mesh.size(), dim=1)[mesh.get_local_rank()]
    return mine.contiguous().requires_grad_(weight.requires_grad)


def fused_rows(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Sizes of the parts of fused weights, by ``global_fqn``.

    The parts follow one another in the rows of the whole weight. A rank has its share of every
    part, so the DTensor's rows are in another order than the whole weight's; ``whole_rows`` has
    planners for checkpoints that translate between the two orders.
    """
    return dict(_fused_rows(model))


def _fused_rows(model: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, module in model.named_modules():
        if isinstance(module, AttentionOfHeads):
            yield f"{name}.qkv.weight", module.sizes
        elif isinstance(module, SwiGLU) and isinstance(module.w1, ColumnLinear):
            yield f"{name}.w1.weight", _gate_up(module.w1.weight)
        elif isinstance(module, VocabularyEmbedding):
            yield f"{name}.weight", (module.weight.shape[0],)
        elif isinstance(getattr(module, "head", None), ColumnLinear):
            yield f"{name}.head.weight".removeprefix("."), (module.head.weight.shape[0],)


def _gate_up(weight: Tensor) -> tuple[int, int]:
    half = weight.shape[0] // 2
    return half, half


def _sharded(weight: Tensor, mesh: DeviceMesh, dim: int) -> nn.Parameter:
    whole = DTensor.from_local(weight.detach(), mesh, [Shard(dim)], run_check=False)
    return nn.Parameter(whole, weight.requires_grad)


def _autocast(x: Tensor) -> Tensor:
    """Cast ``x`` as autocast would in ``linear``, so that the exchange is in that dtype."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_MD: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(x, weight_MD)
        ctx.group = group
        return functional.linear(x, weight_MD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight_MD = ctx.saved_tensors
        grad_x = grad_MD = work = None
        if wants_gradient(ctx, 0):
            grad_x = grad @ weight_MD
            work = dist.all_reduce(grad_x, group=ctx.group, async_op=True)
        if wants_gradient(ctx, 1):
            grad_MD = grad.flatten(0, -2).t() @ x.flatten(0, -2)
        if work is not None:
            work.wait()
        return grad_x, grad_MD, None


class _SameOnRanks(torch.autograd.Function):
    """Identity of what all ranks have; the sum over the ranks of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        summed = grad.clone()
        dist.all_reduce(summed, group=ctx.group)
        return summed, None


class _SumOverRanks(torch.autograd.Function):
    """Sum over the ranks, in place.

    All ranks compute the same from the sum, so its gradient is also that of every addend.
    """

    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: dist.ProcessGroup) -> Tensor:
        dist.all_reduce(partial, group=group)
        ctx.mark_dirty(partial)
        return partial

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _SumOfGradients(torch.autograd.Function):
    """Identity of weights that every rank has and uses for its own heads; sums their gradients.

    The weights are small, so one all-reduce sums the gradients of all of them.
    """

    @staticmethod
    def forward(
        ctx: Any, first_Q: Tensor, second_Q: Tensor, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        ctx.group = group
        return first_Q.view_as(first_Q), second_Q.view_as(second_Q)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        together = torch.cat(grads)
        dist.all_reduce(together, group=ctx.group)
        first_Q, second_Q = together.chunk(2)
        return first_Q, second_Q, None
