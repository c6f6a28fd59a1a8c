"""Rewards completions by TRL's GRPOTrainer with its defaults, in graphs; generation is eager.

python examples/trl_grpo.py runs/checkpoint
"""

import sys
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from trl_sft import reports

from moe_graphs.integrations.transformers import GraphCallback


def digits(completions: list[str], **_: object) -> list[float]:
    """The reward: how much of a completion is digits."""
    return [sum(map(str.isdigit, text)) / max(len(text), 1) for text in completions]


def main(directory: Path, steps: int = 100, *callbacks: object, tokens: int = 512) -> GraphCallback:
    callback = GraphCallback()
    trainer = GRPOTrainer(
        str(directory),
        reward_funcs=digits,
        args=GRPOConfig(
            "runs/grpo",
            max_steps=steps,
            max_completion_length=tokens,
            use_cpu=not torch.cuda.is_available(),
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Dataset.from_dict({"prompt": reports(400)}),
        peft_config=LoraConfig(target_modules=["q_proj", "v_proj"]),
        callbacks=[callback, *callbacks],
    )
    trainer.train()
    return callback


if __name__ == "__main__":
    main(Path(sys.argv[1]))
