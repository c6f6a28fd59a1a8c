"""Tensor parallelism: ranks that share heads, columns of feed-forward networks and the vocabulary.

Megatron-LM's cut (arXiv 1909.08053): a half of a block is a projection of which every rank has some
outputs, what is between, and a projection of which it has those inputs. So a half costs one
all-reduce of activations in the forward and one in the backward; the residual stream, norms,
routers and routed experts are on every rank, the same to the bit.

Weights are DTensors of the whole shapes, for FSDP2, gradient norms and checkpoints; activations and
what is computed with them are plain. Fused projections keep the parts' rows together on a rank: see
``fused_rows``.

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

from moe_graphs.kernels.ops import wants_gradient
from moe_graphs.layers import LanguageModel, TransformerConfig
from moe_graphs.layers.attention import Attention
from moe_graphs.layers.mlp import SwiGLU
from moe_graphs.parallel.model_stage import ModelStage

_NAME_OF_RANKS = re.compile(r"\.weight_of_\d+_ranks\b")


class ColumnLinear(nn.Module):
    """A projection of which this rank computes some outputs. The input is the same on all ranks,
    and so is its gradient: an all-reduce beside the weight's gradient."""

    process_group: dist.ProcessGroup
    weight: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        x, weight_MD = _autocast(x), _autocast(local(self.weight))
        return _ColumnLinear.apply(x, weight_MD, self.process_group)


class FusedColumnLinear(ColumnLinear):
    """One whose outputs are this rank's of every part (queries, keys, values): in its DTensor rows
    are in another order than in the whole weight, and in another one for every number of ranks.

    So the parameter has another name: under that of the whole weight, whoever saves or loads it
    without ``WholeRowsSavePlanner`` would get rows that are mixed up, and hear nothing of it.
    """

    @property
    def weight(self) -> nn.Parameter:  # type: ignore[override]
        (only,) = self._parameters.values()
        assert only is not None
        return only


def whole_name(name: str) -> str:
    """What a tensor of a model, or of its optimizer, is called on one GPU: keys for
    ``WholeRowsSavePlanner`` and ``WholeRowsLoadPlanner``."""
    return _NAME_OF_RANKS.sub(".weight", name)


class RowLinear(nn.Module):
    """A projection of which this rank has some inputs: an all-reduce of the outputs."""

    process_group: dist.ProcessGroup
    weight: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        partial = functional.linear(x, local(self.weight))
        return _SumOverRanks.apply(partial, self.process_group)


class VocabularyEmbedding(nn.Module):
    """Rows of tokens of which this rank has some: an all-reduce of the rows."""

    process_group: dist.ProcessGroup
    weight: nn.Parameter
    first: int

    def forward(self, tokens_BS: Tensor) -> Tensor:
        weight_VD = local(self.weight)
        here_BS = tokens_BS - self.first
        elsewhere_BS = (here_BS < 0) | (here_BS >= weight_VD.shape[0])
        rows_BSD = functional.embedding(here_BS.masked_fill(elsewhere_BS, 0), weight_VD)
        rows_BSD.masked_fill_(elsewhere_BS.unsqueeze(-1), 0)
        return _SumOverRanks.apply(rows_BSD, self.process_group)


class AttentionOfHeads(Attention):
    """Attention with the heads of this rank. All of them have the norms' weights."""

    process_group: dist.ProcessGroup

    def _norm_weights(self) -> tuple[Tensor | None, Tensor | None]:
        if self.qk_norm == "none":
            return None, None
        weights = self.query_norm.weight, self.key_norm.weight
        return _SumOfGradients.apply(*weights, self.process_group)


def check_tensor_parallel(config: TransformerConfig, tp: int) -> None:
    """Returns if ``tp`` ranks can share such a model.

    Raises:
        ValueError: what they cannot divide, or cannot be shared.
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
    }
    for name, found in refused.items():
        if found:
            raise ValueError(f"tp: {name} is not built for several ranks: pass tp=1")


def share_tensors(model: LanguageModel | ModelStage, mesh: DeviceMesh) -> None:
    """Divides ``model`` (whole, a stage of a pipeline, or on the meta device) over the ranks of
    ``mesh``, in place.

    Raises:
        ValueError: as ``check_tensor_parallel``.
    """
    check_tensor_parallel(model.config, mesh.size())
    for module in list(model.modules()):
        if isinstance(module, Attention):
            _share_heads(module, mesh)
        elif isinstance(module, SwiGLU):
            _share_columns(module, mesh)
    embedding, head = cast(Any, model.embedding), cast(Any, model.head)
    if embedding is not None:
        _become(VocabularyEmbedding, embedding, _rows(embedding.weight, mesh), mesh)
        embedding.first = mesh.get_local_rank() * (model.config.vocab_size // mesh.size())
    if head is not None:
        _become(ColumnLinear, head, _rows(head.weight, mesh), mesh)
    for module in list(model.modules()):
        if isinstance(module, (AttentionOfHeads, SwiGLU)):
            _rename(module.qkv if isinstance(module, AttentionOfHeads) else module.w1, mesh)


def _rename(fused: Any, mesh: DeviceMesh) -> None:
    weight = fused.weight
    del fused.weight, fused.bias  # None: projections have no biases
    fused.__class__ = FusedColumnLinear
    fused.register_parameter(f"weight_of_{mesh.size()}_ranks", weight)


def _become(kind: type[nn.Module], module: Any, weight: Tensor, mesh: DeviceMesh) -> None:
    """In place: a stage of a pipeline and the model that it is of have the same module.

    ``weight``: of this rank. ``mesh``: of one dimension, the ranks that share it.
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


def _rows(weight: Tensor, mesh: DeviceMesh, parts: tuple[int, ...] = ()) -> Tensor:
    """This rank's of every part, of a copy."""
    ranks, rank = mesh.size(), mesh.get_local_rank()
    split = weight.detach().split(parts or (weight.shape[0],))
    mine = torch.cat([part.chunk(ranks)[rank] for part in split])
    return mine.requires_grad_(weight.requires_grad)


def _columns(weight: Tensor, mesh: DeviceMesh) -> Tensor:
    mine = weight.detach().chunk(mesh.size(), dim=1)[mesh.get_local_rank()]
    return mine.contiguous().requires_grad_(weight.requires_grad)


def fused_rows(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The parameters whose first dimension ranks share, by ``whole_name``: how many rows each of
    the parts has that lie one behind the other in the whole weight.

    A rank has its share of every part, so the DTensor of a weight of several parts has its rows in
    another order than the whole weight has them: ``WholeRows`` knows both.
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


def local(weight: Tensor) -> Tensor:
    """What this rank computes with."""
    to_local = getattr(weight, "to_local", None)
    return weight if to_local is None else to_local()


def _sharded(weight: Tensor, mesh: DeviceMesh, dim: int) -> nn.Parameter:
    whole = DTensor.from_local(weight.detach(), mesh, [Shard(dim)], run_check=False)
    return nn.Parameter(whole, weight.requires_grad)


def _autocast(x: Tensor) -> Tensor:
    """As ``linear`` would: what is exchanged is cast before."""
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


class _SumOverRanks(torch.autograd.Function):
    """In place. All ranks go on alike, so the gradient is everyone's."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: dist.ProcessGroup) -> Tensor:
        dist.all_reduce(partial, group=group)
        ctx.mark_dirty(partial)
        return partial

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _SumOfGradients(torch.autograd.Function):
    """Of weights that every rank has and uses for its own part; together, since they are small."""

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
