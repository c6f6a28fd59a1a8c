"""Holds the replays of a captured step against eager runs, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def check_replays(step: Callable[[], Sequence[Tensor]], change: Callable[[], object]) -> None:
    """Runs without waiting for the host, replays like eager after every change, repeats its bits.

    Args:
        step: returns fresh tensors without history: a graph of autograd that lives on remembers
            the stream it was made on.
        change: puts other numbers into the step's inputs.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in range(3):
        torch.manual_seed(seed)
        with torch.no_grad():
            change()
        for static in captured:
            static.fill_(77)
        graph.replay()
        for static, eager, again in zip(captured, step(), step(), strict=True):
            assert torch.equal(static, eager)
            assert torch.equal(eager, again)
