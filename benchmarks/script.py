"""The command line of this folder's scripts, with the flags, tables, files and plots of the bench."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zero_optim.bench.request import Menu, add_arguments, read_request
from zero_optim.bench.run import Measure, Op, main
from zero_optim.cli import Parser, run_command


def run_script(
    name: str,
    about: str,
    menu: Menu,
    *,
    ops: Mapping[str, Op] | None = None,
    alone: Mapping[str, Measure] | None = None,
    arguments: Sequence[str] | None = None,
) -> int:
    """Measure the benchmarks on the menu, by ``ops`` or ``alone``. Returns the exit code. ``about``: for --help."""
    parser = Parser(prog=f"bench_{name}.py", description=f"{about} Defaults in brackets.", allow_abbrev=False)
    add_arguments(parser, menu)
    parser.set_defaults(ops=[*menu.choices])
    parsed = parser.parse_args(arguments)
    return run_command(parser.prog, lambda: main(read_request(parsed, menu), ops or {}, alone or {}))
