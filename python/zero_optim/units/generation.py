"""``generate`` of transformers: ranks whose sequences have ended go on calling the model for as long as any has not.

Each token is a forward, in which all ranks gather. A rank that left earlier would leave the others waiting::

    rank 0   token 1   token 2   done: gathers its metrics     waits for rank 1
    rank 1   token 1   token 2   token 3: gathers the root     waits for rank 0

``generate`` has an argument for that, ``synced_gpus``. It knows DeepSpeed's and FSDP's models, and not ours.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from .stand_in import StandIn
from .unit import Unit, UnitState

_OPTION = "synced_gpus"


class SyncedGenerate(StandIn):
    """Gives a module's ``generate`` the argument ``synced_gpus=True`` where its tokens communicate.

    False is not left as it is: ``Seq2SeqTrainer`` gives it to every model that it does not know.
    """

    def __init__(self, module: nn.Module, units: Sequence[Unit]) -> None:
        super().__init__(module, "generate")
        self._units = units

    def __call__(self, *args: Any, **options: Any) -> Any:
        method = self._method()
        if all(unit.state is UnitState.GATHERED for unit in self._units):  # a rank may generate alone
            return method(*args, **options)
        given = inspect.signature(method).bind_partial(*args, **options)
        given.arguments[_OPTION] = True
        return method(*given.args, **given.kwargs)


def sync_generation(model: nn.Module, units: Sequence[Unit], ranks: Iterable[int]) -> None:
    """Let every ``generate`` within ``model`` that can keep ranks together do so. It asks all ranks of the job."""
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if not several or {*ranks} != {*range(dist.get_world_size())}:
        return
    for module in model.modules():
        method = getattr(type(module), "generate", None)
        own = vars(module).get("generate")
        copied = isinstance(own, functools.partial) and own.func is method  # by ``StandIn.__reduce__``
        if (own is None or copied) and callable(method) and _OPTION in inspect.signature(method).parameters:
            within = {*module.modules()}
            held = [unit for unit in units if any(place.module in within for place in unit.registrations)]
            SyncedGenerate(module, held).watch()
