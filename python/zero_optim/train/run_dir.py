"""The folder of a run: making it, finding its checkpoints, and its log.

::

    RUN_DIR/log.jsonl  run.json  report.html  loss.png  sample.txt  tensorboard/
    RUN_DIR/checkpoint/step-500/    see ``zero_optim.checkpoint``
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from zero_optim_cli import say

from ..checkpoint import folder as folders
from ..errors import UsageError
from .page import LOG

CHECKPOINTS = "checkpoint"


def find_checkpoint(path: Path) -> Path | None:
    """Find what to load: ``path``, a checkpoint; or the checkpoints of ``path``, a run. None: that has none."""
    if folders.step_of(path) is not None:
        return path
    return path / CHECKPOINTS if folders.checkpoints(path / CHECKPOINTS) else None


def run_of(source: Path) -> Path:
    """Give the run that has this checkpoint, or this folder of checkpoints."""
    return source.parent if folders.step_of(source) is None else source.resolve().parent.parent


def open_run(path: Path, source: Path | None, *, overwrite: bool) -> Path:
    """Make the folder of a run, unless ``path`` is the run that ``source`` is a checkpoint of. Returns ``path``.

    Raises UsageError where it can't be written or already holds a run. ``overwrite`` clears instead the log of a run
    that died before its first checkpoint.
    """
    if source and run_of(source).resolve() == path.resolve():
        return path
    if not overwrite and ((path / LOG).exists() or (path / CHECKPOINTS).exists()):
        raise UsageError(f"--out {path} already holds a run: give another folder, or continue it with --resume")
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / LOG).write_text("")
    except OSError as error:
        raise UsageError(f"--out {path}: {error.strerror}") from error
    return path


def rewind(path: Path, step: int) -> None:
    """Remove a run's log lines and checkpoints of later steps. Raises CheckpointError where one cannot be removed."""
    lines = (path / LOG).read_text().splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
    folders.write_atomically(path / LOG, "".join(kept))
    for folder in folders.checkpoints(path / CHECKPOINTS):
        if (folders.step_of(folder) or 0) > step:
            folders.remove(folder)


@contextlib.contextmanager
def open_log(path: Path, done: int, steps: int) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Give a function that writes a step into ``log.jsonl``, TensorBoard's files and a progress bar.

    Without its package, either of the latter is left out.
    """
    tensorboard, tqdm = _optional("torch.utils.tensorboard", "tensorboard"), _optional("tqdm", "tqdm")
    with contextlib.ExitStack() as stack:
        file = stack.enter_context((path / LOG).open("a", buffering=1))  # a process that dies next loses no line
        if tensorboard:
            board = stack.enter_context(tensorboard.SummaryWriter(str(path / "tensorboard"), purge_step=done + 1))
        if tqdm:
            every = 0.1 if sys.stderr.isatty() else 10.0  # seconds
            bar = stack.enter_context(tqdm.tqdm(initial=done, total=steps, unit="step", mininterval=every))

        def write(record: Mapping[str, Any]) -> None:
            file.write(json.dumps(record) + "\n")
            if tensorboard:
                times = {f"ms/{phase}": ms for phase, ms in record["ms"].items()}
                for name, value in {**record, **times, **record.get("telemetry", {})}.items():
                    if isinstance(value, (int, float)) and name != "step":
                        board.add_scalar(name, value, record["step"])
            if tqdm:
                figures = {"loss": record["loss"], "norm": record["grad_norm"], "scale": record["loss_scale"]}
                bar.set_postfix({**figures, "tokens/s": round(record["tokens_per_s"])}, refresh=False)
                bar.update()

        yield write


def _optional(module: str, package: str) -> Any:
    """Import a module of the extra ``train``. Print a line and return None where it is missing."""
    try:
        return import_module(module)
    except ImportError:
        say(f"{package} is not installed, and is left out; pip install zero-kernels[train]")
        return None
