"""One snapshot for every engine: state is copied before a run, and put back after it.

Parts are put back in this order. Each user takes the parts that its run may change.

| part | who may change it | how it is put back | the copy |
|---|---|---|---|
| values of tensors | operations that write in place | copied in place, versions stay | see below |
| torch's random numbers | operations that draw | generators get their state | host |
| FP8 scales, amaxes | Transformer Engine's kernels | copied in place | device |
| position in FP8 autocasts | Transformer Engine's modules | set | host |
| objects that guards found | Python | put into the same places again | none |
| Python's random numbers, numpy's | Python | generators get their state | host |
| hooks | Python | the same dictionaries get the same hooks | none |
| `.grad` fields | backward, `zero_grad()` | the field gets the same object | none |
| an optimizer's state | its `step()` | `load_state_dict()` | device |

Values are those of parameters, buffers, states of optimizers, and of other tensors that the user
names or that a `Trace` has seen written. Their copies lie on the device. The copies of a whole step
lie on the host (`on_host`), because they include all states of the optimizer. FP8 scales are a part
of their own: kernels write scales past torch's dispatcher, so a trace may see too late that they
are written. State that an optimizer makes in its first step is no part of a snapshot; whole steps
take it away again (`whole_step/optimizers.py`).
"""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import random
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from moe_graphs.engine.fp8 import Fp8State
from moe_graphs.engine.guards.introspection import (
    GONE,
    OF_TENSORS,
    hooks_of_modules,
    hooks_of_updates,
)
from moe_graphs.engine.tensors import unwrap

if TYPE_CHECKING:
    from moe_graphs.engine.backends.backend import Backend


_ALIGNMENT = 64  # bytes


class Snapshot:
    """State as it was when this was made. As a context it puts the state back at its end.

    ``put_back()`` may be called as often as needed. If one part cannot be put back, the others are
    put back all the same.

    Args:
        backend: the owner of the random numbers; None leaves random numbers and FP8 state alone.
        values: tensors whose values are copied.
        on_host: whether copies go into host memory, which has room for a whole optimizer.
        guards: several ``Guards``; the Python objects that they have found are kept.
        hooks_of: tensors, modules and optimizers; hooks of all optimizers are added.
        gradients_of: tensors whose ``.grad`` field is kept.
    """

    def __init__(
        self,
        backend: Backend | None = None,
        *,
        values: Iterable[Tensor] = (),
        on_host: bool = False,
        guards: Iterable[Any] = (),
        python_random: bool = False,
        hooks_of: Iterable[Tensor | nn.Module | Optimizer] | None = None,
        gradients_of: Iterable[Tensor] = (),
        optimizer: Optimizer | None = None,
    ) -> None:
        self._values = [_Values(values, on_host=on_host)]
        # These functions are no methods of this object: in a reference cycle its copies would wait
        # for the garbage collector.
        self._undo: list[Callable[[], object]] = [partial(_put_back_values, self._values)]
        self._states: list[_State] = []
        self._fp8: Fp8State | None = None
        if backend is not None:
            self._states, self._fp8 = _random_states(backend), Fp8State()
            self._undo += [partial(state.set, state.value) for state in self._states]
            self._undo.append(self._fp8.put_back)
        self._objects = list(map(_objects_of, guards))
        self._undo.append(partial(_put_back_objects, self._objects))
        self._python: _PythonRandomState | None = None
        if python_random:
            self._python = _PythonRandomState()
            self._undo.append(self._python.put_back)
        if hooks_of is not None:
            self._undo.append(_hooks_kept(hooks_of))
        fields = [(each, each.grad) for each in gradients_of]
        self._undo.append(partial(_set_gradients, fields))
        if optimizer is not None:
            state = copy.deepcopy(optimizer.state_dict())
            self._undo.append(lambda: optimizer.load_state_dict(state))

    def put_back(self) -> None:
        """Puts everything back to what it was when the snapshot was taken."""
        with contextlib.ExitStack() as stack:
            for undo in reversed(self._undo):
                stack.callback(undo)

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *exception: object) -> None:
        self.put_back()
        # The traceback of a caught error may hold this object, and would then hold the copies, too.
        self._values.clear()
        self._undo.clear()

    # ---- what is kept, and what has happened since

    def keep(self, tensor: Tensor) -> None:
        """Adds the value that a tensor has now.

        Several views of one memory may be added: the last one is put back first.
        """
        self._values.append(_Values([tensor]))

    def keep_objects(self, guards: Any) -> None:
        """Adds the Python objects that more ``Guards`` have found.

        Objects that were added earlier are put back first.
        """
        self._objects.append(_objects_of(guards))

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors whose values are kept."""
        return [tensor for each in self._values for tensor, *_ in each.kept]

    @property
    def values(self) -> list[Tensor]:
        """The values that are kept, in the order of ``tensors``."""
        return [value for each in self._values for _, value, *_ in each.kept]

    def counted(self) -> list[Tensor]:
        """The tensors among ``tensors`` whose version has changed since.

        Batch normalisation writes its running statistics without a new version.
        """
        rows = (row for each in self._values for row in each.kept)
        return [t for t, _, *versions in rows if [t._version, unwrap(t)._version] != versions]

    def scales(self) -> dict[str, Tensor]:
        """FP8 scales and amaxes that are kept, by the names that messages use."""
        return {} if self._fp8 is None else self._fp8.named_values()

    def has_drawn(self) -> bool:
        """Whether random numbers of torch have been drawn since."""
        return not all(torch.equal(state.value, state.get()) for state in self._states)

    def drawn_from(self) -> str | None:
        """The name of a generator of Python or numpy that was drawn from since, or None."""
        return None if self._python is None else self._python.drawn_from()


# ---- values of tensors


class _Values:
    """Values that are copied back in place: tensors keep their addresses and versions."""

    def __init__(self, tensors: Iterable[Tensor], *, on_host: bool = False) -> None:
        tensors = list(tensors)
        found = [unwrap(tensor).detach() for tensor in tensors]
        copies = copies_on_host(found, self) if on_host else [each.clone() for each in found]
        self.kept = [
            (tensor, copy, tensor._version, unwrap(tensor)._version)
            for tensor, copy in zip(tensors, copies, strict=True)
        ]

    @torch.no_grad()
    def put_back(self) -> None:
        for tensor, value, *versions in self.kept:
            both = (tensor, unwrap(tensor))
            both[1].detach().copy_(value)
            # An autograd graph of the caller may have saved the tensor; for that graph nothing may
            # have happened.
            torch._C._autograd._unsafe_set_version_counter(both, tuple(versions))


def _put_back_values(values: Sequence[_Values]) -> None:
    for each in reversed(values):
        each.put_back()


def _set_gradients(fields: Iterable[tuple[Tensor, Tensor | None]]) -> None:
    for tensor, gradient in fields:
        tensor.grad = gradient


@torch.no_grad()
def copies_on_host(tensors: Sequence[Tensor], owner: object) -> list[Tensor]:
    """Copies in host memory, made at the speed of the bus.

    Copies of CUDA tensors lie in one block that is pinned as long as ``owner`` lives. Copies to and
    from pageable memory take seven times as long. torch's own pinned memory is not used, because it
    stays pinned for good, in blocks of powers of two.
    """
    if not any(tensor.is_cuda for tensor in tensors):
        return [tensor.to("cpu", copy=True) for tensor in tensors]
    sizes = [-tensor.nbytes // _ALIGNMENT * -_ALIGNMENT for tensor in tensors]
    # All threads write to the block first, because the first write to a page is slow.
    block = torch.empty(sum(sizes), dtype=torch.uint8).fill_(0)
    _pin(block, owner)
    starts = itertools.accumulate(sizes, initial=0)
    copies = [_within(block, *pair) for pair in zip(starts, tensors, strict=False)]
    for made, tensor in zip(copies, tensors, strict=True):
        made.copy_(tensor, non_blocking=True)
    torch.cuda.synchronize()
    return copies


def _within(block: Tensor, start: int, tensor: Tensor) -> Tensor:
    like = torch.empty_like(tensor, device="meta")  # dense, in the order of the tensor's memory
    flat = block[start : start + tensor.nbytes].view(tensor.dtype)
    return flat.as_strided(like.shape, like.stride())


def _pin(block: Tensor, owner: object) -> None:
    runtime = torch.cuda.cudart()
    if block.numel() and int(runtime.cudaHostRegister(block.data_ptr(), block.nbytes, 0)) == 0:
        # The finalizer holds the block until it is unpinned.
        done = weakref.finalize(owner, lambda: runtime.cudaHostUnregister(block.data_ptr()))
        done.atexit = False


# ---- random numbers


class _State:
    """The state of one of torch's random number generators."""

    def __init__(self, get: Callable[[], Tensor], set: Callable[[Tensor], object]) -> None:
        self.get, self.set, self.value = get, set, get()


def _random_states(backend: Backend) -> list[_State]:
    """States of the CPU, of the device, and of other generators that the backend knows."""
    found, device = [_State(torch.get_rng_state, torch.set_rng_state)], backend.device
    if device.type == "cuda":
        cuda = torch.cuda
        found.append(_State(partial(cuda.get_rng_state, device), partial(_set_on, device)))
    return found + [_State(each.get_state, each.set_state) for each in backend.generators]


def _set_on(device: torch.device, state: Tensor) -> None:
    torch.cuda.set_rng_state(state, device)


def random_digest(backend: Backend) -> tuple[bytes, ...]:
    """A value that is the same if torch will draw the same numbers next."""
    return tuple(bytes(state.value.numpy()) for state in _random_states(backend))


class _PythonRandomState:
    """State of the generators besides torch's that Python code draws from."""

    def __init__(self) -> None:
        self._random = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy: Any = numpy.random if numpy is not None else None
        self._legacy: Any = self._numpy.get_state() if self._numpy is not None else None

    def put_back(self) -> None:
        if self._has_moved():
            random.setstate(self._random)
        if self._numpy_has_moved():
            self._numpy.set_state(self._legacy)

    def drawn_from(self) -> str | None:
        if self._numpy_has_moved():
            return "numpy.random"
        return "Python's random" if self._has_moved() else None

    def _has_moved(self) -> bool:
        return random.getstate() != self._random

    def _numpy_has_moved(self) -> bool:
        return self._numpy is not None and not _same_numpy_state(
            self._numpy.get_state(), self._legacy
        )


def _same_numpy_state(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return a[0] == b[0] and a[2:] == b[2:] and bool((a[1] == b[1]).all())


def state_of(generator: Any) -> Any:
    """The state of one of Python's or numpy's generators."""
    if hasattr(generator, "bit_generator"):
        return copy.deepcopy(generator.bit_generator.state)
    return generator.getstate() if hasattr(generator, "getstate") else generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    elif hasattr(generator, "setstate"):
        generator.setstate(state)
    else:
        generator.set_state(state)


# ---- Python


def _objects_of(guards: Any) -> tuple[Any, ...]:
    """Lists of the objects as ``guards`` compares them now.

    After a comparison by path ``guards`` has new lists.
    """
    return guards.contents, guards.cells, guards.draws


def _put_back_objects(several: Sequence[tuple[Any, ...]]) -> None:
    for contents, cells, draws in several:
        for container, before in contents:
            if list(map(id, container.contents().values())) != list(map(id, before.values())):
                container.put_back(before)
        for cell, value in cells:
            if cell.write is not None and value is not GONE and not cell.is_still(value):
                cell.write(value)
        for _, generator, state in draws:
            _set_state(generator, state)


def _hooks_kept(
    holders: Iterable[Tensor | nn.Module | Optimizer],
) -> Callable[[], None]:
    """A function that puts hooks of the holders, and of all optimizers, back as they are now."""
    holders = list(holders)
    tensors = [
        (each, kind, getattr(each, kind), dict(getattr(each, kind) or {}))
        for each in holders
        if isinstance(each, Tensor)
        for kind in OF_TENSORS
    ]
    modules = [each for each in holders if isinstance(each, nn.Module)]
    optimizers = [each for each in holders if isinstance(each, Optimizer)]
    dicts = [*hooks_of_modules(modules), *hooks_of_updates(optimizers)]
    kept = [(hooks, dict(hooks)) for hooks in dicts]

    def put_back() -> None:
        for tensor, kind, hooks, contents in tensors:
            if getattr(tensor, kind) is not hooks:
                setattr(tensor, kind, hooks)
            _fill(hooks, contents)
        for hooks, contents in kept:
            _fill(hooks, contents)

    return put_back


def _fill(hooks: dict[Any, Any] | None, contents: dict[Any, Any]) -> None:
    if hooks is not None and hooks != contents:
        hooks.clear()
        hooks.update(contents)


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Context without garbage collection: a CUDA graph freed in a capture invalidates it."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


# ---- parameter aliases: other parameters on the same memory

_WEIGHTS = "_flat_weights"


def _weights_in_lists(module: nn.RNNBase) -> dict[str, list[Any]]:
    """Weights in the lists that ``nn.LSTM`` and similar modules keep beside their parameters."""
    keys = (_WEIGHTS, "_flat_weight_refs")
    return {key: module.__dict__[key] for key in keys if key in module.__dict__}


class ParameterAliases:
    """Aliases of the parameters of some modules: other parameters on the same memory.

    An alias has the class and the attributes of its parameter, but not its hooks and not its
    gradient accumulator. An accumulator belongs to the stream on which it was first used. As long
    as the caller keeps a loss of an eager step, that is the caller's stream. To capture a backward
    into this accumulator would make the caller's stream wait for the capture, which CUDA refuses.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """Makes aliases; frozen parameters get none."""
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
        made = {id(p): (p, _alias(p)) for _, _, p in self._places}
        self._made = {key: alias_of for key, (_, alias_of) in made.items()}
        self.originals = {id(alias_of): p for p, alias_of in made.values()}

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Context in which the modules hold the aliases."""
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

    def _lists_like(self, lists: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """Lists like these, with the aliases in place of the parameters."""
        weights = [w if w is None else self.alias_of(w) for w in lists[_WEIGHTS]]
        references = [w if w is None else weakref.ref(w) for w in weights]
        return {key: weights if key == _WEIGHTS else references for key in lists}

    def original(self, tensor: Tensor) -> Tensor:
        return self.originals.get(id(tensor), tensor)

    def alias_of(self, parameter: Tensor) -> Tensor:
        return self._made.get(id(parameter), parameter)


def _alias(parameter: nn.Parameter) -> nn.Parameter:
    made: Any
    if is_traceable_wrapper_subclass(parameter):
        made = nn.Parameter(parameter.detach(), parameter.requires_grad)
    else:
        made = torch.Tensor._make_subclass(type(parameter), parameter.detach())
    made.__dict__.update(parameter.__dict__)
    return made.requires_grad_(parameter.requires_grad)
