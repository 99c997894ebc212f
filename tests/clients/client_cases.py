"""What the client tests share: the examples as modules, torchrun's environment, the bound to torch's AdamW.

Clients are imported inside functions: they take seconds, which a run that collects these tests need not pay.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
import zero_optim
from cells import slow
from harness import run_ranks
from oracle import adamw_bound
from torch import Tensor, nn
from training_cases import assert_bitwise
from zero_optim.integrations.clients import is_sharded

ALONE_SLOW = [pytest.param(1, marks=slow), 2]
"""Numbers of ranks: what one does alone, two do as well, and communicate."""

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

# In exact arithmetic some gradients are zero: of the keys' bias in attention for one. What is left is rounding noise,
# and Adam's ratio of noise to noise is anything. 1e-6 is far above the noise and far below the other gradients.
EPS = 1e-6


# To import the three takes four seconds of a core.
run_client_ranks = functools.partial(run_ranks, imported=("accelerate", "lightning", "transformers.trainer"))
"""As ``run_ranks``, on ranks that have imported the clients."""


QUIET = {"logger": False, "enable_model_summary": False, "enable_progress_bar": False}
"""Of Lightning's Trainer."""


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skip where a client is not installed. requirements.txt has them all."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def load_example(name: str) -> ModuleType:
    """``examples/<name>.py`` as a module, its ``main`` not run."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def as_torchrun(rank: int, world_size: int) -> Iterator[None]:
    """The environment of a rank under torchrun, its process group being the one that the harness has made."""
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "TORCHELASTIC_RUN_ID": "tests",
        "OMP_NUM_THREADS": "1",  # else accelerate sets the threads of this process
    }
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(dist, "init_process_group", lambda *args, **options: None),
        mock.patch.object(dist, "destroy_process_group", lambda *args, **options: None),
    ):
        try:
            yield
        finally:
            forget_accelerator()


@contextlib.contextmanager
def taking_meshes() -> Iterator[None]:
    """accelerate refuses a ParallelismConfig where there are no GPUs. Within this it takes one on the CPU."""
    from accelerate import Accelerator

    with mock.patch.object(Accelerator, "multi_device", True):
        yield


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Without what Lightning says of itself."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


def forget_accelerator() -> None:
    """accelerate keeps for the whole process what it first found out about devices and ranks."""
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def weights(model: nn.Module) -> list[Tensor]:
    """Whole parameters, on every rank. Collective where the model is sharded."""
    if not is_sharded(model):
        return [parameter.detach().clone() for parameter in model.parameters()]
    state = zero_optim.full_model_state_dict(model, rank=None)
    return [state[name] for name, _ in model.named_parameters()]


def reductions_a_step(optimizer: zero_optim.ShardedAdamW) -> int:
    """How often each bucket was reduced for a step, on several ranks. Before a step ranks may compare rounds, too."""
    stats = optimizer.stats()
    calls = stats["collectives"]["reduce_scatter" if optimizer.stage else "all_reduce"]["calls"]
    return calls // (stats["buckets"] * stats["steps"])


def gathers_in_flight(optimizer: Any) -> bool:
    """Whether ``step`` has left gathers to the next forward."""
    ours = isinstance(optimizer, zero_optim.ShardedAdamW)
    return ours and any(bucket.unsharding.pending is not None for bucket in optimizer.engine.reducer.buckets)


def close(optimizer: Any) -> None:
    """Of those of one process that are not closed, each communicates in a group of its own: clients keep them alive."""
    if isinstance(optimizer, zero_optim.ShardedAdamW):
        optimizer.close()


def assert_like_adamw(actual: Iterable[Tensor], expected: Iterable[Tensor], lr: float, steps: int) -> None:
    """Equal within 8 times the bound for equal gradients: after the first step the gradients differ too, by what their
    parameters do (seen: up to 2.7 times, over 20 steps of these models)."""
    for index, (ours, torchs) in enumerate(zip(actual, expected, strict=True)):
        ratio = ((ours - torchs).abs() / adamw_bound(torchs, lr, steps)).max().item()
        assert ratio <= 8, f"parameter {index}, {tuple(ours.shape)}: {ratio:.1f} times the bound"


def assert_ranks_alike(per_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """What rank 0 returned, once the others' tensors were found to be the same."""
    for other in per_rank[1:]:
        for name, tensors in per_rank[0].items():
            assert_bitwise(other[name], tensors, f"{name} on another rank")
    return per_rank[0]


def replicate(model: nn.Module) -> nn.Module:
    """The model in DDP on several ranks, itself on one: what ``torch.optim.AdamW`` needs."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        return nn.parallel.DistributedDataParallel(model)
    return model
