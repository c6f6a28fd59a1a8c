"""State that is put back as it was, whatever happens in between."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from moe_graphs.engine.fp8 import Fp8State
from moe_graphs.engine.host_memory import copies_on_host
from moe_graphs.engine.stand_for import local


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A graph that is collected during a capture invalidates it."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


class RandomState:
    """The numbers that torch will draw next: of the CPU, the device, and other generators."""

    def __init__(self, device: torch.device, generators: Iterable[torch.Generator] = ()) -> None:
        self._device = device
        self._others = [(generator, generator.get_state()) for generator in generators]
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def put_back(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)
        for generator, state in self._others:
            generator.set_state(state)

    def digest(self) -> tuple[bytes, ...]:
        """A value that is the same for the same state."""
        return tuple(bytes(state.numpy()) for state in (self._cpu, *self._states()))

    def is_current(self) -> bool:
        """Whether nothing has been drawn since."""
        now = RandomState(self._device, [generator for generator, _ in self._others])
        pairs = [(self._cpu, now._cpu), *zip(self._states(), now._states(), strict=True)]
        return all(torch.equal(before, after) for before, after in pairs)

    def _states(self) -> list[Tensor]:
        return [state for _, state in self._others] + ([] if self._cuda is None else [self._cuda])


class HiddenState:
    """What operations change beside the tensors that they are given: random numbers, and the
    scales of Transformer Engine."""

    def __init__(self, device: torch.device, generators: Iterable[torch.Generator] = ()) -> None:
        self.random, self._fp8 = RandomState(device, generators), Fp8State()

    def put_back(self) -> None:
        self.random.put_back()
        self._fp8.put_back()

    def scales(self) -> dict[str, Tensor]:
        """By the names that messages use."""
        return self._fp8.named_values()


@contextlib.contextmanager
def preserved_hidden_state(
    device: torch.device, generators: Iterable[torch.Generator] = ()
) -> Iterator[None]:
    """What is drawn inside was never drawn, no scale has moved."""
    state = HiddenState(device, generators)
    try:
        yield
    finally:
        state.put_back()


class Values:
    """The values of tensors, to be copied back in place: their addresses and versions stay.

    on_host: keeps the copies in host memory, where there is room for a whole optimizer.
    """

    def __init__(self, tensors: Iterable[Tensor], *, on_host: bool = False) -> None:
        tensors = list(tensors)
        found = [local(tensor).detach() for tensor in tensors]
        copies = copies_on_host(found, self) if on_host else [each.clone() for each in found]
        self._kept = [
            (tensor, copy, tensor._version, local(tensor)._version)
            for tensor, copy in zip(tensors, copies, strict=True)
        ]

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for tensor, *_ in self._kept]

    @property
    def values(self) -> list[Tensor]:
        return [value for _, value, *_ in self._kept]

    @torch.no_grad()
    def put_back(self) -> None:
        for tensor, value, *versions in self._kept:
            both = (tensor, local(tensor))
            both[1].detach().copy_(value)
            # Somebody's autograd graph may have saved the tensor: for it nothing has happened.
            torch._C._autograd._unsafe_set_version_counter(both, tuple(versions))


@contextlib.contextmanager
def preserved_values(tensors: Iterable[Tensor], *, on_host: bool = False) -> Iterator[Values]:
    values = Values(tensors, on_host=on_host)
    try:
        yield values
    finally:
        values.put_back()


_WEIGHTS = "_flat_weights"


def _weights_in_lists(module: nn.RNNBase) -> dict[str, list]:
    """``nn.LSTM`` and its kin read their weights in lists that they keep beside them."""
    keys = (_WEIGHTS, "_flat_weight_refs")
    return {key: module.__dict__[key] for key in keys if key in module.__dict__}


class StandIns:
    """For each parameter of some modules another one on the same memory, of the same class and
    with the same attributes, but without its hooks and its gradient accumulator.

    An accumulator belongs to the stream on which it was first used. As long as the caller keeps a
    loss of an eager step, that is the caller's stream, and capturing a backward into it would make
    that stream wait for the capture, which CUDA refuses.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """Frozen parameters are left alone."""
        modules = list(modules)
        places = {
            (id(module), key): (module._parameters, key, parameter)
            for root in modules
            for module in root.modules()
            for key, parameter in module._parameters.items()
            if parameter is not None and parameter.requires_grad
        }
        self._places = list(places.values())
        found = (module for root in modules for module in root.modules())
        self._recurrent = list({id(m): m for m in found if isinstance(m, nn.RNNBase)}.values())
        made = {id(p): (p, _stand_in(p)) for _, _, p in self._places}
        self._made = {key: stand_in for key, (_, stand_in) in made.items()}
        self.originals = {id(stand_in): p for p, stand_in in made.values()}

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Within this context the modules hold the stand-ins."""
        lists = [(each.__dict__, _weights_in_lists(each)) for each in self._recurrent]
        try:
            for place, key, parameter in self._places:
                place[key] = self._made[id(parameter)]
            for attributes, found in lists:
                attributes.update(self._lists_like(found))
            yield
        finally:
            for place, key, parameter in self._places:
                place[key] = parameter
            for attributes, found in lists:
                attributes.update(found)

    def _lists_like(self, lists: dict[str, list]) -> dict[str, list]:
        """Lists as these, with the stand-ins."""
        weights = [w if w is None else self.stand_in(w) for w in lists[_WEIGHTS]]
        references = [w if w is None else weakref.ref(w) for w in weights]
        return {key: weights if key == _WEIGHTS else references for key in lists}

    def original(self, tensor: Tensor) -> Tensor:
        return self.originals.get(id(tensor), tensor)

    def stand_in(self, parameter: Tensor) -> Tensor:
        return self._made.get(id(parameter), parameter)


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    if is_traceable_wrapper_subclass(parameter):
        made = nn.Parameter(parameter.detach(), parameter.requires_grad)
    else:
        made = torch.Tensor._make_subclass(type(parameter), parameter.detach())
    made.__dict__.update(parameter.__dict__)
    return made.requires_grad_(parameter.requires_grad)
