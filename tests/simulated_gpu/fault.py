"""What a seeded fault is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from order_programs import DEFAULT, SIDE, OrderProgram

PACKAGE = Path(__file__).resolve().parents[2] / "python" / "zero_optim"
AT_ONCE = "{0}()"  # where it would be queued
NOWHERE = '__import__("contextlib").nullcontext()'


@dataclass(frozen=True)
class Edit:
    """In one function of the package, one expression becomes another, or is evaluated later.

    Attributes:
        place: "module.Class.function: expression", from the package on. The names before an expression may be left
            out: "left.wait()" is "page.left.wait()", too. "(...)" stands for any arguments.
        new: what the expression becomes; "{0}" is the first argument of its call.
        behind: an expression of the same function: the one at ``place`` is evaluated right after it. Empty: it stays.
    """

    place: str
    new: str = "None"
    behind: str = ""

    def __str__(self) -> str:
        return f"{self.place}{f' behind {self.behind}' * bool(self.behind)}{f' -> {self.new}' * (self.new != 'None')}"

    @property
    def _names(self) -> list[str]:
        return self.place.partition(": ")[0].split(".")

    @property
    def file(self) -> Path:
        """In ``PACKAGE``."""
        files = (Path(*self._names[:count]).with_suffix(".py") for count in range(1, len(self._names)))
        return next(file for file in files if (PACKAGE / file).exists())

    def applied_to(self, text: str) -> str:
        """Raises ValueError where an expression is not there exactly once."""
        scopes: list[Any] = [ast.parse(text)]
        for name in self._names[len(self.file.parts) :]:
            scopes = [node for scope in scopes for node in ast.walk(scope) if _defines(node, name)]
        node = self._one(scopes, self.place.partition(": ")[2])
        becomes = {node: self.new.replace("{0}", _source(text, node.args[0])) if "{0}" in self.new else self.new}
        if self.behind:
            first = self._one(scopes, self.behind)
            becomes[first] = f"[{_source(text, first)}, {_source(text, node)}][0]"
        for node in sorted(becomes, key=lambda node: (node.lineno, node.col_offset), reverse=True):
            text = _with(text, node, becomes[node])
        return text

    def _one(self, scopes: Sequence[Any], expression: str) -> Any:
        found = [node for scope in scopes for statement in scope.body for node in _found(statement, expression)]
        if len(found) != 1:
            raise ValueError(f"{self.place!r}: {expression!r} is there {len(found)} times, and not once")
        return found[0]


def _defines(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name


def _found(statement: ast.AST, expression: str) -> Iterator[ast.expr]:
    pattern = r"([\w.]+\.)?" + re.escape(expression).replace(r"\(\.\.\.\)", r"\(.*\)")
    for node in ast.walk(statement):
        is_target = isinstance(getattr(node, "ctx", None), ast.Store | ast.Del)
        if isinstance(node, ast.expr) and not is_target and re.fullmatch(pattern, ast.unparse(node), re.DOTALL):
            yield node


def _source(text: str, node: ast.expr) -> str:
    return ast.get_source_segment(text, node) or ""


def _with(text: str, node: ast.expr, new: str) -> str:
    assert node.end_lineno is not None and node.end_col_offset is not None
    lines = [line.encode() for line in text.splitlines(keepends=True)]
    first, last = lines[node.lineno - 1], lines[node.end_lineno - 1]
    lines[node.lineno - 1 : node.end_lineno] = [first[: node.col_offset] + new.encode() + last[node.end_col_offset :]]
    return b"".join(lines).decode()


@dataclass(frozen=True)
class Fault:
    """One wait that is missing, or is at the wrong place.

    Attributes:
        programs: what reveals it, the likeliest first.
        simulation: which simulated GPU they run on.
        hidden_by: of a fault with several edits, why there are several, and one alone can be missed.
        unseen: why no program shows it on these simulations. Such a fault is not run; empty: one of ``programs`` does.
        ranks: how many run the programs.
        debug: what ``ZERO_OPTIM_DEBUG`` is.
    """

    edits: tuple[Edit, ...]
    programs: tuple[OrderProgram, ...]
    simulation: str = "streams:never"
    hidden_by: str = ""
    unseen: str = ""
    ranks: int = 2
    debug: str = ""

    @property
    def name(self) -> str:
        return f"{self.edits[0]} ({self.programs[0].what})"


def one(what: str, *stages: int) -> tuple[OrderProgram, ...]:
    """Made and trained on the default stream."""
    return tuple(OrderProgram(stage, what) for stage in stages)


def side(what: str, *stages: int) -> tuple[OrderProgram, ...]:
    """Made and trained on another stream."""
    return tuple(OrderProgram(stage, what, SIDE, SIDE) for stage in stages)


def two(what: str, *stages: int) -> tuple[OrderProgram, ...]:
    """Made on the default stream, trained on another."""
    return tuple(OrderProgram(stage, what, DEFAULT, SIDE) for stage in stages)


def fault(
    place: str,
    *programs: tuple[OrderProgram, ...],
    new: str = "None",
    behind: str = "",
    and_: tuple[Edit, ...] = (),
    **more: Any,
) -> Fault:
    """What waits at ``place`` does nothing; ``new`` and ``behind``: something else, see ``Edit``. ``and_``: further
    edits. ``more``: of ``Fault``."""
    return Fault((Edit(place, new, behind), *and_), tuple(chain(*programs)), **more)


def within(path: str, *faults: Fault) -> tuple[Fault, ...]:
    """The same, at places in this module or class."""
    places = [replace(each.edits[0], place=f"{path}.{each.edits[0].place}") for each in faults]
    return tuple(replace(each, edits=(place, *each.edits[1:])) for place, each in zip(places, faults, strict=True))
