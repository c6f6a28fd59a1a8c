"""Cross entropy by parts of the columns: together they are torch's, with kernels and without."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from grids import by_turns
from moe_graphs.kernels import LossRule
from moe_graphs.kernels.cross_entropy import part as cross_entropy_part
from moe_graphs.kernels.cross_entropy.part import (
    ELSEWHERE,
    IGNORED,
    columns_here,
    gradient_of_part,
    losses_of_ranks,
    part_of_rows,
)

RULES = [
    LossRule(),
    LossRule(label_smoothing=0.2),
    LossRule(logit_scale=0.7, logit_cap=2.5, z_loss=0.01),
    LossRule(logit_scale=1.5, logit_cap=4.0, label_smoothing=0.1, z_loss=0.02),
]


def test_targets_as_columns():
    targets = torch.tensor([0, 9, 10, 19, 20, -100, 12])
    assert columns_here(targets, 10, 10, -100).tolist() == [
        *(ELSEWHERE, ELSEWHERE, 0, 9, ELSEWHERE, IGNORED, 2)
    ]
    # A target that looks like the mark of another one, here and there.
    assert columns_here(targets, 110, 10, 12).tolist() == [*(ELSEWHERE,) * 6, IGNORED]


def losses_of_whole(logits: torch.Tensor, targets: torch.Tensor, rule: LossRule) -> torch.Tensor:
    logits = rule.logit_scale * logits
    if rule.logit_cap is not None:
        logits = rule.logit_cap * torch.tanh(logits / rule.logit_cap)
    losses = functional.cross_entropy(
        logits, targets, ignore_index=3, reduction="none", label_smoothing=rule.label_smoothing
    )
    return losses + rule.z_loss * logits.logsumexp(1).square().masked_fill(targets == 3, 0)


def check(widths: list[int], dtype: torch.dtype, rule: LossRule) -> None:
    """Loss and gradient of parts of these widths, where row 1 does not count."""
    torch.manual_seed(0)
    logits = (3 * torch.randn(9, sum(widths))).to(dtype)
    targets = torch.randint(sum(widths), (9,))
    targets[1] = 3
    ignored = targets == 3
    starts = [sum(widths[:number]) for number in range(len(widths))]
    columns = [columns_here(targets, s, w, 3) for s, w in zip(starts, widths, strict=True)]
    parts = logits.split(widths, dim=1)
    here = [torch.stack(part_of_rows(*each, rule)) for each in zip(parts, columns, strict=True)]
    losses, logsumexp = losses_of_ranks(torch.stack(here), targets, sum(widths), 3, rule)
    leaf = logits.float().requires_grad_()
    expected = losses_of_whole(leaf, targets, rule)
    torch.testing.assert_close(losses, expected.detach())
    for grad in (torch.rand(9), torch.tensor(0.25)):
        (wanted,) = torch.autograd.grad(expected, leaf, grad.expand(9), retain_graph=True)
        found = [
            gradient_of_part(part, column, logsumexp, grad, rule=rule, columns=sum(widths))
            for part, column in zip(parts, columns, strict=True)
        ]
        assert all(each.dtype == dtype for each in found)
        assert not torch.cat(found, 1)[ignored].any()
        torch.testing.assert_close(torch.cat(found, 1), wanted.to(dtype))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_parts_together_are_torchs(dtype, rule):
    check([20, 20], dtype, rule)
    check([1, 30, 3], dtype, rule)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy: log(0), a maximum of NaNs
@pytest.mark.parametrize(("rule", "dtype"), by_turns(RULES, [torch.float32, torch.bfloat16]))
def test_the_kernels_parts_together_are_torchs(dtype, rule, monkeypatch, request):
    pytest.importorskip("triton")
    request.getfixturevalue("interpreted")
    request.getfixturevalue("poisoned_memory")
    monkeypatch.setattr(cross_entropy_part, "has_kernel", lambda _: True)
    check([20, 20], dtype, rule)
    check([1, 2500, 3], dtype, rule)
