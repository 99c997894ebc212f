"""The gradients of the next round, and whether the user has zeroed them since a backward raised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..params.tensor_slice import local_of
from .bucket import Bucket
from .slots import Zeroed


@dataclass(frozen=True)
class AfterRaise:
    """State of a round that a raise has left open, as found before the rest of it leaves.

    Attributes:
        launched: how many buckets had left.
        zeroed: how the user has zeroed this rank's gradients since the raise: those in the buckets that had left, and
            those that are still here. None: some of them were not zeroed. A tensor, [] bool on the device: they were
            written in place, and it is False where all of them are zero.
    """

    launched: int
    zeroed: Zeroed | Tensor | None


class RoundGrads:
    """Notes each gradient as it comes, until a round has taken it along.

    A backward that raises leaves its round open, and the user may zero gradients before whatever completes it. Then
    what arrives from other ranks is to be zero, too::

        rank 0   backward raises after bucket 0 has left   model.zero_grad()   bucket 1 leaves; dropped
        rank 1   backward                                  model.zero_grad()   dropped
    """

    def __init__(self, parameters: Mapping[int, Tensor]) -> None:
        self._parameters = parameters
        self._versions: dict[int, int] = {}  # by parameter index, as the gradient came
        self._after_raise: AfterRaise | None = None

    def note(self, index: int, parameter: Tensor) -> None:
        """Note the gradient that ``parameter``, number ``index``, has now."""
        grad = parameter.grad
        self._versions[index] = -1 if grad is None else grad._version

    def backward_begins(self) -> None:
        """Note anew the gradients of ``no_sync`` backwards, which wait for a round: edits so far came before it."""
        waiting = [index for index in self._versions if self._parameters[index].grad is not None]
        self._versions.clear()
        for index in waiting:
            self.note(index, self._parameters[index])

    def forget(self) -> None:
        self._versions.clear()
        self._after_raise = None

    def after_raise(self, launched: Sequence[Bucket]) -> AfterRaise:
        """Find what a raise has left, before more of the round leaves. Once all was zeroed, the answer stays until the
        round is complete."""
        if self._after_raise is None or self._after_raise.zeroed is None:
            self._after_raise = AfterRaise(len(launched), self._zeroed_since(launched))
        return self._after_raise

    def _zeroed_since(self, launched: Sequence[Bucket]) -> Zeroed | Tensor | None:
        how = {bucket.zeroed_since_launch() for bucket in launched}
        gone = {slot.param for bucket in launched for slot in bucket.layout.slots}
        local = [
            (self._parameters[index].grad, version) for index, version in self._versions.items() if index not in gone
        ]
        written = [local_of(grad).detach() for grad, version in local if grad is not None and grad._version != version]
        # A gradient that was written may be zeroed, or scaled. Only the device knows, and the host must not wait.
        if local and len(written) == len(local):
            return None if how - {Zeroed.IN_PLACE} else torch.stack([grad.ne(0).any() for grad in written]).any()
        # A module's ``zero_grad`` zeroes all in one way. Several ways, or a part, are edits of some gradients.
        if local:
            how.add(Zeroed.TO_NONE if all(grad is None for grad, _ in local) else None)
        return how.pop() if len(how) == 1 else None
