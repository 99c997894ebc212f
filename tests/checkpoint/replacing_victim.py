"""A rank of a job that saves the same step again and again, and of which rank 0 is killed within such a save."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from zero_optim import ShardedAdamW, checkpoint, full_state_dict
from zero_optim.checkpoint import folder

CALLS: list[tuple[Any, str]] = [(Path, "rename"), (os, "fsync"), (os, "unlink"), (os, "rmdir")]
"""All that changes what is on the disk, once the files of a checkpoint are written."""


def die_in_publishing(at: int) -> None:
    """The process is killed as it comes to the ``at``-th of ``CALLS`` in ``publish_folder``."""
    publish = folder.publish_folder

    def counted(left: list[int], call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **more: Any) -> Any:
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return call(*arguments, **more)

        return wrapped

    def armed(writing: Path, target: Path) -> None:
        left = [at]
        for owner, name in CALLS:
            setattr(owner, name, counted(left, getattr(owner, name)))
        publish(writing, target)

    folder.publish_folder = armed


def digest(model: nn.Module, opt: ShardedAdamW) -> str:
    """Collective. Of all values, in hexadecimal."""
    found = hashlib.sha256()
    state = full_state_dict(opt, rank=None)["state"]
    tensors = [*model.state_dict().values(), *(value for entry in state.values() for value in entry.values())]
    for tensor in tensors:
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def live(path: Path, store: Path, rank: int, ranks: int, last: int, at: int) -> None:
    """Go on from what is there up to ``last`` updates, and save after each. Prints what was resumed and saved: updates,
    and a digest. In the last save rank 0 dies as it comes to the ``at``-th of ``CALLS``; -1: it does not."""
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 60), nn.Linear(60, 5))
    opt = ShardedAdamW(model.named_parameters(), lr=1e-2)
    done = 0
    if checkpoint.latest(path) is not None:
        done = checkpoint.load(path, model, opt).extra["done"]
    print("resumed", done, digest(model, opt), flush=True)
    while done < last:
        inputs = torch.randn(4, 40, generator=torch.Generator().manual_seed(done * ranks + rank))
        model(inputs).square().mean().backward()
        opt.step()
        opt.zero_grad()
        done += 1
        if done == last and at >= 0 and rank == 0:
            die_in_publishing(at)
        checkpoint.save(path, model, opt, step=0, extra={"done": done})
        print("saved", done, digest(model, opt), flush=True)
