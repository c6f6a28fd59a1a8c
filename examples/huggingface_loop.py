"""Trains a checkpoint of Hugging Face's in a loop of one's own, layers or whole steps as graphs.

python examples/huggingface_loop.py runs/checkpoint
python examples/huggingface_loop.py runs/checkpoint --whole-steps
"""

import sys
from pathlib import Path

import torch
from huggingface_checkpoint import token_batches
from torch import Tensor
from transformers import AutoModelForCausalLM

from moe_graphs import FullIteration
from moe_graphs.integrations.transformers import accelerate_model
from moe_graphs.optim import AdamW

STEPS = 20


def main(directory: Path, whole_steps: bool) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).to(device).train()
    accelerated = accelerate_model(model, whole_steps=whole_steps)
    print(accelerated)
    optimizer = AdamW(model.parameters(), lr=torch.tensor(1e-3, device=device))

    def step(tokens: Tensor) -> Tensor:
        with accelerated.step():
            loss: Tensor = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = FullIteration(step, model=model, optimizer=optimizer) if whole_steps else step
    for number, tokens in enumerate(token_batches(directory, STEPS), start=1):
        loss = run(tokens.to(device))
        if number % 5 == 0:
            print(f"step {number}: loss {loss:.4f}")
    engine = run if isinstance(run, FullIteration) else accelerated.graphs
    report = engine.report()
    print(f"matched {report.matched}, eager {report.eager_calls}")
    accelerated.undo()
    model.save_pretrained("runs/trained_in_a_loop")


if __name__ == "__main__":
    main(Path(sys.argv[1]), "--whole-steps" in sys.argv[2:])
