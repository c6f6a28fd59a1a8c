"""The environment stamp, for the scripts of this folder; it lives in the package."""

from moe_graphs.bench.environment import describe, stamp

__all__ = ["describe", "stamp"]
