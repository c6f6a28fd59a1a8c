"""State that is put back as it was, whatever happens in between."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator

import torch
from torch import nn


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A graph that is collected during a capture invalidates it."""
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@contextlib.contextmanager
def preserved_rng(
    device: torch.device, generators: Iterable[torch.Generator] = ()
) -> Iterator[None]:
    """The CPU's and the device's default generators, and others: a capture draws no numbers."""
    others = [(generator, generator.get_state()) for generator in generators]
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)
        for generator, state in others:
            generator.set_state(state)


@contextlib.contextmanager
def preserved_values(tensors: Iterable[torch.Tensor], *, on_host: bool = False) -> Iterator[None]:
    """The values of tensors, copied back in place: their addresses stay.

    on_host: keeps the copies in host memory, where there is room for a whole optimizer.
    """
    values = [
        (tensor, tensor.detach().to("cpu", copy=True) if on_host else tensor.detach().clone())
        for tensor in tensors
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in values:
                tensor.copy_(value)


@contextlib.contextmanager
def attributes_put_back_on_failure(model: nn.Module) -> Iterator[None]:
    """Numbers, flags and strings on modules. If all goes well, what was set up lazily stays."""
    plain = (bool, int, float, str, type(None))
    before = [
        (module.__dict__, key, value)
        for module in model.modules()
        for key, value in module.__dict__.items()
        if type(value) in plain
    ]
    try:
        yield
    except BaseException:
        for attributes, key, value in before:
            attributes[key] = value
        raise


@contextlib.contextmanager
def undisturbed(
    model: nn.Module, device: torch.device, generators: Iterable[torch.Generator]
) -> Iterator[None]:
    """Whatever happens inside: buffers, random states and garbage collection stay as they are."""
    rng = preserved_rng(device, generators)
    with no_garbage_collection(), preserved_values(model.buffers()), rng:
        yield


@contextlib.contextmanager
def stand_in_parameters(model: nn.Module) -> Iterator[dict[int, nn.Parameter]]:
    """Within this context every module holds a stand-in on the same memory for each parameter.
    Gives the id of a stand-in -> the parameter.

    A parameter's gradient accumulator belongs to the stream on which it was first used. As long as
    the caller keeps a loss of an eager step, that is the caller's stream, and capturing a backward
    into it would make that stream wait for the capture, which CUDA refuses.
    """
    places = [
        (module._parameters, key, parameter)
        for module in model.modules()
        for key, parameter in module._parameters.items()
        if parameter is not None and parameter.requires_grad
    ]
    stand_ins = {id(p): nn.Parameter(p.detach()) for _, _, p in places}
    try:
        for place, key, parameter in places:
            place[key] = stand_ins[id(parameter)]
        yield {id(stand_ins[id(p)]): p for _, _, p in places}
    finally:
        for place, key, parameter in places:
            place[key] = parameter
