"""Groups the shards that one call of the rule updates: neighbours that are small, and alike in rule and dtypes.

A call costs the host some time, and a launch costs a GPU some, however few elements it updates. Where many ranks share
a bucket that is more than the update itself takes. But the parameters of a shard are sent out when its update has been
launched. So a batch has no more elements than are updated in about that time.

Where an update makes parameters whole that are cut over ranks, one call has all of them: then each rank has as much to
do as the others.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..rules.update_rule import ShardUpdate
from .shard_state import ShardState
from .workplace import Coefficients

ON_A_GPU, ON_A_PROCESSOR = 2**22, 2**16
"""Elements of a batch, at most. By the bytes that it moves, such an update takes some 30 µs on an H200. Nobody has
measured that. On two threads of a processor 2^20 elements took 290 µs, so 2^16 take some 20."""


class Batch:
    """Shards that are updated together, or one alone."""

    def __init__(self, shards: Sequence[ShardState]) -> None:
        self.shards = shards
        self._rule = shards[0].rule.prepared()

    @property
    def parameters(self) -> list[int]:
        """Their indices."""
        return [index for shard in self.shards for index in shard.parameters]

    def prefetch(self) -> None:
        """``update`` will follow soon."""
        for shard in self.shards:
            shard.prefetch()

    def update(self, by: Coefficients) -> None:
        """One fused pass: unscale, clip, update, cast into the buckets' parameters. See ``ShardUpdate``."""
        begun: list[ShardState] = []
        updates: list[ShardUpdate] = []
        try:
            for shard in self.shards:
                update = shard.begin_update(by)
                if update is not None:
                    begun.append(shard)
                    updates.append(update)
            if updates:
                self._rule.update(updates)
        except BaseException:
            for shard in begun:
                shard.give_up_update()
            raise
        for shard in begun:
            shard.end_update()


def batches_of(shards: Sequence[ShardState]) -> list[Batch]:
    """Cut ``shards`` into batches: those that are to be made whole first, the others in their order."""
    joining = [shard for shard in shards if shard.joins_parts]
    others = [shard for shard in shards if not shard.joins_parts]
    return [Batch(batch) for batch in (*_alike(joining), *_neighbours(others))]


def _alike(shards: Sequence[ShardState]) -> list[list[ShardState]]:
    """All that one call may update, wherever they are."""
    batches: list[list[ShardState]] = []
    for shard in shards:
        batch = next((batch for batch in batches if shard.is_updated_like(batch[0])), None)
        if batch is None:
            batches.append([shard])
        else:
            batch.append(shard)
    return batches


def _neighbours(shards: Sequence[ShardState]) -> list[list[ShardState]]:
    batches: list[list[ShardState]] = []
    numel = 0
    for shard in shards:
        numel += shard.numel
        most = ON_A_PROCESSOR if shard.device.type == "cpu" else ON_A_GPU
        together = batches and shard.is_updated_like(batches[-1][-1]) and numel <= most
        if together:
            batches[-1].append(shard)
        else:
            batches.append([shard])
            numel = shard.numel
    return batches
