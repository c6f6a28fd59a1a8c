"""Batches of changing length: padded to a few lengths, which have graphs; numbers stay the same."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs the extra hf")
from hf_families import FAMILIES, counted, skip_unknown, tiny  # noqa: E402
from moe_graphs import FullIteration, GraphConfig, routing  # noqa: E402
from moe_graphs.integrations.transformers import accelerate_model, static_batch  # noqa: E402
from moe_graphs.integrations.transformers.lengths import choose, rounded  # noqa: E402

LAYERS = 2
# A window and sinks, linear attention, and neither; the others are marked long.
OFTEN = ("gpt_oss", "qwen3_next", "qwen3_moe")
LONG = dict(max_position_embeddings=512)
# Its linear attention shares no keys; noise on its router depends on the number of tokens.
TINY = {"bailing_hybrid": {"num_key_value_heads": 4}, "phimoe": {"router_jitter_noise": 0.0}}
# Sums over padded rows are made in another order; all else is the same.
NEAR = dict(rtol=1e-4, atol=1e-5)


def batch(length, rows=3, side="right"):
    """A batch in which one row has the whole length, or all (``side="none"``)."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(3, 128, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        short = length if side == "none" else length // (row + 1)
        mask[row, short:] = 0
        if side == "left":
            mask[row] = mask[row].flip(0)
    # Padding on the left predicts the first token from positions that see nothing.
    behind = torch.cat([torch.zeros_like(mask[:, :1]), mask[:, :-1]], 1)
    return {
        "input_ids": ids.masked_fill(mask == 0, 0),
        "attention_mask": mask,
        "labels": ids.masked_fill((mask == 0) | (behind == 0), -100),
    }


def outcome(model, given):
    """The loss, the auxiliary loss, logits of real tokens and all gradients."""
    model.zero_grad()
    output = model(**given)
    output.loss.backward()
    logits = output.logits[given["attention_mask"] == 1] if "attention_mask" in given else None
    found = {"loss": output.loss.detach(), "logits": logits}
    if output.get("aux_loss") is not None:
        found["aux_loss"] = output.aux_loss.detach()
    found |= {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: each for name, each in found.items() if each is not None}


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(
    "family",
    [
        each if each in OFTEN else pytest.param(each, marks=pytest.mark.long)
        for each in [*FAMILIES, "llama"]
    ],
)
def test_padding_changes_no_number_but_by_rounding(family, side):
    skip_unknown(family)
    model = tiny(family, None, **LONG, **TINY.get(family, {}))
    if hasattr(model.config, "output_router_logits") and family != "deepseek_v4":
        model.config.output_router_logits = True  # transformers 5.24 collects none of deepseek_v4
    plain, given = copy.deepcopy(model), batch(39, side=side)
    accelerate_model(plain, graphs=False)
    accelerated = accelerate_model(model, graphs=False, lengths=(64,))
    expected = outcome(plain, given)
    with accelerated.step():
        found = outcome(model, given)
    assert accelerated.lengths.padding == 3 * (64 - 39)
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        torch.testing.assert_close(found[name], each, **NEAR, msg=lambda m, n=name: f"{n}: {m}")


def trained(model, accelerated, lengths, side="right"):
    """Losses, gradients and parameters of a step for each length."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    left = []
    for length in lengths:
        with accelerated.step():
            given = {name: x.to(model.device) for name, x in batch(length, side=side).items()}
            loss = model(**given).loss
            loss.backward()
        left += [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return [*left, *(p.detach() for p in model.parameters())]


SEEN = (70, 33, 120, 90, 64, 100, 75, 40)
LATER = (70, 33, 120, 90, 66, 126, 75, 40, 130, 90, 91, 20)


@pytest.mark.parametrize("checkpointing", [pytest.param(False, marks=pytest.mark.long), True])
def test_batches_of_changing_length_are_replayed_bit_for_bit(checkpointing):
    runs = []
    for graphs in (False, True):
        model = tiny("qwen3_moe", "grouped_mm", **LONG)
        if checkpointing:
            model.gradient_checkpointing_enable()
        accelerated = accelerate_model(model, graphs=graphs, lengths=True)
        runs.append(trained(model, accelerated, SEEN + LATER))
    assert all(map(torch.equal, *runs))
    report = accelerated.graphs.report()
    assert counted(report) == {"warmup": (1 + 2) * LAYERS, "lengths": 7 * LAYERS}
    assert report.matched == (len(LATER) - 2) * LAYERS
    assert accelerated.lengths.chosen == [64, 128, 192]
    (chunk,) = accelerated.graphs.captured.chunks
    assert {leaf.shape[1] for leaf in chunk.slots[0].sites[0].forward.own_inputs[:1]} == {128}
    assert "lengths  changed    12 64, 128, 192: forwards were padded" in str(accelerated)


def on_a_gpu(lengths, given, graphs=True):
    model = tiny("qwen3_moe", "grouped_mm", **LONG, num_hidden_layers=8).to("cuda", torch.bfloat16)
    model.gradient_checkpointing_enable()
    accelerated = accelerate_model(model, graphs=graphs, lengths=given)
    return trained(model, accelerated, lengths), accelerated.graphs.report()


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")  # flash attention's backward adds with atomics
def test_on_a_gpu_it_is_bit_for_bit():
    lengths = [70, 33, 120, 90, 66, 126, 75, 40, 250, 90, 91, 20]
    (eager, _), (found, report) = (on_a_gpu(lengths, (64, 128, 256), g) for g in (False, True))
    assert all(map(torch.equal, eager, found))
    assert report.matched == (len(lengths) - 3) * 8
    assert report.shapes == 3


@pytest.mark.gpu
def test_on_a_gpu_lengths_share_a_pool():
    def taken(*given):
        return on_a_gpu([64, 128, 256] * 4, given)[1]

    alone, several = taken(256), taken(64, 128, 256)
    assert several.pool_bytes < 1.2 * alone.pool_bytes
    assert several.static_bytes <= alone.static_bytes


def test_nothing_is_padded_as_long_as_there_is_one_length():
    model = tiny("qwen3_moe", "grouped_mm", **LONG)
    accelerated = accelerate_model(model)
    trained(model, accelerated, [40] * 6)
    assert accelerated.graphs.report().eager_calls == {"warmup": 3 * LAYERS}
    assert accelerated.lengths.forwards == 0
    trained(model, accelerated, [40] * 3 + [30, 50])  # the first one that is not too late
    assert accelerated.lengths.chosen == [40, 64]


def test_masks_that_come_and_go_at_one_length_are_left_out():
    runs = []
    for graphs in (False, True):
        model = tiny("qwen3_moe", "grouped_mm", **LONG)
        accelerated = accelerate_model(model, graphs=graphs, lengths=True)
        sides = ("right", "right", "none", "right", "none", "right", "none", "none")
        runs.append([each for side in sides for each in trained(model, accelerated, [40], side)])
    assert all(map(torch.equal, *runs))
    assert accelerated.graphs.report().eager_calls == {"warmup": 3 * LAYERS}


def test_few_lengths_are_taken_as_they_are():
    model = tiny("qwen3_moe", "grouped_mm", **LONG)
    accelerated = accelerate_model(model)
    trained(model, accelerated, [40, 60] * 8)
    assert accelerated.lengths.chosen == [40, 60]
    assert accelerated.lengths.padding == 2 * 3 * (60 - 40)  # in the first four steps
    assert accelerated.graphs.report().matched == (16 - 7 - 3) * LAYERS


def test_a_count_of_targets_as_trainer_gives_it_is_no_obstacle():
    model = tiny("llama", None, **LONG)
    accelerated = accelerate_model(model, graphs=False, lengths=(64,))
    plain = model(**batch(39), num_items_in_batch=torch.tensor(70)).loss
    with accelerated.step():
        loss = model(**batch(39), num_items_in_batch=torch.tensor(70)).loss
    assert accelerated.lengths.padding == 3 * (64 - 39)
    torch.testing.assert_close(loss, plain, **NEAR)


def test_the_lengths_that_are_chosen_cost_least():
    assert choose({100: 1, 300: 5, 299: 1, 500: 2, 510: 1, 40: 1}) == [64, 128, 320, 512]
    assert choose({30: 1, 60: 1}) == [30, 60]
    assert [rounded(n) for n in (1, 64, 65, 1023, 1025, 4000)] == [64, 64, 128, 1024, 1152, 4096]


def test_evaluation_copies_and_the_undone_model_pad_nothing():
    model = tiny("qwen3_moe", "grouped_mm", **LONG)
    accelerated = accelerate_model(model, lengths=(64,))
    with torch.no_grad():
        model(**batch(39))
    with accelerated.step(), accelerated.graphs.paused():
        model.eval()(**batch(39))
        model.train()
        for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            each(**batch(39)).loss.backward()
    assert accelerated.lengths.forwards == 0
    accelerated.undo()
    assert type(model.model) is transformers.Qwen3MoeModel
    with accelerated.step():
        model(**batch(39))
    assert accelerated.lengths.forwards == 0


def test_what_nobody_knows_how_to_pad_stays_as_it_is():
    model = tiny("llama", None, **LONG)
    accelerated = accelerate_model(model, graphs=False, lengths=(64,))
    given = batch(39)
    given["attention_mask"] = torch.ones(3, 1, 39, 39, dtype=torch.bool).tril()
    with accelerated.step():
        model(**given)
    assert accelerated.lengths.left_alone == {"attention_mask has another shape than the tokens": 1}
    assert "another shape than the tokens: not padded" in str(accelerated)


def test_packed_rows_are_padded_within_their_last_document():
    model = tiny("qwen3_moe", None, **LONG)
    plain, accelerated = copy.deepcopy(model), accelerate_model(model, graphs=False, lengths=(64,))
    accelerate_model(plain, graphs=False)
    ids = batch(39)["input_ids"][:1]
    positions = torch.cat([torch.arange(25), torch.arange(14)])[None]
    given = {"input_ids": ids, "labels": ids, "position_ids": positions}
    given["cu_seq_lens_q"] = torch.tensor([0, 25, 39], dtype=torch.int32)
    expected = outcome(plain, given)
    with accelerated.step():
        found = outcome(model, given)
    assert accelerated.lengths.padding == 64 - 39
    for name, each in expected.items():
        torch.testing.assert_close(found[name], each, **NEAR, msg=lambda m, n=name: f"{n}: {m}")


def counted_pairs(graphs, **lengths):
    model = tiny("qwen3_moe", "grouped_mm", **LONG)
    watch = routing.watch(model)
    accelerated = accelerate_model(model, graphs=graphs, **lengths)
    trained(model, accelerated, [40, 70, 50, 100, 60, 100], side="none")
    return watch.report(), accelerated


def test_counters_of_experts_count_no_padding():
    plain, _ = counted_pairs(False)
    found, accelerated = counted_pairs(True, lengths=(64, 128))
    assert sum(found.layers[0].pairs) == 3 * (40 + 70 + 50 + 100 + 60 + 100) * 2
    assert found == plain
    assert accelerated.graphs.report().matched == 3 * LAYERS


def test_recorded_choices_are_of_the_tokens_that_there_are():
    model = tiny("qwen3_moe", "grouped_mm", **LONG)
    accelerated = accelerate_model(model, graphs=False, lengths=(64,))
    with accelerated.step(), routing.record(model) as choices:
        model(**batch(39))
    assert len(choices[0]) == 3 * 39
    assert accelerated.lengths.left_alone.total() == 1


def test_positions_that_depend_on_the_length_are_left():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = tiny("llama", None, rope_parameters=rope)
    accelerated = accelerate_model(model, graphs=False, lengths=True)
    assert "its positions depend on the length (dynamic)" in str(accelerated)


def test_a_collator_pads_for_whole_steps():
    runs = []
    for whole in (False, True):
        model = tiny("qwen3_moe", None, **LONG)
        accelerate_model(model, graphs=False, whole_steps=whole)
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3), fused=True)

        def step(given, model=model, optimizer=optimizer):
            loss = model(**given).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run = FullIteration(step, model=model, optimizer=optimizer) if whole else step
        given = [batch(length) for length in (39, 50, 64, 20, 41)]
        given = [static_batch(each, lengths=(64,)) for each in given] if whole else given
        runs.append(torch.stack([run(each).clone() for each in given]))
    assert run.report().matched == 2
    torch.testing.assert_close(*runs, rtol=1e-3, atol=1e-4)


def test_a_batch_that_cannot_be_padded_is_an_error():
    with pytest.raises(ValueError, match=r"39 tokens in a row, more than all lengths \(32,\)"):
        static_batch(batch(39), lengths=(32,))
    with pytest.raises(ValueError, match=r"position_ids \(1, 39\): nobody knows"):
        static_batch(batch(39) | {"position_ids": torch.arange(39)[None]}, lengths=(64,))


def test_wrong_options_are_named():
    model = tiny("llama", None)
    with pytest.raises(ValueError, match=r"shapes=1\): take shapes="):
        accelerate_model(model, graphs=GraphConfig("model.layers.*"), lengths=True)
    with pytest.raises(ValueError, match=r"static_batch\(lengths="):
        accelerate_model(model, whole_steps=True, lengths=True)
