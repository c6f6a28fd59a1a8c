"""Plans against the memory and the traffic of real models."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from moe_graphs.cli import build_app
from moe_graphs.layers import LanguageModel, TransformerConfig, llama3_1_405b
from moe_graphs.layers.architectures import qwen3_235b_a22b
from moe_graphs.parallel import ParallelConfig
from moe_graphs.planning.layout_plan import RankPlan, plan_layout
from moe_graphs.planning.microbatch_memory import microbatch_memory
from moe_graphs.planning.plan_table import plan_table
from moe_graphs.planning.planned_step import PlannedStep
from planned_layouts import LLAMA_CONFIG, MOE

DENSE = replace(MOE, moe=None, moe_layers="none", qk_norm="none")
ON_CPU = PlannedStep(sequences=2, sequence_length=32, on_gpus=False)


def planned(config: TransformerConfig, layout: ParallelConfig, step: PlannedStep) -> RankPlan:
    return plan_layout(config, layout, step).most


def test_shared_tensors_leave_less_of_everything():
    alone = planned(MOE, ParallelConfig(), replace(ON_CPU, on_gpus=True))
    shared = planned(MOE, ParallelConfig(tp=2), replace(ON_CPU, on_gpus=True))
    assert 0.5 < shared.estimated["activations"] / alone.estimated["activations"] < 0.95
    assert shared.padding == 0


@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_real_tensors_take_what_fake_ones_take(config):
    plan = planned(config, ParallelConfig(), ON_CPU)
    counted = microbatch_memory(LanguageModel(config), torch.randint(96, (2, 32)))
    assert counted.activations == plan.estimated["activations"]
    assert counted.temporaries == plan.estimated["temporaries"] > 0
    # Gradients are complete only when the activations have been freed.
    beside = sum(plan.exact.values()) - plan.exact["gradients"]
    assert counted.peak <= plan.memory - beside < counted.peak + plan.exact["gradients"]


@pytest.mark.parametrize(
    ("config", "kind"), [(DENSE, "dense layer"), (replace(MOE, moe_layers="all"), "MoE layer")]
)
def test_activations_of_a_layer_are_what_one_more_layer_adds(config, kind):
    fewer, more = (
        planned(replace(config, num_layers=count), ParallelConfig(), ON_CPU) for count in (2, 3)
    )
    added = more.estimated["activations"] - fewer.estimated["activations"]
    assert more.per_layer[kind] == added > 0
    assert set(more.per_layer) <= {"embedding", "head", kind}
    table = Console(record=True, width=120)
    table.print(plan_table(plan_layout(config, ParallelConfig(), ON_CPU)))
    assert f"kept by a {kind}" in table.export_text()


def test_activations_grow_with_what_is_sent_to_a_rank():
    layout = ParallelConfig(dp_shard=4, ep=4)
    on_gpus = replace(ON_CPU, on_gpus=True)
    balanced = replace(on_gpus, dispatcher="all_gather", rows_factor=1.0)
    unbounded = replace(balanced, rows_factor=None)
    rows = [plan_layout(MOE, layout, each).expert_rows for each in (on_gpus, balanced, unbounded)]
    assert rows == [128, 128, 512]
    gathered, worst = planned(MOE, layout, balanced), planned(MOE, layout, unbounded)
    # A row has gate and up, in bf16.
    row = 2 * 2 * 24
    # More rows take this memory in two layers, and four bytes each for their order. The input is
    # kept as 128 rows where they are fewer than the 256 tokens of all ranks, else as tokens.
    more = worst.estimated["activations"] - gathered.estimated["activations"]
    tokens = (256 - 128) * 32 * 2
    assert more == pytest.approx(2 * ((512 - 128) * (row + 4) + tokens), abs=16)
    shared = planned(MOE, layout, replace(balanced, dispatcher="symmetric"))
    assert shared.estimated["memory shared with peers"] == 4 * 64 * (32 * 2 + 2 * 12)


def test_dropout_of_a_gpu_keeps_a_byte():
    step, dropping = replace(ON_CPU, on_gpus=True), replace(MOE, hidden_dropout=0.1)
    without, masks = (
        planned(config, ParallelConfig(), step).estimated["activations"]
        for config in (MOE, dropping)
    )
    assert masks - without == 3 * 2 * 64 * 32  # layers, dropouts per layer, tokens, width


def test_bytes_on_the_wire():
    total = LanguageModel(MOE, device="meta").num_parameters() * 4
    head = (96 * 32 + 32) * 4  # norm and head stay gathered
    step = replace(ON_CPU, microbatches=3)
    once = planned(MOE, ParallelConfig(dp_shard=2, reshard_after_forward=False), step).wire
    assert once["FSDP2 all-gather"] == once["FSDP2 reduce-scatter"] == 3 * total // 2
    twice = planned(MOE, ParallelConfig(dp_shard=2), step).wire
    assert twice["FSDP2 all-gather"] == 3 * (2 * total - head) // 2
    mixed = planned(MOE, ParallelConfig(dp_shard=2), replace(step, mixed_precision=True)).wire
    assert mixed["FSDP2 all-gather"] * 2 == twice["FSDP2 all-gather"]
    assert mixed["FSDP2 reduce-scatter"] == twice["FSDP2 reduce-scatter"]
    hybrid = planned(MOE, ParallelConfig(dp_replicate=4, dp_shard=2), step).wire
    assert hybrid["HSDP all-reduce"] == 3 * 2 * 3 * (total // 2) // 4
    assert hybrid["FSDP2 all-gather"] == twice["FSDP2 all-gather"]


def test_bytes_of_the_dispatchers():
    layout = ParallelConfig(dp_shard=4, ep=4)
    row, layers = 32 * 4, 2
    wire = planned(MOE, layout, ON_CPU).wire
    assert wire["expert combine"] == layers * 2 * 128 * row * 3 // 4
    assert wire["expert dispatch"] == wire["expert combine"] + layers * 8 * 8 * 3 // 4
    wire = planned(MOE, layout, replace(ON_CPU, dispatcher="all_gather")).wire
    assert wire["expert combine"] == layers * 2 * 3 * 64 * row
    assert wire["expert dispatch"] == wire["expert combine"] + layers * 3 * 128 * (8 + 4 + 4)
    sent = planned(MOE, layout, replace(ON_CPU, dispatcher="symmetric")).wire
    # A token chooses two of eight experts; with probability (6 * 5) / (8 * 7) none of a rank's two.
    assert sent["expert combine"] == round(wire["expert combine"] * (1 - 30 / 56))


def test_ranks_that_share_sequences():
    step = replace(ON_CPU, microbatches=3)
    shared = planned(DENSE, ParallelConfig(cp=4), step)
    alone = planned(DENSE, ParallelConfig(dp_shard=4), step)
    assert shared.exact == alone.exact
    # 16 tokens exchange four query heads, two kv heads copied for two ranks each, and the results.
    numbers = 16 * 8 * (4 + 4 + 4 + 4)
    assert shared.wire.pop("context exchange") == 3 * 3 * 2 * numbers * 4 * 3 // 4
    assert shared.wire == alone.wire
    long = replace(step, sequence_length=8)
    small = planned(DENSE, ParallelConfig(dp_shard=4), long).estimated
    # A rank has as many tokens, and keeps the received tensors besides the sent ones.
    assert small["activations"] < shared.estimated["activations"] < alone.estimated["activations"]
    with pytest.raises(ValueError, match="cp: 3 ranks cannot share sequences of 32 tokens"):
        planned(DENSE, ParallelConfig(cp=3), step)


def test_experts_that_their_ranks_do_not_divide_are_padded():
    plan = planned(MOE, ParallelConfig(dp_shard=16, ep=2), ON_CPU)
    assert plan.padding > 0.35  # four experts on eight ranks
    assert planned(MOE, ParallelConfig(dp_shard=2, ep=2), ON_CPU).padding == 0


def test_published_sizes():
    sizes = {config: LanguageModel(config(), device="meta") for config in (qwen3_235b_a22b,)}
    assert sizes[qwen3_235b_a22b].num_parameters() == 235_093_634_560
    assert LanguageModel(llama3_1_405b(), device="meta").num_parameters() == 405_853_388_800


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpus", 4, "--tp", 2], "tp: 2 ranks cannot share num_heads 3"),
        (["--gpus", 2, "--schedule", "gpipe"], "of a pipeline: add --pp"),
        (["--gpus", 4, "--pp", 4], "3 layer(s) cannot be divided into 4 stages"),
        (["--gpus", 2, "--pp", 2], "at least as many microbatches, got 1"),
        (["--gpus", 2, "--pp", 2, "--microbatches", 2, "--mixed-precision"], "it is FSDP2's"),
        (["--gpus", 4, "--dp-shard", 3], "dp_shard (3) = 3, and there are 4 ranks"),
        (
            ["--gpus", 3, "--ep", 3],
            "--batch-size: 8 sequences in 1 microbatch(es) cannot be",
        ),
        (["--gpus", 16, "--ep", 16, "--batch-size", 16], "--ep: 16 ranks cannot share 8 experts"),
        (["--gpus", 2, "--ep", 2, "--dispatcher", "local"], "'local' sends nothing"),
        (["--gpus", 2, "--ep", 2, "--rows-factor", 2], "take symmetric or all_gather"),
        (["--gpus", 2, "--pp", 2, "--no-reshard-after-forward"], "of FSDP2, which shards nothing"),
        (["--gpus", 1, "--layers-per-group", 2], "of FSDP2, which shards nothing"),
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
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    arguments = ["plan", "--model", str(tmp_path), "--gpus", "512", "--dp-replicate", "8", "--json"]
    result = CliRunner().invoke(build_app(), arguments)
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["tokens"] == 512 * 64
    assert document["wire"]["HSDP all-reduce"] > 0
    assert "most at once" in result.stderr
    assert "ranks" not in result.stderr
    arguments += ["--pp", "2", "--microbatches", "4", "--schedule", "gpipe"]
    result = CliRunner().invoke(build_app(), arguments)
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["memory"] == max(rank["memory"] for rank in document["ranks"])
    assert [rank["in_flight"] for rank in document["ranks"]] == [[4], [4]]
    assert document["idle"] == pytest.approx(1 / 5)
    assert "ranks of pp, gpipe of 4 microbatches" in result.stderr
