r"""Fine-tuning of Qwen3-MoE models on one GPU: tokens per second and memory.

    python benchmarks/fine_tuning.py --out benchmarks/results/fine_tuning_h200.jsonl
    python benchmarks/fine_tuning.py --rows attention_16k,launch_bound
    python benchmarks/fine_tuning.py --rows attention_16k,experts_16k --layers 4 \
        --contenders accelerate_model

Rows with LoRA: transformers with PEFT (`grouped_mm`), beside the same model with
`accelerate_model`, eagerly and with graphs of layers. All 48 layers of Qwen3-30B-A3B at 16,384
tokens with gradient checkpointing, adapters on attention or on the experts as well; at 2,048 tokens
with and without checkpointing; and 12 small layers, where launches take the time. LoRA has rank 16.

Rows with `nf4`: frozen experts in NF4 (`quantize_experts`), or with scales in 8 bits as well,
beside bf16 ones, with gradient checkpointing, adapters on attention or on the experts as well. Lean
states: adapters in bf16, rounded stochastically by our AdamW, whose states have 8 bits. Peaks of
memory are those of training: the model is made in bf16 on the GPU and packed before the count
begins. Rows with `gpt_oss`: the shapes of gpt-oss-20b, with experts in MXFP4.

Before a row with LoRA and checkpointing runs without graphs, `predicted_memory.py` says how much
memory it will take, by part; the line has both numbers.

Rows with all weights: `accelerate_model` with graphs and checkpointing, our AdamW with 8-bit states
and stochastic rounding, and updates within the backward; all 48 layers (124 GiB),
and 4 layers beside the same with fp32 states.

Timed graphs have no audits (`--audits` switches them on), because a short run has more of them than
a long one.

Weights are random and made on the GPU. Tokens of such a model are alike behind the first layer, and
more than half of the experts get none, where a trained model uses all of them. So routers read
columns of the embeddings that no layer writes, which spreads tokens about evenly
(`--routing untrained` leaves that out); `load` is the fullest expert's number of tokens over the
mean, in the layer where that is most. Lines without `routing` are of untrained models.

Each contender runs in a process of its own. A contender fails if its losses differ from those of
the first contender of its row by more than `TOLERANCE`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from environment import stamp
from moe_graphs import GraphConfig
from moe_graphs.lm.metrics import peak_flops
from own_process import in_own_process, leave

WARMUP, MEASURED = 5, 5
# Adapters write the columns that routers read, so choices would not stay even at a usual rate.
RATE = {"even": 1e-7, "untrained": 1e-4}
READ = 64  # columns of the embeddings that routers read, where tokens spread evenly
TOLERANCE = 2e-2  # of the loss: kernels round otherwise
AS_IT_COMES, ACCELERATED, GRAPHS = "transformers", "accelerate_model", "accelerate_model, graphs"
NF4 = "accelerate_model, experts in NF4"
NF4_GRAPHS = "accelerate_model, graphs, experts in NF4"
DOUBLE_NF4 = "accelerate_model, experts in double NF4"
LEAN = "accelerate_model, experts in double NF4, lean states"
MXFP4 = "accelerate_model, experts in MXFP4"
MXFP4_GRAPHS = "accelerate_model, graphs, experts in MXFP4"
PACKED = {NF4: "nf4", NF4_GRAPHS: "nf4", MXFP4: "mxfp4", MXFP4_GRAPHS: "mxfp4"}
PACKED |= {DOUBLE_NF4: "nf4_double", LEAN: "nf4_double"}
PREDICTED = (ACCELERATED, NF4, DOUBLE_NF4, LEAN, MXFP4)
WITHOUT_GRAPHS = (AS_IT_COMES, *PREDICTED)
FP32_STATES = (
    "accelerate_model, graphs, fp32 states"  # of AdamW; other states of all weights: 8 bit
)
QWEN3_30B_A3B = dict(
    model_type="qwen3_moe", hidden_size=2048, num_hidden_layers=48, num_attention_heads=32,
    num_key_value_heads=4, head_dim=128, intermediate_size=6144, moe_intermediate_size=768,
    num_experts=128, num_experts_per_tok=8, vocab_size=151_936, max_position_embeddings=40_960,
)  # fmt: skip
LAUNCH_BOUND = QWEN3_30B_A3B | dict(
    hidden_size=1024, num_hidden_layers=12, num_attention_heads=16, num_key_value_heads=2,
    head_dim=128, moe_intermediate_size=512, num_experts=32, num_experts_per_tok=4,
    vocab_size=32_768,
)  # fmt: skip
SMALL = QWEN3_30B_A3B | dict(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    intermediate_size=64, moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2,
    vocab_size=128,
)  # fmt: skip
GPT_OSS_20B = dict(
    model_type="gpt_oss", num_hidden_layers=24, num_local_experts=32, num_experts_per_tok=4,
    hidden_size=2880, intermediate_size=2880, num_attention_heads=64, num_key_value_heads=8,
    head_dim=64, sliding_window=128, vocab_size=201_088,
)  # fmt: skip
SMALL_GPT_OSS = GPT_OSS_20B | dict(
    num_hidden_layers=2, num_local_experts=8, num_experts_per_tok=2, hidden_size=64,
    intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=128,
)  # fmt: skip
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ON_ATTENTION, ON_EXPERTS, ALL_WEIGHTS = (
    "adapters on attention",
    "adapters on experts, too",
    "all weights",
)
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


@dataclass(frozen=True)
class Size:
    """A model and a batch.

    Attributes:
        runs: contenders, and whether each has gradient checkpointing. The first one is what the
            others are compared with.
        trained: adapters on attention, adapters on the experts as well, or all weights.
        attention: transformers' implementation; gpt-oss has no `sdpa`, because of its sinks.
    """

    model: Mapping[str, Any]
    sequences: int
    sequence: int
    runs: Sequence[tuple[str, bool]]
    trained: str = ON_ATTENTION
    attention: str = "sdpa"


_NF4 = ((ACCELERATED, True), (NF4, True), (DOUBLE_NF4, True), (NF4_GRAPHS, True))
_CHECKPOINTED = ((AS_IT_COMES, True), (ACCELERATED, True), (GRAPHS, True))
SIZES = {
    "attention_16k": Size(QWEN3_30B_A3B, 4, 4096, _CHECKPOINTED),
    "experts_16k": Size(QWEN3_30B_A3B, 4, 4096, _CHECKPOINTED, ON_EXPERTS),
    "nf4_attention_16k": Size(QWEN3_30B_A3B, 4, 4096, _NF4),
    "nf4_experts_16k": Size(QWEN3_30B_A3B, 4, 4096, (*_NF4, (LEAN, True)), ON_EXPERTS),
    "attention_2k": Size(
        QWEN3_30B_A3B,
        1,
        2048,
        ((AS_IT_COMES, False), (ACCELERATED, False), (GRAPHS, False), *_CHECKPOINTED),
    ),
    "gpt_oss_attention_16k": Size(
        GPT_OSS_20B, 4, 4096, ((MXFP4, True),), attention="flex_attention"
    ),
    "gpt_oss_experts_16k": Size(
        GPT_OSS_20B, 4, 4096, ((MXFP4, True),), ON_EXPERTS, attention="flex_attention"
    ),
    "gpt_oss_attention_2k": Size(
        GPT_OSS_20B, 1, 2048, ((MXFP4, True), (MXFP4_GRAPHS, True)), attention="flex_attention"
    ),
    "launch_bound": Size(LAUNCH_BOUND, 2, 1024, _CHECKPOINTED),
    "all_weights": Size(QWEN3_30B_A3B, 2, 2048, ((GRAPHS, True),), ALL_WEIGHTS),
    "all_weights_4_layers": Size(
        QWEN3_30B_A3B | dict(num_hidden_layers=4),
        2,
        2048,
        ((FP32_STATES, True), (GRAPHS, True)),
        ALL_WEIGHTS,
    ),
}


@dataclass(frozen=True)
class Case:
    """One contender at one size.

    Attributes:
        smoke: a model that trains on a CPU in seconds.
        layers: how many layers the model has in place of the row's; 0 stands for the row's.
        routing: "even", or "untrained", which is how the random weights have it.
    """

    row: str
    contender: str
    checkpointing: bool
    smoke: bool = False
    measured: int = MEASURED
    audits: bool = False
    layers: int = 0
    routing: str = "even"

    @property
    def size(self) -> Size:
        size = SIZES[self.row]
        if self.smoke and size.model["model_type"] == "gpt_oss":
            # A CPU has no sinks with flex_attention.
            size = replace(size, model=SMALL_GPT_OSS, sequence=16, attention="eager")
        elif self.smoke:
            size = replace(size, model=SMALL, sequence=16)
        if not self.layers:
            return size
        return replace(size, model={**size.model, "num_hidden_layers": self.layers})

    @property
    def tokens(self) -> int:
        return self.size.sequences * self.size.sequence


def cases(options: argparse.Namespace) -> Iterator[Case]:
    given = options.smoke, options.measured, options.audits, options.layers, options.routing
    for row in options.rows:
        for contender, checkpointing in SIZES[row].runs:
            if options.contenders is None or contender in options.contenders:
                yield Case(row, contender, checkpointing, *given)


# ---- one contender, in a process of its own


def model_of(case: Case, device: torch.device, sizes: Mapping[str, Any] | None = None) -> nn.Module:
    """The model of a case, or the same with other sizes."""
    return prepared(bare_model(case, device, sizes), case, device)


def bare_model(
    case: Case, device: torch.device, sizes: Mapping[str, Any] | None = None
) -> nn.Module:
    """The model of transformers, with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    size = case.size
    config = AutoConfig.for_model(**(sizes or size.model), norm_topk_prob=True)
    config.dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    torch.set_default_dtype(config.dtype)
    chosen = {"attn_implementation": size.attention, "experts_implementation": "grouped_mm"}
    with device:
        model = AutoModelForCausalLM.from_config(config, **chosen)
    torch.set_default_dtype(torch.float32)
    if case.routing == "even":
        route_evenly(model)
    return model


def prepared(model: nn.Module, case: Case, device: torch.device) -> nn.Module:
    """The model with adapters, experts in few bits and checkpointing, as the case wants them."""
    from peft import LoraConfig, get_peft_model

    size = case.size
    if size.trained != ALL_WEIGHTS:
        lora = LoraConfig(
            r=16,
            lora_alpha=32,
            task_type="CAUSAL_LM",
            target_modules=list(ATTENTION),
            target_parameters=list(EXPERTS) if size.trained == ON_EXPERTS else None,
        )
        model = get_peft_model(model, lora, autocast_adapter_dtype=case.contender != LEAN)
    if case.contender in PACKED:
        _pack_experts(model, PACKED[case.contender], device)
    model.train()
    if case.checkpointing:  # as Trainer and TRL set it
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


@torch.no_grad()
def route_evenly(model: Any) -> None:
    """Let routers read columns of the embeddings that attention and experts do not write."""
    for layer in model.model.layers:
        router, down = router_of(layer), layer.mlp.experts.down_proj
        read = min(READ, router.weight.shape[1])
        router.weight[:, :read] *= (router.weight.shape[1] / read) ** 0.5
        router.weight[:, read:] = 0
        is_transposed = down.shape[2] == router.weight.shape[1]  # [E, F, D]
        (down if is_transposed else down.mT)[..., :read] = 0
        layer.self_attn.o_proj.weight[:read] = 0
        biased = layer.self_attn.o_proj.bias, getattr(layer.mlp.experts, "down_proj_bias", None)
        for bias in biased:
            if bias is not None:
                bias[..., :read] = 0
        if getattr(router, "bias", None) is not None:  # behind some layers it would decide alone
            router.bias.zero_()


def router_of(layer: Any) -> Any:
    return next(getattr(layer.mlp, n) for n in ("gate", "router") if hasattr(layer.mlp, n))


@torch.no_grad()
def load_of(model: Any, tokens_BS: torch.Tensor) -> float:
    """The fullest expert's tokens over the mean, in the layer where that is most."""
    found: list[float] = []

    def note(router: Any, given: Any, output: Any) -> None:
        counts_E = torch.bincount(output[-1].flatten(), minlength=len(router.weight))
        found.append(float(counts_E.max() / counts_E.float().mean()))

    hooks = [router_of(layer).register_forward_hook(note) for layer in model.model.layers]
    model.model(input_ids=tokens_BS, use_cache=False)
    for hook in hooks:
        hook.remove()
    return max(found)


def _pack_experts(model: nn.Module, format: str, device: torch.device) -> None:
    from moe_graphs.integrations.transformers import quantize_experts

    print(quantize_experts(model, format))
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def graphs_of(case: Case, model: nn.Module) -> GraphConfig | bool:
    if case.contender in WITHOUT_GRAPHS:
        return False
    if case.audits:
        return True
    (layers,) = (name for name, _ in model.named_modules() if name.endswith("model.layers"))
    return GraphConfig(f"{layers}.*", audit_every=None)


def optimizer_of(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    """Torch's AdamW for adapters, or ours; for all weights ours, which updates in the backward."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    from moe_graphs.optim import AdamW

    if case.contender == LEAN:
        return AdamW(
            trained, lr=RATE[case.routing], state_dtype=torch.uint8, stochastic_rounding=True
        )
    if case.size.trained != ALL_WEIGHTS:
        return torch.optim.AdamW(trained, lr=RATE[case.routing], fused=True)
    from moe_graphs.training.update_in_backward import UpdateInBackward

    state = torch.float32 if case.contender == FP32_STATES else torch.uint8
    optimizer = AdamW(trained, lr=1e-5, state_dtype=state, stochastic_rounding=True)
    UpdateInBackward(optimizer, max_norm=1.0)
    return optimizer


def flops_per_token(model: nn.Module, sequence: int, trained: str) -> float:
    """FLOPs per token of the forward, of gradients between layers, and of all weights' if trained.

    Frozen weights get no gradients. Recomputations of checkpointing do not count.
    """
    config = model.config
    dense = experts = 0
    for name, parameter in model.named_parameters():
        if name.endswith(("_absmax", "_offset", "_scales")):  # of a packed weight
            continue
        if ".experts." in name:
            experts += parameter.numel() * (2 if name.endswith(("_codes", "_blocks")) else 1)
        elif parameter.dim() == 2 and "embed_tokens" not in name:
            dense += parameter.numel()
    active = dense + experts * config.num_experts_per_tok / config.num_experts
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    window = 2 * (getattr(config, "sliding_window", None) or sequence)  # causal, so half as many
    seen = (min(window, sequence) if kind.startswith("sliding") else sequence for kind in kinds)
    attention = config.num_attention_heads * config.head_dim * sum(seen)
    products = 3 if trained == ALL_WEIGHTS else 2
    return 2 * products * active + 3 * 2 * attention  # causal: 2 per pair, backward 4


def measure(case: Case) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, accelerated = bare_model(case, device), None
    shape = (1, min(case.size.sequence, 2048))
    load = load_of(model, torch.randint(model.config.vocab_size, shape, device=device))
    model = prepared(model, case, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    if case.contender != AS_IT_COMES:
        from moe_graphs.integrations.transformers import accelerate_model

        accelerated = accelerate_model(model, graphs=graphs_of(case, model))
    optimizer = optimizer_of(case, model)
    generator = torch.Generator().manual_seed(3)
    losses, seconds = [], []
    for _ in range(WARMUP + case.measured):
        shape = (case.size.sequences, case.size.sequence)
        tokens = torch.randint(model.config.vocab_size, shape, generator=generator).to(device)
        _wait(device)
        begin = time.perf_counter()
        with contextlib.nullcontext() if accelerated is None else accelerated.step():
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        _wait(device)
        seconds.append(time.perf_counter() - begin)
        losses.append(loss.item())
    step = statistics.median(seconds[WARMUP:])
    per_second = case.tokens / step
    flops, peak = (
        per_second * flops_per_token(model, case.size.sequence, case.size.trained),
        peak_flops(device),
    )
    found = {
        "step_ms": 1e3 * step,
        "tokens_per_second": per_second,
        "model_tflops": flops / 1e12,
        "mfu": None if peak is None else flops / peak,
        "losses": losses,
        "load": load,
    }
    if device.type == "cuda":
        found["reserved_bytes"] = torch.cuda.max_memory_reserved()
        found["max_allocated_bytes"] = torch.cuda.max_memory_allocated()
    if case.contender not in WITHOUT_GRAPHS:
        assert accelerated is not None
        report = accelerated.graphs.report()
        found["graphs"] = {"matched": report.matched, "eager_calls": report.eager_calls,
                           "audit_seconds": report.audit_seconds,
                           "refused": {each.name: each.refused for each in report.scopes
                                       if each.refused}}  # fmt: skip
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


# ---- all of them


def compared(found: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """Compare the losses with those of the first contender of the row, if both have some."""
    if found["error"] or reference["error"]:
        return found
    apart = max(abs(a - b) / b for a, b in zip(found["losses"], reference["losses"], strict=True))
    error = f"losses are {apart:.3f} of their size apart" if apart > TOLERANCE else None
    speedup = reference["step_ms"] / found["step_ms"]
    return found | {"error": error, "loss_difference": apart, "speedup": speedup}


def every_contender() -> set[str]:
    return {contender for size in SIZES.values() for contender, _ in size.runs}


def is_lora(size: Size) -> bool:
    return size.trained != ALL_WEIGHTS


def prediction(case: Case) -> dict[str, int] | None:
    """Bytes by part, printed before the run; None where nobody predicts them."""
    if case.contender not in PREDICTED or not is_lora(case.size) or not case.checkpointing:
        return None
    from predicted_memory import in_gib, predicted

    found = predicted(case)
    print(f"predicted GiB: {in_gib(found)}", flush=True)
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="a file of JSON lines to append to")
    parser.add_argument("--commit", help="the commit to stamp, where .git does not say it")
    parser.add_argument(
        "--rows",
        type=lambda given: given.split(","),
        default=list(SIZES),
        help=f"what to run, by commas: {', '.join(SIZES)}",
    )
    parser.add_argument("--layers", type=int, default=0, help="in place of the model's")
    parser.add_argument(
        "--contenders",
        type=lambda given: given.split(";"),
        help=f"which to run, by semicolons: {'; '.join(sorted(every_contender()))}",
    )
    parser.add_argument("--measured", type=int, default=MEASURED, help="steps that are timed")
    parser.add_argument(
        "--routing", choices=("even", "untrained"), default="even", help="of tokens over experts"
    )
    parser.add_argument("--audits", action="store_true", help="time graphs with their audits")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, also on a CPU")
    parser.add_argument("--timeout", type=float, default=180, help="seconds for a contender")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        print(json.dumps(measure(Case(**json.loads(options.one)))))
        return 0
    unknown = set(options.rows) - SIZES.keys()
    if unknown:
        parser.error(f"--rows: {', '.join(sorted(unknown))}: known are {', '.join(SIZES)}")
    unknown = set(options.contenders or ()) - every_contender()
    if unknown:
        known = "; ".join(sorted(every_contender()))
        parser.error(f"--contenders: {'; '.join(sorted(unknown))}: known are {known}")
    environment, references, failed = stamp(options.commit), {}, 0
    for case in cases(options):
        foreseen = prediction(case)
        found = in_own_process(__file__, [json.dumps(asdict(case))], options.timeout)
        reference = references.setdefault(case.row, found)
        line = {"benchmark": "fine_tuning", "tokens": case.tokens, **asdict(case)}
        line |= compared(found, reference) | {"environment": environment}
        line |= {"predicted_bytes": foreseen}
        failed += line["error"] is not None
        leave(line, SHOWN, options.out)
    return int(failed > 0)


SHOWN = (
    "row",
    "contender",
    "checkpointing",
    "tokens_per_second",
    "speedup",
    "mfu",
    "max_allocated_bytes",
    "load",
    "predicted_bytes",
    "error",
)

if __name__ == "__main__":
    sys.exit(main())
