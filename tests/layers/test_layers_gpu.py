"""The CUDA side of ops, layers and dispatchers, against the CPU side and in CUDA graphs.

Run with: pytest -m "gpu or multigpu".
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from distributed import run_distributed
from moe_graphs.dispatch import AllToAllDispatcher, LocalDispatcher, PaddedDispatcher
from moe_graphs.kernels import grouped_gemm, permute, route_rows, swiglu, unpermute
from moe_graphs.layers import LanguageModel, MoEConfig, MoELayer, TransformerConfig

MOE = MoEConfig(
    num_experts=16,
    top_k=4,
    ffn_hidden_size=64,
    score_function="sigmoid",
    num_groups=4,
    top_k_groups=2,
    aux_loss_coef=0.01,
    z_loss_coef=0.01,
    expert_bias=True,
    shared_ffn_hidden_size=32,
    shared_gate=True,
)
CONFIG = TransformerConfig(
    hidden_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    ffn_hidden_size=256,
    vocab_size=97,
    qk_norm="head",
    moe=MOE,
    moe_layers=2,
)
COUNTS = {
    "even": (32, 32, 32, 32),
    "odd": (1, 127, 3, 66),
    "empty": (0, 70, 0, 0),
    "one-row": (0, 0, 0, 1),
    "none": (0, 0, 0, 0),
}


def _bf16(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").bfloat16().requires_grad_()


def _relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double().cpu() - want.double().cpu()).norm() / want.double().norm()).item()


@pytest.mark.gpu
class TestOps:
    @pytest.mark.parametrize("tail", [0, 5])
    @pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
    def test_grouped_gemm_equals_the_reference(self, counts, tail):
        rows = sum(counts)
        x, w = _bf16(rows + tail, 64), _bf16(4, 64, 48)
        offsets = torch.tensor(counts, device="cuda").cumsum(0).to(torch.int32)
        grad = torch.randn(rows + tail, 48, device="cuda").bfloat16()
        with torch.no_grad():
            x[rows:], grad[rows:] = float("nan"), float("nan")
        got = grouped_gemm(x, w, offsets)
        got_grads = torch.autograd.grad(got, (x, w), grad)
        x64, w64 = (t.detach().cpu().double().requires_grad_() for t in (x, w))
        want = grouped_gemm(x64, w64, offsets.cpu())
        want_grads = torch.autograd.grad(want, (x64, w64), grad.cpu().double())
        for actual, expected in zip((got, *got_grads), (want, *want_grads), strict=True):
            assert actual.isfinite().all()
            torch.testing.assert_close(
                actual.double().cpu(), expected, rtol=2**-7, atol=2**-7 * max(rows, 64) ** 0.5
            )
        assert got[rows:].eq(0).all()
        assert got_grads[0][rows:].eq(0).all()
        empty = [expert for expert, count in enumerate(counts) if count == 0]
        assert got_grads[1][empty].eq(0).all()

    def test_grouped_gemm_refuses_what_it_cannot_do(self):
        offsets = torch.tensor([2, 4], device="cuda", dtype=torch.int32)
        x, w = torch.randn(4, 16, device="cuda"), torch.randn(2, 16, 8, device="cuda")
        accepted = "takes bfloat16 or float16 or float32, got torch.float64"
        with pytest.raises(ValueError, match=rf"{accepted}.*autocast"):
            grouped_gemm(x.double(), w.double(), offsets)
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            assert grouped_gemm(x, w, offsets).dtype == torch.bfloat16
        with pytest.raises(ValueError, match="multiples of 8"):
            grouped_gemm(_bf16(4, 16), _bf16(2, 16, 7), offsets)

    def test_moves_equal_the_cpu(self):
        experts = torch.rand(50, 9).topk(4).indices
        order, order_cuda = route_rows(experts, 9), route_rows(experts.cuda(), 9)
        assert torch.equal(order.order_R, order_cuda.order_R.cpu())
        assert torch.equal(order.inverse_R, order_cuda.inverse_R.cpu())
        assert torch.equal(order.offsets_E, order_cuda.offsets_E.cpu())
        hidden, weights = _bf16(50, 32), torch.rand(50, 4, device="cuda", requires_grad=True)
        host = [t.detach().cpu().requires_grad_() for t in (hidden, weights)]
        results = []
        for x, w, where in ((hidden, weights, order_cuda), (*host, order)):
            out = unpermute(swiglu(permute(x, where)), where, w)
            grads = torch.autograd.grad(out.float().square().sum(), (x, w))
            results.append((out, *grads))
        for actual, expected in zip(*results, strict=True):
            assert _relative_error(actual, expected) < 5e-3


@pytest.mark.gpu
@pytest.mark.parametrize("dispatcher", [LocalDispatcher(), PaddedDispatcher(1.0)], ids=repr)
class TestLayer:
    def test_equals_fp64_on_the_cpu(self, dispatcher):
        layer = MoELayer(MOE, 128, dispatcher, device="cuda", dtype=torch.bfloat16)
        exact = MoELayer(MOE, 128, dispatcher, dtype=torch.float64)
        exact.load_state_dict(layer.state_dict())
        hidden = torch.randn(300, 128).bfloat16()
        got, want = layer(hidden.cuda()), exact(hidden.double())
        assert _relative_error(got.hidden, want.hidden) < 0.02
        assert got.dropped_tokens.item() == want.dropped_tokens.item()

    def test_two_runs_are_the_same_bits(self, dispatcher):
        layer = MoELayer(MOE, 128, dispatcher, device="cuda", dtype=torch.bfloat16)
        hidden = _bf16(4096, 128)
        grad = torch.randn_like(hidden)
        runs = [_gradients(layer, hidden, grad) for _ in range(3)]
        assert all(map(torch.equal, runs[0], runs[1]))
        assert all(map(torch.equal, runs[0], runs[2]))

    def test_nothing_syncs(self, dispatcher):
        model = LanguageModel(CONFIG, dispatcher, device="cuda")
        tokens = torch.randint(97, (2, 64), device="cuda")
        for mode in ("default", "error"):
            torch.cuda.set_sync_debug_mode(mode)
            try:
                with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
                    output = model(tokens)
                (output.logits_BSV.float().square().mean() + output.aux_loss).backward()
                model.update_expert_bias()
            finally:
                torch.cuda.set_sync_debug_mode("default")

    def test_a_graph_of_the_whole_layer_replays_other_routings(self, dispatcher):
        layer = MoELayer(MOE, 128, dispatcher, device="cuda", dtype=torch.bfloat16)
        hidden, grad = _bf16(512, 128), torch.randn(512, 128, device="cuda").bfloat16()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                _gradients(layer, hidden, grad)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            static = _gradients(layer, hidden, grad)
        for _ in range(5):
            with torch.no_grad():
                hidden.normal_()
            graph.replay()
            replayed = [tensor.clone() for tensor in static]
            assert all(map(torch.equal, replayed, _gradients(layer, hidden, grad)))


def _gradients(layer: MoELayer, hidden: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    output = layer(hidden)
    loss = (output.hidden * grad).float().sum() + output.aux_loss
    leaves = (hidden, *layer.parameters())
    return [output.hidden.detach(), loss.detach(), *torch.autograd.grad(loss, leaves)]


def _two_ranks(rank: int, world_size: int) -> None:
    for bias in ([0.0] * 16, [-9.0] * 8 + [0.0] * 8):
        layers = []
        for dispatcher in (AllToAllDispatcher(), LocalDispatcher()):
            torch.manual_seed(5)
            config = replace(MOE, num_groups=None, top_k_groups=None)
            layer = MoELayer(config, 128, dispatcher, device="cuda", dtype=torch.bfloat16)
            layer.router.expert_bias.copy_(torch.tensor(bias))
            layers.append(layer)
        parallel, whole = layers
        torch.manual_seed(rank)
        hidden = _bf16(300 + 40 * rank, 128)
        grad = torch.randn_like(hidden)
        got, want = (_gradients(layer, hidden, grad) for layer in layers)
        assert _relative_error(got[0], want[0].cpu()) < 0.01
        assert _relative_error(got[2], want[2].cpu()) < 0.01
        local = parallel.dispatcher.local_experts(16)
        for (name, _), actual, expected in zip(
            whole.named_parameters(), got[3:], want[3:], strict=True
        ):
            expected = expected.float()
            dist.all_reduce(expected)
            if name.startswith("experts."):
                expected, actual = expected[local.start : local.stop], actual.float()
            else:
                actual = actual.float()
                dist.all_reduce(actual)
            error = (actual - expected).norm()
            assert error <= 0.02 * expected.norm(), f"{name}: {error}"


@pytest.mark.multigpu
def test_two_nccl_ranks_equal_one():
    run_distributed(_two_ranks, 2, "nccl")
