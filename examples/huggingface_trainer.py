"""Trains a checkpoint of Hugging Face's with transformers' Trainer, layers as graphs.

python examples/huggingface_trainer.py runs/checkpoint
"""

import sys
from pathlib import Path

import torch
from huggingface_checkpoint import token_batches
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from moe_graphs.integrations.transformers import GraphCallback

STEPS = 20


def main(directory: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    rows = token_batches(directory, STEPS).flatten(0, 1)
    arguments = TrainingArguments(
        "runs/trainer",
        max_steps=STEPS // 2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        dataloader_drop_last=True,  # a smaller last batch would run eagerly
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        learning_rate=1e-3,
        logging_steps=5,
        report_to="none",
    )
    dataset = [{"input_ids": row, "labels": row} for row in rows]
    Trainer(model, arguments, train_dataset=dataset, callbacks=[GraphCallback()]).train()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
