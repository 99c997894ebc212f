"""State tensors, and codecs: forms in which a logical fp32 state tensor is stored, such as int8 with a scale a row.

An update rule works with logical values: fp32, one an element. The device's memory and checkpoints have the stored
tensors, which the codec names. Updates and stores see these alone. Code that shows, compares or loads state sees the
logical values::

    exp_avg, fp32 [rows, 128]  --encode-->  exp_avg_int8, int8 [rows, 128]   and   exp_avg_scale, fp32 [rows, 1]
                               <--decode--

A codec works on each row of 128 elements by itself. A row is one parameter's alone, and no shard cuts it. So stored
values do not depend on the number of ranks, the bucket size or the stage.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from zero_kernels import ROW
from zero_kernels.codecs import FORMS, encode_stochastic_in_update, join_master, split_master

from ..params.storage_order import StorageOrder


class Per(enum.Enum):
    """The extent of one value of a state tensor."""

    ELEMENT = enum.auto()
    ROW = enum.auto()  # of 128 elements, as they lie in memory: a row is one parameter's alone, and no shard cuts it


class Begins(enum.Enum):
    """The content of a state tensor before the first update."""

    ZERO = enum.auto()
    PARAMETER = enum.auto()  # a copy of the parameter. If the parameter has the dtype itself there is no such tensor
    AVERAGE = enum.auto()  # a copy of the parameter, always: later the average of its values


@dataclasses.dataclass(frozen=True)
class StateTensor:
    """One tensor of a shard's state: flat, along the shard."""

    name: str
    begins: Begins = Begins.ZERO
    dtype: torch.dtype = torch.float32
    per: Per = Per.ELEMENT

    def span(self, offset: int, numel: int) -> tuple[int, int]:
        """Find start and length of the values of ``numel`` elements from ``offset`` on, which begins a row."""
        return (offset, numel) if self.per is Per.ELEMENT else (offset // ROW, -(-numel // ROW))

    def shape(self, parameter: Sequence[int], numel: int) -> tuple[int, ...]:
        """Make the shape of the state of a whole parameter, whose shape is ``parameter``, with ``numel`` elements."""
        return tuple(parameter) if self.per is Per.ELEMENT else (-(-numel // ROW),)

    def order(self, parameter: StorageOrder) -> StorageOrder:
        """Give the order in which state lies whose parameter lies in the order ``parameter``.

        State per row has no dimensions. But the parameter's order decides which elements make a row: so values of rows
        in one order mean nothing in another, and loading refuses them.
        """
        return parameter if self.per is Per.ELEMENT else None


class Codec:
    """A form in which state is stored, by the arithmetic of ``zero_kernels/codecs.py``. A codec is one of the
    subclasses below.

    Three things hold for each. Zeros are stored as zeros. Decoded values do not change when they are encoded and
    decoded again: so state may be loaded any number of times. NaN stays NaN.

    Attributes:
        name: as checkpoints record it.
        suffix, dtype: of the tensor that is stored in place of another, with a value an element.
        reads_parameter: whether the parameter is a part of the stored form, which is a master's then; ``decode`` gets
            it behind the other parts.
        stochastic: whether updates round by noise, for which they are given keys of rows.
    """

    name = ""
    suffix = ""
    dtype: torch.dtype
    reads_parameter = False
    stochastic = False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Codec) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def parts(self, tensor: StateTensor) -> tuple[StateTensor, ...]:
        """The tensors that are stored in place of ``tensor``, under other names; the first has a value an element, and
        a second one scale a row."""
        stored = StateTensor(f"{tensor.name}_{self.suffix}", dtype=self.dtype)
        scaled = not self.reads_parameter and FORMS[self.dtype].scaled
        return (stored, StateTensor(f"{tensor.name}_scale", per=Per.ROW)) if scaled else (stored,)

    def encode(self, values: Tensor) -> Sequence[Tensor]:
        """Encode whole rows, [rows, 128] fp32: into [rows, 128], and [rows, 1] of a scale. The last row of a parameter
        may come alone, and without what is behind its last element."""
        return FORMS[self.dtype].encode(values)

    def decode(self, parts: Sequence[Tensor]) -> Tensor:
        """Decode to [rows, 128] fp32: the values that were encoded, as the codec has rounded them. An element depends
        on what is stored of it and of its row alone."""
        return FORMS[self.dtype].decode(*parts)

    def encode_in_update(self, values: Tensor, columns: Mapping[str, Tensor], state: int) -> Sequence[Tensor]:
        """Encode ``values`` that an update has made. ``columns``: of the table, [rows, 1], and the keys of rows;
        ``state``: the number of the state among those of the rule."""
        return self.encode(values)

    # -- flat ------------------------------------------------------------------------------------------------------

    def decode_flat(self, tensor: StateTensor, parts: Sequence[Tensor]) -> Tensor:
        """Decode a flat range that begins with a row: [numel] fp32. ``parts``: flat, of the same range; with
        ``reads_parameter`` the parameter is the last."""
        numel, stored = parts[0].numel(), self.parts(tensor)
        of_rows = [of.per is Per.ROW for of in stored] + [False] * self.reads_parameter
        shaped = [part.view(-1, 1) if one else _rows_of(part) for one, part in zip(of_rows, parts, strict=True)]
        return self.decode(shaped).reshape(-1)[:numel]

    def encode_flat(self, values: Tensor) -> list[Tensor]:
        """Encode a flat range that begins with a row, ``values`` [numel] of any floating dtype, into flat parts."""
        numel = values.numel()
        encoded = self.encode(_rows_of(values.float()))
        return [part.reshape(-1)[:numel] if part.shape[1] > 1 else part.reshape(-1) for part in encoded]


def _rows_of(flat: Tensor) -> Tensor:
    """View ``flat`` as [rows, 128], with zeros behind its last element."""
    return torch.nn.functional.pad(flat, (0, -flat.numel() % ROW)).view(-1, ROW)


class Int8(Codec):
    """For values of either sign, as a first moment: values that are small beside their row's largest survive.

    With s the largest magnitude of the row, steps close to 0 are s / 254, and close to s they are s / 64. A row with
    inf or NaN is decoded to NaN.
    """

    name = suffix = "int8"
    dtype = torch.int8


class Root8(Codec):
    """For values that are not negative, as a second moment: 8 bits for the root of each. Only 0 is stored as 0: an
    update divides by the root, and must not divide by 0 where there was more. A row with NaN is decoded to NaN."""

    name = suffix = "root8"
    dtype = torch.uint8


class Bf16(Codec):
    """For any values, in bf16. An update rounds each value stochastically: to one of its two neighbours, so that the
    mean is the value, by noise that goes on from a checkpoint, however parameters are sharded. What is loaded, or set,
    is rounded to nearest even."""

    name = suffix = "bf16"
    dtype, stochastic = torch.bfloat16, True

    def encode_in_update(self, values: Tensor, columns: Mapping[str, Tensor], state: int) -> Sequence[Tensor]:
        return encode_stochastic_in_update(values, columns, state)


class Split(Codec):
    """A master whose high half is the bf16 parameter itself, the master rounded to nearest even: 16 bits are stored
    beside it. One of 65536 masters, which lies just between two parameters, is moved by a unit in its last place; all
    others are kept bit for bit.

    An edited parameter has the old number beside it. Where the two make no number together, as may happen after a
    parameter was set to 0, the master is the parameter.
    """

    name, suffix = "split", "low"
    dtype, reads_parameter = torch.int16, True

    def encode(self, values: Tensor) -> Sequence[Tensor]:
        return split_master(values, self.dtype)[1:]

    def decode(self, parts: Sequence[Tensor]) -> Tensor:
        low, parameter = parts
        return join_master(parameter, low)


class Split8(Split):
    """A master of 24 bits, whose high 16 are the bf16 parameter itself: 8 bits are stored beside it. So a master is
    moved by 1/512 of a unit in the parameter's last place at most, and by 1/256 where it is within 1/512 of the middle
    between two parameters."""

    name, suffix = "split8", "low8"
    dtype = torch.int8


CODECS: Mapping[str, Codec] = {codec.name: codec for codec in (Bf16(), Int8(), Root8(), Split(), Split8())}
"""The codecs of the package, by name."""

MASTERS: Mapping[str, Codec | None] = {"fp32": None, "split": Split(), "split8": Split8()}
"""The codec of a master, by the word for it."""


def default_master(dtypes: Iterable[torch.dtype]) -> str:
    """Choose the word of ``MASTERS`` for parameters of these dtypes: a split master needs bf16, and fp32 parameters
    have no master."""
    return "fp32" if torch.float16 in dtypes else "split"


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""The dtype of parameters and gradients, by the word for it in commands."""

STATE_DTYPES = ("fp32", "bf16", "int8")


def codecs_for(
    tensors: Sequence[StateTensor], nonnegative: Collection[str], master: str, state_dtype: str
) -> dict[str, Codec]:
    """Choose the codecs for ``tensors`` of a rule, by name, from a user's two words.

    Args:
        nonnegative: names of the tensors that are never below 0.
        master: one of ``MASTERS``. state_dtype: one of ``STATE_DTYPES``, for all fp32 state beside the master.
    """
    chosen: dict[str, Codec] = {}
    for tensor in tensors:
        codec: Codec | None = None
        if tensor.begins is Begins.PARAMETER:
            codec = MASTERS[master]
        elif tensor.begins is Begins.ZERO and tensor.per is Per.ELEMENT and tensor.dtype == torch.float32:
            eight = Root8() if tensor.name in nonnegative else Int8()
            codec = {"fp32": None, "bf16": Bf16(), "int8": eight}[state_dtype]
        if codec is not None:
            chosen[tensor.name] = codec
    return chosen


def saved_codec(tensor: StateTensor, entry: Mapping[str, object], own: Mapping[str, Codec]) -> Codec | None:
    """Find the codec by which a parameter's state ``entry`` has stored ``tensor``, by the names in it; None: it has the
    logical values, or nothing. ``own``: the codecs of the rule, by the names of tensors: tried first."""
    if tensor.name in entry or not any(name.startswith(tensor.name) for name in entry):
        return None
    known = ([own[tensor.name]] if tensor.name in own else []) + [*CODECS.values()]
    alone = (codec for codec in known if not codec.reads_parameter)  # a state has split masters joined, in fp32
    return next((codec for codec in alone if all(part.name in entry for part in codec.parts(tensor))), None)
