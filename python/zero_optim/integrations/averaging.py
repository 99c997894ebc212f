"""Lightning's callbacks that read parameters outside of any forward, where a model of stage 3 has only shards.

``WeightAveraging`` (an EMA, say) and ``StochasticWeightAveraging`` keep a whole copy of the model on every rank:
parameters are gathered while they are read or written. ``BaseFinetuning`` asks which parameters the optimizer has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

from lightning.pytorch import callbacks
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ..errors import ZeroOptimError
from ..shard_module import gather_parameters

_READ, _WRITE = False, True
# Methods that access the parameters of modules among their arguments, and whether they write them.
_METHODS = {
    "WeightAveraging": {"setup": _READ, "_swap_models": _WRITE, "_copy_average_to_current": _WRITE},
    "StochasticWeightAveraging": {"setup": _READ, "update_parameters": _READ, "transfer_weights": _WRITE},
}


def prepare_callbacks(of_trainer: Iterable[Any]) -> None:
    """Gather whole weights for the callbacks that average them. A model that is not sharded stays as it is.

    Those that unfreeze parameters look for them in the optimizer by identity.
    """
    for callback in of_trainer:
        for name, methods in _METHODS.items():
            kind = getattr(callbacks, name, None)  # an older release lacks one
            if kind is not None and isinstance(callback, kind):
                for method, writes in methods.items():
                    _gather_in(callback, method, writes=writes)
        if isinstance(callback, callbacks.BaseFinetuning) and "finetune_function" not in vars(callback):
            callback.finetune_function = _by_identity(callback.finetune_function)


def check_callbacks(of_trainer: Iterable[Any], *, sharded: bool) -> None:
    """Raise ZeroOptimError for ``ModelPruning`` where it would fail later. ``sharded``: the model is."""
    for callback in of_trainer:
        if not isinstance(callback, callbacks.ModelPruning):
            continue
        if sharded:
            raise ZeroOptimError(
                "the callback ModelPruning ranks the values of whole weights, and at stage 3 the model has shards: "
                "make the optimizer with stage=2, and leave out units"
            )
        if callback._use_lottery_ticket_hypothesis:
            raise ZeroOptimError(
                "the callback ModelPruning would give parameters new data after each epoch, which the optimizer does "
                "not follow: give it use_lottery_ticket_hypothesis=False"
            )


def _gather_in(owner: Any, method: str, *, writes: bool) -> None:
    """Wrap a method of this one object, once, so that the modules among its arguments are gathered."""
    if method in vars(owner) or not hasattr(owner, method):
        return
    plain: Callable[..., Any] = getattr(owner, method)

    @functools.wraps(plain)
    def gathered(*args: Any, **options: Any) -> Any:
        with ExitStack() as stack:
            for given in (*args, *options.values()):
                if isinstance(given, nn.Module):
                    stack.enter_context(gather_parameters(given, writeback=writes))
            result = plain(*args, **options)
        average = getattr(owner, "_average_model", None)
        if isinstance(average, AveragedModel):
            _gather_in(average, "update_parameters", writes=False)
        return result

    setattr(owner, method, gathered)


def _by_identity(finetune: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``finetune_function``. Lightning compares values: shards have none, and two biases of zeros are equal."""
    kind = callbacks.BaseFinetuning

    def not_in(optimizer: Any, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return [parameter for parameter in params if id(parameter) not in held]

    @functools.wraps(finetune)
    def finetune_by_identity(*args: Any, **options: Any) -> None:
        by_value, kind.filter_on_optimizer = kind.filter_on_optimizer, staticmethod(not_in)
        try:
            finetune(*args, **options)
        finally:
            kind.filter_on_optimizer = staticmethod(by_value)

    return finetune_by_identity
