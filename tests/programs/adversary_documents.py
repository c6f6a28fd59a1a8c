"""Adversaries: several documents in one row, whose number and lengths change from step to step."""

from __future__ import annotations

import torch
from torch.nn import functional

from moe_graphs.layers.documents import document_ids, document_mask
from programs.cases import WIDTH, Table

case = Table()
SCOPED = ("scopes", "callables")
AUDITED = {"audit_every": 2}
# Lengths of documents in each of two rows of eight tokens, step by step.
ROWS = (
    ([8], [8]),
    ([3, 5], [1, 7]),
    ([1] * 8, [8]),
    ([8], [4, 4]),  # row 0 ends with its document, and row 1 begins another one
    ([2, 2, 4], [7, 1]),
    ([8], [8]),
    ([5, 3], [1, 1, 6]),
)


def _rows(first=0):
    """Batches ``[2, 8, WIDTH + 1]``, the last column holds positions.

    Every other document begins at ``first``.
    """

    def batch(generator, i):
        rows = [
            torch.cat([torch.arange(n) + first * (k % 2) for k, n in enumerate(lengths)])
            for lengths in ROWS[i % len(ROWS)]
        ]
        x = torch.randn(2, 8, WIDTH, generator=generator)
        return torch.cat((x, torch.stack(rows)[..., None].float()), -1)

    return batch


def _positions(x):
    return x[..., WIDTH].long()


def _attention(s, x, mask):
    heads = s.l(x)[:, None]
    return functional.scaled_dot_product_attention(heads, heads, heads, mask)[:, 0]


def _outside(m, x):
    mask = document_mask(document_ids(_positions(x)))
    return m.sc(m.pre(x[..., :WIDTH]), mask)


def _inside(m, x):
    return m.sc(m.pre(x[..., :WIDTH]), _positions(x))


def _masked(s, x, positions):
    return _attention(s, x, document_mask(document_ids(positions)))


def _only_where_packed(m, x):
    """The mask is left out for rows of one document each, as in transformers."""
    documents = document_ids(_positions(x))
    mask = document_mask(documents) if documents.any() else None
    return m.sc(m.pre(x[..., :WIDTH]), mask)


def _read(s, x, positions):
    documents = document_ids(positions)
    if not documents.any():
        return _attention(s, x, document_mask(torch.zeros_like(documents)))
    return _attention(s, x, document_mask(documents)) * 2


def _lengths(positions):
    begins = (positions.flatten() == 0).nonzero().flatten()
    return torch.cat((begins, torch.tensor([positions.numel()]))).diff()


def _by_lengths(m, x):
    """The lengths of the documents, whose number differs from step to step."""
    return m.sc(m.pre(x[..., :WIDTH]), _lengths(_positions(x)))


def _by_longest(m, x):
    return m.sc(m.pre(x[..., :WIDTH]), int(_lengths(_positions(x)).max()))


def _two_microbatches(m, x, e):
    for rows in (x, x.roll(1, 1)):
        e.case.loss(m, rows, e).backward()


case("documents whose mask is made outside", _attention, use=_outside, batch=_rows(),
     options=AUDITED)  # fmt: skip
case("documents whose mask is made inside", _masked, use=_inside, batch=_rows(),
     options=AUDITED)  # fmt: skip
case("documents that do not begin at 0", _masked, use=_inside, batch=_rows(7), options=AUDITED)
case("documents in two microbatches", _masked, use=_inside, batch=_rows(), step=_two_microbatches)
case("a mask that only packed rows have", _attention, use=_only_where_packed, batch=_rows())
case("a branch on whether rows are packed", _read, use=_inside, batch=_rows())
case("documents given by their lengths", lambda s, x, lengths: s.l(x) * lengths.max(),
     use=_by_lengths, batch=_rows(), engines=SCOPED)  # fmt: skip
case("the length of the longest document as a number", lambda s, x, longest: s.l(x) * longest,
     use=_by_longest, batch=_rows(), engines=SCOPED)  # fmt: skip
