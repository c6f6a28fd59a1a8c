"""TRL's ``SFTTrainer`` on a tiny Qwen3-MoE: random weights and a tokenizer that is made here."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import peft
import torch
import transformers
import trl

from hf_families import tiny
from hf_texts import texts, write_tokenizer

STEPS, SAVED_AT, LAYERS = 8, 3, 2


@dataclass
class Trained:
    """The trained ``parameters``, and ``logged`` losses and router losses, step by step."""

    trainer: Any
    logged: list[dict[str, float]]
    parameters: list[torch.Tensor]

    def equals(self, other: Trained) -> bool:
        same = map(torch.equal, self.parameters, other.parameters)
        return self.logged == other.logged and all(same)


def model_of(**options: Any) -> torch.nn.Module:
    return tiny("qwen3_moe", "grouped_mm", vocab_size=320, output_router_logits=True, **options)


def sft(
    folder: Path,
    *callbacks: Any,
    model: torch.nn.Module | None = None,
    lora: Any = "all-linear",
    resume: Path | None = None,
    **options: Any,
) -> Trained:
    """Every argument is at its default but those that make the run small and say what it logs.

    ``lora``: the modules that get one; None for a full fine-tuning.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(write_tokenizer(folder / "tokenizer"))
    tokenizer.pad_token = tokenizer.eos_token
    small = dict(
        max_steps=STEPS,
        save_steps=SAVED_AT,
        logging_steps=1,
        max_length=48,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    arguments = trl.SFTConfig(str(folder), **(small | options))
    with _no_bars():
        trainer = trl.SFTTrainer(
            model_of() if model is None else model,
            args=arguments,
            train_dataset=datasets.Dataset.from_dict({"text": texts(20)}),
            processing_class=tokenizer,
            peft_config=None if lora is None else peft.LoraConfig(r=2, target_modules=lora),
            callbacks=list(callbacks),
        )
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    trained = [p.detach().clone() for p in trainer.model.parameters() if p.requires_grad]
    kept = ("step", "loss", "aux_loss", "grad_norm")
    logged = [
        {name: line[name] for name in kept if name in line}
        for line in trainer.state.log_history
        if "loss" in line
    ]
    return Trained(trainer, logged, trained)


@contextlib.contextmanager
def _no_bars():
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()
