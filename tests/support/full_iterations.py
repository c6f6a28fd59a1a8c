"""Training with a whole step as one graph, or the same step eagerly, to be compared bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from moe_graphs.engine.whole_step.full_iteration import FullIteration
from moe_graphs.layers.model_config import Precision
from training_runs import SEQUENCE, VOCABULARY, Trace, loss_of, tiny_model


def optimizer_of(model: nn.Module, device: str, **options: Any) -> torch.optim.AdamW:
    """AdamW that a graph can hold, with its learning rate in a tensor."""
    rate = torch.tensor(1e-2, device=device)
    on_gpu = {"capturable": True} if device == "cuda" else {}
    return torch.optim.AdamW(model.parameters(), lr=rate, fused=True, **on_gpu, **options)


def batches(
    device: str, steps: int, microbatches: int = 1, seed: int = 1
) -> Iterator[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        shape = (2, SEQUENCE + 1)
        tokens = [
            torch.randint(VOCABULARY, shape, generator=generator) for _ in range(microbatches)
        ]
        yield {"tokens": [part.to(device) for part in tokens], "scale": 1.0 / microbatches}


class Run:
    """A model, its optimizer and schedule, a training and a validation step, graphed or not."""

    def __init__(
        self,
        device: str,
        *,
        graphed: bool,
        layers: str = "mixed",
        microbatches: int = 1,
        inside: bool = True,
        precision: Precision = "weights",
        **options: Any,
    ) -> None:
        self.device, self.microbatches, self.inside = device, microbatches, inside
        self.model = tiny_model(device, layers, precision=precision)
        self.optimizer = optimizer_of(self.model, device)
        self.schedule = LambdaLR(self.optimizer, lambda step: 1.0 / (1 + step))
        self.checkpoint: dict[str, Any] = {}
        self.step: Any = self.train_step
        self.validate: Any = self.validation_step
        if graphed:
            inner = {"optimizer": self.optimizer} if inside else {}
            self.step = FullIteration(self.train_step, model=self.model, **inner, **options)
            self.validate = FullIteration(self.validation_step, model=self.model, warmup_steps=1)

    def train_step(self, batch: dict[str, Any]) -> dict[str, Any]:
        losses, dropped = [], []
        for tokens in batch["tokens"]:
            loss, output = loss_of(self.model, tokens)
            (loss * batch["scale"]).backward()
            losses.append(loss)
            dropped.append(output.dropped_tokens)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        if self.inside:
            self.update()
        return {"losses": losses, "norm": norm, "dropped": dropped}

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.model.update_expert_bias()

    def validation_step(self, batch: dict[str, Any]) -> torch.Tensor:
        self.model.eval()
        with torch.no_grad():
            loss = loss_of(self.model, batch["tokens"][0])[0]
        self.model.train()
        return loss

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state() if self.device == "cuda" else None,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.load_rng(state)

    def load_rng(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["rng"])
        if state["cuda_rng"] is not None:
            torch.cuda.set_rng_state(state["cuda_rng"])

    def trace(self, trace: Trace, where: str) -> None:
        trace.note_state(self.model, where)
        for name, parameter in self.model.named_parameters():
            trace.note(f"{where} grad {name}", parameter.grad)
            for key, value in sorted(self.optimizer.state.get(parameter, {}).items()):
                trace.note(f"{where} {key} {name}", value)


def train(run: Run, steps: int, first: int = 0, total: int | None = None) -> tuple[Trace, list]:
    """Notes everything after each step; returns also what the steps returned, looked at last."""
    if first == 0:
        torch.manual_seed(3)
    trace, kept = Trace(), []
    for index, batch in enumerate(batches(run.device, total or steps, run.microbatches)):
        if not first <= index < first + steps:
            continue
        result = run.step(batch)
        kept.append(result)
        run.trace(trace, f"step {index}")
        if not run.inside:
            run.update()
        run.schedule.step()
        if index % 3 == 2:
            kept.append(run.validate(batch))
    for index, result in enumerate(kept):
        for number, leaf in enumerate(torch.utils._pytree.tree_leaves(result)):
            trace.note(f"result {index} {number}", leaf)
    run.trace(trace, "end")
    run.checkpoint = run.state()
    trace.note("random number", torch.rand(1, device=run.device))
    return trace, kept
