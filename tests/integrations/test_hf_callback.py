"""`GraphCallback`: Trainer's training is the same bit for bit with graphs, whole and resumed."""

from __future__ import annotations

import pytest
import torch

from moe_graphs import GraphError

transformers = pytest.importorskip("transformers", reason="needs the extra hf")
pytest.importorskip("accelerate", reason="transformers' Trainer needs it")
from hf_families import Texts, tiny  # noqa: E402
from moe_graphs.integrations.transformers import GraphCallback  # noqa: E402

STEPS, SAVED_AT = 12, 6
KEPT = ("step", "loss", "eval_loss", "grad_norm")


def trained(folder, *callbacks, resume=None, dtype=torch.float32, **options):
    """Losses in the log, and the parameters."""
    model = tiny("qwen3_moe", "grouped_mm", moe_intermediate_size=64)
    if resume is not None:  # Trainer leaves out experts, see GraphCallback
        model = type(model).from_pretrained(resume)
    model = model.to(dtype)
    given = dict(
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=4,
        save_steps=SAVED_AT,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        learning_rate=1e-3,
        dataloader_drop_last=True,
        dataloader_pin_memory=False,
    )
    arguments = transformers.TrainingArguments(str(folder), **(given | options))
    arguments._n_gpu = min(arguments.n_gpu, 1)  # on several GPUs Trainer takes DataParallel
    trainer = transformers.Trainer(
        model, arguments, train_dataset=Texts(40), eval_dataset=Texts(6), callbacks=[*callbacks]
    )
    trainer.train(resume_from_checkpoint=resume)
    logged = [
        {k: v for k, v in line.items() if k in KEPT or k.startswith("experts/")}
        for line in trainer.state.log_history
    ]
    return logged, [p.detach() for p in model.parameters()]


def same(one, other):
    return one[0] == other[0] and all(map(torch.equal, one[1], other[1]))


@pytest.mark.filterwarnings("ignore:.*use_cache")
@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.long)])
def test_the_log_shows_the_load_of_experts(tmp_path, checkpointing):
    """Lines of the training have it, those of evaluations do not, and training is the same."""
    shown = []

    class Show(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **_):
            shown.append(dict(logs))

    options = dict(max_steps=4, gradient_checkpointing=checkpointing)
    plain = trained(tmp_path / "plain", GraphCallback(), **options)
    callback = GraphCallback(watch_experts=True)
    watched = trained(tmp_path / "watched", callback, Show(), **options)
    assert all(map(torch.equal, plain[1], watched[1]))
    lines = [line for line in watched[0] if "loss" in line]
    assert all(line["experts/max_over_mean"] >= 1 for line in lines)
    counts = [line["experts/unused"] for line in lines]
    assert [line["experts/unused"] for line in shown if "loss" in line] == counts
    assert not any("experts/unused" in line for line in shown if "loss" not in line)
    assert callback.report.eager_calls.keys() <= {"warmup", "no_grad", "recompute"}


def test_it_is_trainers_training_bit_for_bit(tmp_path):
    plain = trained(tmp_path / "plain", GraphCallback(graphs=False))
    callback = GraphCallback()
    graphed = trained(tmp_path / "graphed", callback)
    assert same(plain, graphed)
    assert callback.report.replayed > 0
    resumed = GraphCallback()
    checkpoint = tmp_path / "graphed" / f"checkpoint-{SAVED_AT}"
    again = trained(tmp_path / "resumed", resumed, resume=str(checkpoint))
    assert same(plain, again)
    assert resumed.report.replayed > 0


@pytest.mark.gpu
def test_sixty_steps_in_bf16_are_trainers_bit_for_bit(tmp_path, deterministic):
    options = dict(dtype=torch.bfloat16, use_cpu=False, max_steps=60, eval_steps=20, save_steps=30)
    plain = trained(tmp_path / "plain", GraphCallback(graphs=False), **options)
    callback = GraphCallback()
    assert same(plain, trained(tmp_path / "graphed", callback, **options))
    assert callback.report.matched == 2 * 2 * (60 - 3)
    resumed = GraphCallback()
    checkpoint = str(tmp_path / "graphed" / "checkpoint-30")
    assert same(plain, trained(tmp_path / "resumed", resumed, resume=checkpoint, **options))
    assert resumed.report.matched == 2 * 2 * (30 - 3)


def test_evaluating_and_saving_does_not_end_the_replays(tmp_path):
    callback = GraphCallback()
    trained(tmp_path, callback)
    reasons = {reason for scope in callback.report.scopes for reason in scope.eager_calls}
    assert reasons == {"warmup"}
    assert callback.report.matched == 2 * 2 * (STEPS - 3)  # layers, microbatches, steps


def test_layers_under_checkpointing_recompute_in_graphs(tmp_path):
    known = transformers.TrainingArguments.__dataclass_fields__
    option = next(n for n in ("activation_checkpointing", "gradient_checkpointing") if n in known)
    plain = trained(tmp_path / "plain", GraphCallback(graphs=False), **{option: True})
    callback = GraphCallback()
    assert same(plain, trained(tmp_path / "found", callback, **{option: True}))
    assert callback.report.matched == 2 * 2 * (STEPS - 3)  # layers, microbatches, steps
    assert all(scope.recomputed_bytes for scope in callback.report.scopes)


@pytest.mark.long
def test_autocast_is_trainers_bit_for_bit(tmp_path):
    """Accelerate's caches casts of weights, which the callback's hook stops."""
    plain = trained(tmp_path / "plain", GraphCallback(graphs=False), bf16=True)
    callback = GraphCallback()
    assert same(plain, trained(tmp_path / "graphed", callback, bf16=True))
    assert callback.report.replayed > 0
    assert torch.is_autocast_cache_enabled()


def test_torch_compile_is_refused(tmp_path):
    with pytest.raises(GraphError, match="torch_compile"):
        trained(tmp_path, GraphCallback(), torch_compile=True)
