"""Accelerated models are copied and pickled whole: ``deepcopy``, ``torch.save(model)``."""

from __future__ import annotations

import copy
import io

import pytest
import torch

from moe_graphs.integrations.transformers import accelerate_model

pytest.importorskip("transformers", reason="needs the extra hf")
from grids import by_turns
from hf_families import implementation_of, loss_and_gradients, tiny, tokens

OPTIONS = {"graphs": {}, "no graphs": {"graphs": False}, "whole steps": {"whole_steps": True}}


def pickled(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def with_lora(model):
    peft = pytest.importorskip("peft", reason="needs the extra peft")
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))


def step(model, accelerated):
    with accelerated.step():
        model(tokens(), labels=tokens()).loss.backward()
    model.zero_grad()


@pytest.mark.parametrize(
    ("copied", "options", "family", "lora"),
    by_turns(
        [copy.deepcopy, pickled], list(OPTIONS), ["qwen3_moe", "llama"], ["none", "first", "second"]
    ),
)
def test_a_copy_computes_the_same_bit_for_bit(copied, options, family, lora):
    model = tiny(family, implementation_of(family))
    model = with_lora(model) if lora == "first" else model
    accelerated = accelerate_model(model, **OPTIONS[options])
    model = with_lora(model) if lora == "second" else model
    for _ in range(5 if options == "graphs" else 1):
        step(model, accelerated)
    other = copied(model)
    expected = {name: value.clone() for name, value in loss_and_gradients(model, tokens()).items()}
    found = loss_and_gradients(other, tokens())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert not {id(p) for p in model.parameters()} & {id(p) for p in other.parameters()}


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_of_a_model_for_whole_steps_collects_outputs(copied):
    model = tiny("qwen3_moe", "grouped_mm")
    accelerate_model(model, whole_steps=True)
    other = copied(model)
    expected, found = (each(tokens(), output_router_logits=True) for each in (model, other))
    assert len(found.router_logits) == len(expected.router_logits) == 2
    assert all(map(torch.equal, found.router_logits, expected.router_logits))


def test_a_pickle_names_classes_that_everybody_can_import():
    model = tiny("qwen3_moe", "grouped_mm")
    accelerated = accelerate_model(model)
    loaded = pickled(model)
    assert type(loaded.model.layers[0]).__mro__[-1] is object
    assert type(loaded.model) is not type(model).__mro__[1]
    accelerated.undo()
    assert pickled(model).state_dict().keys() == loaded.state_dict().keys()
