"""MegaBlocks' experts behind ``MoELayer``, and its dMoE layers as ours and back.

Extra: ``moe_graphs[megablocks]``. ``MoEConfig(experts="megablocks")`` multiplies by
``grouped_gemm``; MegaBlocks' block-sparse layers refuse every Triton that we support. A model's
``state_dict`` has the experts under MegaBlocks' own names (``experts.mlp.w1``, ``v1``, ``w2``) and
in its layout. A layer that is there, and back::

    moe = from_megablocks(dmoe, experts="megablocks")
    dmoe = to_megablocks(moe)

A dMoE that stays in a model is left eager: it reads sizes on the host. Scopes on other submodules
work beside it, one that contains it is refused by name.
"""

from __future__ import annotations

from moe_graphs.integrations.megablocks.dmoe import from_megablocks, to_megablocks
from moe_graphs.integrations.megablocks.glu_experts import MegaBlocksExperts

__all__ = ["MegaBlocksExperts", "from_megablocks", "to_megablocks"]
