"""Errors of captures, with the scope and the line that they come from."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator

from moe_graphs.engine.backends.backend import Backend
from moe_graphs.engine.hooks import drop_leaked_hooks
from moe_graphs.engine.tracing import source_line
from moe_graphs.errors import CaptureError


@contextlib.contextmanager
def explained(scope: str, direction: str, backend: Backend) -> Iterator[None]:
    """Turns whatever goes wrong into a ``CaptureError`` that says where."""
    where = f"scope {scope!r}: capture of its {direction} failed"
    try:
        yield
    except CaptureError as error:
        drop_leaked_hooks(error)
        raise CaptureError(f"{where}: {error}; the model is eager again") from error
    except Exception as error:
        line = source_line(traceback.extract_tb(error.__traceback__))
        drop_leaked_hooks(error)
        raise CaptureError(
            f"{where} with {type(error).__name__}{backend.memory_note(error)}: {error}; at {line}; "
            f"the model is eager again"
        ) from error
