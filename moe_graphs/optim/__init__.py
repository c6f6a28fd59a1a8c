"""Optimizers whose updates run at the speed of memory, with torch's interfaces and states."""

from moe_graphs.optim.adamw import AdamW

__all__ = ["AdamW"]
