"""Configuration of captures, and the table of rules that says which choices are legal."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

IMPLS = ("none", "local", "transformer_engine")
ON_MISMATCH = ("eager", "error", "recapture")
ON_CAPTURE_ERROR = ("eager", "error")
ON_AUDIT = ("eager", "error")

# A scope name stands for these stages of a layer. `full` stands for all the stages a layer has.
SCOPE_STAGES: Mapping[str, tuple[str, ...]] = {
    "attn": ("attn",),
    "mlp": ("mlp",),
    "moe": ("moe_router", "moe_preprocess", "moe_experts"),
    "moe_router": ("moe_router",),
    "moe_preprocess": ("moe_preprocess",),
    "full": (),
}


@dataclass(frozen=True)
class Choice:
    """The choice that rules check.

    Attributes:
        stages: the model's stages, each with the reason why it cannot be captured, or None; None
            as long as no model is known.
        patterns: some that select submodules of the model, for messages.
    """

    impl: str
    scopes: tuple[str, ...]
    stages: Mapping[str, str | None] | None = None
    patterns: tuple[str, ...] = ()

    def names(self) -> list[str]:
        return [scope for scope in self.scopes if not is_pattern(scope)]

    def wanted_stages(self) -> list[str]:
        if "full" in self.scopes:
            return list(self.stages or ())
        return [stage for name in self.names() for stage in SCOPE_STAGES.get(name, ())]


def is_pattern(scope: str) -> bool:
    """Whether ``scope`` selects submodules: a pattern or a dotted name, not a scope name."""
    return any(character in scope for character in "*?[.")


def _unknown(choice: Choice) -> str | None:
    for name in choice.names():
        if name not in SCOPE_STAGES:
            close = difflib.get_close_matches(name.lower(), SCOPE_STAGES, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}? " if close else ""
            return (
                f"unknown scope {name!r}: {hint}scopes are {', '.join(SCOPE_STAGES)}; "
                f"a submodule is selected by a pattern on its name, such as '*{name}', members of "
                f"a list by '{name}.*'"
            )
    return None


def _duplicate(choice: Choice) -> str | None:
    repeated = sorted({s for s in choice.scopes if choice.scopes.count(s) > 1})
    return f"scope {repeated[0]!r} is listed twice: list it once" if repeated else None


def _impl_none(choice: Choice) -> str | None:
    if choice.impl == "none" and choice.scopes:
        return (
            f"impl='none' captures nothing, but scopes={choice.scopes} are given: leave scopes out "
            f"to train eagerly, GraphConfig(impl='none'), or leave impl out to capture them"
        )
    return None


def _nothing_chosen(choice: Choice) -> str | None:
    if choice.impl == "local" and not choice.scopes:
        return "impl='local' with an empty scope list captures nothing: name scopes or impl='none'"
    return None


def _full_is_alone(choice: Choice) -> str | None:
    if "full" in choice.scopes and len(choice.scopes) > 1:
        return f"'full' is the whole layer and stands alone, got {choice.scopes}: drop the others"
    return None


def _moe_excludes_its_parts(choice: Choice) -> str | None:
    parts = [s for s in ("moe_router", "moe_preprocess") if s in choice.scopes]
    if "moe" in choice.scopes and parts:
        return (
            f"'moe' already contains {' and '.join(map(repr, parts))}: drop {' and '.join(parts)}"
        )
    return None


def _preprocess_needs_router(choice: Choice) -> str | None:
    if "moe_preprocess" in choice.scopes and "moe_router" not in choice.scopes:
        return "'moe_preprocess' continues the graph of 'moe_router': add 'moe_router'"
    return None


def _otherwise(choice: Choice, name: str | None) -> str:
    """Remedies that lead on: names that the model has, and patterns that select something."""
    ways = [] if not choice.stages else [f"drop {name!r} (on this rank of a pipeline)"]
    ways += [] if not choice.stages else ["take 'full'"]
    some = ", ".join(map(repr, choice.patterns)) or "'*.mlp'"
    return ", or ".join([*ways, f"select submodules by patterns on their names, such as {some}"])


def _stage_exists(choice: Choice) -> str | None:
    stages = choice.stages or {}
    for name in choice.names():
        missing = [stage for stage in SCOPE_STAGES[name] if stage not in stages]
        if missing:
            kind = {"attn": "staged", "mlp": "dense"}.get(name, "MoE")
            found = ", ".join(stages) or "none"
            return (
                f"scope {name!r} needs a {kind} layer, and this model has none (stages found: "
                f"{found}): {_otherwise(choice, name)}"
            )
    if "full" in choice.scopes and not stages:
        return (
            f"scope 'full' needs staged layers, and this model has none: {_otherwise(choice, None)}"
        )
    return None


def _stage_can_be_captured(choice: Choice) -> str | None:
    for stage in choice.wanted_stages():
        reason = (choice.stages or {}).get(stage)
        if reason:
            return (
                f"scopes {choice.scopes} contain stage {stage!r}, which synchronises with the "
                f"host ({reason}): use 'moe_router,moe_preprocess' instead, or a dispatcher "
                f"and experts ('moe_graphs') without host sync"
            )
    return None


# The first broken rule is reported. The rules of MODEL_RULES need to know the model.
CONFIG_RULES: tuple[Callable[[Choice], str | None], ...] = (
    _unknown,
    _duplicate,
    _impl_none,
    _nothing_chosen,
    _full_is_alone,
    _moe_excludes_its_parts,
    _preprocess_needs_router,
)
MODEL_RULES: tuple[Callable[[Choice], str | None], ...] = (_stage_exists, _stage_can_be_captured)


def check(choice: Choice) -> None:
    """Check all rules.

    Raises:
        ValueError: the choice breaks a rule; the message is that of the first one.
    """
    rules = CONFIG_RULES if choice.stages is None else CONFIG_RULES + MODEL_RULES
    for rule in rules:
        message = rule(choice)
        if message:
            raise ValueError(message)


def check_option(name: str, value: str, accepted: Sequence[str]) -> None:
    """Check that an option has one of the accepted values.

    Raises:
        ValueError: the value is another one; the message names those that are accepted.
    """
    if value not in accepted:
        raise ValueError(f"{name}={value!r}: accepted are {', '.join(map(repr, accepted))}")


def check_audits(value: int | str | None, on_audit: str) -> None:
    """Check the distance of audits, and what follows a difference.

    Raises:
        ValueError: the distance is neither "auto", nor a number of at least 1, nor None, or nobody
            knows what ``on_audit`` means.
    """
    check_option("on_audit", on_audit, ON_AUDIT)
    is_number = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if not (is_number or value is None or value == "auto"):
        raise ValueError(
            f"audit_every={value!r}: accepted are 'auto', a number of calls (at least 1), and None "
            f"for no audits"
        )


@dataclass(frozen=True)
class GraphConfig:
    """Configuration of ``moe_graphs.graph``.

    Args:
        scopes: names (attn, mlp, moe, moe_router, moe_preprocess, full) and patterns on submodule
            names (``"*.self_attn"``), as a sequence or comma-separated. Default: attn.
        impl: "local" captures scopes, "none" captures nothing. "transformer_engine" is Megatron's
            name for another implementation that captures the same scopes; here it becomes "local".
        warmup_steps: number of eager steps that are observed before the capture.
        on_mismatch: what happens to a call that differs from its capture. "eager" runs the call
            eagerly and counts it, "error" raises a ``GraphError`` that names every difference,
            "recapture" runs it eagerly, then observes the next steps and captures anew.
        on_capture_error: what happens if a capture fails. "eager" warns (``GraphWarning``) and
            trains on eagerly, on all ranks; "error" raises ``CaptureError`` at the end of the step.
            ``graphs.capture(step)`` raises in any case.
        split_backward: capture the gradients of weights apart from the gradients of inputs, so
            that zero-bubble schedules (torch's, or by ``graphs.delayed_weights()``) can compute
            them later. The tensors that the weights' part needs are kept until then, which takes
            memory. Without this option, a scope whose weights had a backward of their own in the
            warm-up stays eager, with a warning.
        recompute: which scopes keep their inputs only: True for all, or names and patterns as in
            ``scopes``. The backward of such a scope begins with its forward again, as under
            ``torch.utils.checkpoint``. This takes less memory and more time. Eager calls of these
            scopes run under ``torch.utils.checkpoint``. A pattern that names no scope names modules
            within scopes (``"*.mlp"``); these keep their inputs only, and must draw no random
            numbers.
        shapes: how many shapes of microbatches may have graphs at once. The warm-up gives the
            first. A microbatch whose inputs differ from it in shapes and strides alone captures
            another one when it first comes. If there are too many, the rarest one leaves for one
            that came more often among the last 64 microbatches; the report counts it. The graphs of
            all shapes work in the same memory, inputs and outputs included; outputs of the first
            shape have memory of their own unless their scopes recompute. Memory is least if the
            largest shape comes first. Scopes that communicate have one shape.
        memory_limit: bytes; a capture that is predicted to take more is refused, with the table of
            ``graphs.plan()``. It wants ``shapes=1``, since nobody knows the others before.
        verify: compare the first replay of every recording, forward and backward, bit for bit with
            the eager call. The comparison takes the time of about one eager step, once. With
            False, nothing finds a replay that differs from eager.
        audit_every: how often a call runs eagerly in place of its replay, to compare what it does
            with what was captured. "auto" audits a single scope after 1, 2, 4, 8, ... replays, N
            scopes by turns within the first N, and then so often that audits take at most 1 % of
            the time. A number is a number of replays: one call is audited in every so many. In both
            cases the next call is audited, too, when the model was switched by ``train()`` or
            ``eval()``, or loaded. None is never.
        on_audit: what happens if an audit finds a difference. The audited call itself is right, but
            replays since the last audit may have been wrong. "eager" warns (``GraphWarning``) and
            runs the scope eagerly from then on; "error" raises ``GraphError``.

    Raises:
        ValueError: a combination that is not legal; the message says what to change.
    """

    scopes: Sequence[str] | str | None = None
    impl: str = "local"
    warmup_steps: int = 3
    on_mismatch: str = "eager"
    on_capture_error: str = "eager"
    split_backward: bool = False
    recompute: Sequence[str] | str | bool = False
    shapes: int = 1
    memory_limit: int | None = None
    verify: bool = True
    audit_every: int | str | None = "auto"
    on_audit: str = "eager"

    def __post_init__(self) -> None:
        # Megatron has it as one more choice of these options.
        if "full_iteration" in (self.impl, *_normalised(self.scopes, self.impl)):
            raise ValueError(
                "'full_iteration' captures the function that makes a step, which "
                "moe_graphs.graph never sees: use moe_graphs.FullIteration(step, model=model)"
            )
        if self.impl not in IMPLS:
            raise ValueError(f"impl={self.impl!r}: accepted are {', '.join(IMPLS)}")
        check_option("on_mismatch", self.on_mismatch, ON_MISMATCH)
        check_option("on_capture_error", self.on_capture_error, ON_CAPTURE_ERROR)
        check_audits(self.audit_every, self.on_audit)
        if self.warmup_steps < 1:
            raise ValueError(
                f"warmup_steps={self.warmup_steps}: at least 1, since the calls to capture are "
                f"observed in these steps"
            )
        if self.shapes < 1 or (self.shapes > 1 and self.memory_limit is not None):
            raise ValueError(
                f"shapes={self.shapes}: at least 1, and 1 with a memory_limit, since nobody knows "
                f"what other shapes take before they come"
            )
        if self.impl == "transformer_engine":
            object.__setattr__(self, "impl", "local")
        scopes = _normalised(self.scopes, self.impl)
        object.__setattr__(self, "scopes", scopes)
        check(Choice(self.impl, scopes))
        recompute = self.recompute
        if not isinstance(recompute, bool):
            recompute = _normalised(recompute, self.impl)
            check(Choice(self.impl, recompute))
            object.__setattr__(self, "recompute", recompute)
        if recompute and self.impl == "none":
            raise ValueError(
                "impl='none' with recompute: nothing is captured, so nothing is computed anew: "
                "call torch.utils.checkpoint in the model"
            )
        if recompute and self.split_backward:
            raise ValueError(
                "recompute with split_backward=True: the part for the weights would run the "
                "forward a third time: choose one of the two"
            )

    def __str__(self) -> str:
        return f"{self.impl}, {','.join(self.scopes or ())}"

    @classmethod
    def from_megatron(
        cls,
        cuda_graph_impl: str = "local",
        cuda_graph_scope: Sequence[str] | str | None = None,
        cuda_graph_modules: Sequence[str] | str | None = None,
        cuda_graph_warmup_steps: int = 3,
        **options: Any,
    ) -> GraphConfig:
        """Make the configuration from Megatron-LM's flags; no scope means the whole layer there.

        "local" and "transformer_engine" both become "local". Three things differ from Megatron:

        - Its "transformer_engine" captures every microbatch of a declared schedule. We capture as
          many microbatches as the warm-up has seen in flight.
        - Its "local" captures "moe_preprocess" together with "moe_router". We capture the scopes
          that are named.
        - Megatron replays or stops if a call differs from its capture. Here the call runs eagerly
          and is counted.

        Raises:
            ValueError: an illegal combination, or "full_iteration", which is
                ``moe_graphs.FullIteration`` here.
        """
        if cuda_graph_scope and cuda_graph_modules:
            raise ValueError("cuda_graph_scope is the older name of cuda_graph_modules: set one")
        scopes = cuda_graph_modules or cuda_graph_scope
        if not scopes and cuda_graph_impl != "none":
            scopes = "full"
        return cls(scopes, cuda_graph_impl, cuda_graph_warmup_steps, **options)


@dataclass(frozen=True)
class FullIterationConfig:
    """Choice of whole steps as one graph (``moe_graphs.FullIteration``), for trainers.

    Args:
        optimizer_in_graph: put clipping, the optimizer's update and the zeroing of gradients into
            the graph, too.
        warmup_steps: number of eager steps before the capture.
        audit_every, on_audit: as in ``GraphConfig``.
    """

    optimizer_in_graph: bool = False
    warmup_steps: int = 3
    audit_every: int | str | None = "auto"
    on_audit: str = "eager"

    def __str__(self) -> str:
        return f"full_iteration, {'with' if self.optimizer_in_graph else 'without'} the optimizer"


def _normalised(scopes: Sequence[str] | str | None, impl: str) -> tuple[str, ...]:
    if scopes is None:
        return ("attn",) if impl == "local" else ()
    if isinstance(scopes, str):
        scopes = scopes.split(",")
    return tuple(scope.strip() for scope in scopes if scope.strip())
