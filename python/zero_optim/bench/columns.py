"""Columns: for each figure of a row its name, its place in the row, and its form as text.

A table shows a column as text. A drawing (``drawings``) shows it as a bar, as a whisker, or as text beside the bar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..drawing.figures import count

JsonRow = Mapping[str, Any]
Form = Callable[[Any], str]

MIB = 2**20
MISSING = "-"


# -- figures as text ---------------------------------------------------------------------------------------------------


def milliseconds(value: float) -> str:
    return f"{value:,.4f}" if value < 1 else f"{value:,.3f}" if value < 10 else f"{value:,.2f}"


def mebibytes(nbytes: int) -> str:
    return f"{nbytes / MIB:,.0f}" if nbytes >= 10 * MIB else f"{nbytes / MIB:,.1f}"


whole = "{:,}".format
ratio = "{:.2f}".format
times = "{:.2f}×".format


# -- columns -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankRow:
    """The first keys of a row that is measured on ranks."""

    op: str
    backend: str
    dtype: str
    numel: int
    ranks: int


@dataclass(frozen=True)
class Column:
    """A figure of a row.

    Attributes:
        name: its heading, with the unit where it has one.
        value: reads the figure from a row; None where the row has none.
        form: writes the figure as text.
        drawn: writes it beside a bar, where that is another text.
        width: of its cells in a table; 0: the table's default.
        left: whether its cells are words, aligned to the left.
    """

    name: str
    value: Callable[[JsonRow], Any]
    form: Form = str
    drawn: Form | None = None
    width: int = 0
    left: bool = False

    def text(self, row: JsonRow) -> str:
        return self._shown(row, self.form)

    def beside_bar(self, row: JsonRow) -> str:
        return self._shown(row, self.drawn or self.form)

    def _shown(self, row: JsonRow, form: Form) -> str:
        value = self.value(row)
        return MISSING if value is None else form(value)


def at(*keys: str | int) -> Callable[[JsonRow], Any]:
    """Make a reader of nested keys: ``at("memory", "steady")`` reads ``row["memory"]["steady"]``, or None where a key
    is missing or null."""

    def value(row: JsonRow) -> Any:
        found: Any = row
        for key in keys:
            if found is None:
                return None
            found = found.get(key) if isinstance(found, Mapping) else found[key]
        return found

    return value


def ratio_to(baseline: str, *keys: str | int) -> Column:
    """Make a column of the baseline's time over the row's own."""
    return Column(f"vs {baseline}", at(*keys), ratio, times)


def spread_at(*keys: str) -> tuple[Column, Column, Column]:
    """Make columns of the median, the 20th and the 80th percentile, which are a list in the row."""
    ms, p20, p80 = (Column(name, at(*keys, place), milliseconds) for place, name in enumerate(("ms", "p20", "p80")))
    return ms, p20, p80


def shown_by_some(columns: Iterable[Column], rows: Sequence[JsonRow]) -> list[Column]:
    """Leave out columns for which no row has a figure."""
    return [column for column in columns if any(column.value(row) is not None for row in rows)]


def of_ranks(row: JsonRow) -> str:
    return count(row.get("ranks") or 1, "rank")


# -- tables ------------------------------------------------------------------------------------------------------------


def below_each_other(columns: Sequence[Column], rows: Sequence[JsonRow], width: int = 0) -> list[str]:
    """Write the headings, and a line for each row. ``width``: of columns without one of their own."""
    headings = _line(columns, [column.name for column in columns], width)
    return [headings, *(line_of(columns, row, width) for row in rows)]


def line_of(columns: Sequence[Column], row: JsonRow, width: int = 0, without: int = 0) -> str:
    """Write the row's figures in a line; the first ``without`` cells are left empty."""
    texts = [column.text(row) if place >= without else "" for place, column in enumerate(columns)]
    return _line(columns, texts, width)


def _line(columns: Sequence[Column], texts: Sequence[str], width: int) -> str:
    """Align words to the left and numbers to the right, with a gap between them."""
    line, room = "", ""
    for column, text in zip(columns, texts, strict=True):
        wide = column.width or width or max(len(column.name) + 2, 8)
        line += f"{room}{text:<{wide}}" if column.left else f"{text:>{wide}}"
        room = "" if column.left else "  "
    return line.rstrip()
