"""Every kernel but the GEMMs, compiled for an H200 without one: no spills, no atomics, wide loads.

Fixture and checks are those of `test_compiled_kernels.py`.
"""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton")

from compiled import check, launch_compiler
from grids import by_turns, few, grid, longer
from moe_graphs import kernels
from moe_graphs.kernels import fp8
from moe_graphs.kernels.adamw import triton_kernels as adamw_triton
from moe_graphs.kernels.choose_experts import triton_kernels as choose_experts_triton
from moe_graphs.kernels.cross_entropy import triton_kernels as cross_entropy_triton
from moe_graphs.kernels.fp8 import triton_kernels as fp8_triton
from moe_graphs.kernels.heads import triton_kernels as heads_triton
from moe_graphs.kernels.permute import triton_kernels as permute_triton
from moe_graphs.kernels.rms_norm import triton_kernels as rms_norm_triton
from moe_graphs.kernels.rotary.triton_kernels import turn_heads
from moe_graphs.kernels.routed_experts import triton_kernels as routed_triton
from moe_graphs.kernels.row_order import triton_kernels as row_order_triton
from moe_graphs.kernels.swiglu import triton_kernels as swiglu_triton

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture
def compiled(monkeypatch):
    return launch_compiler(monkeypatch)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_elementwise(compiled, dtype):
    inverse, weights = torch.zeros(64, 8, dtype=torch.int64), torch.zeros(64, 8)
    hidden, rows = torch.empty(64, 2880, dtype=dtype), torch.empty(512, 2880, dtype=dtype)

    def launches():
        for given in (weights, None):
            permute_triton.spread_rows(hidden, inverse, given, 512, False)
            permute_triton.collect_rows(rows, inverse, given)
        permute_triton.dot_rows(rows, inverse, hidden)
        for limit, turns in ((0.0, False), (7.0, True), (7.0, False)):
            swiglu_triton.swiglu_forward(rows, 1.7, limit, 1.0, turns)
        for with_result in (True, False):
            swiglu_triton.swiglu_backward(rows, rows[:, :1440], with_result)

    found = compiled(launches)
    assert len(found) == 10
    for kernel in found:
        check(kernel, wgmma=False)
        assert "atom" not in kernel.ptx


@pytest.mark.parametrize(
    ("experts", "top_k", "groups", "top_groups", "sigmoid", "biased", "coef"),
    few(
        grid(
            [
                (512, 32, 1, 1),
                (100, 3, 4, 2),
            ],
            [False, True],
            [(True, 0.01), (False, 0.0)],
        )
    )
    + longer(
        grid(
            [(128, 8, 1, 1), (8, 2, 1, 1), (256, 8, 8, 4), (512, 8, 8, 4)],
            [False, True],
            [(True, 0.01), (False, 0.0)],
        )
    ),
)
def test_router(compiled, experts, top_k, groups, top_groups, sigmoid, biased, coef):
    logits, weights = torch.empty(64, experts), torch.empty(64, top_k)
    ranks = torch.zeros(64, experts, dtype=torch.int8)
    counts = torch.zeros(experts, dtype=torch.int64)
    bias, loss = torch.empty(experts) if biased else None, torch.zeros(())
    rule = kernels.RoutingRule(top_k, sigmoid, True, 2.5, groups, top_groups, coef, coef)

    def launches():
        choose_experts_triton.choose_experts(logits, bias, *rule)
        for split in (False, True):
            choose_experts_triton.choose_experts_backward(
                logits, ranks, counts, weights, loss, split, *rule[:4], coef, coef
            )

    found = compiled(launches)
    assert len(found) == 4
    for kernel in found:
        check(kernel, wgmma=False)
        assert "atom" not in kernel.ptx


@pytest.mark.parametrize(("vocabulary", "dtype"), by_turns([256, 50257, 151936], [BF16, FP32]))
def test_cross_entropy(compiled, vocabulary, dtype):
    logits = torch.empty(4, vocabulary, dtype=dtype)
    targets = torch.zeros(4, dtype=torch.int64)

    def launches():
        losses, logsumexp = cross_entropy_triton.cross_entropy_rows(logits, targets, -100)
        mean, count = cross_entropy_triton.mean_of_counted(losses, targets, -100)
        for divisor in (count, None):
            cross_entropy_triton.cross_entropy_backward(
                logits, targets, logsumexp, mean, divisor, -100
            )
        cross_entropy_triton.cross_entropy_backward(
            logits, targets, logsumexp, losses, None, -100, part=True
        )
        cross_entropy_triton.scaled(logits, mean, BF16)
        for rule in (kernels.LossRule(z_loss=1e-4), kernels.LossRule(logit_cap=30.0)):
            numbers = rule.numbers(vocabulary)
            cross_entropy_triton.cross_entropy_rows_by_rule(logits, targets, -100, numbers)
            cross_entropy_triton.cross_entropy_backward(
                logits, targets, logsumexp, mean, None, -100, part=True, rule=numbers
            )

    found = compiled(launches)
    assert len(found) == 10
    for kernel in found:
        check(kernel, wgmma=False)
        assert "atom" not in kernel.ptx
    if vocabulary % 8 == 0:
        for kernel in (found[0], found[2]):
            assert "ld.global.v4.b32" in kernel.ptx, kernel.name


@pytest.mark.parametrize(
    ("norm", "heads", "kv_heads", "size", "dtype"),
    few(grid(["none", "head", "full"], [(32, 4, 128), (12, 12, 64), (6, 2, 96)], [BF16, FP32])),
)
def test_heads(compiled, norm, heads, kv_heads, size, dtype):
    qkv = torch.empty(2, 64, (heads + 2 * kv_heads) * size, dtype=dtype)
    table = torch.empty(64, size // 2)
    weights = (None, None)
    if norm != "none":
        spans = (1, 1) if norm == "head" else (heads, kv_heads)
        weights = tuple(torch.empty(span * size) for span in spans)
    gradients = [torch.empty(2, n, 64, size, dtype=dtype) for n in (heads, kv_heads, kv_heads)]
    gradients = [dy.transpose(1, 2) for dy in gradients]

    def launches():
        heads_triton.heads_forward(qkv, table, table, *weights, heads, kv_heads, 1e-5)
        for wanted in {norm != "none", False}:
            heads_triton.heads_backward(*gradients, qkv, table, table, *weights, 1e-5, wanted)
        counts = (heads, kv_heads)
        sent = heads_triton.heads_by_rank_forward(qkv, table, table, *weights, *counts, 2, 1e-5)
        given = (sent, None if norm == "none" else qkv, table, table, *weights, *counts, 1e-5)
        heads_triton.heads_by_rank_backward(*given, norm != "none")

    found = compiled(launches)
    assert len(found) == (4 if norm == "none" else 7)
    for kernel in found:
        check(kernel, wgmma=False)
        assert "atom" not in kernel.ptx


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "columns", "dtype"),
    [(32, 4, 128, 128, BF16), (12, 12, 96, 48, FP32)],
)
def test_rotary(compiled, heads, kv_heads, size, columns, dtype):
    query, key = (torch.empty(2, 64, n, size, dtype=dtype) for n in (heads, kv_heads))
    table = torch.empty(1, 64, columns, dtype=dtype)

    def launches():
        for back in (False, True):
            turn_heads(query.transpose(1, 2), key.transpose(1, 2), table, table, back)

    found = compiled(launches)
    assert len(found) == 2
    for kernel in found:
        check(kernel, wgmma=False)


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        *by_turns([77, 2880, 8192], [BF16, FP32]),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in itertools.product([64, 128, 2048, 4096, 7168], [BF16, FP32])
        ),
    ],
)
def test_rms_norm(compiled, size, dtype):
    x = torch.empty(64, size, dtype=dtype)
    for weight_dtype in {dtype, FP32}:
        weight = torch.empty(size, dtype=weight_dtype)

        def launches(weight=weight):
            rms_norm_triton.rms_norm_forward(x, weight, 1e-6, True)
            for wanted in (True, False):
                rms_norm_triton.rms_norm_backward(x, x, weight, 1e-6, True, wanted)

        forward, backward, sums, without_sums = compiled(launches)
        for kernel in (forward, backward, sums, without_sums):
            check(kernel, wgmma=False)
            assert "atom" not in kernel.ptx
        if size % 16 == 0:  # 16 bytes at a time, the backward's copied ahead
            assert "ld.global.v4.b32" in forward.ptx
            assert "cp.async.cg.shared.global [ %r" in backward.ptx
        # No row changes its layout in the loop.
        loop = backward.ttgir.split("scf.for")[1].split("scf.yield")[0]
        assert "convert_layout" not in loop


@pytest.mark.parametrize(
    ("size", "dtype", "update_dtype", "weight_dtype"),
    by_turns([77, 8192], [(FP32, BF16, FP32), (BF16, BF16, BF16)])
    + longer(
        by_turns(
            [77, 2048, 4096, 8192],
            [(FP32, FP32, FP32), (BF16, BF16, BF16), (BF16, BF16, FP32), (FP32, BF16, FP32)],
        )
    ),
)
def test_add_rms_norm(compiled, size, dtype, update_dtype, weight_dtype):
    x, update = torch.empty(64, size, dtype=dtype), torch.empty(64, size, dtype=update_dtype)
    weight = torch.empty(size, dtype=weight_dtype)

    def launches():
        rms_norm_triton.add_rms_norm_forward(x, update, weight, 1e-6, False)
        for wanted in (True, False):
            rms_norm_triton.rms_norm_backward(x, x, weight, 1e-6, False, wanted, x)

    found = forward, backward, _, _ = compiled(launches)
    for kernel in found:
        check(kernel, wgmma=False)
        assert "atom" not in kernel.ptx
    if size % 16 == 0 and dtype == BF16:
        assert forward.ptx.count("ld.global.v4.b32") >= 2
        assert "cp.async.cg.shared.global [ %r" in backward.ptx


def test_another_number_of_tokens_needs_no_other_kernel(compiled):
    """Lengths that change compile nothing: Triton makes kernels of their own for 1 and for 16 n."""
    E, K, D, F, H = 32, 4, 128, 64, 32

    def launches(T):
        rule = kernels.RoutingRule(K, False, True, 1.0, 1, 1, 0.01, 0.0)
        logits, weights, chosen = torch.empty(T, E), torch.empty(T, K), torch.zeros(T, K).long()
        choose_experts_triton.choose_experts(logits, None, *rule)
        ranks, counts = torch.zeros(T, E, dtype=torch.int8), torch.zeros(E, dtype=torch.int64)
        given = logits, ranks, counts, weights, torch.zeros(()), False, *rule[:4], 0.01, 0.0
        choose_experts_triton.choose_experts_backward(*given)
        row_order_triton.sort_pairs(chosen, E)
        x, weight = torch.empty(T, D, dtype=BF16), torch.empty(D, dtype=BF16)
        rms_norm_triton.rms_norm_forward(x, weight, 1e-6, False)
        rms_norm_triton.add_rms_norm_forward(x, x, weight, 1e-6, False)
        rms_norm_triton.rms_norm_backward(x, x, weight, 1e-6, False, True)
        gate_up, grad = torch.empty(T * K, 2 * F, dtype=BF16), torch.empty(T * K, F, dtype=BF16)
        swiglu_triton.swiglu_forward(gate_up, 1.0, 0.0, 0.0, False)
        swiglu_triton.swiglu_backward(gate_up, grad, True)
        order, gate = chosen.view(-1), (1.0, 0.0, 0.0, False)
        routed_triton.weighted_swiglu(gate_up, weights, order, *gate)
        given = gate_up, grad, weights, order, gate_up, False, True, *gate
        routed_triton.weighted_swiglu_backward(*given)
        inverse, codes = chosen.int(), torch.empty(T, D, dtype=torch.float8_e4m3fn)
        fp8_triton.fp8_quantize(x, True)
        fp8_triton.fp8_spread(x, inverse, T * K, False, False, True)
        gate_up, grad = torch.empty(T * K, 256, dtype=BF16), torch.empty(T * K, 128, dtype=BF16)
        fp8_triton.fp8_swiglu(gate_up, True)
        for result in ("none", "codes"):
            given = gate_up, grad, weights, order.int(), False, result, True
            fp8_triton.fp8_weighted_swiglu_backward(*given)
        given = codes, torch.empty(1, T), order.int(), torch.zeros(E, dtype=torch.int32), T * K, K
        fp8_triton.columns(*given, True, fp8._columns_like(codes, given[1], given[3], T * K, True))
        qkv, table = torch.empty(1, T, 4 * H, dtype=BF16), torch.empty(T, H // 2)
        heads_triton.heads_forward(qkv, table, table, None, None, 2, 1, 1e-5)
        given = [torch.empty(1, n, T, H, dtype=BF16).transpose(1, 2) for n in (2, 1, 1)]
        heads_triton.heads_backward(*given, qkv, table, table, None, None, 1e-5, False)
        query, key, _ = (each.transpose(1, 2) for each in given)
        turn_heads(query, key, *[torch.empty(1, T, H, dtype=BF16)] * 2, False)

    many, odd, one = (
        [(each.name, each.number) for each in compiled(lambda T=T: launches(T))]
        for T in (64, 63, 1)
    )
    assert len(many) == 24
    assert odd == many
    assert one == many


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize(("dtype", "of_gradients"), [(BF16, BF16), (BF16, FP32), (FP32, FP32)])
def test_adamw(compiled, dtype, of_gradients, in_memory):
    p, m, v = (torch.empty(1 << 16, dtype=dtype) for _ in range(3))
    g, step = torch.empty(1 << 16, dtype=of_gradients), torch.ones(())
    given = (0.1, step) if in_memory else (0.1, None)
    options = (0.9, 0.999, 1e-8, 0.01, False, *(given[1:] * 2), None)

    def launches():
        rest = (*options, [], 0.0, [], [], [], False)
        adamw_triton.adamw_update([p], [g], [m], [v], [step], *given, *rest)

    table, coefficients, update = compiled(launches)
    for kernel in (table, coefficients, update):
        check(kernel, wgmma=False)
    assert "f64" in coefficients.ptx
    assert "f64" not in update.ptx
    written = 4 if in_memory else 3  # the unscaled gradients, too
    assert update.ptx.count("ld.global.v4.b32") == 3 * dtype.itemsize // 2 + g.itemsize // 2
    assert update.ptx.count("st.global.v4.b32") >= written


@pytest.mark.parametrize(("dtype", "rounded"), [(BF16, True), (FP32, False)])
def test_adamw_with_states_of_8_bits(compiled, dtype, rounded):
    """Codes and random numbers lie as the numbers do, and a word serves parameter and both states.

    A block's largest number is found without shared memory, through which only scales and
    parameters pass.
    """
    p, g = (torch.empty(1 << 16, dtype=dtype) for _ in range(2))
    m, v = (torch.empty(1 << 16, dtype=torch.uint8) for _ in range(2))
    scales = [[torch.empty(1 << 10, dtype=torch.uint8)] for _ in range(2)]
    options = (0.1, None, 0.9, 0.999, 1e-8, 0.01, False, None, None, None, [], 0.0, [1 << 62])

    def launches():
        step = [torch.ones(())]
        adamw_triton.adamw_update([p], [g], [m], [v], step, *options, *scales, rounded)

    *_, update = compiled(launches)
    check(update, wgmma=False)
    assert "f64" not in update.ptx
    assert update.shared <= 4096
    # A thread has 16 numbers; the codes of a state are one access.
    assert update.ptx.count("ld.global.v4.b32") == 2 * dtype.itemsize + 2
    assert update.ptx.count("st.global.v4.b32") == dtype.itemsize + 2
    assert update.ptx.count("global.b8") == 4
    assert update.ptx.count("mul.hi.u32") <= 40


@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.parametrize(("dtype", "states"), [(BF16, FP32), (BF16, BF16), (FP32, BF16)])
def test_adamw_rounding_stochastically(compiled, dtype, states, averaged):
    """Words of random numbers lie as the numbers do: wide accesses, and little shared memory."""
    p, g = (torch.empty(1 << 16, dtype=dtype) for _ in range(2))
    m, v = (torch.empty(1 << 16, dtype=states) for _ in range(2))
    emas = [torch.empty(1 << 16)] if averaged else []
    options = (0.1, None, 0.9, 0.999, 1e-8, 0.01, False, None, None, None, emas, 0.99, [1 << 62])
    options += ([], [], True)

    def launches():
        adamw_triton.adamw_update([p], [g], [m], [v], [torch.ones(())], *options)

    *_, update = compiled(launches)
    check(update, wgmma=False)
    assert "f64" not in update.ptx
    assert update.shared <= 4096
    assert update.ptx.count("ld.global.v4.b32") >= 4 + averaged
    assert update.ptx.count("st.global.v4.b32") >= 3 + averaged
    # 10 rounds of two products with 64 bits, each counter for four of a thread's eight numbers.
    assert update.ptx.count("mul.hi.u32") <= (80 if states == BF16 else 40)
