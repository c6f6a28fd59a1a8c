"""Errors and warnings of the engine. Bad arguments raise ``ValueError`` instead."""


class GraphError(RuntimeError):
    """A captured scope was used in a way its graph does not cover."""


class CaptureError(GraphError):
    """A capture failed. The model is eager again, as if the capture had not been tried."""


class CheckError(GraphError):
    """A check in a replayed forward has failed (``assert``, ``if ...: raise``).

    Eager would have raised there. The outcome is read one step late.
    """


class NonFiniteError(GraphError):
    """A training step left values that are not finite.

    Attributes:
        operation: ``engine.nonfinite.NonFiniteOperation``, the first operation with such a value;
            None if torch's dispatcher sees no such operation.
    """

    def __init__(self, message: str, operation: object | None = None) -> None:
        super().__init__(message)
        self.operation = operation


class GraphWarning(UserWarning):
    """Something that was to be replayed runs eagerly from now on; the message says why."""
