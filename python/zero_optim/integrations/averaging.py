"""Lightning's callbacks that access parameters outside of any forward: at stage 3, parameters are gathered meanwhile.

``WeightAveraging`` (an EMA, say) and ``StochasticWeightAveraging`` keep a whole copy of the model on every rank.
``BaseFinetuning`` compares the values of what it unfreezes with those of what the optimizer has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

from lightning.pytorch import callbacks
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ..gather_parameters import gather_parameters

_READ, _WRITE = False, True
# Methods that access the parameters of modules among their arguments, and whether they write them.
_METHODS = {
    "WeightAveraging": {"setup": _READ, "_swap_models": _WRITE, "_copy_average_to_current": _WRITE},
    "StochasticWeightAveraging": {"setup": _READ, "update_parameters": _READ, "transfer_weights": _WRITE},
    "BaseFinetuning": {"finetune_function": _READ},
}


def gather_for_callbacks(of_trainer: Iterable[Any]) -> None:
    """Gather whole weights for the callbacks that access them. A model that is not sharded stays as it is."""
    for callback in of_trainer:
        for name, methods in _METHODS.items():
            kind = getattr(callbacks, name, None)  # an older release lacks one
            if kind is not None and isinstance(callback, kind):
                for method, writes in methods.items():
                    _gather_in(callback, method, writes=writes)


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
