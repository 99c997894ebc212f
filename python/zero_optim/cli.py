"""``zero-optim``: the command line, also ``python -m zero_optim``."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from .bench.request import add_arguments as add_bench_arguments
from .bench.request import add_choice_of_ops
from .bench.request import read_request as read_bench_request
from .doctor import distribution_version
from .errors import UsageError, ZeroOptimError
from .memory import command as planner
from .stores.offload import read_nbytes
from .train.config import DTYPES, add_arguments, read_request
from .train.output import print_nowhere

USAGE_ERROR = 2
FAILURE = 1
CLOSED = 141  # what a shell calls the end by SIGPIPE

Command = Callable[[argparse.Namespace, Sequence[str]], int]


class Parser(argparse.ArgumentParser):
    """A parser that reports an error in one line, without the usage, and on one rank alone."""

    def error(self, message: str) -> NoReturn:
        _complain(f"{self.prog}: {message} (see {self.prog} --help)")
        raise SystemExit(USAGE_ERROR)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code: 0, 1 for a failure, 2 for a wrong usage, 130 when interrupted, 141 when
    nobody reads what it prints."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parsed = _make_parser().parse_args(arguments)
    return run_command(f"zero-optim {parsed.command}", lambda: parsed.run(parsed, arguments))


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
        _complain(f"{name}: {error}")
        return USAGE_ERROR
    except ZeroOptimError as error:
        _complain(f"{name}: {error}")
        return FAILURE
    except KeyboardInterrupt:
        return 130


def _make_parser() -> Parser:
    parser = Parser(prog="zero-optim", description="ZeRO optimizer sharding for PyTorch.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"zero-optim {distribution_version()}")
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
    add_choice_of_ops(bench)
    add_bench_arguments(bench)
    bench.set_defaults(run=_bench)
    _add_plan_command(commands)
    _add_checkpoint_commands(commands)
    _add_report_command(commands)
    return parser


def _add_plan_command(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        help="what a rank needs of memory, before there is a job: by stage and by kind",
        description="Lays a model out as the optimizer does, from shapes alone, and adds up. Defaults in brackets.",
        allow_abbrev=False,
    )
    planner.add_arguments(plan)
    plan.set_defaults(run=planner.run)


def _add_report_command(commands: Any) -> None:
    report = commands.add_parser(
        "report",
        help="write a page of a run, or of benchmarks, for a browser",
        description="Writes one HTML file that needs no network: of a run its losses, speed, memory against plan, "
        "traffic and time; of benchmarks their tables and plots.",
        allow_abbrev=False,
    )
    what = "a run of zero-optim train; or a JSON file of zero-optim bench, or a folder of them"
    report.add_argument("source", type=Path, help=what)
    report.add_argument("--out", type=Path, metavar="FILE.html", help="(report.html in the folder, or FILE.html)")
    report.set_defaults(run=_report)


def _add_checkpoint_commands(commands: Any) -> None:
    def add(name: str, run: Command, **about: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, allow_abbrev=False, **about)
        which = "a checkpoint; or a folder of several, or a run of zero-optim train: the newest whole one"
        command.add_argument("checkpoint", type=Path, help=which)
        command.set_defaults(run=run)
        return command

    inspect = add(
        "inspect",
        _inspect,
        help="list what is in a checkpoint, and verify every checksum",
        description="Lists names, shapes, dtypes, updates and sizes, and reads every byte. Exit code 1: it is damaged.",
    )
    inspect.add_argument("--quick", action="store_true", help="do not read the tensors")
    export = add(
        "export",
        _export,
        help="write a checkpoint's weights as Hugging Face's safetensors",
        description="Writes parameters and buffers, offline, in one process, with memory for one tensor.",
    )
    export.add_argument("out", type=Path, help="a folder that is not there yet")
    export.add_argument("--dtype", choices=tuple(DTYPES), help="of the parameters, made of the masters (as saved)")
    export.add_argument("--ema", action="store_true", help="write the average of the parameters, in their place")
    export.add_argument("--average", metavar="NAME", help="of several averages, which: ema_0, ema_1 and so on")
    export.add_argument("--max-shard-size", type=_nbytes, default="5GB", help="of a file, as in 500MB (5GB)")


def _nbytes(text: str) -> int:
    nbytes = read_nbytes(text)
    if not nbytes:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 5GB or 500MB")
    return nbytes


def _checkpoints_in(path: Path) -> Path:
    """Find the folder of checkpoints of a run of ``zero-optim train``; else return the path itself."""
    from .train.run_dir import LOG, RunDir

    return RunDir(path).checkpoints if (path / LOG).exists() else path


def _inspect(parsed: argparse.Namespace, arguments: Sequence[str]) -> int:
    from .checkpoint.inspection import inspect

    text, problems = inspect(_checkpoints_in(parsed.checkpoint), quick=parsed.quick)
    print(text)
    if problems:
        _complain("\n".join(f"zero-optim inspect: {problem}" for problem in problems))
        return FAILURE
    print("lengths are right" if parsed.quick else "all checksums are right")
    return 0


def _export(parsed: argparse.Namespace, arguments: Sequence[str]) -> int:
    from .checkpoint.hugging_face import export
    from .rules.options import EMA

    dtype = DTYPES[parsed.dtype] if parsed.dtype else None
    choice = {
        "dtype": dtype,
        "max_shard_bytes": parsed.max_shard_size,
        "average": EMA if parsed.ema else parsed.average,
    }
    done = export(_checkpoints_in(parsed.checkpoint), parsed.out, **choice)
    print(f"{done.tensors} tensors, {done.nbytes:,} bytes, in {len(done.files)} file(s) in {done.folder}")
    return 0


def _train(parsed: argparse.Namespace, arguments: Sequence[str]) -> int:
    request = replace(read_request(parsed), command=shlex.join(["zero-optim", *arguments]))
    started = int(os.environ.get("WORLD_SIZE", "0"))
    if request.ranks is not None and not started:
        from .train.world import launch

        return launch(request.ranks, request, main, arguments)
    if request.ranks is not None and request.ranks != started:
        raise UsageError(f"--ranks {request.ranks}: the launcher has started {started}; leave the flag out")
    from .train.loop import train

    return train(request)


def _report(parsed: argparse.Namespace, arguments: Sequence[str]) -> int:
    from .report.command import write_report

    print(write_report(parsed.source, parsed.out))
    return 0


def _doctor(parsed: argparse.Namespace, arguments: Sequence[str]) -> int:
    from .doctor import report

    print(report())
    return 0


def _bench(parsed: argparse.Namespace, arguments: Sequence[str]) -> int:
    request = read_bench_request(parsed)
    from .bench.run import main as bench

    return bench(request)


def _complain(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr, flush=True)
