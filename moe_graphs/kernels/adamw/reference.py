"""``adamw_update`` in torch's operations, for tests of the kernel and for where there is none.

It has the kernel's formulas in the kernel's order, without fused multiply-adds, and the kernel's
random bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from moe_graphs.kernels.adamw.state_codes import MIXER, decode, encode

_LOW = (1 << 32) - 1


@torch.no_grad()
def adamw_update_reference(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    lr: float,
    lr_tensor: Tensor | None,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    grad_factor: Tensor | None,
    emas: Sequence[Tensor],
    ema_decay: float,
    keys: Sequence[int],
    exp_avg_scales: Sequence[Tensor],
    exp_avg_sq_scales: Sequence[Tensor],
    rounded: bool,
) -> None:
    """``triton_kernels.adamw_update`` for any device; in fp64 for parameters of fp64."""
    for number, given in enumerate(zip(params, grads, exp_avgs, exp_avg_sqs, strict=True)):
        row = [_in_memory(tensor) for tensor in given]
        scales = [_in_memory(of[number]) for of in (exp_avg_scales, exp_avg_sq_scales) if of]
        wide = torch.promote_types(row[0].dtype, torch.float32)
        p, g, m, v = (tensor.to(wide) for tensor in (*row[:2], *_read_states(row[2:], scales)))
        t, rate = steps[number].double(), _number(lr, p) if lr_tensor is None else lr_tensor
        step_size = (rate.double() / (1 - _power(beta1, t, p))).to(wide)
        factor = (1 / (1 - _power(beta2, t, p)).sqrt()).to(wide)
        if grad_scale is not None:
            g = _divided(g, grad_scale.to(wide))
            _write(row[1], g, found_inf)
        if grad_factor is not None:
            g = g * grad_factor.to(wide)
        if maximize:
            g = -g
        p = p - (rate.double() * _number(weight_decay, p).double()).to(wide) * p
        m = _lerp(m, g, _number(1 - beta1, p))
        v = _lerp(v, g * g, _number(1 - beta2, p))
        root = v.double().sqrt().to(wide)  # the CPU's root of fp32 is off by a last bit
        r = 1 / (root * factor + eps).double().sqrt().to(wide)
        p = p - step_size * (m * r * r)
        kept: Sequence[Tensor] = (p, m, v)
        if keys:
            kept = _rounded(kept, (row[0], *row[2:]), keys[number], steps[number], rounded)
        for target, value in zip((row[0], *row[2:], *scales), kept, strict=True):
            _write(target, value, found_inf)
        if emas:
            ema, new = _in_memory(emas[number]), kept[0].to(row[0].dtype).to(wide)
            share = torch.where(t > 1, _number(1 - ema_decay, p), 1.0)
            _write(ema, _lerp(ema.to(wide), new, share), found_inf)


def _read_states(states: Sequence[Tensor], scales: Sequence[Tensor]) -> Sequence[Tensor]:
    if not scales:
        return states
    (m, v), (of_m, of_v) = states, scales
    return decode(m, of_m, signed=True), decode(v, of_v, signed=False)


def _rounded(
    values: Sequence[Tensor], targets: Sequence[Tensor], key: int, step: Tensor, rounded: bool
) -> Sequence[Tensor]:
    """Parameter and states as ``targets`` take them; with states of 8 bits their scales, too."""
    p, m, v = values
    bits = random_bits(key, step, len(p))
    of_v = _product(MIXER, bits)[1]
    if rounded:
        p, m, v = (
            round_stochastically(value, bits) if target.dtype == torch.bfloat16 else value
            for target, value, bits in zip(
                targets, values, (bits, bits >> 16, of_v >> 16), strict=True
            )
        )
    if targets[1].dtype != torch.uint8:
        return p, m, v
    m, of_m = encode(m, bits, signed=True)
    v, of_v = encode(v, of_v, signed=False)
    return p, m, v, of_m, of_v


def random_bits(key: int, step: Tensor, count: int) -> Tensor:
    """Random bits of 32 for each of ``count`` places, by Philox4x32-10.

    The counter is (place // 16, 0, step, 0). Its four words are for places 0, 4, 8 and 12 of
    sixteen; the three places behind each take the word's products with powers of ``MIXER``.

    Args:
        key: of up to 63 bits.
        step: 0-dim.

    Returns:
        ``[count]``, int64 on the device of ``step``.
    """
    c0 = torch.arange(-(-count // 16), device=step.device)
    c1, c2, c3 = c0 * 0, step.long(), c0 * 0
    k0, k1 = key & _LOW, key >> 32
    for _ in range(10):
        (high0, low0), (high2, low2) = _product(0xD2511F53, c0), _product(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    words = torch.stack((c0, c1, c2, c3), 1).flatten()
    factors = [MIXER**power & _LOW for power in (0, 2, 1, 3)]
    return torch.stack([_product(each, words)[1] for each in factors], 1).flatten()[:count]


def round_stochastically(x: Tensor, bits: Tensor) -> Tensor:
    """Round to one of the two neighbours in bf16, so that the average result is ``x``.

    Args:
        bits: integers like ``x``, of which the lower 16 are used.

    Returns:
        fp32 with values of bf16; what is not finite is left as it is.
    """
    exact = x.float().view(torch.int32)
    cut = (exact + (bits & 0xFFFF).int()) & -0x10000
    return torch.where(x.isfinite(), cut.view(torch.float32), x.float())


def _product(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """The higher and the lower 32 bits of a product of two numbers of 32 bits."""
    high = (a * (b >> 16) + (a * (b & 0xFFFF) >> 16)) >> 16
    return high, a * b & _LOW


def _in_memory(tensor: Tensor) -> Tensor:
    """All numbers of a dense tensor, in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _number(value: float, like: Tensor) -> Tensor:
    return torch.full((), value, dtype=like.dtype, device=like.device)


def _divided(x: Tensor, by: Tensor) -> Tensor:
    """Divide by one number as a kernel does: torch would multiply by its rounded reciprocal."""
    return x / by.expand_as(x)


def _power(beta: float, t: Tensor, like: Tensor) -> Tensor:
    return torch.exp(t * _number(math.log(beta) if beta > 0 else -math.inf, like).double())


def _lerp(old: Tensor, new: Tensor, share: Tensor) -> Tensor:
    change = new - old
    return torch.where(share < 0.5, old + share * change, new + (share - 1) * change)


def _write(target: Tensor, value: Tensor, found_inf: Tensor | None) -> None:
    value = value.to(target.dtype)
    target.copy_(value if found_inf is None else torch.where(found_inf == 1, target, value))
