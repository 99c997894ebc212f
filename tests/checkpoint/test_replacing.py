"""A job that dies while it saves a step again: at every instant the old checkpoint or the new one is found, whole."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from zero_optim import checkpoint
from zero_optim.checkpoint import folder
from zero_optim.checkpoint.folder import newest

CALLS: list[tuple[Any, str]] = [(Path, "rename"), (os, "fsync"), (os, "unlink"), (os, "rmdir")]
"""All that changes what is on the disk, once the files of a checkpoint are written."""


def model_of(value: float) -> nn.Module:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(value)
    return model


def in_a_child(work: Callable[[], object]) -> int:
    """Its exit code, or minus the signal that it died of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch has threads; the child touches files alone
        child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def dying(publish: Callable[[], object], at: int) -> Callable[[], object]:
    """``publish``, whose process is killed as it comes to the ``at``-th of ``CALLS``."""
    left = [at]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **more: Any) -> Any:
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return call(*arguments, **more)

        return wrapped

    def work() -> None:
        for owner, name in CALLS:
            setattr(owner, name, counted(getattr(owner, name)))
        publish()

    return work


def prepared(path: Path) -> Callable[[], object]:
    """A folder with a checkpoint of step 0, with 1 in it, and another, with 2, that only has to be published."""
    checkpoint.save(path, model_of(1), step=0, extra=1)
    other = path.with_name("other")
    new = checkpoint.save(other, model_of(2), step=0, extra=2)
    writing = folder.writing_folder(path, 0)
    new.rename(writing)
    return lambda: folder.publish_folder(writing, folder.step_folder(path, 0))


def test_it_may_die_anywhere(tmp_path: Path) -> None:
    seen = set()
    for at in range(20):
        path = tmp_path / f"{at}" / "checkpoints"
        died = in_a_child(dying(prepared(path), at)) == -signal.SIGKILL
        assert checkpoint.latest(path) is not None, at
        model = model_of(0)
        extra = checkpoint.load(path, model).extra
        assert extra in (1, 2) and torch.equal(model.weight, torch.full((2, 2), float(extra)))
        # By its own name, too, and as `zero-optim inspect` finds it.
        assert checkpoint.load(path / "step-0", model).extra == newest(path)[1].extra == extra
        seen.add((died, extra))
        # The next save loses neither: it is there before, and what it replaces is gone after.
        folder.begin(path, 5)
        assert checkpoint.info(path / "step-0").extra == extra
        assert sorted(os.listdir(path)) == [".writing-step-5", "step-0"]
        checkpoint.save(path, model_of(3), step=0, extra=3)
        assert os.listdir(path) == ["step-0"] and checkpoint.load(path, model).extra == 3
        if not died:
            break
    assert seen == {(True, 1), (True, 2), (False, 2)}


def test_one_that_was_put_aside_is_removed_with_the_others(tmp_path: Path) -> None:
    """``keep_last`` and its like go by what is there, under whatever name."""
    checkpoint.save(tmp_path, model_of(1), step=0)
    (tmp_path / "step-0").rename(tmp_path / ".replaced-step-0")
    assert checkpoint.latest(tmp_path) == tmp_path / ".replaced-step-0"
    checkpoint.save(tmp_path, model_of(1), step=1)
    assert sorted(os.listdir(tmp_path)) == ["step-0", "step-1"]
    (tmp_path / "step-0").rename(tmp_path / ".replaced-step-0")
    folder.remove(tmp_path / ".replaced-step-0")
    assert os.listdir(tmp_path) == ["step-1"]
