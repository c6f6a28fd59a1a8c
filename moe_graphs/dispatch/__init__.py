"""Dispatchers, which bring rows to the rank that holds their expert, and back."""

from moe_graphs.dispatch.all_gather import AllGatherDispatcher
from moe_graphs.dispatch.all_to_all import AllToAllDispatcher
from moe_graphs.dispatch.dispatcher import Dispatched, Dispatcher, DispatchPlan
from moe_graphs.dispatch.factory import make_dispatcher
from moe_graphs.dispatch.local import LocalDispatcher
from moe_graphs.dispatch.padded import PaddedDispatcher
from moe_graphs.dispatch.symmetric import SymmetricDispatcher

__all__ = [
    "AllGatherDispatcher",
    "AllToAllDispatcher",
    "DispatchPlan",
    "Dispatched",
    "Dispatcher",
    "LocalDispatcher",
    "PaddedDispatcher",
    "SymmetricDispatcher",
    "make_dispatcher",
]
