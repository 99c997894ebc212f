"""Edits of 16-bit parameters that no version counter shows, such as ``p.data.clamp_(-c, c)``: a look at a window.

A parameter is its fp32 master, rounded. The update reads the master alone, so an edit that nobody notices is
overwritten. To compare all parameters in every step takes longer than the update. So only a *window* of them is
compared: its values are kept after an update, and compared before the next. The windows take turns::

    step 1  update | keep window 0           edits?
    step 2  look at window 0 | update | keep window 1
    step 3  look at window 1 | ...

An edit of all weights is found in the step that follows it, an edit that is made again and again within ``_TURNS``
steps or so. Once an edit was found, every update compares all of its shard, and takes edits over.

On a CPU the host reads the answer at once. A GPU's answer it reads in the next step: by then the update has overwritten
the edits that were found, and takes over those that follow. Several ranks read in the next step and no later, so that
ranks with the same parameters take an edit over in the same step; the exchange lets the host be no further ahead
anyway. A rank alone does not wait: it reads an answer once it has arrived.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_kernels import is_capturing

from ..comm.host_copy import HostCopy
from ..comm.sharding import Sharding
from ..params.layout import SlotPiece
from .shard_state import ShardState

_LEAST, _MOST = 2**12, 2**20  # elements of a window
_REMEMBERED = 15  # turns whose answers the host can tell apart
_NOWHERE = _REMEMBERED * _MOST  # exact in fp32, as all that is below
_TURNS = 256  # windows in all, unless they would be smaller or larger than that


@dataclass(frozen=True, eq=False)
class WindowPart:
    """Elements ``start`` to ``start + numel`` of the parameters of a shard."""

    shard: ShardState
    start: int
    numel: int

    def values(self) -> Tensor:
        """[numel] int16, the bits of the present values."""
        return self.shard.bucket.param_shard.narrow(0, self.start, self.numel).view(torch.int16)

    def label_at(self, place: int) -> str:
        """Name the parameter that has this element of the part."""
        bucket, at = self.shard.bucket, self.start + place
        ends = (piece.in_shard + piece.numel for piece in bucket.pieces)
        return next((bucket.label(number) for number, end in enumerate(ends) if at < end), "a parameter")


@dataclass(frozen=True, eq=False)
class Window:
    """Elements that are looked at together: of one shard, or of several small ones."""

    parts: Sequence[WindowPart]

    @property
    def numel(self) -> int:
        return sum(part.numel for part in self.parts)

    def label_at(self, place: int) -> str:
        """Name the parameter that has this element of the window."""
        for part in self.parts:
            if place < part.numel:
                return part.label_at(place)
            place -= part.numel
        return "a parameter"


def windows_of(shards: Sequence[ShardState]) -> list[Window]:
    """Cut the parameters' elements of these shards into windows, of equal size but for the last."""
    ends = [max(piece.in_shard + piece.numel for piece in shard.bucket.pieces) for shard in shards]
    size = min(max(-(-sum(ends) // _TURNS), _LEAST), _MOST)
    windows: list[Window] = []
    parts: list[WindowPart] = []
    room = size
    for shard, end in zip(shards, ends, strict=True):
        start = 0
        while start < end:
            parts.append(WindowPart(shard, start, min(room, end - start)))
            start, room = start + parts[-1].numel, room - parts[-1].numel
            if room == 0:
                windows.append(Window(parts))
                parts, room = [], size
    return [*windows, Window(parts)] if parts else windows


class HiddenEdits:
    """Looks for the hidden edits of one optimizer's parameters.

    Attributes:
        found: whether there was one, as far as the host knows.
    """

    def __init__(self, sharding: Sharding) -> None:
        self._sharding = sharding
        self.found = False
        self._windows: list[Window] = []
        self._turn = 0
        self._kept = 0  # elements of this turn's window that ``_values`` holds, as the last update has left them
        self._looked: dict[int, Window] = {}  # by turn modulo ``_REMEMBERED``, those that were compared last
        self._values = torch.empty(0, dtype=torch.int16, device=sharding.device)
        self._changed = torch.empty(0, dtype=torch.bool, device=sharding.device)
        # Where an edit was found: its place in a window, plus ``_MOST`` for each turn. It stays, so that none is missed
        # while the host has not read the answer before.
        self._found = torch.full((1,), _NOWHERE, dtype=torch.float32, device=sharding.device)
        self._nowhere = torch.full((), _NOWHERE, dtype=torch.int64, device=sharding.device)
        self._on_host = HostCopy(self._found)

    def lay_out(self, shards: Sequence[ShardState]) -> None:
        """Watch ``shards`` from now on, but for those that a user cannot edit unseen."""
        self._kept = 0
        self._looked.clear()
        self._windows = windows_of([shard for shard in shards if shard.can_be_edited_unseen])
        room = max((window.numel for window in self._windows), default=0)
        if room > len(self._values):
            self._values, self._changed = self._values.new_empty(room), self._changed.new_empty(room)

    def accept(self, shard: ShardState, pieces: Sequence[SlotPiece]) -> None:
        """Accept the present values of these parameters: their edit is known."""
        start = 0
        for part in self._window.parts if self._kept and not self._idle else ():
            if part.shard is shard:
                values = part.values()
                for piece in pieces:
                    low = max(piece.in_shard - part.start, 0)
                    high = min(piece.in_shard + piece.numel - part.start, part.numel)
                    if low < high:
                        self._values[start + low : start + high].copy_(values[low:high])
            start += part.numel

    @property
    def _window(self) -> Window:
        return self._windows[self._turn % len(self._windows)]

    @property
    def _idle(self) -> bool:
        """True if nothing is looked for: all is compared anyway, there is nothing to watch, or the step is recorded."""
        return self.found or not self._windows or is_capturing(self._sharding.device)

    def keep(self, shard: ShardState) -> None:
        """Keep the window's values in ``shard``, which was updated, and not yet sent out."""
        start = 0
        for part in () if self._idle else self._window.parts:
            if part.shard is shard:
                self._values[start : start + part.numel].copy_(part.values())
                self._kept += part.numel
            start += part.numel

    def look(self) -> None:
        """Compare the window with its kept values, once a step, before the update."""
        if not self._idle:
            self._read()  # what a GPU has found in the step before
        if not self._idle:
            window = self._window
            if self._kept == window.numel:
                self._compare(window)
            self._turn += 1
        self._kept = 0

    def _compare(self, window: Window) -> None:
        changed, start = self._changed[: window.numel], 0
        for part in window.parts:
            own = slice(start, start + part.numel)
            torch.ne(part.values(), self._values[own], out=changed[own])
            start += part.numel
        place = changed.view(torch.uint8).argmax(0, keepdim=True)  # the first that was changed, if one was
        turn = self._turn % _REMEMBERED
        here = torch.where(changed.index_select(0, place), place + turn * _MOST, self._nowhere)
        self._found.copy_(torch.minimum(self._found, here))
        self._looked[turn] = window
        self._on_host.send()
        if self._on_host.immediate:
            self._read()

    def _read(self) -> None:
        answer = self._on_host.read(wait=self._sharding.agrees)
        if answer is not None and answer[0] != _NOWHERE:
            turn, place = divmod(int(answer[0]), _MOST)
            self.found = True
            self._warn(self._looked[turn].label_at(place) if turn in self._looked else "a parameter")

    def _warn(self, label: str) -> None:
        lost = "" if self._on_host.immediate else " The edits before the last step were overwritten by the masters."
        warnings.warn(
            f"{label} was edited in a way that its version counter does not show, such as through p.data.{lost} From "
            "now on every step compares all 16-bit parameters with their fp32 masters, and takes such edits over. To "
            "save that, edit parameters in place under torch.no_grad(), or call opt.refresh_master() after each edit",
            stacklevel=2,
        )
