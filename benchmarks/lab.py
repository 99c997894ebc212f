"""What every script of this folder has: the flags, the result file, the table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from zero_optim.bench.record import Result
from zero_optim.bench.run import progress
from zero_optim_cli import Parser
from zero_optim_cli.choices import at_least_one, parse_numel

__all__ = ["FLAGS", "draw_beside", "parser_of", "progress", "run_script", "show"]

FLAGS: Mapping[str, Mapping[str, Any]] = {
    "device": {"choices": ("cpu", "cuda"), "help": "where to measure (cuda where torch sees a GPU)"},
    "dtype": {"choices": ("bf16", "fp16", "fp32"), "help": "of the parameters"},
    "numel": {"type": parse_numel, "metavar": "N", "help": "elements, or parameters, as 1000000, 1e6, 2^20 or 64Mi"},
    "contenders": {"nargs": "+", "metavar": "NAME", "help": "who runs beside the baseline"},
    "ranks": {"type": at_least_one, "metavar": "N", "help": "how many ranks"},
    "rounds": {"type": at_least_one, "metavar": "N", "help": "timed rounds"},
    "steps": {"type": at_least_one, "metavar": "N", "help": "steps of each training"},
}
"""Flags that several scripts take; each script gives its defaults."""


def parser_of(file: str, about: str, **defaults: Any) -> Parser:
    """Make the parser of the script ``file``. ``defaults``: the names of FLAGS that it takes, each with its default."""
    parser = Parser(prog=Path(file).name, description=f"{about} Defaults in brackets.", allow_abbrev=False)
    for name, default in defaults.items():
        words = dict(FLAGS[name])
        if default is not None:
            shown = " ".join(map(str, default)) if isinstance(default, list | tuple) else default
            words["help"] = f"{words['help']} ({shown})"
        parser.add_argument(f"--{name}", default=default, **words)
    parser.add_argument("--out", type=Path, metavar="DIR", help="where JSON and plot go (results/<device>)")
    parser.add_argument("--no-write", dest="write", action="store_false", help="print the table only")
    return parser


def run_script(parser: Parser, work: Callable[[Any], int | None], arguments: Sequence[str] | None = None) -> int:
    """Parse and run. Returns the exit code: 2 for a wrong usage, 1 for a failure, each with a line that says why."""
    from zero_optim.cli import run_command

    parsed = parser.parse_args(arguments)
    return run_command(parser.prog, lambda: work(parsed) or 0)


def show(result: Result) -> None:
    """Print the table of a result, and draw it."""
    from plot import draw, table_of

    print(table_of(result.record()))
    draw_beside(result, draw)


def draw_beside(result: Result, draw: Callable[[Mapping[str, Any], Path], object]) -> None:
    """Print the path of the result's file, ``draw`` the plot beside it, and print that, or why there is none."""
    if result.path is None:
        return
    print(f"\n{result.path}")
    try:
        draw(result.record(), result.path.with_suffix(".png"))
        print(result.path.with_suffix(".png"))
    except ImportError as error:
        print(f"no plot: {error}; pip install matplotlib")
