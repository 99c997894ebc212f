"""Forms in which state is stored, in plain torch: the arithmetic that every backend repeats.

Values are whole rows, fp32 [rows, 128]; the last row of a shard may come alone, and without what is behind its last
element. A scale is one fp32 value a row, [rows, 1]. Each operation is rounded to fp32 on its own. Nothing is read on
the host.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_kernels.hyper import ROW, ROW_KEY, STEP_NUMBER
from zero_kernels.rules.rule import square_root

INT8_SMALLEST = 2.0**-100
ROOT8_SMALLEST = 2.0**-63
"""Smaller scales become 0, and their rows too, so that no factor of a product is ever a subnormal number."""

LARGEST = float.fromhex("0x1.fffffep63")
"""The root of the largest fp32, and the largest scale. A second moment that overflowed is stored as the square of this,
and a first moment as this at most: so an update that divides by the root of the one moves by no more than usual."""


def _scales(magnitudes: Tensor, smallest: float) -> Tensor:
    """[rows, 1], the largest of each row, compared as bit patterns: so NaN is above inf, and stays."""
    largest = magnitudes.view(torch.int32).amax(1, keepdim=True).view(torch.float32)
    return torch.where(largest < smallest, 0.0, largest)


def _over(stored: Tensor, divisor: float) -> Tensor:
    """fp32 quotients. By a number torch divides on CUDA by multiplying with its reciprocal, which rounds twice."""
    values = stored.float()
    return values / torch.full_like(values, divisor)


def encode_int8(values: Tensor) -> tuple[Tensor, Tensor]:
    """Give int8 [rows, 128], with steps that are finest close to 0, and the scales. Finite values are clamped to
    `LARGEST`. A row that is not finite is stored as zeros, with a scale that is not finite."""
    values = torch.where(values.isfinite(), values.clamp(-LARGEST, LARGEST), values)
    scale = _scales(values.abs(), INT8_SMALLEST)
    x = torch.where(scale > 0, values / scale, 0.0)  # 0 or NaN, where the scale is not finite
    y = (x + x) / (1 + x.abs())
    return (127 * y).round().nan_to_num(0.0).to(torch.int8), scale


def decode_int8(stored: Tensor, scale: Tensor) -> Tensor:
    y = _over(stored, 127)
    return y / (2 - y.abs()) * scale


def encode_root8(values: Tensor) -> tuple[Tensor, Tensor]:
    """Give uint8 [rows, 128] of the roots of values that are not negative, 0 for 0 alone, and the scales. The root of
    inf is taken to be `LARGEST`. A row with NaN, or a negative value, is stored as zeros, with a scale that is NaN."""
    roots = square_root(values).clamp(max=LARGEST)
    scale = _scales(roots.abs(), ROOT8_SMALLEST)
    near = (255 * torch.where(scale > 0, roots / scale, 0.0)).round().nan_to_num(0.0)
    lost = (near == 0) & (roots > 0) & (scale > 0)
    return torch.where(lost, 1.0, near).to(torch.uint8), scale


def decode_root8(stored: Tensor, scale: Tensor) -> Tensor:
    root = _over(stored, 255) * scale
    return root * root


def encode_bf16(values: Tensor) -> tuple[Tensor]:
    """Give bf16 [rows, 128], rounded to nearest even."""
    return (values.to(torch.bfloat16),)


def decode_bf16(stored: Tensor) -> Tensor:
    return stored.float()


_WORD = 0xFFFFFFFF
NOISE_STRIDE = 0x9E3779B9
"""Distance of the numbers from which `mixed` makes the words of a row. From consecutive numbers it would make words
whose upper halves are not quite independent: a test of 2^23 pairs finds it."""

CUT_FROM = 0x7F7F0000
"""From this magnitude on nothing is rounded up: the largest finite bf16, infinities and NaN."""


def mixed(x: Tensor) -> Tensor:
    """Mix the bits of 32-bit words, given and returned as int64 from 0 to 2^32 - 1: the hash `lowbias32` (Wellons,
    "Prospecting for Hash Functions", 2018)."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _WORD
    return x ^ (x >> 16)


def noise_of(row_key: Tensor, step_number: Tensor, state: int, width: int = ROW) -> Tensor:
    """Make the noise of rows, int64 [rows, width], each from 0 to 2^16 - 1: two elements use one word.

    Args:
        row_key: int32 [rows, 1].
        step_number: fp32 [rows, 1]: the column of that name.
        state: the number of the state among those of the rule.
    """
    of_row = mixed(row_key.to(torch.int64) & _WORD) + step_number.contiguous().view(torch.int32)
    of_state = mixed(mixed(of_row & _WORD) + state & _WORD)
    words = mixed(of_state + torch.arange(ROW // 2, device=row_key.device) * NOISE_STRIDE & _WORD)
    return torch.stack((words & 0xFFFF, words >> 16), dim=-1).view(-1, ROW)[:, :width]


def encode_bf16_stochastic(values: Tensor, noise: Tensor) -> tuple[Tensor]:
    """Give bf16 [rows, 128]: one of the two neighbours of each value, the nearer the likelier.

    The noise is added to the lower half of the bits, which is cut off then. A finite value stays finite: from the
    largest bf16 on it is cut without noise.
    """
    bits = values.contiguous().view(torch.int32)
    bits = torch.where((bits & 0x7FFFFFFF) < CUT_FROM, bits + noise.to(torch.int32), bits)
    cut = (bits >> 16).to(torch.int16).view(torch.bfloat16)
    return (torch.where(values.isnan(), math.nan, cut),)


def encode_stochastic_in_update(values: Tensor, columns: Mapping[str, Tensor], state: int) -> tuple[Tensor]:
    """Do the same in an update of rows. `columns`: the table's, and the row keys, as `update_rows` passes them."""
    return encode_bf16_stochastic(values, noise_of(columns[ROW_KEY], columns[STEP_NUMBER], state, values.shape[1]))


def row_keys(tensor: int, first: int, rows: int) -> Tensor:
    """Make keys, int32 [rows] on the CPU, for rows `first` to `first + rows` of the tensor of that number."""
    start = int(mixed(torch.tensor(tensor, device="cpu"))) + first
    return (torch.arange(start, start + rows, device="cpu") & _WORD).to(torch.int32)


@dataclass(frozen=True)
class Form:
    """One form of state: `encode` makes its parts of values, `decode` values of its parts, the scales last if any."""

    encode: Callable[[Tensor], Sequence[Tensor]]
    decode: Callable[..., Tensor]
    scaled: bool = False


FORMS = {
    torch.float32: Form(lambda values: (values,), lambda stored: stored),
    torch.bfloat16: Form(encode_bf16, decode_bf16),
    torch.int8: Form(encode_int8, decode_int8, scaled=True),
    torch.uint8: Form(encode_root8, decode_root8, scaled=True),
}
"""The forms of a state, by the dtype of what is stored an element."""


LOWS = (torch.int16, torch.int8)
"""Dtypes of the low part of a split master."""


def split_master(master: Tensor, dtype: torch.dtype = torch.int16) -> tuple[Tensor, Tensor]:
    """Split fp32 into bf16, rounded to nearest even, and the difference of their bits as int16; or as int8, in units of
    256, rounded to nearest even, from -127 to 127.

    One difference is not exact in int16: the 32768 of a tie is kept as 32767. Where the bf16 is inf or NaN, it is 0.
    """
    high = master.to(torch.bfloat16)
    low = master.view(torch.int32) - (high.view(torch.int16).to(torch.int32) << 16)
    low = torch.where(high.isfinite(), low.clamp(-32767, 32767), 0)
    if dtype == torch.int8:
        low = ((low + 127 + (low >> 8 & 1)) >> 8).clamp(-127, 127)
    return high, low.to(dtype)


def join_master(high: Tensor, low: Tensor) -> Tensor:
    """Join the halves of a split master to fp32, by the dtype of `low`, which is ignored where the high half is inf or
    NaN, or was set to 0 since and both together are NaN."""
    away = low.to(torch.int32) << (8 if low.dtype == torch.int8 else 0)
    master = ((high.view(torch.int16).to(torch.int32) << 16) + away).view(torch.float32)
    return torch.where(high.isfinite() & ~master.isnan(), master, high.float())
