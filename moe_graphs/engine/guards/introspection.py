"""Introspection of kinds of Python values: contents, comparison, restoring, origin of code."""

from __future__ import annotations

import contextlib
import decimal
import functools
import gc
import importlib.util
import itertools
import pathlib
import sys
import sysconfig
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as optim_globals

from moe_graphs.engine.tensors import is_plain, same_value
from moe_graphs.errors import CaptureError

# ---- containers: the places where Python keeps values

GONE = object()
"""Stands for a value that is not there."""


_KINDS = (OrderedDict, dict, list, tuple, deque, set, frozenset)


class Elements:
    """The present contents of a container, in order.

    Methods of a container's own class may say something else: transformers' ``ACT2FN`` keeps
    classes and hands out instances.
    """

    def __init__(self, holder: Any) -> None:
        self._holder = holder
        kind: Any = type(holder)
        if kind not in _KINDS:
            kind = next(kind for kind in _KINDS if isinstance(holder, kind))
        self._kind = kind

    def __len__(self) -> int:
        return self._kind.__len__(self._holder)

    def __iter__(self) -> Iterator[Any]:
        """Iterator over the elements; for a dictionary over its values."""
        if isinstance(self._holder, dict):
            if self._kind is dict:
                return iter(dict.values(self._holder))
            return (dict.__getitem__(self._holder, key) for key in self.keys())
        return self._kind.__iter__(self._holder)

    def keys(self) -> Iterator[Any]:
        return self._kind.__iter__(self._holder)


def elements(holder: Any) -> Any:
    """The contents as ``Elements``, or as something faster that is live and has a length, too."""
    if type(holder) in (list, deque, set):
        return holder
    if type(holder) is OrderedDict:  # the view of a plain dictionary has another order
        return holder.values()
    if isinstance(holder, dict) and not isinstance(holder, OrderedDict):
        return dict.values(holder)
    return Elements(holder)


def keys_of(holder: dict[Any, Any]) -> Any:
    """The keys as a live view, in order, whatever methods the dictionary's own class has."""
    kind = OrderedDict if isinstance(holder, OrderedDict) else dict
    return kind.keys(holder)


def stored(holder: Any) -> list[tuple[Any, Any]]:
    """Keys and values of a dictionary, or of a proxy of one."""
    if isinstance(holder, dict) and type(holder) is not dict:
        kept = Elements(holder)
        return list(zip(kept.keys(), kept, strict=True))
    return list(holder.items())


@dataclass
class Container:
    """A dictionary or list that was looked into.

    Attributes:
        keys: the names that matter, whether they are there or not, if only some entries of a
            dictionary do; None if all entries matter.
        owner: the class that has the dictionary, or None.
    """

    holder: Any
    name: str
    keys: frozenset[str] | None = None
    owner: type | None = None

    @property
    def is_mapping(self) -> bool:
        return isinstance(self.holder, (dict, types.MappingProxyType))

    def contents(self) -> dict[Any, Any]:
        """The entries that matter, as they are now."""
        if not self.is_mapping:
            return dict(enumerate(Elements(self.holder)))
        if self.keys is None:
            return dict(stored(self.holder))
        # The dictionary's own order decides which difference is named first; it is the same in
        # every process. A module has thousands of names and few of them matter; the others must not
        # cost a step of Python each.
        if type(self.holder) in (dict, types.MappingProxyType):
            mattering = filter(self.keys.__contains__, self.holder)
            return {key: self.holder[key] for key in mattering}
        return {key: value for key, value in stored(self.holder) if key in self.keys}

    def absent(self, contents: dict[Any, Any]) -> frozenset[str]:
        """Names that would matter, but are not there."""
        return (self.keys or frozenset()) - contents.keys()

    def put_back(self, contents: dict[Any, Any]) -> None:
        if self.owner is not None:
            for key in self.keys or ():
                if self.holder.get(key, GONE) is not contents.get(key, GONE) and key in contents:
                    setattr(self.owner, key, contents[key])
        elif isinstance(self.holder, dict):
            # Methods of the container's own class are avoided: a Counter's update() adds.
            kind = OrderedDict if isinstance(self.holder, OrderedDict) else dict
            now = self.contents()
            if self.keys is None and list(now) != list(contents):
                kind.clear(self.holder)  # otherwise the order would differ
                now = {}
            for key in now.keys() - contents.keys():
                kind.__delitem__(self.holder, key)
            for key, value in contents.items():
                kind.__setitem__(self.holder, key, value)
        elif isinstance(self.holder, set):
            refill(self.holder, frozenset(contents.values()))
        elif not isinstance(self.holder, types.MappingProxyType):
            sequence = list if isinstance(self.holder, list) else deque
            sequence.clear(self.holder)
            sequence.extend(self.holder, contents.values())


@dataclass(frozen=True)
class Cell:
    """A value that a function of its own reads: a closure's cell, a slot, a context.

    Attributes:
        is_copy: whether ``read`` makes a new value every time, which is then compared by value.
    """

    read: Callable[[], Any]
    write: Callable[[Any], object] | None
    name: str
    is_copy: bool = False

    def is_still(self, value: Any) -> bool:
        now = self.read()
        return now is value or (self.is_copy and now == value)


@dataclass(frozen=True, eq=False)
class Answers:
    """The answers that a cached function has kept. They equal others that they contain."""

    kept: dict[Any, Any]

    @classmethod
    def of(cls, cache: functools._lru_cache_wrapper[Any]) -> Answers | None:
        """The present answers; None if this Python keeps them in a way that is not known."""
        size = functools._lru_cache_wrapper.cache_info(cache).currsize
        # The class, then key, answer and class of each link if there is a limit, then a dictionary.
        referents = gc.get_referents(cache)
        links, table = referents[1 : 1 + 3 * size], (referents[1 + 3 * size :] or [None])[0]
        if size and type(referents[1]) is dict and _keys_are_answered(referents[1], size):
            return cls(dict(referents[1]))
        if type(table) is not dict or len(table) != size:
            return None
        return cls(dict(zip(links[::3], links[1::3], strict=True)))

    def __eq__(self, before: object) -> bool:
        if not isinstance(before, Answers):
            return NotImplemented
        rows = before.kept.items()
        return all(same_value(self.kept.get(key, GONE), answer) for key, answer in rows)

    def __repr__(self) -> str:
        return f"{len(self.kept)} answers"


def _keys_are_answered(table: dict[Any, Any], size: int) -> bool:
    """Whether a cache's table has answers; with a limit it has links, whose class is private."""
    return len(table) == size and not any(
        type(each).__name__ == "_lru_list_elem" for each in table.values()
    )


# ---- single kinds of values


def could_be_read(
    place: Mapping[str, Any], names: set[str], called: set[str]
) -> frozenset[str] | set[str]:
    """The names, without those of plain values that the code mentions only as methods it calls."""
    return names - {key for key in called & place.keys() if is_plain(place[key])}


def contents_of_cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return GONE


@functools.cache
def with_inner_code(code: types.CodeType) -> tuple[types.CodeType, ...]:
    """The code of a function, and of all functions and lambdas inside it."""
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return (code, *itertools.chain.from_iterable(map(with_inner_code, inner)))


def scripted(name: str) -> str:
    """Text of the refusal of a module of ``torch.jit``."""
    return (
        f"module {name or 'model'!r} is a ScriptModule (torch.jit.script or torch.jit.trace), "
        f"whose code nobody can look into: put the module in its place that it was made from, or "
        f"choose scopes without it"
    )


def check_not_scripted(values: Mapping[str, Any]) -> None:
    """Checks that no value is a module of ``torch.jit``.

    Raises:
        CaptureError: if a value is a module that ``torch.jit`` has compiled.
    """
    for name, value in values.items():
        if isinstance(value, torch.jit.ScriptModule):
            raise CaptureError(scripted(name))


def check_not_keyed_by_weights(containers: Iterable[Container]) -> None:
    """Checks that no dictionary has parameters as its keys.

    A capture swaps parameters for aliases, which such a dictionary would not find.

    Raises:
        CaptureError: if the keys of a dictionary are parameters.
    """
    for each in containers:
        keys = each.holder if isinstance(each.holder, dict) else ()
        if any(isinstance(key, Tensor) and key.requires_grad for key in keys):
            raise CaptureError(
                f"dictionary {each.name!r} is keyed by a parameter, and a capture runs forwards on "
                f"other parameters, which lie in the same memory: key it by the parameter's name"
            )


def attribute_of(value: Any, name: str) -> Any:
    """The attribute, or None if there is none or the value's class raises anything."""
    try:
        return getattr(value, name, None)
    except Exception:
        return None


def has_dictionary(value: Any) -> bool:
    """Whether a value has a dictionary of attributes; some classes raise when they are asked."""
    try:
        return isinstance(value.__dict__, dict)
    except Exception:
        return False


def bytes_of(values: Any) -> tuple[Any, ...]:
    """The bytes of an array of any library, with the kind and shape of its elements."""
    kind = getattr(values, "dtype", None) or getattr(values, "typecode", None)
    return str(kind), getattr(values, "shape", None), bytes(values)


def set_bytes(values: Any, before: tuple[Any, ...]) -> None:
    """Puts the bytes of an array back to what ``bytes_of`` has found, unless its size has changed.

    Arrays that cannot be written stay as they are.
    """
    with contextlib.suppress(TypeError, ValueError, BufferError):
        if module_of(type(values)) == "numpy":
            values[...] = type(values)(before[1], values.dtype, before[-1])
        else:
            memoryview(values).cast("B")[:] = before[-1]


def has_bytes(value: Any) -> bool:
    """Whether an object is memory that can be read: an array of any library, ctypes, mmap."""
    try:
        memoryview(value)
    except (TypeError, ValueError, BufferError):
        return module_of(type(value)) == "numpy" and hasattr(value, "tobytes")
    return True


def text_in(namespace: Mapping[str, Any], name: str) -> str | None:
    """The name, file or package of a module; None if no text lies there, or nothing any more."""
    found = namespace.get(name)
    return found if isinstance(found, str) else None


def shown_name(namespace: Mapping[str, Any]) -> str:
    """The name of a module as paths show it. Somebody may have taken the name away."""
    return text_in(namespace, "__name__") or "?"


def module_of(kind: type) -> str:
    """The name of a class's module; empty if the class says none, or something else than a text."""
    found = attribute_of(kind, "__module__")
    return found if isinstance(found, str) else ""


def is_data(value: Any) -> bool:
    """Whether a value is neither a function nor a class nor a module nor a descriptor."""
    return not (
        callable(value) or isinstance(value, types.ModuleType) or hasattr(type(value), "__get__")
    )


def is_without_state(kind: type) -> bool:
    """Whether objects of a class without attributes have nothing that changes."""
    if "__slots__" in vars(kind) or hasattr(kind, "__get__"):  # a class of Python; a descriptor
        return True
    return is_immutable(kind) or module_of(kind).partition(".")[0] in _STATELESS


def is_immutable(kind: type) -> bool:
    """Whether a class of Python's standard library has a hash of its own: a date, a path, ..."""
    hashed: Any = kind.__hash__  # None if its objects have no hash
    return hashed not in (None, object.__hash__) and _is_of_standard_library(kind)


@functools.cache
def names_within(kind: type) -> frozenset[str]:
    """Names that methods of the standard library mention, if the class has such methods.

    A call of ``Event.is_set`` reads ``_flag``, and the caller's code does not mention it.
    """
    bases = [base for base in kind.__mro__ if _is_of_standard_library(base)]
    functions = (value for base in bases for value in vars(base).values())
    found = (each.__code__.co_names for each in functions if isinstance(each, types.FunctionType))
    return frozenset(itertools.chain.from_iterable(found))


def _is_of_standard_library(kind: type) -> bool:
    top = module_of(kind).partition(".")[0]
    return origin_of_class(kind) == "internal" and top not in (*_INTERNAL, "logging", "moe_graphs")


def names_in(text: str) -> list[str]:
    """Names of attributes that a string may stand for: ``"cfg.scale"`` has two."""
    parts = text.split(".")
    return parts if all(map(str.isidentifier, parts)) else []


def decimal_context() -> tuple[Any, ...]:
    now = decimal.getcontext()
    return now.prec, now.rounding, now.Emin, now.Emax, now.capitals, now.clamp


def special_methods(kind: type) -> frozenset[str]:
    """Methods that run without being named."""
    return frozenset(
        name
        for name, value in vars(kind).items()
        if name[:2] == "__" and isinstance(value, types.FunctionType)
    )


def shown_key(index: int, key: Any, tensor_names: Mapping[int, str]) -> str:
    """A dictionary's key as a path shows it.

    ``tensor_names`` has the names of tensors by id.
    """
    if isinstance(key, Tensor):
        return tensor_names.get(id(key), f"tensor {index}")
    parts = key if type(key) is tuple else (key,)
    return repr(key) if all(map(is_plain, parts)) else f"key {index}"


def refill(target: set[Any], values: frozenset[Any]) -> None:
    set.clear(target)
    set.update(target, values)


def slots_of(kind: type) -> list[str]:
    found: list[str] = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        found += [slots] if isinstance(slots, str) else list(slots)
    return [key for key in found if key not in ("__dict__", "__weakref__")]


def is_generator(value: Any) -> bool:
    """Whether a value is a random number generator of Python or numpy."""
    names = {f"{module_of(kind)}.{kind.__name__}" for kind in type(value).__mro__}
    numpy = {"numpy.random._generator.Generator", "numpy.random.mtrand.RandomState"}
    return bool(names & (numpy | {"random.Random"}))


# ---- code: that of torch and Python, of a library, or of the user

_PACKAGE = str(pathlib.Path(__file__).parents[2])
_ENGINE = str(pathlib.Path(__file__).parents[1])
_OTHERS = ("staged.py", "portable_launches.py", "weight_codes.py", "kernels", "optim")
_NOT_READ = (_ENGINE, *(f"{_PACKAGE}/{name}" for name in _OTHERS))
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_INSTALLED = {"site-packages", "dist-packages"}
_INTERNAL = ("torch", "triton", "numpy")
# The classes of these modules that are written in C have no state that changes.
_STATELESS = (*_INTERNAL, "builtins", "collections", "functools", "_thread", "operator", "types",
              "typing", "pydantic_core")  # fmt: skip


# Installed packages whose functions are taken for granted. Other installed packages count as the
# user's own, because a project does not change when it is installed.
_NAMES_OF_LIBRARIES = (
    "IPython PIL _pytest absl accelerate aiohttp apex attr attrs beartype bitsandbytes "
    "causal_conv1d click cloudpickle composer cupy cut_cross_entropy datasets deep_gemm "
    "deepspeed diffusers dill einops execnet fairscale filelock fla flash_attn "
    "flash_attn_interface fsspec functorch grouped_gemm huggingface_hub hydra hypothesis "
    "ipykernel jax jaxtyping jinja2 joblib kernels liger_kernel lightning lightning_fabric "
    "lightning_utilities loguru mamba_ssm matplotlib megablocks mlflow mpmath multiprocess "
    "networkx numba omegaconf optimum packaging pandas peft pluggy psutil pyarrow pydantic "
    "pydantic_core pytest pytorch_lightning regex requests rich safetensors scattermoe scipy "
    "sentence_transformers setuptools sklearn stk sympy tensorboard tensorflow tensorboardX "
    "timm tokenizers torchao torchaudio torchdata torchmetrics torchtitan torchvision tqdm "
    "transformer_engine transformer_engine_torch transformers trl typing_extensions unsloth "
    "vllm wandb xdist xformers yaml"
)
_LIBRARIES = frozenset(_NAMES_OF_LIBRARIES.split())
# How the names of their compiled modules begin: flash_attn_2_cuda, megablocks_ops.
_EXTENSIONS = tuple(f"{name}_" for name in _LIBRARIES)
_MADE_BY_A_CLASS_STATEMENT = 1 << 9  # Py_TPFLAGS_HEAPTYPE


def is_taken_for_granted(module: str) -> bool:
    """Whether a module, a compiled one also, belongs to torch or to a library of the list."""
    top = module.partition(".")[0]
    return top in _INTERNAL or top in _LIBRARIES or top.startswith(_EXTENSIONS)


@functools.cache
def origin_of(filename: str) -> str:
    """The origin of code: "internal" (torch, standard library, engine), "library" or "own"."""
    if filename == "?" or "<frozen" in filename:
        return "internal"
    if filename.startswith(_NOT_READ + _internal_places()):
        return "internal"
    if filename.startswith(_PACKAGE):
        return "library"
    parts = pathlib.PurePath(filename).with_suffix("").parts
    places = [parts.index(place) for place in _INSTALLED.intersection(parts)]
    if filename.startswith(_STANDARD_LIBRARY) and not places:
        return "internal"
    others = next(filter(filename.startswith, _other_places_of_packages()), None)
    if others is not None:
        places.append(len(pathlib.PurePath(others).parts) - 1)
    names = {parts[place + 1].partition(".")[0] for place in places}
    return "own" if names.isdisjoint(_LIBRARIES) else "library"


@functools.cache
def is_of_standard_library(filename: str) -> bool:
    places = _INSTALLED.intersection(pathlib.PurePath(filename).parts)
    return filename.startswith((_STANDARD_LIBRARY, "<frozen")) and not places


def origin_of_code(code: types.CodeType, globals_: dict[str, Any]) -> str:
    """The origin of code, as in ``origin_of``; generated code has the origin of its module.

    ``exec``, dataclasses and ``python -c`` call their file "<string>".
    """
    is_generated = code.co_filename == "<string>"
    return origin_of((is_generated and text_in(globals_, "__file__")) or code.co_filename)


@functools.cache
def _internal_places() -> tuple[str, ...]:
    """Folders of internal code; if torch was built in place, its source folders are among them."""
    found = filter(None, map(importlib.util.find_spec, _INTERNAL))
    return tuple(f"{place}/" for spec in found for place in spec.submodule_search_locations or ())


@functools.cache
def _other_places_of_packages() -> tuple[str, ...]:
    """Folders of packages from ``pip install --target``, which have metadata beside packages."""
    places = (pathlib.Path(entry) for entry in sys.path if entry)
    return tuple(f"{p}/" for p in places if p.is_dir() and any(p.glob("*.dist-info")))


def origin_of_class(kind: type) -> str:
    """The origin of the code that defines a class, as in ``origin_of``."""
    module = sys.modules.get(module_of(kind))
    if module is None:  # made by exec(), or by C
        return "own" if kind.__flags__ & _MADE_BY_A_CLASS_STATEMENT else "internal"
    if text_in(vars(module), "__name__") == "__main__":
        return "own"
    file = text_in(vars(module), "__file__")
    if file is None and kind.__flags__ & _MADE_BY_A_CLASS_STATEMENT and is_own_module(module):
        return "own"
    return origin_of(file or "?")


def is_own_module(module: types.ModuleType) -> bool:
    """Whether a module is the user's. A module made by hand has neither file nor loader."""
    file = text_in(vars(module), "__file__")
    if file is not None:
        return origin_of(file) == "own"
    package = sys.modules.get(shown_name(vars(module)).partition(".")[0], module)
    is_by_hand = vars(module).get("__spec__") is None
    return is_by_hand and (package is module or is_own_module(package))


def is_of_engine(kind: type) -> bool:
    """Whether a class belongs to the engine's graphs, and not to what they hold."""
    return module_of(kind).startswith(f"{__package__.rpartition('.')[0]}.")


def is_of_package(code: types.CodeType) -> bool:
    """Whether code is that of this package, which keeps nothing that graphs depend on."""
    return code.co_filename.startswith(_PACKAGE)


# ---- where torch keeps hooks, and how they are put back

OF_MODULES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_OF_WEIGHTS = {f"torch.nn.utils.{name}" for name in ("weight_norm", "spectral_norm", "prune")}
_OF_INPUTS = (".make_inputs_require_grads", ".make_inputs_require_grad")
OF_OPTIMIZERS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
OF_ALL_OPTIMIZERS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
Hooks = dict[Any, Any]  # a dictionary of torch, with hooks by their handles' numbers


def hooks_of(module: nn.Module) -> list[Hooks]:
    return [getattr(module, kind) for kind in OF_MODULES]


def is_intercepted(module: nn.Module) -> bool:
    """Whether a call of a module runs hooks, or another forward than that of its class."""
    return any(hooks_of(module)) or "forward" in vars(module)


def shown_hooks(dicts: Iterable[Hooks]) -> str:
    """Words for messages: which hooks there are, and whose they are."""
    found = [hook for hooks in dicts for hook in hooks.values()]
    named = [f"{_home(hook)}.{_name(hook)}" for hook in found[:3]]
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return f"hooks ({', '.join(named)}{more})"


def _home(hook: Any) -> str:
    return str(getattr(hook, "__module__", None) or type(hook).__module__)


def _name(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", None) or type(hook).__qualname__)


def hooks_of_modules(modules: Iterable[nn.Module]) -> list[Hooks]:
    """Hooks of these modules and of all modules inside them."""
    return [hooks for root in modules for module in root.modules() for hooks in hooks_of(module)]


def forward_hooks_of(module: nn.Module) -> Hooks:
    """The forward hooks of a module, for code within a scope.

    If that code named the attribute itself, graphs would depend on the hooks of the scope's own
    module, which run outside of the graphs.
    """
    return module._forward_hooks


def tensor_hooks_of(tensors: Iterable[Tensor]) -> list[Callable[..., Any]]:
    """Hooks that tensors call when they get a gradient."""
    dicts = [getattr(tensor, kind) or {} for tensor in tensors for kind in OF_TENSORS]
    return [hook for hooks in dicts for hook in hooks.values()]


def hooks_of_updates(optimizers: Iterable[Optimizer]) -> list[Hooks]:
    """Hooks of the optimizers, and hooks of all optimizers."""
    own = [getattr(each, kind) for each in optimizers for kind in OF_OPTIMIZERS]
    return own + [getattr(optim_globals, kind) for kind in OF_ALL_OPTIMIZERS]


def are_of_weights(hooks: Hooks) -> bool:
    """Whether hooks are those by which torch computes weights: weight norm, spectral norm, pruning.

    They compute with tensors and assign the weight, as a forward may.
    """
    calls = (type(hook).__call__ for hook in hooks.values())
    return all(getattr(call, "__module__", None) in _OF_WEIGHTS for call in calls)


def are_of_fsdp(hooks: Hooks) -> bool:
    """Whether hooks are those by which ``fully_shard`` gathers parameters.

    The graph of a step holds what these hooks do on the device. ``whole_step/fsdp.py`` takes care
    of the state that they keep in Python.
    """
    homes = (str(getattr(hook, "__module__", "")) for hook in hooks.values())
    return all(home.startswith("torch.distributed.fsdp") for home in homes)


def are_of_inputs(hooks: Hooks) -> bool:
    """Whether hooks are those by which transformers and PEFT let embeddings require gradients.

    They set a flag of autograd and compute nothing (``enable_input_require_grads``).
    """
    homes = [(str(getattr(h, "__module__", "")), _name(h)) for h in hooks.values()]
    return all(
        home.startswith(("transformers.", "peft.")) and name.endswith(_OF_INPUTS)
        for home, name in homes
    )
