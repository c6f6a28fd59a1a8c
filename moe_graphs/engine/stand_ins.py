"""Aliases of parameters, which a capture or a trial run uses in the place of the parameters."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

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
