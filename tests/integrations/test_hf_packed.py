"""Many documents in one row (``position_ids`` that begin anew): in graphs, each by itself."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import moe_graphs
from moe_graphs.integrations.transformers import GraphCallback, accelerate_model

transformers = pytest.importorskip("transformers", reason="needs the extra hf")
from hf_families import FAMILIES, implementation_of, skip_unknown, tiny, tokens  # noqa: E402

# Lengths of documents in each of two rows of 16 tokens, step by step.
STEPS = (
    ([16], [16]),
    ([6, 10], [3, 13]),
    ([1, 2, 13], [15, 1]),
    ([4] * 4, [16]),
    ([16], [1] * 16),
    ([8, 8], [2, 3, 4, 7]),
    ([16], [16]),
    ([5, 11], [11, 5]),
)


def positions(rows, first=0):
    """Positions begin at ``first`` in even documents and at 0 in the others."""
    return torch.stack(
        [torch.cat([torch.arange(n) + first * (1 - i % 2) for i, n in enumerate(r)]) for r in rows]
    )


def batches(first=0, **more):
    for shift, rows in enumerate(STEPS):
        ids = tokens().roll(shift, 1)
        yield dict(input_ids=ids, labels=ids, position_ids=positions(rows, first)) | more


def by_layers(model, given, graphs, **options):
    accelerated = accelerate_model(model, graphs=graphs and moe_graphs.GraphConfig(
        "model.layers.*", **options))  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in given:
        with accelerated.step():
            loss = model(**batch).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return accelerated.graphs, [*losses, *(p.detach() for p in model.parameters())]


def by_whole_steps(model, given, graphs, **options):
    accelerate_model(model, whole_steps=True)
    rate = torch.tensor(0.1, device=model.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, fused=True)

    def step(batch):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    whole = moe_graphs.FullIteration(step, model=model, optimizer=optimizer, **options)
    losses = [(whole if graphs else step)(batch).clone() for batch in given]
    return whole, [*losses, *(p.detach() for p in model.parameters())]


WAYS = {"layers": by_layers, "whole steps": by_whole_steps}
OTHERS = ("llama", "mixtral", "deepseek_v3")
AUDITED = dict(audit_every=2, on_audit="error")


@pytest.mark.parametrize("first", [0, pytest.param(7, marks=pytest.mark.long)])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "family", ["qwen3_moe", *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS)]
)
def test_any_number_of_documents_is_replayed_bit_for_bit(family, way, first):
    skip_unknown(family)
    runs = []
    for graphs in (False, True):
        model = tiny(family, implementation_of(family))
        run, found = WAYS[way](model, batches(first), graphs, **AUDITED)
        runs.append(found)
    assert all(map(torch.equal, *runs))
    report = run.report()
    assert report.eager_calls.keys() == {"warmup"}
    assert report.audited > 0
    assert report.audits_passed == report.audited


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_any_number_of_documents_is_replayed_on_a_gpu(family, way):
    runs = []
    for graphs in (False, True):
        model = tiny(family, "grouped_mm", moe_intermediate_size=64).to("cuda", torch.bfloat16)
        given = [{name: x.to("cuda") for name, x in batch.items()} for batch in batches()]
        run, found = WAYS[way](model, given, graphs, **AUDITED)
        runs.append(found)
    assert all(map(torch.equal, *runs))
    assert run.report().eager_calls.keys() == {"warmup"}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "family", ["qwen3_moe", pytest.param("deepseek_v3", marks=pytest.mark.long)]
)
def test_packed_documents_train_as_each_by_itself(family, way):
    """The sum of the losses, the gradients and the router's logits: to rounding."""
    rows = ([6, 10], [1, 2, 13])
    ids, places = tokens(), positions(rows)
    begins = places == 0
    labels = ids.masked_fill(begins, -100)
    model = tiny(family, implementation_of(family))
    alone = copy.deepcopy(model)
    pieces = [piece for row, lengths in zip(ids, rows, strict=True) for piece in row.split(lengths)]
    losses = []
    for piece in pieces:
        logits = alone(input_ids=piece[None], use_cache=False).logits[0]
        lost = torch.nn.functional.cross_entropy(logits[:-1], piece[1:], reduction="sum")
        losses.append(lost.detach())
        lost.backward()
    expected = {name: p.grad for name, p in alone.named_parameters()}
    options = {"whole_steps": True} if way == "whole steps" else {}
    accelerated = accelerate_model(model, **options)
    batch = dict(input_ids=ids, labels=labels, position_ids=places)
    given = [dict(batch) for _ in range(5)]
    if way == "layers":
        for each in given:
            model.zero_grad()
            with accelerated.step():
                lost = model(**each, num_items_in_batch=1).loss
                lost.backward()
        assert accelerated.graphs.report().matched > 0
    else:

        def step(each):
            model.zero_grad()
            lost = model(**each, num_items_in_batch=1).loss
            lost.backward()
            return lost.detach()

        whole = moe_graphs.FullIteration(step, model=model)
        for each in given:
            lost = whole(each)
        assert whole.report().matched == 2
    torch.testing.assert_close(lost.detach(), torch.stack(losses).sum(), atol=1e-4, rtol=1e-5)
    for name, p in model.named_parameters():
        if p.grad is not None or expected[name] is not None:
            torch.testing.assert_close(p.grad, expected[name], atol=1e-4, rtol=1e-4, msg=name)


@pytest.mark.parametrize("options", [{}, {"whole_steps": True}])
def test_router_losses_and_statistics_are_those_of_transformers(options):
    """The mask of packed rows that transformers builds, after it has read them on the host."""
    given = dict(next(batches()), position_ids=positions(STEPS[1]), output_router_logits=True)
    model = tiny("qwen3_moe", "grouped_mm")
    expected = model(**given, use_cache=False)
    accelerated = accelerate_model(model, experts=False, **options)
    with accelerated.step():
        found = model(**given)
    torch.testing.assert_close(found.aux_loss, expected.aux_loss)
    torch.testing.assert_close(found.loss, expected.loss)
    for one, other in zip(found.router_logits, expected.router_logits, strict=True):
        torch.testing.assert_close(one, other)


NOTHING = dict(experts=False, norms=False, residuals=False, rotary=False, loss=False, graphs=False)
LEFT = {  # and why
    **dict.fromkeys(["deepseek_v4", "gpt_oss", "mimo_v2_flash"], "eager attention"),
    **dict.fromkeys(["minimax", "qwen3_5_moe", "qwen3_next"], "linear attention"),
    **dict.fromkeys(["afmoe", "opt"], "not known to follow position_ids"),
    "gemma3_text": "gives masks or_mask_function",
}
SOME = {"qwen3_moe", "mixtral", "llama4_text", *list(LEFT)[-3:]}
ALL = dict.fromkeys([*FAMILIES, "llama", "gpt2", "llama4_text", *LEFT])
WITHOUT_THEM = {"bailing_hybrid", "nemotron_h"}  # transformers takes no such rows, or takes minutes


@pytest.mark.parametrize(
    "family",
    [
        name if name in SOME else pytest.param(name, marks=pytest.mark.long)
        for name in ALL
        if name not in WITHOUT_THEM
    ],
)
def test_packed_rows_are_those_of_transformers_bit_for_bit(family):
    skip_unknown(family)
    no_noise = dict.fromkeys(
        ("router_jitter_noise", "input_jitter_noise", "dropout", "attn_pdrop", "resid_pdrop",
         "embd_pdrop"), 0.0,
    )  # fmt: skip
    model = tiny(family, implementation_of(family), sliding_window=16, **no_noise)
    given = dict(input_ids=tokens(), position_ids=positions(STEPS[2]))
    expected = model(**given, use_cache=False).logits
    accelerated = accelerate_model(model, **NOTHING)
    assert torch.equal(model(**given).logits, expected)
    line = next(change for change in accelerated.changes if change.part == "packing")
    assert line.done == (family not in LEFT)
    assert LEFT.get(family, "documents see themselves alone") in line.note


@pytest.mark.parametrize("change", ["padded", "cached", "evaluated", "windowed", "eager"])
def test_what_is_not_packed_stays_as_transformers_has_it(change):
    given = dict(input_ids=tokens(), position_ids=positions(STEPS[1]))
    window = {"sliding_window": 8} if change == "windowed" else {}
    model = tiny("mixtral", "grouped_mm", **window)
    if change == "eager":
        model.set_attn_implementation("eager")
    if change == "evaluated":
        model.eval()
    if change == "padded":
        given["attention_mask"] = torch.ones(2, 16).tril(10)
    given["use_cache"] = change == "cached"
    expected = model(**given).logits
    accelerated = accelerate_model(model, **NOTHING)
    assert torch.equal(model(**given).logits, expected)
    line = next(change for change in accelerated.changes if change.part == "packing")
    assert line.done == (change != "eager")
    assert ("up to 8 tokens" in line.note) == (change == "windowed")


def test_a_mask_by_position_and_copies_of_the_model_are_served():
    model = tiny("llama", None)
    places = positions(STEPS[1])
    expected = model.model(tokens(), position_ids=places, use_cache=False)[0]
    accelerated = accelerate_model(model, **NOTHING)
    again = pickle.loads(pickle.dumps(model))
    for each in (model, copy.deepcopy(model), again):
        assert torch.equal(each.model(tokens(), None, places)[0], expected)
    accelerated.undo()
    assert type(model.model) is type(tiny("llama", None).model)


class Flattened(torch.utils.data.IterableDataset):
    """Texts of changing length, in threes of 24 tokens together."""

    def __iter__(self):
        ids = torch.randint(3, 128, (24,), generator=torch.Generator().manual_seed(1))
        for step in range(8):
            for piece in ids.roll(step).split([(4, 19, 1), (22, 1, 1), (3, 5, 16)][step % 3]):
                yield {"input_ids": piece.tolist()}


@pytest.mark.parametrize("kernels", [pytest.param(False, marks=pytest.mark.long), True])
def test_trainer_flattens_documents_and_replays_them(kernels, tmp_path):
    """``return_flash_attn_kwargs`` and ``return_seq_idx`` change in length and value."""
    pytest.importorskip("accelerate", reason="transformers' Trainer needs it")
    runs = []
    for graphs in (False, True):
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=8, per_device_train_batch_size=3, logging_steps=1,
            report_to="none", disable_tqdm=True, use_cpu=True, save_strategy="no",
            dataloader_pin_memory=False, remove_unused_columns=False,
            accelerator_config=dict(dispatch_batches=False),
        )  # fmt: skip
        callback = GraphCallback(graphs=graphs)
        model = tiny("qwen3_moe", "grouped_mm")
        collator = transformers.DataCollatorWithFlattening(
            return_flash_attn_kwargs=kernels, return_seq_idx=kernels
        )
        trainer = transformers.Trainer(
            model, arguments, train_dataset=Flattened(), data_collator=collator,
            callbacks=[callback],
        )  # fmt: skip
        trainer.train()
        lost = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        runs.append((lost, [p.detach() for p in model.parameters()]))
    assert runs[0][0] == runs[1][0]
    assert all(map(torch.equal, runs[0][1], runs[1][1]))
    assert callback.report.eager_calls.keys() == {"warmup"}
    assert callback.report.matched == 2 * 5


PACKINGS = {
    "packing": dict(packing=True, pad_to_multiple_of=96),
    "padding_free": dict(padding_free=True, max_length=None, pad_to_multiple_of=256),
}


@pytest.mark.parametrize(
    "packing", ["packing", pytest.param("padding_free", marks=pytest.mark.long)]
)
def test_sft_packs_documents_and_replays_them(packing, tmp_path):
    """TRL takes any attention; with sdpa the mask keeps documents apart."""
    pytest.importorskip("peft", reason="needs the extra trl")
    pytest.importorskip("trl", reason="needs the extra trl")
    from trl_runs import LAYERS, STEPS, sft

    plain = sft(tmp_path / "plain", GraphCallback(graphs=False), lora=None, **PACKINGS[packing])
    callback = GraphCallback()
    graphed = sft(tmp_path / "graphed", callback, lora=None, **PACKINGS[packing])
    assert graphed.equals(plain)
    assert callback.report.eager_calls == {"warmup": 3 * LAYERS}
    assert callback.report.matched == (STEPS - 3) * LAYERS
    theirs = sft(tmp_path / "theirs", lora=None, **PACKINGS[packing])
    assert_near(plain, theirs)


def assert_near(plain, theirs):
    for one, other in zip(plain.logged, theirs.logged, strict=True):
        for name in ("loss", "aux_loss"):
            assert float(one[name]) == pytest.approx(float(other[name]), abs=2e-3)


@pytest.mark.long
@pytest.mark.parametrize("options", [dict(packing=True), dict(padding_free=True, max_length=None)])
def test_sft_packs_rows_of_changing_length(options, tmp_path):
    """TRL's defaults replay behind the forwards whose lengths are looked at."""
    pytest.importorskip("peft", reason="needs the extra trl")
    pytest.importorskip("trl", reason="needs the extra trl")
    from trl_runs import LAYERS, sft

    callback, steps = GraphCallback(), 16
    graphed = sft(tmp_path / "graphed", callback, lora=None, max_steps=steps, **options)
    eager = callback.report.eager_calls
    assert eager.keys() == {"warmup", "lengths"}
    assert sum(eager.values()) <= 10 * LAYERS
    assert callback.report.matched == steps * LAYERS - sum(eager.values())
    theirs = sft(tmp_path / "theirs", lora=None, max_steps=steps, **options)
    for one, other in zip(graphed.logged, theirs.logged, strict=True):
        assert float(one["loss"]) == pytest.approx(float(other["loss"]), abs=3e-3)
