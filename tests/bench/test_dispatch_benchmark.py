"""The benchmark of dispatchers: its lines, and that a wrong result does not pass its gate."""

from __future__ import annotations

import json
from unittest import mock

import pytest
import torch

import dispatch
from distributed import run_distributed


def _smoke(rank: int, world_size: int, out: str) -> None:
    dispatch.main(["--smoke", "--rounds", "1", "--commit", "c", "--out", out])
    both = dispatch.Inputs.both

    def wrong(self, dispatcher):
        found = both(self, dispatcher)
        return [found[0] + (dispatcher.name == "symmetric" and rank == 1), *found[1:]]

    with mock.patch.object(dispatch.Inputs, "both", wrong):
        assert not dispatch.gate(dispatch.Inputs(dispatch.Case(8, 16, 2), torch.device("cpu")))


@pytest.mark.long
def test_a_line_of_layers_and_one_of_kernels(tmp_path):
    out = tmp_path / "lines.jsonl"
    run_distributed(_smoke, 2, arguments=(str(out),))
    layers, kernels = map(json.loads, out.read_text().splitlines())
    names = {"all_to_all", "all_gather", "symmetric", "all_gather 1.25", "symmetric 1.25"}
    assert (layers["kind"], layers["ranks"], layers["bitwise"]) == ("layer", 2, True)
    assert set(layers["forward_ms"]) == set(layers["both_ms"]) == names
    assert min(*layers["forward_ms"].values(), *layers["both_ms"].values()) > 0
    rates = {f"{name} by {n}" for name in ("push", "pull") for n in dispatch.PROGRAMS}
    assert set(kernels["gb_per_s"]) == {*rates, "peer copy", "nccl all_to_all"}
    assert 0 < kernels["bytes"] <= 8 * 16 * 2
    assert kernels["environment"]["commit"] == "c"
