"""``zero-optim``: the command line, also ``python -m zero_optim``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from .bench.request import add_arguments as add_bench_arguments
from .bench.request import read_request as read_bench_request
from .errors import ZeroOptimError
from .train.config import UsageError, add_arguments, read_request

USAGE_ERROR = 2
FAILURE = 1


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage, and on one rank alone."""

    def error(self, message: str) -> NoReturn:
        _complain(f"{self.prog}: {message} (see {self.prog} --help)")
        raise SystemExit(USAGE_ERROR)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code: 0, 1 for a failure, 2 for a wrong usage, 130 when interrupted."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parsed = _make_parser().parse_args(arguments)
    try:
        return parsed.run(parsed, arguments)
    except UsageError as error:
        _complain(f"zero-optim {parsed.command}: {error}")
        return USAGE_ERROR
    except ZeroOptimError as error:
        _complain(f"zero-optim {parsed.command}: {error}")
        return FAILURE
    except KeyboardInterrupt:
        return 130


def _make_parser() -> _Parser:
    parser = _Parser(prog="zero-optim", description="ZeRO optimizer sharding for PyTorch.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"zero-optim {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    train = commands.add_parser(
        "train",
        help="train a byte-level GPT on real text, the optimizer sharded over the ranks",
        description="Trains a byte-level GPT on as many ranks as torchrun or --ranks starts. Defaults in brackets.",
        allow_abbrev=False,
    )
    add_arguments(train)
    train.set_defaults(run=_train)
    about = "show versions, kernel backends, devices, and why what is missing is missing"
    doctor = commands.add_parser("doctor", help=about, description=about, allow_abbrev=False)
    doctor.set_defaults(run=_doctor)
    bench = commands.add_parser(
        "bench",
        help="measure the kernels on this machine against torch and against the memory",
        description="Times ops in interleaved rounds on the same tensors, prints a table and draws the roofline. "
        "Defaults in brackets.",
        allow_abbrev=False,
    )
    add_bench_arguments(bench)
    bench.set_defaults(run=_bench)
    return parser


def _train(parsed: argparse.Namespace, arguments: Sequence[str]) -> int:
    request = read_request(parsed)
    started = int(os.environ.get("WORLD_SIZE", "0"))
    if request.ranks is not None and not started:
        from .train.world import launch

        return launch(request.ranks, request.given.get("device"), arguments)
    if request.ranks is not None and request.ranks != started:
        raise UsageError(f"--ranks {request.ranks}: the launcher has started {started}; leave the flag out")
    from .train.loop import train

    return train(request)


def _doctor(parsed: argparse.Namespace, arguments: Sequence[str]) -> int:
    from .doctor import report

    print(report())
    return 0


def _bench(parsed: argparse.Namespace, arguments: Sequence[str]) -> int:
    request = read_bench_request(parsed)
    from .bench.run import main as bench

    return bench(request)


def _version() -> str:
    from .doctor import distribution_version

    return distribution_version()


def _complain(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr, flush=True)
