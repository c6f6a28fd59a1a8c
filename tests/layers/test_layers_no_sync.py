"""Nothing but ``AllToAllDispatcher.dispatch`` may wait for the device or depend on its data.

On the CPU such an operation is visible as an operator: one that reads a scalar, or one whose data
decides the shape of its output. Custom ops hide their host loops (their CUDA side has none); all
other operators are checked here.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moe_graphs.dispatch import AllToAllDispatcher, LocalDispatcher, PaddedDispatcher
from moe_graphs.layers import LanguageModel, MoEConfig, TransformerConfig
from moe_graphs.staged import Stop, run_until

REFUSED = {
    "_local_scalar_dense": "reads a scalar on the host",
    "is_nonzero": "reads a scalar on the host",
    "equal": "reads a comparison on the host",
    "nonzero": "the data decides the shape",
    "nonzero_static": "the data decides the shape on the host",
    "masked_select": "the data decides the shape",
    "repeat_interleave": "the data decides the shape",
    "_unique": "the data decides the shape",
    "_unique2": "the data decides the shape",
    "unique_dim": "the data decides the shape",
    "unique_consecutive": "the data decides the shape",
    "bincount": "reads the maximum on the host",
    "histc": "adds with atomics on CUDA",
    "index_add": "adds with atomics on CUDA",
    "index_add_": "adds with atomics on CUDA",
    "index_reduce_": "adds with atomics on CUDA",
    "index_put": "may add with atomics on CUDA, syncs with masks",
    "index_put_": "may add with atomics on CUDA, syncs with masks",
    "_index_put_impl_": "may add with atomics on CUDA, syncs with masks",
}

MOE = MoEConfig(
    num_experts=8,
    top_k=2,
    ffn_hidden_size=8,
    score_function="sigmoid",
    num_groups=4,
    top_k_groups=2,
    scaling_factor=2.0,
    input_jitter=0.1,
    aux_loss_coef=0.1,
    z_loss_coef=0.1,
    expert_bias=True,
    shared_ffn_hidden_size=8,
    shared_gate=True,
)
CONFIG = TransformerConfig(
    hidden_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    ffn_hidden_size=16,
    vocab_size=11,
    qk_norm="head",
    attention_dropout=0.1,
    hidden_dropout=0.1,
    moe=MOE,
    moe_layers=2,
)


class StaysOnDevice(TorchDispatchMode):
    """Mode that refuses operators which a CUDA graph cannot hold or which are not deterministic."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in REFUSED, f"{func}: {REFUSED[name]}"
        if name in ("index", "index_put_"):
            masks = [i for i in args[1] if i is not None and i.dtype == torch.bool]
            assert not masks, f"{func}: indexed by a mask, the data decides the shape"
        if name in ("scatter_add", "scatter_add_"):
            _check_distinct(*args[1:3])
        return func(*args, **(kwargs or {}))


def _check_distinct(dim: int, index: torch.Tensor) -> None:
    """Check that no element is added to twice: then atomics in any order give the same sum."""
    ordered = index.sort(dim).values
    assert (ordered.diff(dim=dim) > 0).all(), "scatter_add adds twice to one place"


def _model(dispatcher, **changes) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(replace(CONFIG, **changes), dispatcher)


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dispatcher", [LocalDispatcher(), PaddedDispatcher(1.0)], ids=repr)
def test_forward_and_backward(dispatcher, autocast, score_function):
    model = _model(dispatcher, moe=replace(MOE, score_function=score_function))
    tokens = torch.randint(11, (2, 9))
    with StaysOnDevice():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
            output = model(tokens)
        (output.logits_BSV.float().square().mean() + output.aux_loss).backward()
        model.update_expert_bias()


def test_all_to_all_up_to_its_boundary():
    layer = _model(AllToAllDispatcher()).layers[1]
    hidden = torch.randn(2, 9, 16, requires_grad=True)
    with StaysOnDevice():
        _, boundary = run_until(Stop(capturing=True), lambda: layer(hidden))
        (frame,) = boundary.frames
        assert frame.stage == "moe_experts"
        plan = frame.record.prepared.plan
        loss = plan.tokens.sum() + plan.weights_TK.square().sum()
        (loss + frame.record.prepared.aux_loss + frame.record.residual_BSD.sum()).backward()
    assert hidden.grad is not None


def test_all_to_all_dispatch_does_sync():
    """The mode finds this host sync, so the test above can fail."""
    layer = _model(AllToAllDispatcher()).layers[1]
    with StaysOnDevice(), pytest.raises(AssertionError, match="reads a scalar"):
        layer(torch.randn(2, 9, 16))


@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("dispatcher", [LocalDispatcher(), PaddedDispatcher(1.0)], ids=repr)
def test_shapes_do_not_depend_on_the_routing(dispatcher, top_k):
    """Calls with two routings have the same operators and shapes, as a graph needs."""
    model = _model(dispatcher, moe=replace(MOE, top_k=top_k))
    traces = []
    for seed in range(2):
        torch.manual_seed(seed)
        with ShapeTrace() as trace:
            output = model(torch.randint(11, (2, 9)))
            (output.logits_BSV.square().mean() + output.aux_loss).backward()
        model.zero_grad()
        traces.append(trace.calls)
    assert traces[0] == traces[1]


class ShapeTrace(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = result if isinstance(result, tuple | list) else (result,)
        shapes = [(t.shape, t.stride()) for t in tensors if isinstance(t, torch.Tensor)]
        self.calls.append((str(func), *shapes))
        return result
