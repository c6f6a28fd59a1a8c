"""Optimizers whose updates run at the speed of memory, with torch's interfaces and states."""

from moe_graphs.optim.adamw import AdamW
from moe_graphs.optim.muon import Muon
from moe_graphs.optim.update_options import UpdateOptions

__all__ = ["AdamW", "Muon", "UpdateOptions"]
