"""Errors and warnings of the engine. Bad arguments raise ``ValueError`` instead."""


class GraphError(RuntimeError):
    """A captured scope was used in a way its graph does not cover."""


class CaptureError(GraphError):
    """A capture failed. The model is eager again, as if the capture had not been tried."""


class GraphWarning(UserWarning):
    """Something that was to be replayed runs eagerly from now on; the message says why."""
