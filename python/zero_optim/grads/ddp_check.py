"""Finds a DistributedDataParallel around parameters whose gradients an optimizer of ours reduces."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ..errors import ParameterError


def check_not_replicated(parameters: Mapping[int, Tensor], labels: Sequence[str]) -> None:
    """Raise ParameterError if a live DDP module holds one of these parameters. One walk over the interpreter's objects.

    DDP reduces the gradients too, and writes its averages over those that are reduced already: at stage 0 in silence
    (seen: other numbers than AdamW's from the second step on), else into a FlatShard, which refuses.
    """
    index_of = {id(parameter): index for index, parameter in parameters.items()}
    if not _replicated(index_of):
        return
    gc.collect()  # a wrapper that was dropped may wait in a cycle
    shared = _replicated(index_of)
    if shared:
        raise ParameterError(
            f"{labels[min(shared)]} is in a DistributedDataParallel module, which would reduce its gradient a second "
            "time: train the bare model; the optimizer averages gradients over ranks itself. Clients need not wrap: "
            "zero_optim.integrations has ShardedTrainer (transformers) in place of Trainer, prepare (accelerate) and "
            "ShardedStrategy (lightning)"
        )


def _replicated(index_of: Mapping[int, int]) -> set[int]:
    # type(), not isinstance: that asks lazy objects for their __class__, and they come alive. A class is looked up in a
    # set: issubclass takes three times as long, 0.1 s for the 300,000 objects of a process with torch (a Xeon core).
    kinds = _with_subclasses(DistributedDataParallel)
    replicas = [thing for thing in gc.get_objects() if type(thing) in kinds]
    return {index_of[id(p)] for replica in replicas for p in replica.parameters() if id(p) in index_of}


def _with_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))
