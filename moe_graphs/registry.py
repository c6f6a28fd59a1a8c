"""Classes of one kind by name, which command lines, plans and messages take their lists from.

The facts of a class stand on the class (``Dispatcher``, ``OptimizerChoice``, ``ExpertsBackend``).
Kinds without facts may be functions, too. An entry here is its name and where it is. It is imported
at its first use, so that ``moe-graphs --help`` does not wait for torch. A class of your own has the
same standing: give its place as the name (``"my_package.my_module:MyDispatcher"``), or add it under
a name of its own (``DISPATCHERS.add``).
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any


class Registry(Mapping[str, Any]):
    """Mapping from names to classes.

    Args:
        kind: what the classes are, in one word for messages.
        places: for each name the class, or its module and name as ``"module:Class"``.
        takes_places: whether a place serves as a name. It must not where names are read from files
            that others wrote, because a place is imported.
    """

    def __init__(self, kind: str, places: Mapping[str, Any], *, takes_places: bool = True) -> None:
        self.kind, self._places, self._takes_places = kind, dict(places), takes_places

    def add(self, name: str, place: Any) -> None:
        """Add a class, or its place, under a name that is free.

        Raises:
            ValueError: another class has the name.
        """
        if self._places.get(name, place) != place:
            raise ValueError(f"{self.kind} {name!r} is taken by {self._places[name]}")
        self._places[name] = place

    def __getitem__(self, name: str) -> Any:
        """Return the class of a name, or of a place.

        Raises:
            ValueError: there is no such name or place; the message says what there is.
        """
        self.check(name)
        place = self._places.get(name, name)
        if not isinstance(place, str):
            return place
        module, colon, attribute = place.partition(":")
        if not (module and colon and attribute):
            raise ValueError(self._unknown(name))
        try:
            return getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            if name in self._places:
                raise
            raise ValueError(
                f"{self.kind}: {name!r} cannot be imported ({error}): its module has to be on "
                f"PYTHONPATH, and its class in it"
            ) from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        is_place = self._takes_places and isinstance(name, str) and ":" in name
        return is_place or name in self._places

    def check(self, name: str) -> None:
        """Check that there is a name, or that it could be a place; nothing is imported.

        Raises:
            ValueError: as above.
        """
        if name not in self:
            raise ValueError(self._unknown(name))

    def words(self, allowed: Callable[[Any], bool] | None = None) -> str:
        """Return the names of the classes that are allowed (default: all), as ``a, b or c``."""
        names = [name for name in self if allowed is None or allowed(self[name])]
        return " or ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))

    def _unknown(self, name: str) -> str:
        close = difflib.get_close_matches(name, self, 1)
        meant = f" (did you mean {close[0]!r}?)" if close else ""
        own = ", or a class of your own by module:Class" if self._takes_places else ""
        return f"{self.kind}: {name!r} is unknown: choose one of {', '.join(self)}{meant}{own}"


# The fastest first: without a name, commands take the first that a layout allows.
DISPATCHERS = Registry(
    "dispatcher",
    {
        "local": "moe_graphs.dispatch.local:LocalDispatcher",
        "padded": "moe_graphs.dispatch.padded:PaddedDispatcher",
        "symmetric": "moe_graphs.dispatch.symmetric:SymmetricDispatcher",
        "all_gather": "moe_graphs.dispatch.all_gather:AllGatherDispatcher",
        "all_to_all": "moe_graphs.dispatch.all_to_all:AllToAllDispatcher",
    },
)
OPTIMIZERS = Registry(
    "optimizer",
    {
        "adamw": "moe_graphs.lm.optimizers:OurAdamW",
        "torch_adamw": "moe_graphs.lm.optimizers:TorchAdamW",
        "muon": "moe_graphs.lm.optimizers:MuonForMatrices",
    },
)
EXPERTS = Registry(
    "experts",
    {
        "moe_graphs": "moe_graphs.layers.experts:GroupedExperts",
        "transformer_engine": "moe_graphs.integrations.transformer_engine:TEExperts",
        "megablocks": "moe_graphs.integrations.megablocks:MegaBlocksExperts",
    },
)
ATTENTIONS = Registry(
    "attention",
    {
        "grouped_query": "moe_graphs.layers.attention:Attention",
        "latent": "moe_graphs.layers.latent_attention:LatentAttention",
    },
)
PROJECTIONS = Registry(
    "linear",
    {
        "torch": "moe_graphs.layers.linear:torch_linear",
        "transformer_engine": "moe_graphs.integrations.transformer_engine:te_linear",
    },
)
DEGREES = Registry(
    "degree",
    {
        "pp": "moe_graphs.parallel.pipeline:PipelineParallel",
        "dp_replicate": "moe_graphs.parallel.degrees:DataReplicas",
        "dp_shard": "moe_graphs.parallel.degrees:DataShards",
        "cp": "moe_graphs.parallel.context_parallel:ContextParallel",
        "tp": "moe_graphs.parallel.tensor_parallel:TensorParallel",
        "ep": "moe_graphs.parallel.expert_shards:ExpertParallel",
    },
)
PRESETS = Registry(
    "preset",
    {
        "tiny": "moe_graphs.lm.run_presets:tiny",
        "small": "moe_graphs.lm.run_presets:small",
    },
)
MODELS = Registry(
    "model",
    {
        "mixtral-8x7b": "moe_graphs.layers.architectures:mixtral_8x7b",
        "qwen3-30b-a3b": "moe_graphs.layers.architectures:qwen3_30b_a3b",
        "qwen3-235b-a22b": "moe_graphs.layers.architectures:qwen3_235b_a22b",
        "olmoe-1b-7b": "moe_graphs.layers.architectures:olmoe_1b_7b",
        "deepseek-v3": "moe_graphs.layers.architectures:deepseek_v3",
        "llama3-8b": "moe_graphs.layers.architectures:llama3_8b",
        "llama3.1-405b": "moe_graphs.layers.architectures:llama3_1_405b",
    },
)
# A config.json names its family.
FAMILIES = Registry(
    "family",
    {
        "llama": "moe_graphs.checkpoints.families:LLAMA",
        "mixtral": "moe_graphs.checkpoints.families:MIXTRAL",
        "qwen3_moe": "moe_graphs.checkpoints.families:QWEN3_MOE",
        "olmoe": "moe_graphs.checkpoints.families:OLMOE",
        "deepseek_v3": "moe_graphs.checkpoints.families:DEEPSEEK_V3",
    },
    takes_places=False,
)
FP8_RECIPES = Registry(
    "fp8",
    {
        "delayed": "transformer_engine.common.recipe:DelayedScaling",
        "current": "transformer_engine.common.recipe:Float8CurrentScaling",
        "block": "transformer_engine.common.recipe:Float8BlockScaling",
    },
)
