"""Runs a benchmark that a script of ``benchmarks/`` has, with the flags, tables, files and plots of the bench."""

from __future__ import annotations

from collections.abc import Sequence

from ..cli import Parser, run_command
from .request import Alone, Menu, add_arguments, read_request
from .run import Measure, main


def run_script(name: str, about: str, alone: Alone, measure: Measure, arguments: Sequence[str] | None = None) -> int:
    """Measures ``name`` by ``measure``, as ``alone`` allows; returns the exit code. ``about``: for --help."""
    menu = Menu(ops=(), alone={name: alone})
    parser = Parser(prog=f"bench_{name}.py", description=f"{about} Defaults in brackets.", allow_abbrev=False)
    add_arguments(parser, menu)
    parsed = parser.parse_args(arguments)
    return run_command(parser.prog, lambda: main(read_request(parsed, menu), {name: measure}))
