"""Plans against what models hold, keep and send."""

from __future__ import annotations

import json
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from distributed import run_distributed
from moe_graphs.cli import build_app
from moe_graphs.layers import LanguageModel, MoEConfig, TransformerConfig, llama3_1_405b
from moe_graphs.layers.architectures import qwen3_235b_a22b
from moe_graphs.lm.settings import TrainSettings, build_optimizer
from moe_graphs.lm.trainer import cross_entropy
from moe_graphs.parallel import ParallelConfig, make_mesh, parallelize, vocabulary_group
from moe_graphs.planning.layout_plan import PlannedStep, plan_layout
from moe_graphs.planning.microbatch_memory import microbatch_memory

MOE = TransformerConfig(
    hidden_size=32,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    ffn_hidden_size=48,
    vocab_size=96,
    max_sequence_length=32,
    qk_norm="head",
    moe=MoEConfig(
        num_experts=8, top_k=2, ffn_hidden_size=24, aux_loss_coef=0.01, shared_ffn_hidden_size=16
    ),
    moe_layers=(False, True, True),
)
DENSE = replace(MOE, moe=None, moe_layers="none", qk_norm="none")
ON_CPU = PlannedStep(sequences=2, sequence_length=32, on_gpus=False)
LAYOUTS = [
    {"dp_shard": 2},
    {"dp_shard": 2, "ep": 2},
    {"dp_replicate": 2},
    {"cp": 2, "ep": 2},
    {"tp": 2},
]
SETTINGS = TrainSettings(steps=1, batch_size=2, sequence_length=32, learning_rate=1e-3)


def held(rank: int, world_size: int) -> tuple[list[dict[str, int]], int]:
    """After a step, by layout: what a real rank holds; and what it exchanged in the last one."""
    found, reduced = [], 0
    for degrees in LAYOUTS:
        config = ParallelConfig(**degrees)
        model = LanguageModel(MOE)
        parallelize(model, config, make_mesh(config, "cpu"))
        optimizer = build_optimizer(model, SETTINGS)
        tokens_BS = torch.randint(96, (2, 32 // config.cp))
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as exchanged:
            output = model(tokens_BS)
            loss = cross_entropy(output.logits_BSV, tokens_BS, vocabulary_group(model))
            (loss + output.aux_loss).backward()
        # By ring on two ranks as much arrives as there is.
        reduced = sum(call.args[0].nbytes for call in exchanged.call_args_list)
        optimizer.step()
        states = [each for state in optimizer.state.values() for each in state.values()]
        parameters = list(model.parameters())
        found.append(
            {
                "parameters": storages(parameters),
                "gradients": storages([p.grad for p in parameters]),
                "optimizer": storages(states),
                "buffers": storages(model.buffers()),
            }
        )
    return found, reduced


def storages(tensors) -> int:
    local = [getattr(tensor, "_local_tensor", tensor).untyped_storage() for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in local}.values())


def test_what_two_ranks_hold_is_what_was_planned():
    plans = [plan_layout(MOE, ParallelConfig(**degrees), ON_CPU).exact for degrees in LAYOUTS]
    (first, reduced), (second, _) = run_distributed(held, 2)
    assert first == plans
    assert second == plans  # everything is divisible by two
    assert plans[0]["parameters"] < plans[-1]["parameters"] < plans[2]["parameters"]
    wire = plan_layout(MOE, ParallelConfig(tp=2), ON_CPU).wire["tensor parallelism"]
    norms, losses = 3 * 2 * 8 * 4, 64 * 8  # of queries' and keys' norms; what cross entropy gathers
    assert wire == reduced - norms + losses


def test_shared_tensors_leave_less_of_everything():
    alone = plan_layout(MOE, ParallelConfig(), replace(ON_CPU, on_gpus=True))
    shared = plan_layout(MOE, ParallelConfig(tp=2), replace(ON_CPU, on_gpus=True))
    assert shared.estimated["logits"] == alone.estimated["logits"] // 2
    assert 0.5 < shared.estimated["activations"] / alone.estimated["activations"] < 0.95
    assert shared.padding == 0


@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_activations_are_those_of_a_real_forward(config):
    model = LanguageModel(config)
    owned = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in owned:
            kept[storage._cdata] = storage
        return tensor

    tokens_BS = torch.randint(96, (2, 32))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(tokens_BS)
        loss = torch.nn.functional.cross_entropy(output.logits_BSV.flatten(0, 1), tokens_BS.ravel())
        (loss + output.aux_loss).backward()
    real = sum(storage.nbytes() for storage in kept.values())
    plan = plan_layout(config, ParallelConfig(), ON_CPU)
    predicted = plan.estimated["activations"] + plan.estimated["logits"]
    assert predicted == pytest.approx(real, rel=0.05)
    # On real tensors as on fake ones, the temporaries of its backward, too.
    counted = microbatch_memory(model, tokens_BS)
    assert counted.activations == predicted
    assert counted.temporaries == plan.estimated["temporaries"] > counted.logits
    # Gradients are there when activations are gone.
    beside = sum(plan.exact.values()) - plan.exact["gradients"]
    assert counted.peak < plan.memory - beside < counted.peak + plan.exact["gradients"]


def test_activations_grow_with_what_is_sent_to_a_rank():
    layout = ParallelConfig(dp_shard=4, ep=4)
    on_gpus = replace(ON_CPU, on_gpus=True)
    by_exchange = plan_layout(MOE, layout, on_gpus)
    balanced = replace(on_gpus, dispatcher="all_gather", rows_factor=1.0)
    gathered = plan_layout(MOE, layout, balanced)
    worst = plan_layout(MOE, layout, replace(balanced, rows_factor=None))
    assert (by_exchange.expert_rows, gathered.expert_rows, worst.expert_rows) == (128, 128, 512)
    # A row's input, gate and up, what goes into the second product, and its output; in bf16.
    row = 2 * (32 + 2 * 24 + 24 + 32)
    # What is kept of more rows, in two layers, beside eight bytes of their order.
    more = worst.estimated["activations"] - gathered.estimated["activations"]
    assert more == pytest.approx(2 * (512 - 128) * (row + 8), abs=16)
    shared = plan_layout(MOE, layout, replace(balanced, dispatcher="symmetric"))
    assert shared.estimated["memory shared with peers"] == 4 * 64 * (32 * 2 + 2 * 12)


def test_dropout_of_a_gpu_keeps_a_byte():
    step, dropping = replace(ON_CPU, on_gpus=True), replace(MOE, hidden_dropout=0.1)
    without, masks = (
        plan_layout(config, ParallelConfig(), step).estimated["activations"]
        for config in (MOE, dropping)
    )
    assert masks - without == 3 * 2 * 64 * 32  # layers, dropouts in each, tokens, width


def test_bytes_on_the_wire():
    total = LanguageModel(MOE, device="meta").num_parameters() * 4
    head = (96 * 32 + 32) * 4  # stays gathered, with its norm
    step = replace(ON_CPU, microbatches=3)
    once = plan_layout(MOE, ParallelConfig(dp_shard=2, reshard_after_forward=False), step).wire
    assert once["FSDP2 all-gather"] == once["FSDP2 reduce-scatter"] == 3 * total // 2
    twice = plan_layout(MOE, ParallelConfig(dp_shard=2), step).wire
    assert twice["FSDP2 all-gather"] == 3 * (2 * total - head) // 2
    mixed = plan_layout(MOE, ParallelConfig(dp_shard=2), replace(step, mixed_precision=True)).wire
    assert mixed["FSDP2 all-gather"] * 2 == twice["FSDP2 all-gather"]
    assert mixed["FSDP2 reduce-scatter"] == twice["FSDP2 reduce-scatter"]
    hybrid = plan_layout(MOE, ParallelConfig(dp_replicate=4, dp_shard=2), step).wire
    assert hybrid["HSDP all-reduce"] == 3 * 2 * 3 * (total // 2) // 4
    assert hybrid["FSDP2 all-gather"] == twice["FSDP2 all-gather"]


def test_bytes_of_the_dispatchers():
    layout = ParallelConfig(dp_shard=4, ep=4)
    row, layers = 32 * 4, 2
    wire = plan_layout(MOE, layout, ON_CPU).wire
    assert wire["expert combine"] == layers * 2 * 128 * row * 3 // 4
    assert wire["expert dispatch"] == wire["expert combine"] + layers * 8 * 8 * 3 // 4
    wire = plan_layout(MOE, layout, replace(ON_CPU, dispatcher="all_gather")).wire
    assert wire["expert combine"] == layers * 2 * 3 * 64 * row
    assert wire["expert dispatch"] == wire["expert combine"] + layers * 3 * 128 * (8 + 4 + 4)
    sent = plan_layout(MOE, layout, replace(ON_CPU, dispatcher="symmetric")).wire
    # Two of eight experts, none of the two of a rank: 6 * 5 of 8 * 7 times.
    assert sent["expert combine"] == round(wire["expert combine"] * (1 - 30 / 56))


def test_ranks_that_share_sequences():
    step = replace(ON_CPU, microbatches=3)
    shared = plan_layout(DENSE, ParallelConfig(cp=4), step)
    alone = plan_layout(DENSE, ParallelConfig(dp_shard=4), step)
    assert shared.exact == alone.exact
    # Four query heads, a copy of two kv heads for two ranks each, and the way back; of 16 tokens.
    numbers = 16 * 8 * (4 + 4 + 4 + 4)
    assert shared.wire.pop("context exchange") == 3 * 3 * 2 * numbers * 4 * 3 // 4
    assert shared.wire == alone.wire
    long = replace(step, sequence_length=8)
    small = plan_layout(DENSE, ParallelConfig(dp_shard=4), long).estimated
    # As many tokens on a rank, and what was exchanged is kept beside what was sent.
    assert shared.estimated["logits"] == small["logits"]
    assert small["activations"] < shared.estimated["activations"] < alone.estimated["activations"]
    with pytest.raises(ValueError, match=r"3 ranks \(cp\) cannot share 32 tokens"):
        plan_layout(DENSE, ParallelConfig(cp=3), step)


def test_experts_that_their_ranks_do_not_divide_are_padded():
    plan = plan_layout(MOE, ParallelConfig(dp_shard=16, ep=2), ON_CPU)
    assert plan.padding > 0.35  # four experts on eight ranks
    assert plan_layout(MOE, ParallelConfig(dp_shard=2, ep=2), ON_CPU).padding == 0


def test_published_sizes():
    sizes = {config: LanguageModel(config(), device="meta") for config in (qwen3_235b_a22b,)}
    assert sizes[qwen3_235b_a22b].num_parameters() == 235_093_634_560
    assert LanguageModel(llama3_1_405b(), device="meta").num_parameters() == 405_853_388_800


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpus", 4, "--tp", 2], "tp: 2 ranks cannot share num_heads 3"),
        (["--gpus", 4, "--pp", 2], "pp: a plan counts all layers"),
        (["--gpus", 4, "--tp", 2, "--cp", 2], "cp: a plan does not count heads"),
        (["--gpus", 4, "--dp-shard", 3], "dp_shard (3) = 3, and there are 4 ranks"),
        (["--gpus", 3, "--ep", 3], "batch_size: 8 sequences in 1 microbatch(es) cannot be shared"),
        (["--gpus", 16, "--ep", 16, "--batch-size", 16], "num_experts (8) must be divisible"),
        (["--gpus", 2, "--ep", 2, "--dispatcher", "local"], "'local' sends nothing"),
        (["--gpus", 2, "--ep", 2, "--rows-factor", 2], "take all_gather or symmetric"),
        (["--gpus", 2, "--dispatcher", "all_gather"], "which ep=1 does not use"),
        (["--gpus", 2, "--sequence-length", 9999], "more than the 256 positions"),
        (["--gpus", 2, "--model", "nobody"], "model: 'nobody' is no directory"),
    ],
)
def test_what_is_refused(options, message):
    result = CliRunner().invoke(build_app(), ["plan", "--model", "tiny", *map(str, options)])
    assert result.exit_code == 1
    assert message in result.stderr


def test_the_command_and_a_directory(tmp_path):
    values = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "hidden_act": "silu", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(values))
    arguments = ["plan", "--model", str(tmp_path), "--gpus", "512", "--dp-replicate", "8", "--json"]
    result = CliRunner().invoke(build_app(), arguments)
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["tokens"] == 512 * 64
    assert document["wire"]["HSDP all-reduce"] > 0
    assert "most at once" in result.stderr
