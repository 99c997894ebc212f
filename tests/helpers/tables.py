"""Reads the tables in docstrings, so that a test walks every cell of what the documentation says."""

from __future__ import annotations


def table(docstring: str | None, first_column: str) -> dict[tuple[str, str], str]:
    """Cells by row and column of the table in ``docstring`` whose first column is called ``first_column``.

    A table is a ruler of ``=``, a head, a ruler, rows, a ruler; columns begin where the ruler's marks do.
    """
    lines = (docstring or "").splitlines()
    rulers = [i for i, line in enumerate(lines) if line.strip() and set(line.strip()) <= {"=", " "}]
    for top, middle, bottom in zip(rulers[::3], rulers[1::3], rulers[2::3], strict=True):
        starts = [i for i, mark in enumerate(lines[top]) if mark == "=" and lines[top][i - 1 : i] in ("", " ")]
        head, *rows = (
            [cell.strip() for cell in _cut(line, starts)] for line in lines[top + 1 : bottom] if line != lines[middle]
        )
        if head[0] == first_column:
            return {(row[0], column): cell for row in rows for column, cell in zip(head[1:], row[1:], strict=True)}
    raise LookupError(f"no table whose first column is {first_column!r}")


def _cut(line: str, starts: list[int]) -> list[str]:
    return [line[start:stop] for start, stop in zip(starts, [*starts[1:], len(line) + 1], strict=True)]
