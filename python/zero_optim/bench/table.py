"""The table of a record, in at most 100 columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os.path import commonprefix
from typing import Any

from .record import sources_of

WIDTH = 100
_LESS_NEEDED = ("p20", "p80")  # these columns make room where there are many baselines
_WIDTHS = {"elements": 9, "dtype": 6, "backend": 15, "ms": 9, "p20": 9, "p80": 9, "GB/s": 9}

JsonRow = Mapping[str, Any]
Column = tuple[str, Callable[[JsonRow], str]]


def table(record: Mapping[str, Any]) -> str:
    """A block of lines an op, a number of ranks and one of tokens; the device and the versions above."""
    lines = [f"{record['device']}; torch {record['torch']}; {sources_of(record)}"]
    for block in dict.fromkeys(map(_block_of, record["rows"])):
        rows = [row for row in record["rows"] if _block_of(row) == block]
        lines += ["", *_lines(rows)]
    for name, state in record["baselines"].items():
        lines += [""] * (name == next(iter(record["baselines"]))) + [f"{name}: {state}"]
    return "\n".join(lines)


def _block_of(row: JsonRow) -> tuple[Any, ...]:
    return row["op"], row.get("part"), row.get("ranks"), row.get("tokens")


def _lines(rows: Sequence[JsonRow]) -> list[str]:
    kinds = {"phase": _walkthrough, "timed": _scale, "samples": _endurance, "written": _checkpoints, "part": _offload}
    return next((lines for key, lines in kinds.items() if rows[0].get(key)), _block)(rows)


def elements(numel: int) -> str:
    """``64 Mi`` where that is exact, else rounded to millions or in full."""
    for unit, size in (("Gi", 2**30), ("Mi", 2**20), ("Ki", 2**10)):
        if numel % size == 0 and numel < 10_000 * size:
            return f"{numel // size:,} {unit}"
    return f"{numel / 1e6:,.1f} M" if numel >= 10**7 else f"{numel:,}"


def milliseconds(value: float) -> str:
    return f"{value:,.4f}" if value < 1 else f"{value:,.3f}" if value < 10 else f"{value:,.2f}"


def mebibytes(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.0f}" if nbytes >= 10 * 2**20 else f"{nbytes / 2**20:,.1f}"


def _block(rows: Sequence[JsonRow]) -> list[str]:
    columns = _columns(rows)
    if len(_line(columns, rows[0], heading=True)) > WIDTH:
        columns = [column for column in columns if column[0] not in _LESS_NEEDED]
    lines = [_title(rows), _line(columns, rows[0], heading=True)]
    seen: tuple[str, int] | None = None
    for row in rows:
        group = (row["dtype"], row["numel"])
        if seen not in (None, group):
            lines.append("")
        lines.append(_line(columns, row, heading=False, repeats=seen == group))
        seen = group
    return lines + _phase_lines(rows)


def _title(rows: Sequence[JsonRow]) -> str:
    counts = sorted({row["rounds"] for row in rows})
    rounds = f"medians of {counts[0]}" + (f" to {counts[-1]}" if len(counts) > 1 else "") + " rounds"
    ranks = f", {rows[0]['ranks']} ranks" if rows[0]["ranks"] else ""
    ranks += f", {rows[0]['tokens']:,} tokens each" if rows[0].get("tokens") else ""
    least = "" if rows[0]["bytes"] is None else f"{rows[0]['bytes']} bytes an element at the least; "
    return f"{rows[0]['op']}{ranks}: {least}{rounds}"


def _columns(rows: Sequence[JsonRow]) -> list[Column]:
    columns: list[Column] = [
        ("elements", lambda row: elements(row["numel"])),
        ("dtype", lambda row: row["dtype"]),
        ("backend", lambda row: row["backend"]),
        *((f"{name}", _in_ms(name)) for name in ("ms", "p20", "p80")),
    ]
    if rows[0]["parameters"]:
        columns.insert(2, ("parameters", lambda row: f"{row['parameters']:,}"))
    if rows[0]["tokens_per_s"]:
        columns.append(("tokens/s", lambda row: f"{row['tokens_per_s']:,.0f}"))
    if any(row["memory"] for row in rows):
        columns += [("MiB", _in_mebibytes("steady")), ("at start", _in_mebibytes("start"))]
    if any("rest" in (row["memory"] or ()) for row in rows):
        columns.append(("at rest", _in_mebibytes("rest")))
    if any(row.get("communicated") for row in rows):
        columns.append(("comm. MiB", lambda row: mebibytes(row["communicated"])))
    if rows[0]["bytes"] is not None:
        columns.append(("GB/s", lambda row: f"{row['gbps']:,.1f}"))
        columns.append((f"of {rows[0]['yardstick']}", lambda row: f"{row['fraction']:.3f}"))
    columns.append((f"vs {baseline_of(rows)}", lambda row: f"{row['vs_torch']:.2f}"))
    baselines = dict.fromkeys(name for row in rows for name in row["vs"])
    columns += [(f"vs {name}", _against(name)) for name in baselines]
    if any(row["launches"] for row in rows):
        columns += [("kernels", _kernels), ("a bucket", _kernels_a_bucket)]
    return columns


def baseline_of(rows: Sequence[JsonRow]) -> str:
    """Where rows have several, what their names have in common."""
    named = [row["baseline"] for row in rows if row.get("baseline")]
    return commonprefix(named) or ("ddp" if rows[0]["ranks"] else "fused" if rows[0]["parameters"] else "torch")


def _in_ms(name: str) -> Callable[[JsonRow], str]:
    return lambda row: milliseconds(row[name])


def _in_mebibytes(name: str) -> Callable[[JsonRow], str]:
    return lambda row: mebibytes(row["memory"][name]) if name in (row["memory"] or ()) else "-"


def _against(baseline: str) -> Callable[[JsonRow], str]:
    return lambda row: f"{row['vs'][baseline]:.2f}" if baseline in row["vs"] else "-"


def _kernels(row: JsonRow) -> str:
    return f"{row['launches']['kernels']:,}" if row["launches"] else "-"


def _kernels_a_bucket(row: JsonRow) -> str:
    launches = row["launches"] or {}
    return f"{launches['kernels'] / launches['buckets']:.2f}" if "buckets" in launches else "-"


def _line(columns: Sequence[Column], row: JsonRow, *, heading: bool, repeats: bool = False) -> str:
    """Words to the left, numbers to the right. What the line above says already is left out."""
    cells = []
    for index, (name, cell) in enumerate(columns):
        text = name if heading else "" if repeats and index < 2 else cell(row)
        width = _WIDTHS.get(name, max(len(name) + 2, 8))
        cells.append(f"{text:<{width}}" if name in ("dtype", "backend") else f"{text:>{width}}")
        cells.append("  " if name in ("elements", "parameters") else "")
    return "".join(cells).rstrip()


def _walkthrough(rows: Sequence[JsonRow]) -> list[str]:
    """Stages beside each other, a phase a line."""
    first = rows[0]
    about = f"{elements(first['numel'])} {first['dtype']} parameters, {first['ranks']} ranks"
    names = list(dict.fromkeys(row["backend"] for row in rows))
    cells = {(row["phase"], row["backend"]): row for row in rows}
    phases = list(dict.fromkeys(row["phase"] for row in rows))
    lines = [f"{first['op']}: {about}; MiB of a rank after each phase, and the most in it"]
    lines.append(f"{'phase':<18}" + "".join(f"{name:>10}{'peak':>10}" for name in names))
    for phase in phases:
        of_phase = [cells[phase, name] for name in names]
        texts = [f"{mebibytes(row['after']):>10}{mebibytes(row['peak']):>10}" for row in of_phase]
        lines.append(f"{phase:<18}" + "".join(texts))
    last = [f"{row['after'] / row['numel']:>10.2f}{row['peak'] / row['numel']:>10.2f}" for row in of_phase]
    return [*lines, f"{'bytes a parameter':<18}" + "".join(last)]


def _scale(rows: Sequence[JsonRow]) -> list[str]:
    """Stages of one number of ranks beside each other, a figure a line."""
    first = rows[0]
    about = f"{elements(first['numel'])} {first['dtype']} in {first['parameters']} parameters, {first['ranks']:,} ranks"
    lines = [f"{first['op']}: {about}", _beside("", [row["backend"] for row in rows])]
    lines.append(_beside("buckets", [f"{row['buckets']:,}" for row in rows]))
    lines.append(_beside("largest, elements", [elements(row["largest"]) for row in rows]))
    lines.append(_beside("padding", [f"{row['padding']:.4%}" for row in rows]))
    lines.append(_beside("exchange, bytes", [f"{row['exchange']:,}" for row in rows]))
    for when in first["collectives"]:
        of_rows = [row["collectives"][when] for row in rows]
        for kind in sorted({kind for calls in of_rows for kind in calls}):
            lines.append(_beside(f"{when}: {kind}", [f"{calls.get(kind, 0):,}" for calls in of_rows]))
        lines.append(_beside(f"{when}: bytes of objects", [f"{row['object_bytes'][when]:,}" for row in rows]))
    lines.append(_beside("timed: buckets", [f"{row['timed_buckets']:,}" for row in rows]))
    for what in first["timed"]:
        lines.append(_beside(f"timed: {what}, ms", [milliseconds(row["timed"][what]) for row in rows]))
    parts = [row.get("of_bucket") or {} for row in rows]
    for part in dict.fromkeys(part for of_row in parts for part in of_row):
        cells = [f"{of_row[part]:.1f}" if part in of_row else "-" for of_row in parts]
        lines.append(_beside(f"a small bucket: {part}, µs", cells))
    if any(parts):
        lines.append(_beside("a small bucket: all, µs", [f"{sum(of.values()):.1f}" if of else "-" for of in parts]))
    return lines


def _checkpoints(rows: Sequence[JsonRow]) -> list[str]:
    first = rows[0]
    about = f"{elements(first['numel'])} parameters, {first['dtype']}, {first['written'] / 1e6:,.0f} MB"
    heads = ("save, ms", "blocked, ms", "load, ms", "save/disk", "load/disk", "save +MiB", "load +MiB")
    lines = [f"checkpoint: {about}, {first['ranks']} ranks; medians of {first['rounds']} rounds"]
    lines.append(f"{'':<16}" + "".join(f"{head:>12}" for head in heads))
    for row in rows:
        cells = [milliseconds(row[part][0]) for part in ("save", "blocked", "load")]
        cells += [f"{row['of_disk'][part]:.2f}" for part in ("save", "load")]
        cells += [mebibytes(row["extra"][part]) for part in ("save", "load")]
        lines.append(f"{row['backend']:<16}" + "".join(f"{cell:>12}" for cell in cells))
    return lines


def _offload(rows: Sequence[JsonRow]) -> list[str]:
    """Time and what it is held to, and below it bytes."""
    first = rows[0]
    about = f"{elements(first['numel'])} parameters, {first['dtype']}, ranks: {first['ranks']}"
    heads = ("ms", "p20", "p80", "vs None", "apart, ms", "hidden", "of bound")
    lines = [f"offload, {first['part']}: {about}; medians of {first['rounds']} rounds"]
    lines.append(_offload_line("", heads))
    for row in rows:
        cells = [*map(milliseconds, row["time"]), _shown(row["versus"], "{:.2f}")]
        cells += [milliseconds(sum(row["beside"].values())) if row["beside"] else "-", _shown(row["hidden"], "{:.2f}")]
        cells.append(_shown(row["fraction"], "{:.2f}"))
        lines.append(_offload_line(row["backend"], cells) + f"  {row['bound']}" * bool(row["bound"]))
    if first["part"] == "pages":
        return lines
    places, ways = ("device", "host", "disk"), ("to_device", "to_host", "read", "written")
    lines += ["", _offload_line("MiB of a rank", (*places, "peak", "to device", "to host", "read", "written"))]
    for row in rows:
        known = [*((row["held"] or {}).get(place) for place in places), row["peak"]]
        known += [(row["moved"] or {}).get(way) for way in ways]
        cells = ["-" if nbytes is None else mebibytes(nbytes) for nbytes in known]
        lines.append(_offload_line(row["backend"], cells))
    for row in rows:
        if guesses := row["speculated"]:
            right, made = guesses["right"], sum(guesses.values())
            lines.append(f"  {row['backend']}: of {made:,} updates before the norm was known {right:,} were right")
    return lines


def _offload_line(name: str, cells: Sequence[str]) -> str:
    return (f"{name:<19}" + "".join(f"{cell:>10}" for cell in cells)).rstrip()


def _shown(figure: float | None, form: str) -> str:
    return "-" if figure is None else form.format(figure)


def _beside(name: str, cells: Sequence[str]) -> str:
    return f"{name:<30}" + "".join(f"{cell:>16}" for cell in cells)


def _endurance(rows: Sequence[JsonRow]) -> list[str]:
    """A counter a line."""
    first = rows[0]
    about = f"{elements(first['numel'])} {first['dtype']} parameters, ranks: {first['ranks']}"
    lines = [f"{first['op']}: {about}, {first['steps']:,} steps; growth a step in the second half"]
    lines.append(f"{'':<10}{'':<16}{'first':>14}{'middle':>14}{'last':>14}{'a step':>14}")
    for row in rows:
        for counter, growth in row["growth"].items():
            figures = row["samples"][counter]
            shown = (figures[0], figures[len(figures) // 2], figures[-1])
            texts = [f"{figure:>14,.3f}" if counter == "ms" else f"{figure:>14,}" for figure in shown]
            name = row["backend"] if counter == next(iter(row["growth"])) else ""
            unit = ", bytes" if counter == "resident" else ""
            lines.append(f"{name:<10}{counter + unit:<16}{''.join(texts)}{growth:>14.6f}")
    return lines


def _phase_lines(rows: Sequence[JsonRow]) -> list[str]:
    """Where the time goes, under the rows that have phases."""
    lines = []
    for row in rows:
        if row["phases"]:
            parts = "  ".join(f"{name} {milliseconds(value)}" for name, value in row["phases"].items())
            of = f", {row['parameters']:,} parameters" if row["parameters"] else ""
            lines.append(f"  {row['dtype']} {row['backend']}{of}, ms: {parts}")
    return ["", *lines] if lines else []
