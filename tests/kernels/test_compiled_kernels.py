"""Every kernel variant, compiled for an H200 without one: registers, WGMMA, and what loops carry.

Two silent miscompiles of Triton 3.6 (also in 3.7.1) hit software-pipelined scheduling code, one of
them as a deadlock. They are reproduced here, and the loops of our kernels are checked for them.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

triton = pytest.importorskip("triton")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from triton.experimental import gluon  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from compiled import SHARED_LIMIT, Compiled, check, launch_compiler  # noqa: E402
from grids import few, grid  # noqa: E402
from moe_graphs import kernels  # noqa: E402
from moe_graphs.kernels.gemm import launch as gemm  # noqa: E402
from moe_graphs.kernels.gemm import sm90_common, sm90_lora, tile_scheduler  # noqa: E402
from moe_graphs.kernels.heads import triton_kernels as heads_triton  # noqa: E402
from moe_graphs.kernels.rms_norm import triton_kernels as rms_norm_triton  # noqa: E402
from moe_graphs.kernels.row_order import triton_kernels as row_order_triton  # noqa: E402

VARIANTS = ("cooperative", "pingpong", "tma", "pointer")
CPU = torch.device("cpu")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# Values carried by the loops, per partition, tile loop first. Records are loaded one tile ahead, so
# they are carried; a missing one is a miscompile.
#   rows consumer: slot, phase (ping-pong: passed), first, tiles_m, start, end | K loops:
#   slot, phase (of a half without rows); slot, phase, acc.   producer: slot, phase, e, first,
#   tiles_m, start, end | slot, phase
ROWS_CARRY = {"cooperative": [6, 2, 3] * 2 + [7, 2], "pingpong": [5, 3] * 2 + [7, 2]}
#   weights consumer: slot, phase (ping-pong: passed), e, start, end, and if it is used part | slot,
#   phase, acc.   producer: slot, phase, start, end, and if it zeros a chunk and its expert | slot,
#   phase, chunk, expert | the chunks that are left
WEIGHTS_CARRY = {"cooperative": 5, "pingpong": 4}


@pytest.fixture
def compiled(monkeypatch):
    return launch_compiler(monkeypatch)


def work(words: int) -> tile_scheduler.WorkList:
    records = torch.zeros(64, words, dtype=torch.int32)
    return tile_scheduler.WorkList(records, torch.zeros(4, dtype=torch.int32), records)


@pytest.mark.parametrize(
    ("name", "transposed", "columns", "dtype"),
    few(
        grid(
            [*VARIANTS, "cooperative, cut along K"],
            [False, True],
            [(1024, BF16), (1024, FP16), (384, BF16)],
        )
    ),
)
def test_rows(compiled, name, transposed, columns, dtype):
    name, _, cut = name.partition(", ")
    x, out = torch.empty(4096, 512, dtype=dtype), torch.empty(4096, columns, dtype=dtype)
    w = torch.empty((8, columns, 512) if transposed else (8, 512, columns), dtype=dtype)
    variant = gemm.row_variant(name, columns)
    partials = torch.empty(132, variant.block_m, variant.block_n) if cut else None
    launch = gemm.kernels_of(variant, CPU).rows_launch(
        variant, x, w, out, work(8), transposed, 132, partials
    )
    (kernel,) = compiled(launch.run, arch=80 if name == "pointer" else 90)
    check(kernel, wgmma=name != "pointer")
    if name in ROWS_CARRY:
        assert kernel.carried == ROWS_CARRY[name]
    if name == "tma":  # flattened: one loop over all K steps of all tiles, with the next's state
        assert max(kernel.carried) > 10


@pytest.mark.parametrize(
    ("name", "transposed", "columns", "rank"),
    few(
        grid(
            ["cooperative", "pingpong", "pointer", "cooperative, cut along K"],
            [False, True],
            [1024, 384],
            [8, 24, 64, 72, 128],
        )
    ),
)
def test_rows_with_a_product_beside(compiled, name, transposed, columns, rank):
    """The producer loads other operands behind K, of which the last step multiplies a part."""
    name, _, cut = name.partition(", ")
    x, out = torch.empty(4096, 512, dtype=BF16), torch.empty(4096, columns, dtype=BF16)
    low = torch.empty(4096, rank, dtype=BF16)
    w, b = (
        torch.empty((8, columns, k) if transposed else (8, k, columns), dtype=BF16)
        for k in (512, rank)
    )
    variant = gemm.row_variant(name, columns)
    partials = torch.empty(132, variant.block_m, variant.block_n) if cut else None
    launch = gemm.kernels_of(variant, CPU).rows_launch(
        variant, x, w, out, work(8), transposed, 132, partials, (low, b)
    )
    (kernel,) = compiled(launch.run, arch=80 if name == "pointer" else 90)
    check(kernel, wgmma=name != "pointer")
    if name in ROWS_CARRY:
        last = {8: 16, 24: 32, 72: 16}.get(rank, 64)
        whole = [kind for kind in ROWS_CARRY[name] for _ in range(1 + (kind == 3 and last < 64))]
        assert kernel.carried == whole
        check_products(kernel.ptx, last // 16)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("columns", "rank"), [(1024, 8), (1024, 16), (1024, 32), (384, 16)])
def test_rows_with_lora_in_one_pass(compiled, transposed, columns, rank):
    """Two sums, of which the narrow one is rounded in registers and multiplied from there."""
    x, out = torch.empty(4096, 512, dtype=BF16), torch.empty(4096, columns, dtype=BF16)
    low = torch.empty(4096, rank, dtype=BF16)
    shapes = ((512, columns), (512, rank), (rank, columns))
    matrices = (torch.empty((8, n, k) if transposed else (8, k, n), dtype=BF16) for k, n in shapes)
    variant = gemm.row_variant("cooperative", columns)
    launch = sm90_lora.lora_rows_launch(variant, x, *matrices, out, low, work(8), transposed, 132)
    (kernel,) = compiled(launch.run)
    check(kernel, wgmma=True)
    of_a_consumer = 4 * 2 + max(rank, 16) // 16  # two operands in steps of 16; b
    assert kernel.ptx.count("wgmma.mma_async") == 2 * of_a_consumer


def check_products(ptx: str, last: int) -> None:
    """A consumer has the WGMMAs of whole steps, and `last` for the columns of the last step.

    Those read where the first WGMMAs of a whole step read: constants of descriptors are the same.
    """
    found = [
        [re.search(rf"(?:or\.b64|add\.s64) \s*{re.escape(each)}, %rd\d+, (\d+);", ptx).group(1)
         for each in re.findall(r"%rd\d+", line)[:2]]
        for line in ptx.splitlines() if "wgmma.mma_async" in line
    ]  # fmt: skip
    if last == 4:
        assert len(found) == 2 * 4
        return
    assert len(found) == 2 * (4 + last)
    for consumer in (found[: 4 + last], found[4 + last :]):
        first, second = consumer[:4], consumer[4:]
        assert second == first[:last] or consumer[:last] == consumer[last:][:last]


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rank", [16, 48, 64])
def test_gathered_weights(compiled, rank, transposed, arch):
    """Tokens are copied to shared memory while others are multiplied."""
    hidden, order = torch.empty(512, 2048, dtype=BF16), torch.zeros(4096, dtype=torch.int32)
    shape = (8, rank, 2048) if transposed else (8, 2048, rank)
    launch = gemm.portable_pointer.gathered_weights_launch(
        gemm.gathered_weight_variant(rank), hidden, order, 8, torch.empty(4096, rank, dtype=BF16),
        torch.empty(shape, dtype=BF16), work(4), transposed, 396,
    )  # fmt: skip
    (kernel,) = compiled(launch.run, arch=arch)
    check(kernel, wgmma=arch == 90)
    assert kernel.ptx.count("cp.async.ca.shared") + kernel.ptx.count("cp.async.cg.shared") > 0
    assert 3 * kernel.shared <= SHARED_LIMIT


@pytest.mark.parametrize(
    ("columns", "pingpong", "dtype"),
    [(1024, False, BF16), (1024, True, BF16), (384, False, FP16), (384, True, BF16)],
)
def test_rows_in_fp8(compiled, columns, pingpong, dtype):
    codes = [torch.zeros(s, dtype=torch.uint8) for s in ((4096, 512), (8, columns, 512))]
    x, w = (code.view(torch.float8_e4m3fn) for code in codes)
    variant = replace(gemm.row_variant("fp8", columns), pingpong=pingpong)
    out = torch.empty(4096, columns, dtype=dtype)
    scales = torch.empty(4, 4096), torch.empty(8, columns // 128, 4)
    launch = gemm.kernels_of(variant, CPU).fp8_rows_launch(
        variant, x, scales[0], w, scales[1], out, work(8), 132
    )
    (kernel,) = compiled(launch.run)
    check(kernel, wgmma=True)
    # A consumer's tile loop also carries the right half of the tile before and its place. The loop
    # over K carries the block's sum and the scale of its right half, the producer's loop the places
    # of scales. Steps with two halves change turns outside these loops.
    halves = variant.block_n // 128
    wide, narrow = [10, 2, 6], [6, 2, 4]
    consumers = {
        (2, True): [*wide, 11, 2, 6], (1, True): [7, 3, 5] * 2,
        (2, False): wide * 2, (1, False): narrow * 2,
    }[halves, pingpong]  # fmt: skip
    assert kernel.carried == [*consumers, 7, 4]
    assert kernel.ptx.count("wgmma.mma_async") == 2 * halves * 4 * 2
    assert kernel.ptx.count("fma.rn.f32") == 2 * halves * 64 * 2


@pytest.mark.parametrize(
    ("columns", "pingpong", "dtype"), [(1024, True, BF16), (1024, False, FP16), (384, True, BF16)]
)
def test_weights_in_fp8(compiled, columns, pingpong, dtype):
    codes = [torch.zeros(s, 1024, dtype=torch.uint8) for s in (512, columns)]
    x, dy = (code.view(torch.float8_e4m3fn) for code in codes)
    variant = replace(gemm.weight_variant("fp8", columns, dtype), pingpong=pingpong)
    scales = torch.empty(4, 8), torch.empty(columns // 128, 8)
    dw = torch.empty(8, 512, columns, dtype=dtype)
    launch = gemm.kernels_of(variant, CPU).fp8_weights_launch(
        variant, x, scales[0], dy, scales[1], dw, work(4), 132
    )
    (kernel,) = compiled(launch.run)
    check(kernel, wgmma=True)
    # Tile loop: slot, phase, e, first, end. Steps are carried as those of rows are.
    halves = variant.block_n // 128
    consumers = {(2, True): [9, 6, 10, 6], (1, True): [6, 5] * 2, (2, False): [9, 6] * 2}
    assert kernel.carried == [*consumers[halves, pingpong], 4, 4]
    assert kernel.ptx.count("wgmma.mma_async") == 2 * halves * 4 * 2
    assert kernel.ptx.count("fma.rn.f32") == 2 * halves * 64 * 2


@pytest.mark.parametrize(
    ("name", "columns", "splits", "out_dtype", "add"),
    few(
        grid(
            VARIANTS,
            [1024, 384],
            [False, True],
            [(BF16, ""), (FP32, ""), (FP32, "fetch"), (FP32, "reduce")],
        )
    ),
)
def test_weights(compiled, name, columns, splits, out_dtype, add):
    x, dy = torch.empty(4096, 512, dtype=BF16), torch.empty(4096, columns, dtype=BF16)
    dw = torch.empty(8, 512, columns, dtype=out_dtype)
    variant = gemm.weight_variant(name, columns, out_dtype)
    partials = torch.empty(4, 512, columns) if splits else None
    kernels = gemm.kernels_of(variant, CPU)
    launch = kernels.weights_launch(variant, x, dy, dw, work(4), add, 132, partials)
    (kernel,) = compiled(launch.run, arch=80 if name == "pointer" else 90)
    check(kernel, wgmma=name != "pointer")
    if name in WEIGHTS_CARRY or name == "tma":
        reduces = add == "reduce" or (add == "fetch" and name == "tma")
        assert ("cp.reduce.async.bulk" in kernel.ptx) == reduces
    if name in WEIGHTS_CARRY:
        outer = WEIGHTS_CARRY[name] + (splits or add == "fetch")
        producer = [4, 2] if add else [6, 4, 0]
        assert kernel.carried == [outer, 3] * 2 + producer
        check_row_bounds(kernel)


def check_row_bounds(kernel: Compiled) -> None:
    """The row loop of a consumer ends where the carried record says, not at the first one's."""
    outer = None
    for loop in kernel.loops:
        if len(loop.carried) > 3:
            outer = loop
        elif len(loop.carried) == 3:
            assert {loop.start, loop.stop} <= set(outer.carried), loop


@pytest.mark.parametrize(
    "experts", [8, 1024, *(pytest.param(n, marks=pytest.mark.long) for n in (128, 512))]
)
def test_work_lists_and_routing(compiled, experts):
    offsets = torch.zeros(experts, dtype=torch.int32)
    pairs = torch.zeros(16384, 8, dtype=torch.int64)

    def launches():
        tile_scheduler.row_tiles(offsets, 4096, 128)
        tile_scheduler.row_tiles(offsets[1:], 4096, 128, is_behind=True)
        tail = tile_scheduler.LastRound(16, 64, 132)
        rows = tile_scheduler.row_tiles(offsets, 4096, 128, tail)
        tile_scheduler.add_cut_tiles_(
            torch.empty(64, 512, dtype=BF16), torch.empty(132, 128, 256), rows, tail
        )
        order = tile_scheduler.expert_order(offsets, skip_empty=True, limit=512)
        tile_scheduler.add_partials_(torch.empty(8, 64, 64), torch.empty(4, 64, 64), order, True)
        tile_scheduler.zero_tail_(torch.empty(64, 512, dtype=BF16), offsets)
        row_order_triton.sort_pairs(pairs, experts)

    found = compiled(launches)
    assert len(found) == 10
    for kernel in found:
        check(kernel, wgmma=False)
        assert "atom" not in kernel.ptx  # deterministic by construction


def test_fake_cuda_tensors_see_static_shapes():
    """The whole dropless path, traced without launching anything."""
    with FakeTensorMode():
        hidden = torch.empty(64, 128, device="cuda", dtype=BF16)
        weights = torch.empty(64, 4, device="cuda")
        ids = torch.empty(64, 4, device="cuda", dtype=torch.int64)
        w1 = torch.empty(8, 128, 192, device="cuda", dtype=BF16)
        w2 = torch.empty(8, 96, 128, device="cuda", dtype=BF16)
        order = kernels.route_rows(ids, 8)
        rows = kernels.grouped_gemm(kernels.permute(hidden, order), w1, order.offsets_E)
        rows = kernels.grouped_gemm(kernels.swiglu(rows), w2, order.offsets_E)
        assert kernels.gather_gemm(hidden, order, w1).shape == (256, 192)
        out = kernels.unpermute(rows, order, weights)
        assert out.shape == hidden.shape
        rule = kernels.RoutingRule(4, False, True, 1.0, 1, 1, 0.01, 0.001)
        gate = torch.empty(8, 128, device="cuda", dtype=BF16)
        chosen = kernels.route(hidden, gate, None, rule)
        assert [x.shape for x in chosen] == [(64, 4), (64, 4), (), (8,)]
        qkv = torch.empty(2, 16, 8 * 64, device="cuda", dtype=BF16)
        table, weight = torch.empty(16, 32, device="cuda"), torch.ones(64, device="cuda")
        query, key, value = kernels.split_heads(qkv, table, table, 4, 2, weight, weight)
        assert [x.shape for x in (query, key, value)] == [(2, 16, n, 64) for n in (4, 2, 2)]
        given = (qkv, table, table, weight, weight)
        found = heads_triton.heads_backward(query, key, value, *given, 1e-5, True)
        assert [x.shape for x in found] == [qkv.shape, weight.shape, weight.shape]
        sent = kernels.split_heads_by_rank(qkv, table, table, 4, 2, 2, weight, weight)
        assert sent.shape == (2, 2, 16, 4 * 64)
        found = heads_triton.heads_by_rank_backward(sent, *given, 4, 2, 1e-5, True)
        assert [x.shape for x in found] == [qkv.shape, weight.shape, weight.shape]
        assert kernels.rms_norm(query, weight, 1e-5).shape == query.shape
        found = rms_norm_triton.rms_norm_backward(query, query, weight, 1e-5, False, True)
        assert [x.shape for x in found] == [query.shape, weight.shape]


@triton.jit
def previous_is_current(out, n):
    current = triton.language.program_id(0)
    previous = current
    for k in range(n):
        triton.language.store(out + k, previous)
        previous = current
        current = current + 3


@gluon.jit
def bound_of_a_nested_loop(out, ends, n):
    stop = gl.load(ends)
    for t in range(n):
        now = stop
        stop = gl.load(ends + t + 1)
        for k in range(now):
            gl.store(out + k, t)


@pytest.mark.xfail(strict=True, reason="Triton 3.6 and 3.7.1 drop `previous = current`")
def test_trap_previous_is_current(compiled):
    (kernel,) = compiled(lambda: launch(previous_is_current, 1))
    assert kernel.carried == [2]


@pytest.mark.xfail(strict=True, reason="Triton 3.6 and 3.7.1 drop a value that is only a bound")
def test_trap_bound_of_a_nested_loop(compiled):
    (kernel,) = compiled(lambda: launch(bound_of_a_nested_loop, 2))
    assert 1 in kernel.carried


@gluon.jit
def store_number(barriers, out, number):
    gl.store(out, number)


@gluon.jit
def barriers_without_use(out, n):
    arguments = (sm90_common.make_barriers(2, 1), out, gl.load(out) * n)
    gl.warp_specialize([(store_number, arguments), (store_number, arguments)], [4], [24])


@pytest.mark.xfail(strict=True, reason="Triton 3.6 gives memory of barriers to arguments")
def test_trap_barriers_without_use(compiled):
    """A preempted partition then reads the barrier's initial value as its argument."""
    (kernel,) = compiled(lambda: launch(barriers_without_use, 1))
    assert not kernel.reused_barriers


def launch(kernel: JITFunction, pointers: int) -> None:
    kernel[(1,)](*(torch.zeros(8, dtype=torch.int32) for _ in range(pointers)), 5)
