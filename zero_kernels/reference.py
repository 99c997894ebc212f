"""The ops in plain torch: the executable specification that every other backend equals bit for bit.

Each fp32 operation is a torch call of its own, so each is rounded on its own and in the written order. Nothing is
read on the host, so the same code is right on any device.
"""

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero_kernels.codecs import FORMS, LOWS, encode_stochastic_in_update, join_master, split_master
from zero_kernels.hyper import ROW, ROW_KEY
from zero_kernels.rules import RULES
from zero_kernels.rules.adamw import ADAMW
from zero_kernels.rules.rule import Coefficients, States, Update

STATS_LANES = 1024
"""Running sums that `grad_stats` keeps in a block."""

STATS_BLOCK = 8 * STATS_LANES
"""Elements of one `grad_stats` block: one partial each."""

# Rows handled at once: bounds the temporaries to some 100 MB whatever the shard's size.
_CHUNK_ROWS = 1 << 15
_CHUNK_BLOCKS = 512


class Shard(NamedTuple):
    """One shard's part of `StepArgs`; None, or nothing, of what was not given."""

    grad: Tensor
    master: Tensor
    states: tuple[Tensor, ...]
    param_out: Tensor | None
    row_slot: Tensor
    row_keys: Tensor | None


class StepArgs(NamedTuple):
    """The arguments of `foreach_step` behind the rule, in the order of its schema; see there."""

    grads: Sequence[Tensor]
    masters: Sequence[Tensor]
    states: Sequence[Tensor]
    params_out: Sequence[Tensor]
    row_slots: Sequence[Tensor]
    hyper: Tensor
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    nonfinite_slots: Tensor | None = None
    scales: Sequence[Tensor] | None = None
    row_keys: Sequence[Tensor] | None = None

    def shards(self) -> Iterator[Shard]:
        """The lists, shard by shard."""
        own = len(self.states) // len(self.grads)
        for i, (grad, master, row_slot) in enumerate(zip(self.grads, self.masters, self.row_slots, strict=True)):
            yield Shard(
                grad,
                master,
                tuple(self.states[i * own : (i + 1) * own]),
                self.params_out[i] if self.params_out else None,
                row_slot,
                self.row_keys[i] if self.row_keys else None,
            )

    def scale_of_states(self) -> list[Tensor | None]:
        """The scale of each of `states`; None: its form has none. Raises ValueError where there are more or fewer."""
        left = list(self.scales or ())
        wanted = sum(FORMS[state.dtype].scaled for state in self.states)
        if len(left) != wanted:
            raise ValueError(f"scales must be one for each int8 or uint8 state: {wanted} of them, {len(left)} scales")
        return [left.pop(0) if FORMS[state.dtype].scaled else None for state in self.states]


def foreach_step(rule: str, *given: Any, **optional: Any) -> None:
    """See `zero_kernels.foreach_step`."""
    args, of = StepArgs(*given, **optional), RULES[rule]
    dtypes = [state.dtype for state in args.states[: len(of.states)]]
    pairs = zip(args.states, args.scale_of_states(), strict=True)
    parts = [part for pair in pairs for part in pair if part is not None]
    _update(_encoded(of.update, dtypes), of.columns, args._replace(states=parts, scales=None))


def _encoded(update: Update, dtypes: Sequence[torch.dtype]) -> Update:
    """Wrap `update` for states that are stored in these dtypes: decode each before, and encode it after."""
    forms = [FORMS[dtype] for dtype in dtypes]

    def encode(state: int, value: Tensor, c: Coefficients) -> Sequence[Tensor]:
        if dtypes[state] == torch.bfloat16:
            return encode_stochastic_in_update(value, c, state)
        return forms[state].encode(value)

    def between(g: Tensor, p: Tensor, stored: States, c: Coefficients) -> tuple[Tensor, list[Tensor]]:
        parts = iter(stored)
        values = [form.decode(*(next(parts) for _ in range(1 + form.scaled))) for form in forms]
        new, news = update(g, p, values, c)
        return new, [part for state, value in enumerate(news) for part in encode(state, value, c)]

    return between


def update_rows(
    update: Update,
    columns: Sequence[str],
    grads: Sequence[Tensor],
    masters: Sequence[Tensor],
    states: Sequence[Tensor],
    params_out: Sequence[Tensor],
    row_slots: Sequence[Tensor],
    hyper: Tensor,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    nonfinite_slots: Tensor | None = None,
    row_keys: Sequence[Tensor] | None = None,
) -> None:
    """Update flat shards by any rule that is written in torch, on any device. Reads nothing on the host.

    Args:
        update: the rule's arithmetic, as `Rule.update` is.
        columns: names of the columns of `hyper`, made by `columns_of`.
        masters: as in `foreach_step`, or of another floating dtype.
        states: of any dtype, shard after shard, each shard's in the order that `update` has. Either [numel], which
            `update` sees as [rows, 128], or one value a row, [rows], which it sees as [rows, 1].
        row_keys: of each shard int32 [ceil(numel / ROW)], which `update` finds beside the columns, under "row_key".
        the rest: as in `foreach_step`.

    `update` is called for many rows at a time, and for the last row of a shard apart where that is shorter than 128.
    What it returns is copied where a row is live: it has a slot that is active, and `found_inf` is 0.
    """
    args = StepArgs(grads, masters, states, params_out, row_slots, hyper, grad_scale, found_inf, nonfinite_slots)
    _update(update, columns, args._replace(row_keys=row_keys))


def _update(update: Update, columns: Sequence[str], args: StepArgs) -> None:
    hyper, marks = args.hyper, args.nonfinite_slots
    if hyper.shape[0] == 0:
        return
    scale_of_all = hyper.new_ones(()) if args.grad_scale is None else args.grad_scale.reshape(())
    skipped = hyper.new_zeros(()) if args.found_inf is None else args.found_inf.reshape(())
    skipped = skipped != 0
    for shard in args.shards():
        grad, master, own, param_out, row_slot, keys = shard
        for elements, rows, shape in _row_chunks(grad.numel()):
            slot = row_slot[rows].to(torch.int64)
            of_row = hyper.index_select(0, slot.clamp(min=0)).unsqueeze(-1).unbind(1)
            c = dict(zip(columns, of_row, strict=True))  # each [rows, 1]
            if keys is not None:
                c[ROW_KEY] = keys[rows].unsqueeze(1)
            g = grad[elements].view(shape).float() * (scale_of_all * c["grad_factor"])
            if marks is not None:
                _mark_nonfinite(g, slot, skipped, marks)
            split = master.dtype in LOWS
            p = master[elements].view(shape)
            if split:
                p = join_master(param_out[elements].view(shape), p)  # type: ignore[index]
            olds = [
                state[elements].view(shape) if state.numel() == grad.numel() else state[rows].view(-1, 1)
                for state in own
            ]
            new, news = update(g, p, olds, c)
            live = (slot >= 0).unsqueeze(1) & (c["active"] != 0) & ~skipped
            written = new
            if split:
                high, written = split_master(new, master.dtype)
                new = join_master(high, written)
            if param_out is not None:
                _copy_where(live, new, param_out[elements].view(shape))
            for value, old in zip((written, *news), (master[elements].view(shape), *olds), strict=True):
                _copy_where(live, value, old)


def _copy_where(live: Tensor, value: Tensor, to: Tensor) -> None:
    to.copy_(torch.where(live, value.to(to.dtype), to))


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


def ema(
    averages: Sequence[Tensor],
    masters: Sequence[Tensor],
    params: Sequence[Tensor],
    row_slots: Sequence[Tensor],
    rates: Tensor,
) -> None:
    """See `zero_kernels.ema`."""
    each = rates.shape[1]
    if rates.shape[0] == 0:
        return
    for i, (master, row_slot) in enumerate(zip(masters, row_slots, strict=True)):
        for elements, rows, shape in _row_chunks(master.numel()):
            p = master[elements].view(shape)
            p = join_master(params[i][elements].view(shape), p) if p.dtype in LOWS else p.float()
            slot = row_slot[rows].to(torch.int64)
            of_row = rates.index_select(0, slot.clamp(min=0))
            for k in range(each):
                rate, average = of_row[:, k : k + 1], averages[i * each + k][elements].view(shape)
                moves = (slot >= 0).unsqueeze(1) & (rate != 0)
                _copy_where(moves, average + rate * (p - average), average)


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
    """Rows of the table that `adam_step` reads: see `Rule.fill_table`."""
    ADAMW.fill_table(coefficients, group, step, active, out)


OPS: dict[str, Callable[..., Any]] = {
    "foreach_step": foreach_step,
    "ema": ema,
    "pack": pack,
    "unpack": unpack,
    "grad_stats": grad_stats,
    "hyper_table": hyper_table,
}
