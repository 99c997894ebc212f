"""What the commands of ``zero-optim`` do. ``zero_optim_cli`` reads the command line."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from zero_optim_cli import USAGE_ERROR, Parser, complain, main, print_nowhere

from .errors import UsageError, ZeroOptimError

__all__ = ["Parser", "main", "run", "run_command"]

FAILURE = 1
CLOSED = 141  # what a shell calls the end by SIGPIPE


def run(parsed: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run the command that was parsed of ``arguments``."""
    return run_command(f"zero-optim {parsed.command}", lambda: _work(parsed, arguments))


def run_command(name: str, work: Callable[[], int]) -> int:
    """Return the exit code of ``work``, or of the error that it raised, which is printed in a line after ``name``."""
    try:
        code = work()
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # as by head: a reader that has closed the pipe gets no message either
        print_nowhere()
        return CLOSED
    except UsageError as error:
        complain(f"{name}: {error}")
        return USAGE_ERROR
    except ZeroOptimError as error:
        complain(f"{name}: {error}")
        return FAILURE
    except KeyboardInterrupt:
        return 130


def _work(parsed: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Do what the command is for. Each command imports what it alone needs."""
    if parsed.command in ("inspect", "export"):
        return _read_checkpoint(parsed)
    if parsed.command == "bench":
        from .bench.run import main as bench

        return bench(parsed)
    if parsed.command == "plan":
        from .memory.command import run as plan

        return plan(parsed)
    if parsed.command == "train":
        return _train(parsed, arguments)
    from .doctor import report

    print(report())
    return 0


def _train(parsed: argparse.Namespace, arguments: Sequence[str]) -> int:
    from .train.model import given_flags

    given, ranks, started = given_flags(parsed), parsed.ranks, int(os.environ.get("WORLD_SIZE", "0"))
    if ranks is not None and not started:
        from .train.ranks import launch

        return launch(ranks, given.get("device"), arguments)
    if ranks is not None and ranks != started:
        raise UsageError(f"--ranks {ranks}: the launcher has started {started}; leave the flag out")
    from .train.loop import train

    return train(given, parsed.resume, shlex.join(["zero-optim", *arguments]))


def _read_checkpoint(parsed: argparse.Namespace) -> int:
    """Inspect or export a checkpoint, or the newest of a folder, which may be that of a run of ``zero-optim train``."""
    from .train.run_dir import CHECKPOINTS

    of_run: Path = parsed.checkpoint / CHECKPOINTS
    path = of_run if of_run.is_dir() else parsed.checkpoint
    if parsed.command == "export":
        from .checkpoint.hugging_face import export
        from .rules.codec import DTYPES
        from .rules.options import EMA

        dtype, average = DTYPES[parsed.dtype] if parsed.dtype else None, EMA if parsed.ema else parsed.average
        done = export(path, parsed.out, dtype=dtype, max_shard_bytes=parsed.max_shard_size, average=average)
        print(f"{done.tensors} tensors, {done.nbytes:,} bytes, in {len(done.files)} file(s) in {done.folder}")
        return 0
    from .checkpoint.folder import inspect

    text, problems = inspect(path, quick=parsed.quick)
    print(text)
    if problems:
        complain("\n".join(f"zero-optim inspect: {problem}" for problem in problems))
        return FAILURE
    print("lengths are right" if parsed.quick else "all checksums are right")
    return 0
