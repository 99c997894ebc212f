"""Finds out that ranks wait for each other in vain, long before the group's time-out.

A program can make ranks launch different numbers of rounds: one of several synchronised backwards raised on one rank
before its first gradient, say, and nobody zeroed. Each rank then waits for a collective that no other takes part in,
and by default for half an hour::

    rank 0   backward: raises           backward   step: the norm     waits for rank 1
    rank 1   backward (one round)       backward   step: its round 2  waits for rank 0

Nothing on the wire tells so. But a host that waits has time: after some seconds it writes into the group's store how
many rounds it has launched, and reads what the others have written. Where all have been waiting, with nothing changed,
and their numbers differ, they raise.

Under gloo alone: on CUDA the host does not wait.
"""

from __future__ import annotations

import torch.distributed as dist

from ..errors import RankMismatchError

SECONDS = 2.0
"""Between two looks. A step that waits for less costs nothing."""
LOOKS = 4
"""At which all ranks have to be found as they were, before one raises."""


class Standstill:
    """What one rank writes and reads while it waits.

    Attributes:
        rounds: that this rank has launched since its optimizer was made. Equal on all ranks whenever none waits in
            vain, but for those that are on their way.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rounds = 0
        self._rank, self._world_size = rank, world_size
        self._waits = 0
        self._seen: list[str] = []
        self._looks = 0
        self._written = False

    def look(self, group: dist.ProcessGroup) -> None:
        """After ``SECONDS`` more of waiting. Raises RankMismatchError on each of the ranks that wait in vain."""
        store = dist.distributed_c10d._get_default_store()
        keys = [f"zero_optim/{group.group_name}/{rank}" for rank in range(self._world_size)]
        if not self._written:
            self._waits += 1
            store.set(keys[self._rank], f"{self.rounds} {self._waits}")
            self._written = True
        if not store.check(keys):
            return
        now = [store.get(key).decode() for key in keys]
        self._looks = self._looks + 1 if now == self._seen and "" not in now else 0
        self._seen = now
        rounds = [entry.split()[0] for entry in now if entry]
        if self._looks >= LOOKS and len(set(rounds)) > 1:
            told = ", ".join(f"rank {rank} has reduced {count}" for rank, count in enumerate(rounds))
            verdict = (
                f"the ranks wait for each other, and have reduced different numbers of backwards: {told}. Did one "
                "raise on one of them before its first gradient, or reach none of this optimizer's parameters? Then "
                "call opt.zero_grad() on every rank, or opt.step(), before the next. Make a new optimizer to go on"
            )
            store.set(self._verdict_key(group), verdict)  # a rank that raises may be gone before another looks
            raise RankMismatchError(verdict)

    def verdict(self, group: dist.ProcessGroup) -> str | None:
        """Why another rank has given up, if it has for what ``look`` looks for."""
        try:
            store, key = dist.distributed_c10d._get_default_store(), self._verdict_key(group)
            return store.get(key).decode() if store.check([key]) else None
        except RuntimeError:  # the store has gone with its rank
            return None

    def _verdict_key(self, group: dist.ProcessGroup) -> str:
        return f"zero_optim/{group.group_name}/verdict"

    def ended(self, group: dist.ProcessGroup) -> None:
        """What was waited for has come."""
        if self._written:
            key = f"zero_optim/{group.group_name}/{self._rank}"
            dist.distributed_c10d._get_default_store().set(key, "")
            self._written, self._looks = False, 0
