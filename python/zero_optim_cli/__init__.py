"""``zero-optim``: reads the command line, and imports neither torch nor ``zero_optim`` before it has.

``choices`` has the words that flags take; ``bench``, ``plan`` and ``train`` the flags of a command each. What the
commands do is in ``zero_optim.cli``.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

from . import bench, plan, train
from .choices import DTYPES, read_nbytes

DISTRIBUTION = "zero-kernels"
USAGE_ERROR = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code: 0, 1 for a failure, 2 for a wrong usage, 130 when interrupted, 141 when
    nobody reads what it prints."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parsed = make_parser().parse_args(arguments)
    from zero_optim.cli import run

    return run(parsed, arguments)


class Parser(argparse.ArgumentParser):
    """A parser that reports an error in one line, without the usage, and on one rank alone."""

    def error(self, message: str) -> NoReturn:
        complain(f"{self.prog}: {message} (see {self.prog} --help)")
        raise SystemExit(USAGE_ERROR)


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        print(f"zero-optim {distribution_version()}")
        parser.exit()


def distribution_version() -> str:
    """Look up the version of the installed distribution, or of the source tree that is run without being installed."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        import zero_kernels

        return f"{zero_kernels.__version__} (not installed)"


def make_parser() -> Parser:
    parser = Parser(prog="zero-optim", description="ZeRO optimizer sharding for PyTorch.", allow_abbrev=False)
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    def add(name: str, text: str, description: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=description, allow_abbrev=False)

    about = "Trains a byte-level GPT on as many ranks as torchrun or --ranks starts. Defaults in brackets."
    text = "train a byte-level GPT on real text, the optimizer sharded over the ranks"
    train.add_arguments(add("train", text, about))
    text = "show versions, kernel backends, devices, and why what is missing is missing"
    add("doctor", text, text)
    about = "Times ops in interleaved rounds on the same tensors, prints a table and draws the roofline."
    text = "time the kernels on this machine against torch and against the memory"
    bench.add_arguments(add("bench", text, f"{about} Defaults in brackets."))
    about = "Lays a model out as the optimizer does, from shapes alone, and adds up. Defaults in brackets."
    plan.add_arguments(add("plan", "what a rank needs of memory, before there is a job: by stage and by kind", about))
    about = "Lists names, shapes, dtypes, updates and sizes, and reads every byte. Exit code 1: it is damaged."
    inspect = add("inspect", "list what is in a checkpoint, and verify every checksum", about)
    about = "Writes parameters and buffers, offline, in one process, with memory for one tensor."
    export = add("export", "write a checkpoint's weights as Hugging Face's safetensors", about)
    which = "a checkpoint; or a folder of several, or a run of zero-optim train: the newest whole one"
    for command in (inspect, export):
        command.add_argument("checkpoint", type=Path, help=which)
    inspect.add_argument("--quick", action="store_true", help="do not read the tensors")
    export.add_argument("out", type=Path, help="a folder that is not there yet")
    export.add_argument("--dtype", choices=DTYPES, help="of the parameters, made of the masters (as saved)")
    export.add_argument("--ema", action="store_true", help="write the average of the parameters, in their place")
    export.add_argument("--average", metavar="NAME", help="of several averages, which: ema_0, ema_1 and so on")
    export.add_argument("--max-shard-size", type=_nbytes, default="5GB", help="of a file, as in 500MB (5GB)")
    return parser


def _nbytes(text: str) -> int:
    nbytes = read_nbytes(text)
    if not nbytes:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 5GB or 500MB")
    return nbytes


def complain(line: str) -> None:
    """Print an error, on one rank alone."""
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr, flush=True)


def say(*lines: str) -> None:
    """Print lines at once, on one rank alone.

    Where the pipe is closed, as by ``head``, drop all output and stop the command as Ctrl-C.
    """
    try:
        if os.environ.get("RANK", "0") == "0":
            print(*lines, sep="\n", flush=True)
    except BrokenPipeError:
        print_nowhere()
        signal.raise_signal(signal.SIGINT)


def print_nowhere() -> None:
    """Send stdout to the null device: else the interpreter would complain at exit of what is left in its buffer."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
