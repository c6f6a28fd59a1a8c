"""Kinds of routers, for the tests of the choice of experts: name -> (experts, rule)."""

from __future__ import annotations

from moe_graphs.kernels import RoutingRule

PLAIN = RoutingRule(
    top_k=2,
    sigmoid=False,
    normalize=True,
    scaling=1.0,
    num_groups=1,
    top_k_groups=1,
    aux_loss_coef=0.0,
    z_loss_coef=0.0,
)
LOSSES = {"aux_loss_coef": 0.3, "z_loss_coef": 0.2}
RULES = {
    "plain": (8, PLAIN),
    "raw, losses": (7, PLAIN._replace(top_k=3, normalize=False, scaling=0.7, **LOSSES)),
    "one of many": (130, PLAIN._replace(top_k=1, normalize=False, aux_loss_coef=0.1)),
    "all of them": (5, PLAIN._replace(top_k=5, z_loss_coef=0.1)),
    "sigmoid": (24, PLAIN._replace(sigmoid=True, normalize=False, z_loss_coef=0.1)),
    "deepseek": (
        24,
        PLAIN._replace(
            top_k=5, sigmoid=True, scaling=2.5, num_groups=6, top_k_groups=3, aux_loss_coef=0.2
        ),
    ),
    "groups of one": (8, PLAIN._replace(num_groups=8, top_k_groups=3, **LOSSES)),
    "one expert": (1, PLAIN._replace(top_k=1, normalize=False, **LOSSES)),
}
