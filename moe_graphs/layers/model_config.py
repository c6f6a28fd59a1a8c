"""Configuration of a model: three frozen records, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from moe_graphs.layers.rope_scaling import Llama3Scaling, YarnScaling, check_positive
from moe_graphs.registry import ATTENTIONS, EXPERTS, PROJECTIONS

Precision = Literal["weights", "fp8", "fp8_powers", "fp8_rows"]


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """One mixture-of-experts layer.

    Attributes:
        num_experts: routed experts over all ranks.
        top_k: experts per token.
        ffn_hidden_size: width of one routed expert.
        score_function: logits to scores; ``sigmoid`` is DeepSeek-V3's.
        normalize_top_k: the chosen scores of a token are made to sum to one.
        num_groups: number of groups of experts; a token's experts come from its best
            ``top_k_groups`` groups (DeepSeek-V3). None for no groups.
        scaling_factor: factor of the routing weights, applied after normalising.
        input_jitter: in training the router sees its input times ``uniform(1 - j, 1 + j)``
            (Switch, arXiv 2101.03961).
        aux_loss_coef: coefficient of the load-balancing loss (Switch), which is 1.0 at perfect
            balance.
        z_loss_coef: coefficient of the mean squared logsumexp of the logits (ST-MoE,
            arXiv 2202.08906).
        expert_bias: balance by a bias on the selection (arXiv 2408.15664), moved by
            ``bias_update_rate`` at every ``update_expert_bias``.
        shared_ffn_hidden_size: width of an expert that sees every token; 0 for none.
        shared_gate: multiply the shared expert's output by a learned sigmoid gate (Qwen2-MoE).
        experts: kernels of the routed experts, see ``layers.expert_backends``.
        recompute: ``"experts"`` keeps of the routed experts nothing but their tokens for the
            backward, which runs the first of their two products again. All bits stay the same.
        precision: ``"fp8"`` computes the routed experts' products and all of their gradients in
            FP8, with a scale for each block of 128 numbers (128x128 of weights, and of what
            gradients of weights are made of), and sums in fp32, as DeepSeek-V3 trains.
            ``"fp8_powers"`` has scales that are all powers of two, as UE8M0 stores them.
            ``"fp8_rows"`` computes gradients of weights in the tokens' dtype. Weights keep theirs;
            their codes, one byte a number, are kept from the forward to the backward, unless
            ``recompute`` is set. 128 has to divide ``hidden_size`` and ``ffn_hidden_size``, and a
            GPU has to be a Hopper GPU. ``"weights"`` computes in the weights' dtype.
    """

    num_experts: int
    top_k: int
    ffn_hidden_size: int
    score_function: Literal["softmax", "sigmoid"] = "softmax"
    normalize_top_k: bool = True
    num_groups: int | None = None
    top_k_groups: int | None = None
    scaling_factor: float = 1.0
    input_jitter: float = 0.0
    aux_loss_coef: float = 0.0
    z_loss_coef: float = 0.0
    expert_bias: bool = False
    bias_update_rate: float = 1e-3
    shared_ffn_hidden_size: int = 0
    shared_gate: bool = False
    experts: str = "moe_graphs"
    recompute: Literal["none", "experts"] = "none"
    precision: Precision = "weights"

    def __post_init__(self) -> None:
        check_positive(self, "num_experts", "top_k", "ffn_hidden_size", "scaling_factor")
        _not_negative(self, "aux_loss_coef", "z_loss_coef", "shared_ffn_hidden_size")
        _not_negative(self, "bias_update_rate")
        if self.top_k > self.num_experts:
            raise ValueError(
                f"top_k ({self.top_k}) must not be above num_experts ({self.num_experts})"
            )
        if self.score_function not in ("softmax", "sigmoid"):
            raise ValueError(
                f"score_function {self.score_function!r} is unknown: choose softmax or sigmoid"
            )
        if not 0 <= self.input_jitter < 1:
            raise ValueError(f"input_jitter must be in [0, 1), got {self.input_jitter}")
        if self.shared_gate and not self.shared_ffn_hidden_size:
            raise ValueError("shared_gate=True needs a shared expert: set shared_ffn_hidden_size")
        EXPERTS.check(self.experts)
        if self.recompute not in ("none", "experts"):
            raise ValueError(f"recompute {self.recompute!r} is unknown: choose none or experts")
        if self.recompute == "experts" and not EXPERTS[self.experts].recomputes:
            raise ValueError(
                f"recompute='experts' needs experts={EXPERTS.words(lambda e: e.recomputes)!r}, got "
                f"experts={self.experts!r}"
            )
        check_precision(self.precision)
        if self.precision != "weights" and not EXPERTS[self.experts].computes_fp8:
            raise ValueError(
                f"precision={self.precision!r} needs "
                f"experts={EXPERTS.words(lambda e: e.computes_fp8)!r}, got experts={self.experts!r}"
            )
        self._check_groups()

    def _check_groups(self) -> None:
        if (self.num_groups is None) != (self.top_k_groups is None):
            raise ValueError(
                f"num_groups ({self.num_groups}) and top_k_groups ({self.top_k_groups}) go "
                f"together: set both or none"
            )
        if self.num_groups is None or self.top_k_groups is None:
            return
        check_positive(self, "num_groups", "top_k_groups")
        if self.num_experts % self.num_groups:
            raise ValueError(
                f"num_groups ({self.num_groups}) must divide num_experts ({self.num_experts})"
            )
        if self.top_k_groups > self.num_groups:
            raise ValueError(
                f"top_k_groups ({self.top_k_groups}) must not be above num_groups "
                f"({self.num_groups})"
            )
        eligible = self.top_k_groups * (self.num_experts // self.num_groups)
        if self.top_k > eligible:
            raise ValueError(
                f"top_k ({self.top_k}) must not be above the {eligible} experts of "
                f"top_k_groups={self.top_k_groups} groups: raise top_k_groups"
            )


@dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

    Attributes:
        query_rank: rank of the queries' low-rank projection; None for a single full projection.
        kv_rank: rank of the projection that keys and values have in common.
        plain_head_dim: size of the part of a query's and key's head that is not rotated.
        rope_head_dim: size of the rotated part; all heads share this part of the key.
        value_head_dim: size of a head's values and output.
        norm_eps: epsilon of the norms between low-rank projections.
    """

    query_rank: int | None
    kv_rank: int
    plain_head_dim: int
    rope_head_dim: int
    value_head_dim: int
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        check_positive(
            self, "kv_rank", "plain_head_dim", "rope_head_dim", "value_head_dim", "norm_eps"
        )
        if self.query_rank is not None:
            check_positive(self, "query_rank")
        if self.rope_head_dim % 2:
            raise ValueError(
                f"rope_head_dim must be even (rotary embedding), got {self.rope_head_dim}"
            )


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """A decoder-only language model, dense or with mixture-of-experts layers.

    Attributes:
        num_kv_heads: key and value heads, shared by groups of query heads; None for num_heads.
        head_dim: None for ``hidden_size / num_heads``.
        ffn_hidden_size: width of the dense layers; not needed where all layers are MoE.
        max_sequence_length: number of positions in the rotary tables.
        rope_scaling: scaling of the rotary frequencies, for long sequences.
        qk_norm: RMSNorm of queries and keys, per head (Qwen3) or over all heads (OLMoE).
        latent: multi-head latent attention in place of grouped-query attention. Latent attention
            has sizes and norms of its own: leave ``num_kv_heads``, ``head_dim`` and ``qk_norm`` at
            their defaults.
        moe: the MoE layers; None for a dense model.
        moe_layers: which layers are MoE: all, none, one flag per layer, or an interval n for
            every n-th (layers n-1, 2n-1, ...). Without ``moe`` all layers are dense.
        linear: kernels of the projections in attention, dense layers and shared experts, see
            ``layers.linear``. Router, norms, embedding and head always use ours or torch's.
        attention: a class of ``registry.ATTENTIONS``, or ``module:Class`` of your own; None for
            latent attention with ``latent``, else grouped-query attention.
        precision: ``"fp8"`` computes the products of attention's projections, dense layers and
            shared experts, and all their gradients, in blocks of FP8, as ``MoEConfig.precision``
            does those of routed experts. ``"fp8_powers"`` and ``"fp8_rows"`` are those of
            ``MoEConfig``. All leave out the first layer, whose errors go through all others, and
            the last one, whose errors go straight into the head; one precision per layer says
            otherwise. 128 has to divide the sizes of every such projection. Router, gates, norms,
            embedding and head stay as they are: they are small, or errors there reach every
            token. ``"weights"`` computes in the weights' dtype.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    vocab_size: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    ffn_hidden_size: int | None = None
    max_sequence_length: int = 4096
    rope_theta: float = 10_000.0
    rope_scaling: YarnScaling | Llama3Scaling | None = None
    norm_eps: float = 1e-5
    qk_norm: Literal["none", "head", "full"] = "none"
    latent: LatentAttentionConfig | None = None
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    moe: MoEConfig | None = None
    moe_layers: Literal["all", "none"] | tuple[bool, ...] | int = "all"
    linear: str = "torch"
    attention: str | None = None
    precision: Precision | tuple[Precision, ...] = "weights"

    def __post_init__(self) -> None:
        check_positive(self, "hidden_size", "num_layers", "num_heads", "vocab_size")
        check_positive(self, "max_sequence_length", "rope_theta", "norm_eps")
        if self.qk_norm not in ("none", "head", "full"):
            raise ValueError(f"qk_norm {self.qk_norm!r} is unknown: choose none, head or full")
        for name in ("attention_dropout", "hidden_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        PROJECTIONS.check(self.linear)
        ATTENTIONS.check(self.attention_kind)
        self._check_heads()
        self._check_layers()
        self._check_precision()

    @property
    def attention_kind(self) -> str:
        """The name of the attention's class."""
        return self.attention or ("grouped_query" if self.latent is None else "latent")

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_size(self) -> int:
        """Size of a head of queries and keys."""
        if self.latent is not None:
            return self.latent.plain_head_dim + self.latent.rope_head_dim
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def value_head_size(self) -> int:
        return self.head_size if self.latent is None else self.latent.value_head_dim

    @property
    def rope_size(self) -> int:
        """Size of the rotated part of a head."""
        return self.head_size if self.latent is None else self.latent.rope_head_dim

    def is_moe_layer(self, index: int) -> bool:
        if self.moe is None or self.moe_layers == "none":
            return False
        if isinstance(self.moe_layers, tuple):
            return self.moe_layers[index]
        return self.moe_layers == "all" or (index + 1) % self.moe_layers == 0

    def precision_of(self, index: int) -> Precision:
        """Precision of the projections of a layer."""
        if isinstance(self.precision, tuple):
            return self.precision[index]
        return self.precision if 0 < index < self.num_layers - 1 else "weights"

    def _check_precision(self) -> None:
        given = self.precision if isinstance(self.precision, tuple) else (self.precision,)
        for each in given:
            check_precision(each)
        if isinstance(self.precision, tuple) and len(given) != self.num_layers:
            raise ValueError(
                f"precision must have one word per layer ({self.num_layers}), got {self.precision}"
            )
        if set(given) == {"weights"}:
            return
        if self.linear != "torch":
            raise ValueError(
                f"precision={self.precision!r} needs linear='torch', got linear={self.linear!r}"
            )
        if {self.precision_of(i) for i in range(self.num_layers)} == {"weights"}:
            raise ValueError(
                f"precision={self.precision!r} leaves out the first and the last layer, and there "
                f"are {self.num_layers}: give one precision per layer"
            )

    def _check_heads(self) -> None:
        if self.latent is not None:
            given = (self.num_kv_heads, self.head_dim, self.qk_norm)
            if given != (None, None, "none"):
                raise ValueError(
                    f"num_kv_heads, head_dim and qk_norm are {given}, but latent attention has "
                    f"its own: leave them out"
                )
            return
        if self.head_dim is None and self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size ({self.hidden_size}) must be divisible by num_heads "
                f"({self.num_heads}), or set head_dim"
            )
        if self.head_size <= 0 or self.head_size % 2:
            raise ValueError(
                f"head_dim must be positive and even (rotary embedding), got {self.head_size}"
            )
        if self.kv_heads <= 0 or self.num_heads % self.kv_heads:
            raise ValueError(
                f"num_kv_heads ({self.num_kv_heads}) must divide num_heads ({self.num_heads})"
            )

    def _check_layers(self) -> None:
        given, accepted = self.moe_layers, "'all', 'none', one flag per layer, or an interval"
        if isinstance(given, tuple):
            if len(given) != self.num_layers or not all(isinstance(flag, bool) for flag in given):
                raise ValueError(
                    f"moe_layers must have one True or False per layer ({self.num_layers}), got "
                    f"{given}"
                )
        elif isinstance(given, bool) or not (
            given in ("all", "none") or (isinstance(given, int) and given > 0)
        ):
            raise ValueError(f"moe_layers must be {accepted}, got {given!r}")
        if self.moe is None and given not in ("all", "none"):
            raise ValueError(f"moe_layers is {given!r} but moe is None: set moe=MoEConfig(...)")
        dense = [i for i in range(self.num_layers) if not self.is_moe_layer(i)]
        if dense and not (self.ffn_hidden_size and self.ffn_hidden_size > 0):
            raise ValueError(
                f"ffn_hidden_size must be positive, got {self.ffn_hidden_size}: layers {dense} "
                f"are dense"
            )


def check_precision(precision: str) -> None:
    """Check the name of a precision.

    Raises:
        ValueError: it is unknown.
    """
    if precision not in get_args(Precision):
        *others, last = get_args(Precision)
        known = f"{', '.join(others)} or {last}"
        raise ValueError(f"precision {precision!r} is unknown: choose {known}")


def _not_negative(config: object, *names: str) -> None:
    for name in names:
        if not getattr(config, name) >= 0:
            raise ValueError(f"{name} must not be negative, got {getattr(config, name)}")
