"""Fine-tunes a checkpoint of Hugging Face's by TRL's SFTTrainer with its defaults, in graphs.

python examples/trl_sft.py runs/checkpoint
"""

import sys
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

from moe_graphs.integrations.transformers import GraphCallback


def reports(count: int) -> list[str]:
    """Texts of different lengths: each batch is padded to its longest row."""
    line = "Station {} reports wind from the north, {} knots.\n"
    return ["".join(line.format(n, n * k % 9) for k in range(1 + n * 7 % 11)) for n in range(count)]


def main(directory: Path, steps: int = 100, *callbacks: object) -> GraphCallback:
    callback = GraphCallback()
    trainer = SFTTrainer(
        str(directory),
        args=SFTConfig(
            "runs/sft",
            max_steps=steps,
            learning_rate=1e-3,
            use_cpu=not torch.cuda.is_available(),
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Dataset.from_dict({"text": reports(400)}),
        peft_config=LoraConfig(target_modules="all-linear"),
        callbacks=[callback, *callbacks],
    )
    trainer.train()
    return callback


if __name__ == "__main__":
    main(Path(sys.argv[1]))
