"""Whether a block of transformers computes what its replacement does: both are run."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from moe_graphs.errors import GraphWarning
from moe_graphs.integrations.transformers.swapped_block import SwappedMoE
from moe_graphs.layers import MoEConfig

_WIDTH, _TOKENS, _ERROR = 8, (2, 16), 1e-5


def why_it_differs(block: nn.Module, config: MoEConfig) -> str | None:
    """Compares outputs and gradients of the two, with random weights; None if equal to 1e-5.

    On the CPU in fp32, in training and evaluation (there the output alone), on a copy whose
    experts have a width of 8: nothing of the size of the experts is copied. 13 s and 2 GB for a
    block of DeepSeek-V3. Leaves no trace in torch's random numbers.
    """
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", GraphWarning)
            theirs = _small_copy(block)
            ours = SwappedMoE(theirs, config)
            return _compare(theirs, ours) or _compare(theirs, _with_own_choice(ours))
    except Exception as error:
        return f"could not be tried: {type(error).__name__}: {error}"


def _with_own_choice(ours: Any) -> nn.Module:
    """The block as a change of the router leaves it; its outputs are to be those that we know."""
    kind = ours._router_kind
    getattr(ours, ours._router).__class__ = type(kind.__name__, (kind,), {})
    return ours


def _small_copy(block: Any) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    replaced: dict[int, object] = {}
    for tensor in (*block.parameters(), *block.buffers()):
        shape = list(tensor.shape)
        if tensor is block.experts.gate_up_proj:
            shape[1] = 2 * _WIDTH
        elif tensor is block.experts.down_proj:
            shape[2] = _WIDTH
        # Logits and biases of about one, so that experts are chosen for both.
        scale = shape[-1] ** -0.5 if len(shape) > 1 else 1.0
        drawn = scale * torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        is_parameter = isinstance(tensor, nn.Parameter)
        replaced[id(tensor)] = nn.Parameter(drawn) if is_parameter else drawn
    small = copy.deepcopy(block, replaced)
    small.experts.config._experts_implementation = "eager"
    return small


def _compare(theirs: nn.Module, ours: nn.Module) -> str | None:
    for training in (True, False):
        expected = _run(theirs.train(training))
        for name, value in _run(ours.train(training)).items():
            # Values are about one. Less than a tenth is a zero with the noise of sums of ones, as
            # the router's gradient where the one chosen expert always has the weight one.
            largest = expected[name].abs().max()
            scale = torch.where(largest < 0.1, 1.0, largest)
            error = (value - expected[name]).abs().max() / scale
            if not error <= _ERROR:
                mode = "training" if training else "evaluation"
                return f"computes something else: {name} differs by {error:.1g} in {mode}"
    return None


def _run(block: Any) -> dict[str, Tensor]:
    """The output; in training its gradients for the input and the parameters, too, by name."""
    named = dict(block.named_parameters())
    hidden_size = block.experts.gate_up_proj.shape[2]
    generator = torch.Generator().manual_seed(1)
    x, grad = torch.randn(2, *_TOKENS, hidden_size, generator=generator, device="cpu")
    x.requires_grad_()
    output = block(x)
    if not block.training:
        return {"output": output}
    gradients = torch.autograd.grad(output, (x, *named.values()), grad)
    return {"output": output, **dict(zip(("its input", *named), gradients, strict=True))}
