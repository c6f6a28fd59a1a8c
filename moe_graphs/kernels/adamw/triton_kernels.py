"""AdamW's update of many tensors, each in one pass over its memory.

    p -= lr * decay * p
    m = beta1 * m + (1 - beta1) * g,  v = beta2 * v + (1 - beta2) * g^2
    p -= lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

The kernel computes in fp32 and rounds once, in the order of torch's fused kernel, which computes in
fp64 between two roundings to fp32. Coefficients that all numbers of a tensor share are computed
once, in fp64, by a small kernel: fp64 in every program would cost more than the memory does.

Stochastic rounding to bf16 adds 16 random bits below the last one that is kept, and cuts. The bits
are Philox's of a key of the tensor's, the step and the place in memory. A word serves four numbers;
parameter and both states use parts and products of it. `reference.py` has the same in torch's
operations. States of 8 bits are codes with scales (`state_codes.py`).

An update with codes is bound by instructions, 60 a number on Hopper; other updates by memory.

All tensors of the same dtypes are one launch. Gradients lie elsewhere at every step, and a graph
must not read host memory again: so addresses are arguments of launches that store them into a table
on the device. A program looks up there what it works on.

N tensors, F fields that come from the host, W fields of a row of the table.
"""

import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_graphs.kernels.adamw.state_codes import MIXER, NUMBERS
from moe_graphs.kernels.launching import cdiv, launch, next_power_of_2
from moe_graphs.kernels.ops import define_op

# A row of the table has F fields of 64 bits: how many numbers, the first span, addresses of step,
# parameter, gradient and states, then if they exist those of the average and the scales, and the
# key. Behind the F fields stand, in fp32: lr * decay, lr / (1 - beta1^t), 1 / sqrt(1 - beta2^t),
# 1 - beta1, 1 - beta2, eps, scale, live, factor, t, 1 - the decay of the average.
COEFFICIENTS = 6  # fields that the fp32 numbers take
BLOCK, WARPS = 1024, 4  # 16 bytes of bf16 for a thread: the fastest of those tried on an H200
SPAN = 16  # blocks for which an entry of the map names the tensor
SENT = 32  # rows of the table that are arguments of one launch: at most 4 KiB, which all GPUs take
WIDE = tl.constexpr(1 << 62)  # added to a number, so that Triton takes it for one of 64 bits


@triton.jit(do_not_specialize=["numbers"], do_not_specialize_on_alignment=["numbers"])
def adamw_table_kernel(table_ptr, numbers, F: tl.constexpr, W: tl.constexpr):
    for i in tl.static_range(len(numbers)):
        number = numbers[i]
        if i % F < 2:
            number -= WIDE
        tl.store(table_ptr + i // F * W + i % F, number)


@triton.jit
def _value(x):
    """A number, given as one or as a tensor of one."""
    x = tl.core.to_tensor(x)  # in the interpreter it is a float of Python
    if x.dtype.is_ptr():
        x = tl.load(x)
    return x.to(tl.float64)


@triton.jit
def _at(address_ptr, dtype: tl.constexpr, ALIGNED: tl.constexpr = False):
    """The pointer that lies at an address.

    Triton 3.6 forgets `multiple_of` if it is said of the number, before that is a pointer.
    """
    found = tl.load(address_ptr).to(tl.pointer_type(dtype))
    return tl.multiple_of(found, 16) if ALIGNED else found


@triton.jit
def _coefficients(row, F: tl.constexpr):
    return (row + F).to(tl.pointer_type(tl.float32), bitcast=True)


@triton.jit
def adamw_coefficients_kernel(
    table_ptr, map_ptr, lr, share1, share2, log_beta1, log_beta2, eps, weight_decay,
    grad_scale, found_inf, grad_factor, ema_share,
    F: tl.constexpr, W: tl.constexpr, SPAN: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """A program for a tensor: also its part of the map, `SPAN` numbers an entry."""
    i = tl.program_id(0)
    row = table_ptr + i * W
    spans = tl.cdiv(tl.load(row), SPAN)
    of_spans = map_ptr + tl.load(row + 1)
    for first in range(0, spans, LANES):
        at = first + tl.arange(0, LANES)
        tl.store(of_spans + at, i, mask=at < spans)
    step = tl.load(_at(row + 2, tl.float32)).to(tl.float64)
    lr = _value(lr)
    out = _coefficients(row, F)
    tl.store(out, (lr * weight_decay).to(tl.float32))
    correction1 = 1 - tl.exp(step * _value(log_beta1))
    correction2 = 1 - tl.exp(step * _value(log_beta2))
    tl.store(out + 1, (lr / correction1).to(tl.float32))
    tl.store(out + 2, (1 / tl.sqrt(correction2)).to(tl.float32))
    tl.store(out + 3, share1)
    tl.store(out + 4, share2)
    tl.store(out + 5, eps)
    tl.store(out + 6, _value(grad_scale).to(tl.float32))
    tl.store(out + 7, tl.where(_value(found_inf) == 1, 0.0, 1.0))
    tl.store(out + 8, _value(grad_factor).to(tl.float32))
    tl.store(out + 9, step.to(tl.float32))
    # The first average is the parameter itself, not a part of it added to zeros.
    tl.store(out + 10, tl.where(step > 1, ema_share, 1.0))


@triton.jit
def _lerp(old, new, share, NEAR: tl.constexpr):
    """(1 - share) * old + share * new, computed as torch.lerp does.

    1 - share is never rounded: its error would add up over many steps. NEAR: share is known to be
    below 0.5.
    """
    if NEAR:
        return tl.fma(share, new - old, old)
    is_near = share < 0.5
    return tl.fma(tl.where(is_near, share, share - 1), new - old, tl.where(is_near, old, new))


@triton.jit
def _moved(p, g, m, v, c_ptr, NEAR: tl.constexpr):
    decay, step_size, factor = tl.load(c_ptr), tl.load(c_ptr + 1), tl.load(c_ptr + 2)
    share1, share2, eps = tl.load(c_ptr + 3), tl.load(c_ptr + 4), tl.load(c_ptr + 5)
    p = tl.fma(-decay, p, p)
    m = _lerp(m, g, share1, NEAR)
    v = _lerp(v, g * g, share2, NEAR)
    r = tl.rsqrt(tl.fma(tl.sqrt(v), factor, eps))  # a division costs nine instructions, this three
    return tl.fma(-step_size, m * r * r, p), m, v


@triton.jit
def _random(key, step, first, MIXER: tl.constexpr, BLOCK: tl.constexpr):
    """32 bits for each number of a block that begins at `first`; a counter serves sixteen."""
    c0 = (first // 16 + tl.arange(0, BLOCK // 16)).to(tl.int32)
    none = c0 * 0
    a, b, c, d = tl.philox(key, c0, none, none + step, none)
    words = tl.join(tl.join(a, c), tl.join(b, d)).reshape(BLOCK // 4)
    more = tl.join(words, words * MIXER).reshape(BLOCK // 2)
    return tl.join(more, more * (MIXER * MIXER & 0xFFFFFFFF)).reshape(BLOCK)


@triton.jit
def _narrowed(x, bits, dtype: tl.constexpr, STOCHASTIC: tl.constexpr):
    """`bits`: the lower 16 are used."""
    if STOCHASTIC and dtype == tl.bfloat16:
        exact = x.to(tl.int32, bitcast=True)
        # An infinity stays one. The sum would turn a NaN with all bits set into a zero.
        more = tl.maximum(exact + (bits & 0xFFFF).to(tl.int32), exact)
        return (more >> 16).to(tl.int16).to(dtype, bitcast=True)
    return x.to(dtype)


@triton.jit
def _of_each(of_block, BLOCK: tl.constexpr, NUMBERS: tl.constexpr):
    """A number for each group of NUMBERS, repeated for every member of the group."""
    return tl.broadcast_to(of_block[:, None], (BLOCK // NUMBERS, NUMBERS)).reshape(BLOCK)


@triton.jit
def _power(exponents, BLOCK: tl.constexpr, NUMBERS: tl.constexpr):
    """2 to `exponents` - 127, for every number."""
    return _of_each(exponents << 23, BLOCK, NUMBERS).to(tl.float32, bitcast=True)


@triton.jit
def decoded(codes, scales, SIGNED: tl.constexpr, NUMBERS: tl.constexpr, BLOCK: tl.constexpr):
    """`codes` [BLOCK] and `scales` [BLOCK // NUMBERS], uint8: fp32 [BLOCK]."""
    up: tl.constexpr = 2.0**112
    if SIGNED:  # the sign goes along to all bits above the code
        exact = (codes.to(tl.int8, bitcast=True).to(tl.int32) << 20) & -0x78100000
    else:
        exact = codes.to(tl.int32) << 19
    scale = _power(tl.maximum(scales.to(tl.int32), 1), BLOCK, NUMBERS)
    return exact.to(tl.float32, bitcast=True) * up * scale


@triton.jit
def encoded(x, bits, SIGNED: tl.constexpr, NUMBERS: tl.constexpr, BLOCK: tl.constexpr):
    """fp32 [BLOCK] and uint32 whose upper bits are used: codes and scales."""
    cut: tl.constexpr = 20 if SIGNED else 19
    most: tl.constexpr = 2.0**126
    down: tl.constexpr = 2.0**-112
    noise = (bits.to(tl.uint32) >> (32 - cut)).to(tl.int32)
    size = tl.minimum(tl.abs(x), most)
    exact = size.to(tl.int32, bitcast=True)
    scales = (tl.max(exact.reshape(BLOCK // NUMBERS, NUMBERS), 1) + ((1 << cut) - 1)) >> 23
    scaled = size * _power(254 - tl.maximum(scales, 1), BLOCK, NUMBERS) * down
    code = (scaled.to(tl.int32, bitcast=True) + noise) >> cut
    if SIGNED:
        code |= (x.to(tl.int32, bitcast=True) >> 24) & 128
    else:
        code = tl.maximum(code, tl.minimum(exact, 1))
    return code.to(tl.uint8), scales.to(tl.uint8)


@triton.jit
def _place(
    table_ptr, map_ptr, begin, ALIGNED: tl.constexpr, W: tl.constexpr, SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The row of a program's tensor, how many numbers that has, and the first of the program's."""
    block = tl.program_id(0)
    row = table_ptr + tl.load(map_ptr + begin + block // SPAN) * W
    n = tl.load(row)
    if ALIGNED:
        n = tl.multiple_of(n, 16)
    return row, n, (block + (begin - tl.load(row + 1)) * SPAN) * BLOCK


@triton.jit(do_not_specialize=["begin"])
def adamw_kernel(
    table_ptr, map_ptr, begin,
    P: tl.constexpr, G: tl.constexpr, M: tl.constexpr, V: tl.constexpr, E: tl.constexpr,
    ALIGNED: tl.constexpr, MAXIMIZE: tl.constexpr, SCALED: tl.constexpr,
    MULTIPLIED: tl.constexpr, STOCHASTIC: tl.constexpr, CODED: tl.constexpr,
    NEAR: tl.constexpr, NUMBERS: tl.constexpr, MIXER: tl.constexpr, F: tl.constexpr,
    W: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`begin`: the first span of this launch. `E` is None if there is no average."""
    row, n, first = _place(table_ptr, map_ptr, begin, ALIGNED, W, SPAN, BLOCK)
    p_ptr, g_ptr = _at(row + 3, P, ALIGNED), _at(row + 4, G, ALIGNED)
    m_ptr, v_ptr = _at(row + 5, M, ALIGNED), _at(row + 6, V, ALIGNED)
    c_ptr = _coefficients(row, F)
    if first >= n:  # the last span of a tensor
        return
    i = first + tl.arange(0, BLOCK)
    inside = i < n
    p = tl.load(p_ptr + i, mask=inside).to(tl.float32)
    g = tl.load(g_ptr + i, mask=inside).to(tl.float32)
    m = tl.load(m_ptr + i, mask=inside)
    v = tl.load(v_ptr + i, mask=inside)
    at_scale = first // NUMBERS + tl.arange(0, BLOCK // NUMBERS)
    if CODED:
        m_scale_ptr, v_scale_ptr = _at(row + F - 3, tl.uint8), _at(row + F - 2, tl.uint8)
        has_scale = at_scale < n // NUMBERS
        m_scale = tl.load(m_scale_ptr + at_scale, mask=has_scale, other=0)
        m = decoded(m, m_scale, True, NUMBERS, BLOCK)
        v_scale = tl.load(v_scale_ptr + at_scale, mask=has_scale, other=0)
        v = decoded(v, v_scale, False, NUMBERS, BLOCK)
    m, v = m.to(tl.float32), v.to(tl.float32)
    stop = tl.where(tl.load(c_ptr + 7) > 0, n, 0)
    written = i < stop
    if SCALED:
        g /= tl.load(c_ptr + 6)
        tl.store(g_ptr + i, g.to(g_ptr.dtype.element_ty), mask=written)
    if MULTIPLIED:
        g *= tl.load(c_ptr + 8)
    if MAXIMIZE:
        g = -g
    p, m, v = _moved(p, g, m, v, c_ptr, NEAR)
    of_p, of_v = i, i
    if STOCHASTIC or CODED:
        of_p = _random(tl.load(row + F - 1), tl.load(c_ptr + 9).to(tl.int32), first, MIXER, BLOCK)
        of_v = of_p * MIXER
    new = _narrowed(p, of_p, p_ptr.dtype.element_ty, STOCHASTIC)
    tl.store(p_ptr + i, new, mask=written)
    if CODED:
        m, m_scale = encoded(m, of_p, True, NUMBERS, BLOCK)
        tl.store(m_scale_ptr + at_scale, m_scale, mask=at_scale < stop // NUMBERS)
        v, v_scale = encoded(v, of_v, False, NUMBERS, BLOCK)
        tl.store(v_scale_ptr + at_scale, v_scale, mask=at_scale < stop // NUMBERS)
    else:
        m = _narrowed(m, of_p >> 16, m_ptr.dtype.element_ty, STOCHASTIC)
        v = _narrowed(v, of_v >> 16, v_ptr.dtype.element_ty, STOCHASTIC)
    tl.store(m_ptr + i, m, mask=written)
    tl.store(v_ptr + i, v, mask=written)
    if E is not None:
        ema_ptr = _at(row + 7, E, ALIGNED)
        ema = tl.load(ema_ptr + i, mask=inside).to(tl.float32)
        ema = _lerp(ema, new.to(tl.float32), tl.load(c_ptr + 10), False)
        tl.store(ema_ptr + i, ema.to(ema_ptr.dtype.element_ty), mask=written)


_WRITTEN = (
    "params", "grads", "exp_avgs", "exp_avg_sqs", "emas", "exp_avg_scales", "exp_avg_sq_scales"
)  # fmt: skip


@define_op(device="default", mutates_args=_WRITTEN)
def adamw_update(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    steps: Sequence[torch.Tensor],
    lr: float,
    lr_tensor: torch.Tensor | None,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool,
    grad_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
    grad_factor: torch.Tensor | None,
    emas: Sequence[torch.Tensor],
    ema_decay: float,
    keys: Sequence[int],
    exp_avg_scales: Sequence[torch.Tensor],
    exp_avg_sq_scales: Sequence[torch.Tensor],
    rounded: bool,
) -> None:
    """One update, `steps` counting it already: 0-dim, fp32.

    The four tensors of a parameter are dense, have the same strides and any dtypes of fp16, bf16
    and fp32. `lr_tensor`, if given, is read instead of `lr`. With `grad_scale` gradients are
    divided by it first, in place. `grad_factor` multiplies them on their way, which leaves them as
    they are. `emas`, if not empty, has a moving average of each parameter, which its new value
    goes into. `rounded`: what is of bf16 is rounded stochastically, by `keys` of 63 bits.
    With scales, and keys, states are contiguous uint8 codes, and 64 divides a parameter's numbers.
    If `found_inf` is 1, nothing changes.
    """
    scales, block = [], BLOCK
    if exp_avg_scales:
        scales = [exp_avg_scales, exp_avg_sq_scales]
        block = BLOCK * 2  # a tenth fewer instructions
    columns = [params, grads, exp_avgs, exp_avg_sqs, *([emas] if emas else [])]
    table_NW, map_, launches = _table(columns, steps, scales, keys, block)
    if not launches:
        return
    rate = lr if lr_tensor is None else lr_tensor
    numbers = (1 - beta1, 1 - beta2, *map(_log, (beta1, beta2)), eps, weight_decay)
    scale = 1.0 if grad_scale is None else grad_scale
    found = 0.0 if found_inf is None else found_inf
    factor = 1.0 if grad_factor is None else grad_factor
    args = (table_NW, map_, rate, *numbers, scale, found, factor, 1 - ema_decay)
    N, W = table_NW.shape
    sizes = {"F": W - COEFFICIENTS, "W": W}
    spans = {"SPAN": SPAN * block, "LANES": 128, "num_warps": 1}
    launch(adamw_coefficients_kernel, (N,), args, **sizes, **spans)
    constants = sizes | {
        "MAXIMIZE": maximize, "SCALED": grad_scale is not None,
        "MULTIPLIED": grad_factor is not None, "STOCHASTIC": rounded, "CODED": bool(scales),
        "NEAR": min(beta1, beta2) > 0.5, "NUMBERS": NUMBERS, "MIXER": MIXER, "SPAN": SPAN,
        "BLOCK": block, "num_warps": WARPS,
    }  # fmt: skip
    for kind, begin, end in launches:
        args = (table_NW, map_, begin)
        launch(adamw_kernel, ((end - begin) * SPAN,), args, **kind, **constants)
    # torch's documentation asks for this where memory is written past its operators.
    written = (params, exp_avgs, exp_avg_sqs, emas, *scales)
    torch.autograd.graph.increment_version(list(itertools.chain.from_iterable(written)))


@torch.library.register_fake("moe_graphs::adamw_update")
def _(*_):
    return None


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf


def _table(
    columns: Sequence[Sequence[Tensor]],
    steps: Sequence[Tensor],
    scales: Sequence[Sequence[Tensor]],
    keys: Sequence[int],
    block: int,
) -> tuple[Tensor, Tensor, list[tuple[dict[str, Any], int, int]]]:
    """The table of all tensors that are not empty, room for the map, and the launches.

    A launch has the constants of one kind of tensors, their first span and the end of their spans.
    """
    sizes = list(map(Tensor.numel, columns[0]))
    addresses = [list(map(Tensor.data_ptr, of)) for of in (steps, *columns, *scales)]
    odd: Iterable[int] = sizes
    for of_column in addresses[1 : 1 + len(columns)]:
        odd = map(operator.or_, odd, of_column)
    aligned = [bits % 16 == 0 for bits in odd]
    dtypes = (map(operator.attrgetter("dtype"), of) for of in columns)
    kinds = list(zip(map(bool, sizes), aligned, *dtypes, strict=True))
    fields, span = [sizes, *addresses, *([keys] if keys else [])], 0
    numbers: list[int] = []
    launches: list[tuple[dict[str, Any], int, int]] = []
    for kind in dict.fromkeys(kinds):
        if not kind[0]:
            continue
        alike = [each == kind for each in kinds]
        ns, *of_kind = (list(itertools.compress(of, alike)) for of in fields)
        spans = [-(-n // (block * SPAN)) for n in ns]
        begin, end = span, span + sum(spans)
        firsts = itertools.accumulate(spans, initial=begin + WIDE.value)
        rows = zip([n + WIDE.value for n in ns], firsts, *of_kind, strict=False)
        numbers += itertools.chain.from_iterable(rows)
        constants = {"ALIGNED": kind[1], "E": None}
        constants |= zip("PGMVE", map(_triton_dtype, kind[2:]), strict=False)
        launches.append((constants, begin, end))
        span = end
    device = columns[0][0].device
    table_NW = _on_device(numbers, len(fields) + 1, device)
    return table_NW, torch.empty(span, dtype=torch.int32, device=device), launches


def _on_device(numbers: list[int], F: int, device: torch.device) -> Tensor:
    """The numbers of N rows of F fields, stored into a table [N, W] by launches."""
    N, sizes = len(numbers) // F, {"F": F, "W": F + COEFFICIENTS}
    room = torch.empty(cdiv(N, SENT) * SENT, sizes["W"], dtype=torch.int64, device=device)
    for first in range(0, N, SENT):
        part = numbers[first * F : (first + SENT) * F]
        wanted = min(SENT, next_power_of_2(N - first))  # few kinds of launches
        part += part[:F] * (wanted - len(part) // F)
        launch(adamw_table_kernel, (1,), (room[first:], tuple(part)), **sizes, num_warps=1)
    return room[:N]


def _triton_dtype(dtype: torch.dtype) -> tl.dtype:
    return getattr(tl, str(dtype).removeprefix("torch."))
