"""The ops in plain torch: the executable specification that every other backend equals bit for bit.

Each fp32 operation is a torch call of its own, so each is rounded on its own and in the written order. Nothing is
read on the host, so the same code is right on any device.
"""

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from zero_kernels.hyper import HYPER_COLUMNS, ROW

STATS_LANES = 1024
"""Running sums that `grad_stats` keeps in a block."""

STATS_BLOCK = 8 * STATS_LANES
"""Elements of one `grad_stats` block: one partial each."""

STEP_BITS = 32
"""Bits of a step count that `hyper_table` looks at."""

# Rows handled at once: bounds the temporaries to some 100 MB whatever the shard's size.
_CHUNK_ROWS = 1 << 15
_CHUNK_BLOCKS = 512


def adam_step(
    grad: Tensor,
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    param_out: Tensor | None,
    row_slot: Tensor,
    hyper: Tensor,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    nonfinite_slots: Tensor | None,
) -> None:
    """See `zero_kernels.adam_step`."""
    if hyper.shape[0] == 0:
        return
    scale_of_all = hyper.new_ones(()) if grad_scale is None else grad_scale.reshape(())
    skipped = hyper.new_zeros(()) if found_inf is None else found_inf.reshape(())
    skipped = skipped != 0
    for elements, rows, shape in _row_chunks(grad.numel()):
        slot = row_slot[rows].to(torch.int64)
        columns = hyper.index_select(0, slot.clamp(min=0)).unsqueeze(-1).unbind(1)
        coefficients = dict(zip(HYPER_COLUMNS, columns, strict=True))  # each [rows, 1]
        scale = scale_of_all * coefficients["grad_factor"]
        g = grad[elements].view(shape).float() * scale
        if nonfinite_slots is not None:
            _mark_nonfinite(g, slot, skipped, nonfinite_slots)
        live = (slot >= 0).unsqueeze(1) & (coefficients["active"] != 0) & ~skipped
        p, m, v = (state[elements].view(shape) for state in (master, exp_avg, exp_avg_sq))
        out = None if param_out is None else param_out[elements].view(shape)
        _update(g, p, m, v, out, coefficients, live)


def one_by_one(adam_step: Callable[..., None]) -> Callable[..., None]:
    """`foreach_adam_step` by a call of a backend's `adam_step` for each shard."""

    def foreach_adam_step(
        grads: Sequence[Tensor],
        masters: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        params_out: Sequence[Tensor],
        row_slots: Sequence[Tensor],
        *shared: Tensor | None,
    ) -> None:
        outs: Sequence[Tensor | None] = params_out or [None] * len(grads)
        for shard in zip(grads, masters, exp_avgs, exp_avg_sqs, outs, row_slots, strict=True):
            adam_step(*shard, *shared)

    return foreach_adam_step


def _row_chunks(numel: int) -> Iterator[tuple[slice, slice, tuple[int, int]]]:
    """Cut [0, numel) into (elements, rows, two-dimensional shape): runs of whole rows, then the tail row."""
    full = numel // ROW
    for start in range(0, full, _CHUNK_ROWS):
        stop = min(start + _CHUNK_ROWS, full)
        yield slice(start * ROW, stop * ROW), slice(start, stop), (stop - start, ROW)
    if numel % ROW:
        yield slice(full * ROW, numel), slice(full, full + 1), (1, numel % ROW)


def _mark_nonfinite(g: Tensor, slot: Tensor, skipped: Tensor, nonfinite_slots: Tensor) -> None:
    bad = ((~g.isfinite()).any(dim=1) & skipped & (slot >= 0)).to(torch.int32)
    nonfinite_slots.scatter_reduce_(0, slot.clamp(min=0), bad, "amax")


def _update(
    g: Tensor,
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    param_out: Tensor | None,
    c: dict[str, Tensor],
    live: Tensor,
) -> None:
    """The update's formula, over [rows, width] fp32 views with [rows, 1] coefficients, where `live`."""
    p = master
    g = torch.where(c["weight_decay"] != 0, g + c["weight_decay"] * p, g)
    p = p * c["decay"]
    m = exp_avg * c["beta1"] + g * c["one_minus_beta1"]
    v = exp_avg_sq * c["beta2"] + (g * c["one_minus_beta2"]) * g
    # torch.sqrt of fp32 is not correctly rounded on the CPU; through float64 it is.
    root = v.double().sqrt().float()
    p = p - c["step_size"] * (m / (root / c["bias_correction2_sqrt"] + c["eps"]))
    master.copy_(torch.where(live, p, master))
    exp_avg.copy_(torch.where(live, m, exp_avg))
    exp_avg_sq.copy_(torch.where(live, v, exp_avg_sq))
    if param_out is not None:
        param_out.copy_(torch.where(live, p.to(param_out.dtype), param_out))


def pack(
    grads: Sequence[Tensor], offsets: Sequence[int], bucket: Tensor, scale: float, nonfinite: Tensor | None
) -> None:
    """See `zero_kernels.pack`."""
    scale = ctypes.c_float(scale).value
    end = 0
    for i, (grad, offset) in enumerate(zip(grads, offsets, strict=True)):
        if nonfinite is not None:
            nonfinite[i].copy_((~grad.isfinite()).any())
        bucket[end:offset].zero_()
        end = offset + grad.numel()
        bucket[offset:end].copy_(grad.reshape(-1).float() * scale)
    bucket[end:].zero_()


def unpack(bucket: Tensor, offsets: Sequence[int], grads: Sequence[Tensor], scale: float) -> None:
    """See `zero_kernels.unpack`."""
    scale = ctypes.c_float(scale).value
    for grad, offset in zip(grads, offsets, strict=True):
        grad.copy_((bucket[offset : offset + grad.numel()].float() * scale).view(grad.shape))


def grad_stats(shards: Sequence[Tensor], norm_type: float) -> Tensor:
    """See `zero_kernels.grad_stats`."""
    return torch.stack([_stats_of(shard, norm_type) for shard in shards])


def _stats_of(shard: Tensor, norm_type: float) -> Tensor:
    count = sum(
        ((~chunk.isfinite()).sum() for chunk in shard.split(_CHUNK_BLOCKS * STATS_BLOCK)),
        torch.zeros((), dtype=torch.int64, device=shard.device),
    )
    if norm_type in (1.0, 2.0):
        norm = _ordered_sum(shard, norm_type)
    elif norm_type == math.inf:
        norm = _max_abs(shard)
    else:
        norm = shard.double().abs().pow(norm_type).sum()
    return torch.stack((norm.float(), count.float()))


def _ordered_sum(shard: Tensor, norm_type: float) -> Tensor:
    """Sum of x*x (norm 2) or |x| (norm 1) in the one fixed order of fp32 additions."""
    partials = [torch.zeros(0, dtype=torch.float32, device=shard.device)]
    for chunk in shard.split(_CHUNK_BLOCKS * STATS_BLOCK):
        x = torch.nn.functional.pad(chunk.float(), (0, -chunk.numel() % STATS_BLOCK))
        terms = x * x if norm_type == 2.0 else x.abs()
        partials.append(_fold(terms.view(-1, STATS_BLOCK // STATS_LANES, STATS_LANES)))
    partial = torch.cat(partials)
    partial = torch.nn.functional.pad(partial, (0, -partial.numel() % STATS_LANES))
    return _fold(partial.view(1, -1, STATS_LANES)).reshape(())


def _fold(terms: Tensor) -> Tensor:
    """[blocks, depth, lanes] → [blocks]: lanes summed down the depth in order, then folded by halves."""
    acc = torch.zeros_like(terms[:, 0]) if terms.shape[1] else terms.new_zeros(terms.shape[0], terms.shape[2])
    for k in range(terms.shape[1]):
        acc = acc + terms[:, k]
    while acc.shape[1] > 1:
        half = acc.shape[1] // 2
        acc = acc[:, :half] + acc[:, half:]
    return acc[:, 0]


def _max_abs(shard: Tensor) -> Tensor:
    """max |x| compared as integers: the order of bit patterns is that of magnitudes, with NaN above inf."""
    bits = shard.new_zeros(1, dtype=torch.int32)
    for chunk in shard.split(_CHUNK_BLOCKS * STATS_BLOCK):
        bits = (
            torch.maximum(bits, chunk.float().abs().view(torch.int32).amax(0, keepdim=True)) if chunk.numel() else bits
        )
    return bits.view(torch.float32).reshape(())


def hyper_table(coefficients: Tensor, group: Tensor | None, step: Tensor, active: Tensor | None, out: Tensor) -> None:
    """Rows of the table that `adam_step` reads, in float64, each coefficient rounded once (see `docs/ops.md`).

    Args:
        coefficients: fp64 [len(HYPER_COEFFICIENTS), groups].
        group: int32 [slots], the column of `coefficients` that a slot uses; None: slot i uses column i.
        step: fp64 [slots], whole numbers below 2^32.
        active: bool [slots]; None: all are.
        out: fp32 [slots, len(HYPER_COLUMNS)].
    """
    of_slot = coefficients if group is None else coefficients.index_select(1, group)
    lr, beta1, beta2, eps, weight_decay, decoupled, maximize = of_slot
    shared = weight_decay * decoupled
    columns = {
        "step_size": lr / (1 - _power(beta1, step)),
        "decay": 1 - lr * shared,
        "weight_decay": weight_decay - shared,
        "eps": eps,
        "beta1": beta1,
        "one_minus_beta1": 1 - beta1,
        "beta2": beta2,
        "one_minus_beta2": 1 - beta2,
        "bias_correction2_sqrt": (1 - _power(beta2, step)).sqrt(),
        "active": torch.ones_like(step) if active is None else active.double(),
        "grad_factor": 1 - 2 * maximize,
    }
    padding = torch.zeros_like(step)
    out.copy_(torch.stack([columns.get(name, padding) for name in HYPER_COLUMNS], dim=-1))


def _power(base: Tensor, exponent: Tensor) -> Tensor:
    """base^exponent by squaring: a product in one fixed order, which a library's pow does not promise."""
    bits, result, square = exponent.to(torch.int64), torch.ones_like(base), base
    for bit in range(STEP_BITS):
        result = torch.where((bits >> bit) & 1 == 1, result * square, result)
        square = square * square
    return result


OPS: dict[str, Callable[..., Any]] = {
    "adam_step": adam_step,
    "foreach_adam_step": one_by_one(adam_step),
    "pack": pack,
    "unpack": unpack,
    "grad_stats": grad_stats,
    "hyper_table": hyper_table,
}
