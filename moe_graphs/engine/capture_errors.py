"""Errors of captures, with what was captured and the line that they come from."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator

import torch

from moe_graphs.engine.backends.backend import Backend
from moe_graphs.engine.tracing import source_line
from moe_graphs.errors import CaptureError

# Part of the line that an error names -> what to do if that line is somebody else's code.
_REMEDIES = {
    "transformers/cache_utils.py": "pass use_cache=False to the model",
    "transformers/masking_utils.py": (
        "it looks for padding in the batch, which moe_graphs.integrations.transformers."
        "accelerate_model(model, whole_steps=True) spares it"
    ),
}


@contextlib.contextmanager
def explaining_errors(what: str, backend: Backend, *, then: str) -> Iterator[None]:
    """Turns any error into a ``CaptureError`` that says where it came from and what runs now."""
    try:
        yield
    except CaptureError as error:
        _drop_leaked_hooks(error)
        raise CaptureError(f"{what} failed: {error}{_remedy(str(error))}; {then}") from error
    except Exception as error:
        line = source_line(traceback.extract_tb(error.__traceback__))
        _drop_leaked_hooks(error)
        if isinstance(error, KeyError) and isinstance(error.args[0], torch.nn.Parameter):
            raise CaptureError(
                f"{what} failed: a dictionary is keyed by a parameter, at {line}: a capture runs "
                f"forwards on other parameters, which lie in the same memory: key it by the "
                f"parameter's name; {then}"
            ) from None
        raise CaptureError(
            f"{what} failed with {type(error).__name__}{backend.memory_note(error)}: {error}; at "
            f"{line}{_remedy(line)}; {then}"
        ) from error


def explaining_errors_of(
    scope: str, direction: str, backend: Backend
) -> contextlib.AbstractContextManager[None]:
    """Turns errors in a scope's forward or backward (``direction``) into a ``CaptureError``."""
    what = f"scope {scope!r}: capture of its {direction}"
    return explaining_errors(what, backend, then="the model is eager again")


def _remedy(text: str) -> str:
    return next((f": {remedy}" for place, remedy in _REMEDIES.items() if place in text), "")


def _drop_leaked_hooks(error: BaseException) -> None:
    """Removes the saved-tensor hooks that an exception inside torch's checkpoint leaves in force.

    They stay as long as the traceback holds the frame of checkpoint's generator (torch 2.11).
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        traceback.clear_frames(error.__traceback__)
