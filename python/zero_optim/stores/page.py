"""A page of a ``PagedStore``: its tensors, its home, and the frame that it has while it is on the device."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..params.layout import round_up
from .homes import Home
from .lanes import Mark
from .offload import FRAME_ALIGNMENT


class PageState(enum.Enum):
    """The place of a page: AWAY without a frame; COMING, copied into its frame; or HERE, fetched."""

    AWAY = enum.auto()
    COMING = enum.auto()
    HERE = enum.auto()


@dataclass(frozen=True)
class Field:
    """A tensor of a page, and where it lies in the page's run of bytes."""

    dtype: torch.dtype
    numel: int
    offset: int

    def of(self, run: Tensor) -> Tensor:
        return run[self.offset : self.offset + self.numel * self.dtype.itemsize].view(self.dtype)


def laid_out(tensors: Mapping[str, Tensor], start: int = 0) -> tuple[dict[str, Field], int]:
    """Lay tensors one after another from ``start`` on. Returns where each lies, and where the last one ends."""
    fields, end = {}, round_up(start, FRAME_ALIGNMENT)
    for name, tensor in tensors.items():
        fields[name] = Field(tensor.dtype, tensor.numel(), end)
        end = round_up(end + tensor.nbytes, FRAME_ALIGNMENT)
    return fields, end


@dataclass(eq=False)
class Frame:
    """A place on the device that pages take turns in."""

    run: Tensor  # [bytes] uint8 on the device
    free: Mark  # once it has passed, the frame may be overwritten
    page: Page | None = None


@dataclass(eq=False)
class Page:
    """A page of state, and the tensors that visit the device with it. Both lie in one frame, one after the other.

    A resident page stays on the device, and has no home: only its visiting tensors move.
    """

    own: dict[str, Field]
    nbytes: int  # of ``own``
    visiting: dict[str, tuple[Field, Tensor]]  # each with the tensor in host memory that it is a copy of
    home: Home | None  # None: resident
    stays: Mapping[str, Tensor]  # of a resident page
    arrived: Mark  # it was copied into its frame
    used: Mark  # it was updated, or read
    left: Mark  # it was copied out of its frame
    state: PageState = PageState.AWAY
    frame: Frame | None = None

    @property
    def moved(self) -> int:
        """Bytes that are copied in for an update, and out after it."""
        visiting = sum(round_up(of.numel * of.dtype.itemsize, FRAME_ALIGNMENT) for of, _ in self.visiting.values())
        return (self.nbytes if self.home is not None else 0) + visiting

    def tensors(self) -> dict[str, Tensor]:
        """Give all that an update uses, on the device."""
        if self.frame is None:
            return dict(self.stays)
        own = self.own if self.home is not None else {}
        here = {**own, **{name: field for name, (field, _) in self.visiting.items()}}
        return {**self.stays, **{name: field.of(self.frame.run) for name, field in here.items()}}

    def take_frame(self, frame: Frame) -> None:
        self.frame, self.state, frame.page = frame, PageState.COMING, self

    def leave_frame(self, free: Mark) -> None:
        """Leave the frame, which is free once the mark has passed."""
        if self.frame is not None:
            self.frame.free, self.frame.page = free, None
            self.frame, self.state = None, PageState.AWAY

    def stay(self, run: Tensor) -> None:
        """Become resident in ``run``, which holds the page. From now on visiting tensors have a frame to themselves."""
        self.home, self.stays = None, {name: field.of(run) for name, field in self.own.items()}
        fields, _ = laid_out({name: tensor for name, (_, tensor) in self.visiting.items()})
        self.visiting = {name: (field, self.visiting[name][1]) for name, field in fields.items()}
