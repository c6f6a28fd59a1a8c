"""Trains the tiny language model as a pipeline, with graphs under torch's 1F1B schedule.

    torchrun --nproc-per-node 2 examples/pipeline_1f1b.py 50

A GPU per rank and NCCL, or CPU processes and gloo. Graphs see how many microbatches are in flight.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import moe_graphs
from moe_graphs.layers import LanguageModel
from moe_graphs.lm.data import TrainingBatches, standard_library
from moe_graphs.lm.optimizers import build_optimizer
from moe_graphs.lm.run_presets import tiny


class Part(nn.Module):
    """The layers of one rank. The load-balancing losses travel along with the hidden states."""

    def __init__(self, model: LanguageModel, rank: int, ranks: int) -> None:
        super().__init__()
        count = len(model.layers)
        self.layers = model.layers[rank * count // ranks : (rank + 1) * count // ranks]
        self.embedding = model.embedding if rank == 0 else nn.Identity()
        self.norm = model.norm if rank == ranks - 1 else nn.Identity()
        self.head = model.head if rank == ranks - 1 else nn.Identity()

    def forward(self, entered: Tensor, aux_loss: Tensor | None = None) -> tuple[Tensor, Tensor]:
        hidden_BSD = self.embedding(entered)
        aux_loss = torch.zeros(1, device=entered.device) if aux_loss is None else aux_loss
        for layer in self.layers:
            output = layer(hidden_BSD)
            hidden_BSD = output.hidden_BSD
            aux_loss = aux_loss + output.aux_loss if layer.is_moe else aux_loss
        return self.norm(hidden_BSD), aux_loss

    def loss(self, outputs: tuple[Tensor, Tensor], targets_BS: Tensor) -> Tensor:
        """The last rank's head computes the cross entropy by chunks: no logits are whole."""
        return self.head(outputs[0], targets_BS) + outputs[1].sum()


def train(steps: int, rank: int, ranks: int, device: torch.device) -> None:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    part = Part(LanguageModel(tiny().model, device=device, dtype=dtype), rank, ranks)
    graphs = moe_graphs.graph(part, moe_graphs.GraphConfig("full"))  # whole layers, of any kind
    stage = PipelineStage(part, rank, ranks, device)
    schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=part.loss)
    optimizer = build_optimizer(part, tiny().training)
    documents = standard_library().train_documents
    batches = TrainingBatches(documents, sequence_length=128, batch_size=16, seed=0)
    for step in range(1, steps + 1):
        tokens_BS, losses = batches.batch(step).to(device).long(), list[Tensor]()
        inputs = [tokens_BS[:, :-1].contiguous()] if rank == 0 else []  # others receive theirs
        with graphs.step():
            schedule.step(*inputs, target=tokens_BS[:, 1:], losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        if losses and step % 5 == 0:
            print(f"step {step}: loss {torch.stack(losses).mean():.4f}", flush=True)
    report = graphs.report()
    in_flight, counts = report.slots[0], f"{report.matched} replayed or audited"
    print(f"rank {rank}: {in_flight} microbatches in flight; calls: {counts}", flush=True)
    graphs.release()


if __name__ == "__main__":
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if on_gpus := torch.cuda.device_count() >= ranks:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    train(int(sys.argv[1]), rank, ranks, torch.device(f"cuda:{rank}" if on_gpus else "cpu"))
    dist.destroy_process_group()
