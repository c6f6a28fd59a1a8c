"""AdamW's update of many tensors, each in one pass over its memory.

    p -= lr * decay * p
    m = beta1 * m + (1 - beta1) * g,  v = beta2 * v + (1 - beta2) * g^2
    p -= lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

fp32 inside, rounded once. It is the order of torch's fused kernel, which computes in fp64 between
two roundings to fp32. What all numbers of a tensor share is computed once, in fp64, by a small
kernel: fp64 in every program would cost more than the memory does.

Stochastic rounding to bf16 adds 16 random bits below the last one that is kept, and cuts. The bits
are Philox's of a key of the tensor's, the step and the place in memory: a word for two numbers, of
which parameter and both states use parts and products. `adamw_reference.py` has the same in torch's
operations. States of 8 bits are codes with scales (`state_codes_reference.py`).

Other updates are bound by memory, that of codes by instructions: 76 a number on Hopper.

N tensors, C coefficients.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from moe_graphs.kernels.launching import cdiv, launch
from moe_graphs.kernels.ops import define_op
from moe_graphs.kernels.state_codes_reference import MIXER, NUMBERS
from moe_graphs.kernels.state_codes_triton import decoded, encoded

# lr * decay, lr / (1 - beta1^t), sqrt(1 - beta2^t), 1 - beta1, 1 - beta2, eps, scale, live, factor,
# t, 1 - the decay of the average
C = 11
BLOCK, WARPS = 1024, 4  # 16 bytes of bf16 for a thread: the fastest of those tried on an H200


@triton.jit
def _value(x):
    """A number, given as one or as a tensor of one."""
    x = tl.core.to_tensor(x)  # the interpreter has floats of Python
    if x.dtype.is_ptr():
        x = tl.load(x)
    return x.to(tl.float64)


@triton.jit
def adamw_coefficients_kernel(
    step_ptr, out_ptr, N, lr, share1, share2, log_beta1, log_beta2, eps, weight_decay,
    grad_scale, found_inf, grad_factor, ema_share, BLOCK: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < N
    step = tl.load(step_ptr + i, mask=live, other=1.0).to(tl.float64)
    lr = _value(lr)
    out = out_ptr + i * C
    tl.store(out, (lr * weight_decay).to(tl.float32), mask=live)
    correction1 = 1 - tl.exp(step * _value(log_beta1))
    correction2 = 1 - tl.exp(step * _value(log_beta2))
    tl.store(out + 1, (lr / correction1).to(tl.float32), mask=live)
    tl.store(out + 2, tl.sqrt(correction2).to(tl.float32), mask=live)
    tl.store(out + 3, share1, mask=live)
    tl.store(out + 4, share2, mask=live)
    tl.store(out + 5, eps, mask=live)
    tl.store(out + 6, _value(grad_scale).to(tl.float32), mask=live)
    tl.store(out + 7, tl.where(_value(found_inf) == 1, 0.0, 1.0), mask=live)
    tl.store(out + 8, _value(grad_factor).to(tl.float32), mask=live)
    tl.store(out + 9, step.to(tl.float32), mask=live)
    # The first average is the parameter: so that of zeros is none.
    tl.store(out + 10, tl.where(step > 1, ema_share, 1.0), mask=live)


@triton.jit
def _lerp(old, new, share):
    """(1 - share) * old + share * new, as torch.lerp: so 1 - share is never rounded, which would
    add up over many steps."""
    is_near = share < 0.5
    return tl.fma(tl.where(is_near, share, share - 1), new - old, tl.where(is_near, old, new))


@triton.jit
def _random(key, step, first, MIXER: tl.constexpr, BLOCK: tl.constexpr):
    """32 bits for each number of a block that begins at `first`; a counter serves eight."""
    c0 = (first // 8 + tl.arange(0, BLOCK // 8)).to(tl.int32)
    none = c0 * 0
    a, b, c, d = tl.philox(key, c0, none, none + step, none)
    words = tl.join(tl.join(a, c), tl.join(b, d)).reshape(BLOCK // 2)
    return tl.join(words, words * MIXER).reshape(BLOCK)


@triton.jit
def _narrowed(x, bits, dtype: tl.constexpr, STOCHASTIC: tl.constexpr):
    """`bits`: the lower 16 are used."""
    if STOCHASTIC and dtype == tl.bfloat16:
        cut = (x.to(tl.int32, bitcast=True) + (bits & 0xFFFF).to(tl.int32)) & -0x10000
        x = tl.where(x == x, cut.to(tl.float32, bitcast=True), x)  # an infinity stays one
    return x.to(dtype)


@triton.jit
def adamw_kernel(
    p_ptr, g_ptr, m_ptr, v_ptr, c_ptr, ema_ptr, m_scale_ptr, v_scale_ptr, n, key,
    MAXIMIZE: tl.constexpr, SCALED: tl.constexpr, MULTIPLIED: tl.constexpr,
    STOCHASTIC: tl.constexpr, CODED: tl.constexpr, AVERAGED: tl.constexpr,
    NUMBERS: tl.constexpr, MIXER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * BLOCK
    i = first + tl.arange(0, BLOCK)
    inside = i < n
    p = tl.load(p_ptr + i, mask=inside).to(tl.float32)
    g = tl.load(g_ptr + i, mask=inside).to(tl.float32)
    m = tl.load(m_ptr + i, mask=inside)
    v = tl.load(v_ptr + i, mask=inside)
    at_scale = first // NUMBERS + tl.arange(0, BLOCK // NUMBERS)
    if CODED:
        has_scale = at_scale < n // NUMBERS
        m_scale = tl.load(m_scale_ptr + at_scale, mask=has_scale, other=0)
        m = decoded(m, m_scale, True, NUMBERS, BLOCK)
        v_scale = tl.load(v_scale_ptr + at_scale, mask=has_scale, other=0)
        v = decoded(v, v_scale, False, NUMBERS, BLOCK)
    m, v = m.to(tl.float32), v.to(tl.float32)
    decay, step_size, correction = tl.load(c_ptr), tl.load(c_ptr + 1), tl.load(c_ptr + 2)
    share1, share2, eps = tl.load(c_ptr + 3), tl.load(c_ptr + 4), tl.load(c_ptr + 5)
    stop = tl.where(tl.load(c_ptr + 7) > 0, n, 0)
    written = i < stop
    if SCALED:
        g /= tl.load(c_ptr + 6)
        tl.store(g_ptr + i, g.to(g_ptr.dtype.element_ty), mask=written)
    if MULTIPLIED:
        g *= tl.load(c_ptr + 8)
    if MAXIMIZE:
        g = -g
    p = tl.fma(-decay, p, p)
    m = _lerp(m, g, share1)
    v = _lerp(v, g * g, share2)
    p -= step_size * m / (tl.sqrt(v) / correction + eps)
    of_p, of_v = i, i
    if STOCHASTIC or CODED:
        of_p = _random(key, tl.load(c_ptr + 9).to(tl.int32), first, MIXER, BLOCK)
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
    if AVERAGED:
        ema = tl.load(ema_ptr + i, mask=inside).to(tl.float32)
        ema = _lerp(ema, new.to(tl.float32), tl.load(c_ptr + 10))
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
    goes into. `rounded`: what is of bf16 is rounded stochastically, by `keys` of up to 63 bits.
    With scales, and keys, states are contiguous uint8 codes, and 64 divides a parameter's numbers.
    If `found_inf` is 1, nothing changes.
    """
    coefficients_NC = torch.empty(len(params), C, dtype=torch.float32, device=params[0].device)
    rate = lr if lr_tensor is None else lr_tensor
    numbers = (1 - beta1, 1 - beta2, *map(_log, (beta1, beta2)), eps, weight_decay)
    scale = 1.0 if grad_scale is None else grad_scale
    found = 0.0 if found_inf is None else found_inf
    factor = 1.0 if grad_factor is None else grad_factor
    args = (torch.stack(steps), coefficients_NC, len(params), rate, *numbers, scale, found, factor)
    args += (1 - ema_decay,)
    launch(adamw_coefficients_kernel, (cdiv(len(params), 32),), args, BLOCK=32, C=C, num_warps=1)
    block = BLOCK * 2 if exp_avg_scales else BLOCK  # for codes: a tenth fewer instructions
    constants = {
        "MAXIMIZE": maximize,
        "SCALED": grad_scale is not None,
        "MULTIPLIED": grad_factor is not None,
        "STOCHASTIC": rounded,
        "CODED": bool(exp_avg_scales),
        "AVERAGED": bool(emas),
        "NUMBERS": NUMBERS,
        "MIXER": MIXER,
        "BLOCK": block,
        "num_warps": WARPS,
    }
    columns = (
        params, grads, exp_avgs, exp_avg_sqs, coefficients_NC.unbind(), emas or params,
        exp_avg_scales or params, exp_avg_sq_scales or params,
    )  # fmt: skip
    for *tensors, key in zip(*columns, keys or [0] * len(params), strict=True):
        if n := tensors[0].numel():
            launch(adamw_kernel, (cdiv(n, block),), (*tensors, n, key), **constants)
    # As the documentation of torch wants it of whoever writes past its operators.
    scales = (*exp_avg_scales, *exp_avg_sq_scales)
    torch.autograd.graph.increment_version([*params, *exp_avgs, *exp_avg_sqs, *emas, *scales])


@torch.library.register_fake("moe_graphs::adamw_update")
def _(*_):
    return None


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf
