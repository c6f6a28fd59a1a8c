"""Table of the tensors in Hugging Face's files, and the parts of our tensors that they are.

Shapes in their files: linear layers ``[out, in]``. Our shapes are the same, but layers that read
the same input are stacked by rows, and experts are ``[e, in, out]``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe_graphs.checkpoints.families import Family, Values
from moe_graphs.layers.model_config import MoEConfig, TransformerConfig
from moe_graphs.registry import FAMILIES


@dataclass(frozen=True, kw_only=True)
class InterleavedRope:
    """Order of rows ``heads * [plain, rotated]`` that rotates pairs ``(0, 1), (2, 3), ...``.

    Our layers rotate the pairs ``(0, R/2), (1, R/2 + 1), ...``. Queries and keys are reordered in
    the same way, so attention is the same to the bit.
    """

    heads: int
    plain: int
    rotated: int

    def order(self) -> Tensor:
        """The number of the file's row for each of our rows."""
        row_HQ = torch.arange(self.heads * (self.plain + self.rotated)).view(self.heads, -1)
        plain, rotated = row_HQ.split((self.plain, self.rotated), dim=1)
        return torch.cat((plain, rotated[:, 0::2], rotated[:, 1::2]), dim=1).flatten()


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A tensor of the files, or one expert's part of it, and the rows of our tensor that it is.

    Attributes:
        theirs: the tensor's name in the files.
        ours: the name of our tensor in the model's ``state_dict``.
        rows: first and last (exclusive) row of our tensor; None for all rows.
        expert: number of the expert over all ranks, if our tensor is a stack of experts.
        fused: whether their tensor is a stack of all experts, too (transformers 5, in memory).
        rope: the order of their rows, None if it is our order.
    """

    theirs: str
    ours: str
    rows: tuple[int, int] | None = None
    expert: int | None = None
    fused: bool = False
    rope: InterleavedRope | None = None

    def region(self, ours: Tensor) -> tuple[slice, ...]:
        """Region of our tensor with all experts: a slice for every dimension."""
        slices = [slice(0, size) for size in ours.shape]
        if self.rows is not None:
            slices[0 if self.expert is None else -1] = slice(*self.rows)
        if self.expert is not None:
            slices[0] = slice(self.expert, self.expert + 1)
        return tuple(slices)

    def view(self, ours: Tensor, first_expert: int = 0) -> Tensor:
        """The part of our tensor, in the shape of their tensor (of one expert, if fused)."""
        if self.expert is not None:
            ours = ours[self.expert - first_expert].T
        return ours if self.rows is None else ours[slice(*self.rows)]


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers, by the names in ``Piece.ours``.

    Weights of experts in another backend's layout are copies in our layout.
    """
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, module in model.named_modules():
        if hasattr(module, "stacked_weights") and f"{name}.w1" not in found:
            found[f"{name}.w1"], found[f"{name}.w2"] = module.stacked_weights()
    return found


def pieces(config: TransformerConfig, values: Values, *, fused: bool = False) -> list[Piece]:
    """All pieces of a model, each once.

    Args:
        config: configuration of the model.
        values: config.json, which says more about the files than ``config``.
        fused: whether experts are stacks, as transformers keeps them in memory.
    """
    found = [
        Piece(theirs="model.embed_tokens.weight", ours="embedding.weight"),
        Piece(theirs="model.norm.weight", ours="norm.weight"),
        Piece(theirs="lm_head.weight", ours="head.weight"),
    ]
    attention = _attention if config.latent is None else _latent_attention
    for index in range(config.num_layers):
        theirs, ours = f"model.layers.{index}.", f"layers.{index}."
        found.append(
            Piece(theirs=f"{theirs}input_layernorm.weight", ours=f"{ours}attention_norm.weight")
        )
        found += attention(config, values, f"{theirs}self_attn.", f"{ours}attention.")
        found.append(
            Piece(theirs=f"{theirs}post_attention_layernorm.weight", ours=f"{ours}mlp_norm.weight")
        )
        if config.moe is not None and config.is_moe_layer(index):
            family = FAMILIES[values["model_type"]]
            block = f"{theirs}{'mlp' if fused else family.block}."
            found += _moe(config.moe, block, f"{ours}moe.", None if fused else family)
        else:
            assert config.ffn_hidden_size is not None
            found += _swiglu(f"{theirs}mlp.", f"{ours}mlp.", config.ffn_hidden_size)
    return found


def _attention(
    config: TransformerConfig, values: Values, theirs: str, ours: str
) -> Iterator[Piece]:
    sizes = [heads * config.head_size for heads in (config.num_heads, *[config.kv_heads] * 2)]
    names = [f"{theirs}{name}_proj.weight" for name in "qkv"]
    yield from _stacked(f"{ours}qkv.weight", names, sizes)
    if config.qk_norm != "none":
        yield Piece(theirs=f"{theirs}q_norm.weight", ours=f"{ours}query_norm.weight")
        yield Piece(theirs=f"{theirs}k_norm.weight", ours=f"{ours}key_norm.weight")
    yield Piece(theirs=f"{theirs}o_proj.weight", ours=f"{ours}out.weight")


def _latent_attention(
    config: TransformerConfig, values: Values, theirs: str, ours: str
) -> Iterator[Piece]:
    latent = config.latent
    assert latent is not None
    query = key = None
    if values.get("rope_interleave", True):
        rotated = latent.rope_head_dim
        query = InterleavedRope(
            heads=config.num_heads, plain=latent.plain_head_dim, rotated=rotated
        )
        key = InterleavedRope(heads=1, plain=latent.kv_rank, rotated=rotated)
    rank = latent.query_rank or 0
    rows = (rank, rank + latent.kv_rank + latent.rope_head_dim)
    down, up = f"{ours}down.weight", f"{theirs}q_proj.weight"
    if latent.query_rank is not None:
        up = f"{theirs}q_b_proj.weight"
        yield Piece(theirs=f"{theirs}q_a_proj.weight", ours=down, rows=(0, rank))
        yield Piece(theirs=f"{theirs}q_a_layernorm.weight", ours=f"{ours}query_norm.weight")
    yield Piece(theirs=up, ours=f"{ours}query_up.weight", rope=query)
    yield Piece(theirs=f"{theirs}kv_a_proj_with_mqa.weight", ours=down, rows=rows, rope=key)
    yield Piece(theirs=f"{theirs}kv_a_layernorm.weight", ours=f"{ours}kv_norm.weight")
    yield Piece(theirs=f"{theirs}kv_b_proj.weight", ours=f"{ours}kv_up.weight")
    yield Piece(theirs=f"{theirs}o_proj.weight", ours=f"{ours}out.weight")


def _moe(moe: MoEConfig, theirs: str, ours: str, family: Family | None) -> Iterator[Piece]:
    """Pieces of a layer with experts, which are stacks if ``family`` is None."""
    yield Piece(theirs=f"{theirs}gate.weight", ours=f"{ours}router.weight")
    if moe.expert_bias:
        bias = f"{theirs}gate.e_score_correction_bias"
        yield Piece(theirs=bias, ours=f"{ours}router.expert_bias")
    w1, w2 = f"{ours}experts.w1", f"{ours}experts.w2"
    for expert in range(moe.num_experts):
        if family is None:
            for name, weight in (("gate_up_proj", w1), ("down_proj", w2)):
                name = f"{theirs}experts.{name}"
                yield Piece(theirs=name, ours=weight, expert=expert, fused=True)
            continue
        prefix, (gate, up, down) = f"{theirs}experts.{expert}.", family.products
        names = [f"{prefix}{gate}.weight", f"{prefix}{up}.weight"]
        yield from _stacked(w1, names, [moe.ffn_hidden_size] * 2, expert)
        yield Piece(theirs=f"{prefix}{down}.weight", ours=w2, expert=expert)
    if moe.shared_ffn_hidden_size:
        width = moe.shared_ffn_hidden_size
        yield from _swiglu(f"{theirs}shared_experts.", f"{ours}shared_expert.", width)


def _swiglu(theirs: str, ours: str, width: int) -> Iterator[Piece]:
    names = [f"{theirs}gate_proj.weight", f"{theirs}up_proj.weight"]
    yield from _stacked(f"{ours}w1.weight", names, [width] * 2)
    yield Piece(theirs=f"{theirs}down_proj.weight", ours=f"{ours}w2.weight")


def _stacked(
    ours: str, theirs: list[str], sizes: list[int], expert: int | None = None
) -> Iterator[Piece]:
    start = 0
    for name, size in zip(theirs, sizes, strict=True):
        yield Piece(theirs=name, ours=ours, rows=(start, start + size), expert=expert)
        start += size
