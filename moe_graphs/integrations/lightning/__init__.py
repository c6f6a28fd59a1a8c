"""Graphs in Lightning 2.6 and later: two callbacks for ``Trainer(callbacks=[...])``.

``GraphScopes`` graphs parts of the model, ``GraphWholeSteps`` forward and backward of a batch as
one graph. Training is bit for bit Lightning's own with either; what a graph cannot do Lightning
does, and a warning says why. Works with ``lightning`` and with ``pytorch_lightning``.
"""

from __future__ import annotations

from moe_graphs.integrations.lightning.scopes import GraphScopes
from moe_graphs.integrations.lightning.whole_steps import GraphWholeSteps

__all__ = ["GraphScopes", "GraphWholeSteps"]
