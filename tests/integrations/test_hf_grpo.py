"""TRL's ``GRPOTrainer`` on the experts that the old policy has chosen."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra hf")
pytest.importorskip("peft", reason="needs the extra trl")
trl = pytest.importorskip("trl", reason="needs the extra trl")
import datasets  # noqa: E402
import transformers  # noqa: E402

from hf_families import tiny  # noqa: E402
from hf_texts import write_tokenizer  # noqa: E402
from moe_graphs import routing  # noqa: E402
from moe_graphs.integrations.transformers import GraphCallback  # noqa: E402

STEPS = 8
try:
    GRPOTrainer = trl.GRPOTrainer
except RuntimeError as error:  # TRL 1.0 imports requests and does not install it
    if "requests" not in str(error):
        raise
    pytest.skip("this TRL needs requests", allow_module_level=True)


class ReplayingGRPOTrainer(GRPOTrainer):
    """Sequences carry the choices of the old policy, ``[S, L, K]`` each, which TRL shuffles.

    Attributes:
        replays: whether training uses them.
        chosen: for each step, whether training has used the experts of the old policy.
    """

    def _generate_and_score_completions(self, inputs):
        with routing.record(self.model) as choices:  # the last call is that of the old policy
            outputs = super()._generate_and_score_completions(inputs)
        sequences = len(outputs["completion_ids"])
        return {**outputs, "choices": torch.stack(choices, 1).unflatten(0, (sequences, -1))}

    def _compute_loss(self, model, inputs):
        given = inputs["choices"].flatten(0, 1).unbind(1)
        with routing.replay(model, given) if self.replays else routing.record(model) as own:
            loss = super()._compute_loss(model, inputs)
        self.chosen.append(all(map(torch.equal, given, given if own is None else own)))
        return loss


def trained(folder, *callbacks, replays: bool) -> ReplayingGRPOTrainer:
    tokenizer = transformers.AutoTokenizer.from_pretrained(write_tokenizer(folder / "tokenizer"))
    tokenizer.pad_token = tokenizer.eos_token
    arguments = trl.GRPOConfig(
        str(folder),
        max_steps=STEPS,
        num_iterations=2,  # the second one trains on what an older policy has generated
        steps_per_generation=1,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        learning_rate=1e-2,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
    )
    trainer = ReplayingGRPOTrainer(
        tiny("qwen3_moe", "grouped_mm", vocab_size=320),
        args=arguments,
        reward_funcs=lambda completions, **_: [float(len(set(each))) for each in completions],
        train_dataset=datasets.Dataset.from_dict({"prompt": ["Station 1 reports"] * 8}),
        processing_class=tokenizer,
        callbacks=list(callbacks),
    )
    trainer.replays, trainer.chosen = replays, []
    trainer.train()
    return trainer


def losses(trainer: ReplayingGRPOTrainer) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def test_training_uses_the_experts_of_the_old_policy(tmp_path):
    """An updated policy chooses other experts than the old one, if nothing is replayed."""
    plain = trained(tmp_path / "plain", replays=False)
    replayed = trained(tmp_path / "replayed", replays=True)
    assert plain.chosen == [True, False] * (STEPS // 2)
    assert all(replayed.chosen)
    assert losses(plain)[0] == losses(replayed)[0]
    assert losses(plain)[1] != losses(replayed)[1]


def test_graphs_are_bitwise_eager(tmp_path):
    eager = trained(tmp_path / "eager", GraphCallback(graphs=False), replays=True)
    callback = GraphCallback()
    graphed = trained(tmp_path / "graphed", callback, replays=True)
    assert losses(eager) == losses(graphed)
    assert callback.report.replayed > 0
