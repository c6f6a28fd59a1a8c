"""Words of the reports: why calls run eagerly, and why gradients are copied.

Every reason that the engine counts has an entry here. Reports, warnings and ``docs/guide.md`` print
these entries. ``tests/engine/test_reasons.py`` finds the reasons in the sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

BACKWARD = "backward: "
"""Prefix of a reason for which a backward ran eagerly after a replayed forward."""

CAPTURE_AGAIN = "capture again (graphs.recapture(), step.capture(batch) of a FullIteration)"


@dataclass(frozen=True)
class Reason:
    """Explanation and remedy of one reason.

    Attributes:
        warns_at: the number of the call of a scope that warns. None: no call warns, because the
            user has asked for eager calls, or because another message has already said it.
    """

    explanation: str
    remedy: str
    warns_at: int | None = 3

    def __str__(self) -> str:
        return f"{self.explanation}: {self.remedy}"


EAGER_CALLS: Mapping[str, Reason] = {
    "warmup": Reason("the first steps run eagerly and are observed", "nothing to do", None),
    "paused": Reason("the call was made within graphs.paused()", "nothing to do", None),
    "lengths": Reason(
        "the lengths of the first batches are looked at, to choose lengths to pad to",
        "nothing to do, or give them: accelerate_model(lengths=(256, 512, 1024))",
        None,
    ),
    "no_grad": Reason("gradients are off, as in evaluation", "nothing to do", None),
    "off": Reason("impl='none' captures nothing", "take impl='local' for graphs", None),
    "released": Reason("release() has ended the graphs", "make new graphs if you want some", None),
    "capture_failed": Reason(
        "the capture has failed, and the model is eager",
        f"mend what the message names, then {CAPTURE_AGAIN}",
        None,
    ),
    "differs_from_eager": Reason(
        "a replay did not compute what eager computes", "report it as a bug, with the message", None
    ),
    "found_by_audit": Reason(
        "an audit found that the call does something else than at its capture",
        f"do not change what the message names while you train, or {CAPTURE_AGAIN}",
        None,
    ),
    "outside_step": Reason(
        "a forward with gradients ran outside of 'with graphs.step()', where nothing is observed "
        "or replayed",
        "put forwards and backwards of a training step inside of it, and others under "
        "torch.no_grad() or graphs.paused()",
        1,
    ),
    "shape": Reason(
        "an input has another shape than the captured one",
        f"pad inputs to one shape, take GraphConfig(shapes=4), leave a short last batch out "
        f"(drop_last=True), or {CAPTURE_AGAIN}",
    ),
    "dtype": Reason(
        "an input has another dtype than the captured one",
        f"convert it, or {CAPTURE_AGAIN}",
    ),
    "device": Reason("an input is on another device", "move it to the model's device"),
    "requires_grad": Reason(
        "an input or parameter requires a gradient now, or did at the capture",
        f"set requires_grad back, or {CAPTURE_AGAIN}",
    ),
    "layout": Reason("an input has another layout (sparse)", "convert it"),
    "stride": Reason(
        "an input lies in memory in another way",
        f"call contiguous(), or {CAPTURE_AGAIN}",
    ),
    "kind": Reason("an input is a tensor of another class", f"convert it, or {CAPTURE_AGAIN}"),
    "structure": Reason(
        "the call has other arguments, keys or containers than the captured one",
        f"call it alike, or {CAPTURE_AGAIN}",
    ),
    "constant": Reason(
        "an argument that is no tensor has another value",
        "pass it as a tensor if it varies",
    ),
    "aliases": Reason(
        "other arguments than at the capture are the very same tensor, or one is memory or an "
        "object that the code knows by another name",
        "call it alike",
    ),
    "attribute": Reason(
        "a value that the Python of the scope can read has changed",
        f"set it back, keep what varies in a buffer and change it in place, or {CAPTURE_AGAIN}",
    ),
    "training_flag": Reason(
        "a module was switched between train() and eval()", "set it back by train() or eval()"
    ),
    "hooks": Reason(
        "a module, tensor or optimizer has other hooks now, which a replay does not run",
        f"remove them, or register them before the capture; then {CAPTURE_AGAIN}",
    ),
    "moved": Reason(
        "a parameter or buffer was moved or replaced, and a graph reads the old memory",
        f"change tensors in place, or {CAPTURE_AGAIN}",
        1,
    ),
    "autocast": Reason(
        "autocast is on, off or of another dtype than at the capture",
        "enter it around every call alike",
    ),
    "context": Reason(
        "a setting of torch (precision, attention backend, determinism) has changed",
        "keep it the same around every call",
    ),
    "grad_mode": Reason(
        "a whole step was called with gradients on and captured with them off, or the reverse",
        "keep torch.no_grad() within the step",
    ),
    "saved_tensors_hooks": Reason(
        "hooks on saved tensors are on, as under activation checkpointing, and see nothing of a "
        "graph",
        "take GraphConfig(recompute=...) instead, or leave layers under checkpointing out of the "
        "scopes",
    ),
    "recompute": Reason(
        "a forward ran inside of a backward, as activation checkpointing does",
        "take GraphConfig(recompute=...) instead, or leave layers under checkpointing out of the "
        "scopes",
    ),
    "checkpointing": Reason(
        "checkpointing of this scope was switched on or off, or to another use_reentrant, since "
        "the capture",
        f"keep it as it was, or {CAPTURE_AGAIN}",
    ),
    "gradient_checkpointing": Reason(
        "gradient checkpointing of transformers runs by a function that graphs do not know",
        "choose nothing but use_reentrant for it, no offloading and no function of your own",
        None,
    ),
    "dispatch_mode": Reason(
        "a mode of torch sees every operation (FlopCounterMode, fake tensors)",
        "leave the mode for training",
    ),
    "function_mode": Reason("a mode over torch's functions is on", "leave the mode for training"),
    "transform": Reason(
        "the call runs under torch.func (vmap, grad, jvp)", "call it outside of the transform"
    ),
    "forward_mode_ad": Reason(
        "forward-mode derivatives are on", "call it outside of forward_ad.dual_level()"
    ),
    "anomaly_mode": Reason("anomaly mode is on", "turn torch's detect_anomaly off"),
    "parametrization_cache": Reason(
        "the cache of torch's parametrizations is on", "leave parametrize.cached()"
    ),
    "global_module_hooks": Reason(
        "hooks for all modules are registered, which a replay does not run",
        "remove what torch.nn.modules.module.register_module_*_hook has registered",
    ),
    "fp8": Reason(
        "Transformer Engine's FP8 state is calibrated, is of an unknown version, or is that of "
        "other modules",
        "enter its autocast in every step alike, and capture when all modules have run",
    ),
    "slots_full": Reason(
        "more microbatches are in flight than in the observed steps",
        f"warm up with the schedule of training, or {CAPTURE_AGAIN}",
    ),
    "not_observed": Reason(
        "the scope was not called in the warm-up steps",
        f"warm up with steps that call it, or {CAPTURE_AGAIN}",
    ),
    "not_captured": Reason(
        "calls are missing that were there in the warm-up steps, or their order is another one",
        f"call the scopes of every microbatch alike, or {CAPTURE_AGAIN}",
    ),
    "input_written": Reason(
        "an input was written through `.data` between forward and backward, and a graph reads a "
        "copy from before",
        "write to a clone() of it",
        1,
    ),
    "input_moved": Reason(
        "an input was the untouched output of another scope at the capture, and is another tensor",
        "call the scopes of every microbatch alike",
    ),
    "output_held": Reason(
        "a view of an output of the last replay is still in use", "clone() what you keep"
    ),
    "gradient_held": Reason(
        "a view of a gradient of the last replay is still in use", "clone() what you keep"
    ),
    "double_backward": Reason(
        "gradients were differentiated in the warm-up steps (create_graph=True)",
        "leave the modules out of the scopes, or run that forward within graphs.paused()",
    ),
    "second_backward": Reason(
        "a forward has several backwards (retain_graph=True)",
        "add the losses up and run one backward",
        None,
    ),
    "autocast_cache": Reason(
        "other code uses weights of the scope under autocast, whose cache casts a weight once",
        "use torch.autocast(..., cache_enabled=False)",
        None,
    ),
    "separate_weight_backward": Reason(
        "gradients of weights have a backward of their own, as in zero-bubble schedules",
        "set GraphConfig(split_backward=True)",
        None,
    ),
    "another_rank": Reason(
        "the call of another rank differs from the captured one",
        "read the warning of that rank, or its report",
    ),
    "sharding": Reason(
        "settings of fully_shard differ from those of the capture", "set them within the step"
    ),
    "gradients_left": Reason(
        "a .grad is there that was None at the capture",
        "call zero_grad() before every step, or within it",
    ),
    "gradients_gone": Reason(
        "a .grad is None that was there at the capture, as a part of a buffer or without a "
        "backward that adds to it",
        "call zero_grad(set_to_none=False)",
    ),
    "gradients_held": Reason(
        "a view of a .grad of an earlier step is still in use", "clone() what you keep"
    ),
    "out_of_order": Reason(
        "backwards come in another order than at the capture",
        f"run backwards of a microbatch in one order, or {CAPTURE_AGAIN}",
    ),
    "other_layout": Reason(
        "gradients of outputs lie in memory in another way than at the capture",
        f"compute the loss alike in every step, or {CAPTURE_AGAIN}",
    ),
    "other_outputs": Reason(
        "other outputs of the scope get a gradient than at the capture",
        f"compute the loss alike in every step, or {CAPTURE_AGAIN}",
    ),
}
"""Reasons for eager calls, in the order of the guide's table."""

COPIED_GRADIENTS: Mapping[str, Reason] = {
    "grad_never_none": Reason(
        "a step of the warm-up began while .grad existed", "use zero_grad(set_to_none=True)"
    ),
    "accumulated": Reason(
        "microbatches are accumulated, and the backward can be run once only", "nothing to do"
    ),
    "several_slots": Reason(
        "several microbatches are in flight, and the next one needs the memory", "nothing to do"
    ),
    "several_shapes": Reason(
        "memory for gradients in place would grow with each shape of batches", "nothing to do"
    ),
    "split": Reason("split_backward=True computes weight gradients apart", "nothing to do"),
    "used_twice": Reason("the weight is used several times in a microbatch", "nothing to do"),
    "shared_memory": Reason(
        "the gradient shares memory with another tensor, or is a part of one", "nothing to do"
    ),
    "other_layout": Reason(
        "the gradient has another layout or dtype than the weight", "nothing to do"
    ),
    "other_type": Reason("weight or gradient is of a class of its own (DTensor)", "nothing to do"),
    "freed_in_backward": Reason(
        "a hook updates the weight within the backward and frees its gradient", "nothing to do"
    ),
    "not_observed": Reason("callables have no warm-up that shows who uses .grad", "nothing to do"),
    "hooks": Reason("the weight has a gradient hook", "remove the hook if you can"),
    "asked_for": Reason("torch.autograd.grad has asked for the gradient", "nothing to do"),
    "still_held": Reason(
        "somebody still held .grad when the memory was needed", "drop gradients before the forward"
    ),
    "view_held": Reason(
        "somebody held a view of .grad, and it is copied from then on", "clone() what you keep"
    ),
}
"""Reasons why a weight's gradient is copied to become ``.grad``."""


def reason_for(word: str) -> Reason:
    """Entry of a reason for eager calls, also for one of a backward or of a transformers option."""
    word = word.removeprefix(BACKWARD)
    if word.startswith("output_"):
        return Reason(f"the call asks for {word}", "nothing to do", None)
    return EAGER_CALLS.get(word, Reason(f"the call was not replayed ({word})", "see the log"))


# Part of the place that a message names -> what to do if its code is somebody else's.
_REMEDIES = {
    "transformers/cache_utils.py": "pass use_cache=False to the model",
    "transformers/masking_utils.py": (
        "it looks for padding in the batch, which moe_graphs.integrations.transformers."
        "accelerate_model(model, whole_steps=True) spares it"
    ),
}


def remedy_at(place: str) -> str:
    """The remedy for code of another library, to be added to a message; may be empty.

    Args:
        place: a text with the file of the code.
    """
    return next((f": {remedy}" for file, remedy in _REMEDIES.items() if file in place), "")
