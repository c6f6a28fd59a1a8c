"""Acceleration leaves what it does not know as it is, and a line says which part it is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moe_graphs import GraphConfig
from moe_graphs.integrations.transformers import accelerate_model, swap_moe_layers

pytest.importorskip("transformers", reason="needs the extra hf")
from hf_families import loss_and_gradients, skip_unknown, tiny, tokens, trained

UNKNOWN = {
    "afmoe": "its router (AfmoeTokenChoiceRouter) has no weight of its own",
    "cohere2_moe": "its router (Cohere2MoeTopKRouter)",
    "deepseek_v4": "its experts are no SwiGLU: a gate of their own",
    "ernie4_5_moe": "its router has moe_statics.e_score_correction_bias besides",
    "gpt_oss": "its experts have biases",
    "hunyuan_v1_moe": "its router (HunYuanMoEV1Gate) has no weight of its own",
    "hy_v4": "its experts are no SwiGLU: a gate of their own",
    "jetmoe": "it has experts, kv_proj, and no router named gate or router",
    "llama4_text": "its experts are none of transformers' interface",
    "minimax_m3_vl_text": "its experts are no SwiGLU: a gate of their own",
    "nemotron_h": "its experts are no SwiGLU: ReLUSquaredActivation",
    "phimoe": "router_jitter_noise is not zero",
}


@pytest.mark.parametrize("family", UNKNOWN)
def test_a_line_says_which_part_of_a_block_is_unknown(family):
    skip_unknown(family)
    (change,) = swap_moe_layers(tiny(family, None)).changes
    assert not change.done
    assert UNKNOWN[family] in change.note
    converts = family in ("cohere2_moe", "ernie4_5_moe", "phimoe")
    assert ("MoELayer.from_experts(block.experts, block." in change.note) == converts
    assert ("without the shared expert" in change.note) == (family == "ernie4_5_moe")


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = nn.Linear(64, 32, bias=False), nn.Linear(64, 32, bias=False)
        self.w2 = nn.Linear(32, 64, bias=False)


class Block(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.gate = nn.Linear(64, 4, bias=bias)
        self.experts = nn.ModuleList(Expert() for _ in range(4))


@pytest.mark.parametrize("bias", [False, True])
def test_the_conversion_of_a_block_of_ones_own_is_named(bias):
    model = tiny("llama", None)
    model.model.layers[0].mlp = Block(bias)
    (change,) = swap_moe_layers(model).changes
    part = "its router has bias besides" if bias else "its experts are none of transformers'"
    assert "Block" in change.what
    assert part in change.note or bias
    assert "MoELayer.from_experts(block.experts, block.gate, top_k=...)" in change.note


@pytest.mark.parametrize("family", ["jetmoe", "opt"])
def test_layers_that_no_graph_can_hold_stay_eager_from_the_start(family):
    """OPT's decoder made a cache of its own, and ended in a CaptureError as JetMoE did."""
    skip_unknown(family)
    model = tiny(family, None)
    accelerated = accelerate_model(model)
    trained(model, accelerated.step)
    report = accelerated.graphs.report()
    if family == "opt":
        assert report.replayed > 0
        return
    (line, none) = (change for change in accelerated.changes if change.part == "graphs")
    assert line.count == 2
    assert "JetMoeTopKGating.forward reads values on the host (tolist)" in line.note
    assert not line.done
    assert not none.done
    assert report.state == "off"
    assert "tolist" in report.off_because


def test_layers_beside_them_are_graphed():
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    class Reading(modeling_qwen3_moe.Qwen3MoeDecoderLayer):
        def forward(self, hidden_states, *args, **kwargs):
            if hidden_states.sum().item() > 1e9:
                raise OverflowError
            return super().forward(hidden_states, *args, **kwargs)

    runs = []
    for graphs in (False, True):
        model = tiny("qwen3_moe", "grouped_mm")
        model.model.layers[1].__class__ = Reading
        accelerated = accelerate_model(model, graphs=graphs)
        runs.append(trained(model, accelerated.step))
    assert all(map(torch.equal, *runs))
    (left, done) = (change for change in accelerated.changes if change.part == "graphs")
    assert "Reading.forward reads values on the host (item)" in left.note
    assert (left.count, done.count) == (1, 1)
    assert done.what == "model.layers.0"
    assert accelerated.graphs.report().matched == 2


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_experts_that_read_sizes_on_the_host_are_seen(implementation):
    """Experts of transformers loop where they are "eager"; the others do not."""
    model = tiny("gpt_oss", implementation)
    accelerated = accelerate_model(model, experts=False)
    assert ("nonzero" in str(accelerated)) == (implementation == "eager")
    before = {name: value.clone() for name, value in loss_and_gradients(model, tokens()).items()}
    accelerated.undo()
    assert before.keys() == loss_and_gradients(model, tokens()).keys()


def test_scopes_that_are_asked_for_are_taken():
    skip_unknown("jetmoe")
    accelerated = accelerate_model(tiny("jetmoe", None), graphs=GraphConfig("model.layers.*"))
    assert accelerated.graphs.report().state != "off"
