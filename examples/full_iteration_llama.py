"""A dense Llama-style model, trained with the whole step in one graph, optimizer included.

python examples/full_iteration_llama.py            # on a GPU, else on the CPU recorder
python examples/full_iteration_llama.py --eager    # the same losses, without a graph
"""

from __future__ import annotations

import argparse
import time

import torch
from torch.optim.lr_scheduler import OneCycleLR

from moe_graphs import FullIteration, StaticLoader
from moe_graphs.layers import LanguageModel, TransformerConfig

SEQUENCE = 256


def llama(device: str) -> LanguageModel:
    """Grouped-query attention, SwiGLU, RMSNorm, rotary positions: small enough to wait for."""
    large = device == "cuda"
    config = TransformerConfig(
        hidden_size=512 if large else 64,
        num_layers=12 if large else 2,
        num_heads=8,
        num_kv_heads=2,
        ffn_hidden_size=1408 if large else 176,
        vocab_size=256,
        max_sequence_length=SEQUENCE,
    )
    return LanguageModel(config, device=device, dtype=torch.bfloat16 if large else torch.float32)


def counting(steps: int, microbatches: int) -> list[dict[str, torch.Tensor]]:
    """Sequences that count up by a stride: easy to learn, and there is nothing to download."""
    generator = torch.Generator().manual_seed(0)
    shape = (steps, microbatches, 4, 1)
    start = torch.randint(256, shape, generator=generator)
    stride = torch.randint(1, 8, shape, generator=generator)
    tokens = (start + stride * torch.arange(SEQUENCE + 1)) % 256
    return [{"tokens": step} for step in tokens]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--eager", action="store_true")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    torch.manual_seed(0)
    model = llama(device)
    # A tensor, which the scheduler changes in place: a float would be frozen in the graph.
    rate = torch.tensor(1e-3, device=device)
    capturable = device == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=capturable)
    scheduler = OneCycleLR(optimizer, 3e-3, options.steps, cycle_momentum=False)

    def train_step(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        losses = []
        for tokens in batch["tokens"]:
            loss = model(tokens[:, :-1], tokens[:, 1:]).loss
            (loss / len(batch["tokens"])).backward()
            losses.append(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": torch.stack(losses).mean(), "grad_norm": norm}

    graphed = FullIteration(train_step, model=model, optimizer=optimizer)
    step = train_step if options.eager else graphed
    loader = StaticLoader(counting(options.steps, options.microbatches), device)
    started = time.perf_counter()
    for number, batch in enumerate(loader, 1):
        metrics = step(batch)
        scheduler.step()
        if number % 20 == 0:  # reading a value is the only wait for the device
            loss, seconds = metrics["loss"].item(), time.perf_counter() - started
            print(f"step: {number:4d}  loss: {loss:.4f}  seconds: {seconds:.2f}")
    print(graphed.report())
    graphed.release()


if __name__ == "__main__":
    main()
