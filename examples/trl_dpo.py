"""Prefers one answer to another by TRL's DPOTrainer with its defaults, in graphs.

python examples/trl_dpo.py runs/checkpoint
"""

import sys
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer
from trl_sft import reports

from moe_graphs.integrations.transformers import GraphCallback


def main(directory: Path, steps: int = 100, *callbacks: object) -> GraphCallback:
    texts = reports(400)
    rows = {
        "prompt": [text[: len(text) // 3] for text in texts],
        "chosen": [text[len(text) // 3 :] for text in texts],
        "rejected": [text[len(text) // 3 :].upper()[::2] for text in texts],
    }
    callback = GraphCallback()
    trainer = DPOTrainer(
        str(directory),
        args=DPOConfig(
            "runs/dpo",
            max_steps=steps,
            use_cpu=not torch.cuda.is_available(),
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Dataset.from_dict(rows),
        peft_config=LoraConfig(target_modules=["q_proj", "v_proj"]),
        callbacks=[callback, *callbacks],
    )
    trainer.train()
    return callback


if __name__ == "__main__":
    main(Path(sys.argv[1]))
