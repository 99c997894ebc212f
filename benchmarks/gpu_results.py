"""The results of `make gpu-check`: outcomes and figures, in one JSON file that is written as they come."""

from __future__ import annotations

import enum
import json
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gpu_phases import Phase

SKIP_CODE = 77  # exit code of a script that cannot do its work here; its last line says why
NO_TESTS = 5  # exit code of pytest that has run no test
OWN_RESULTS = ("trainer", "memory", "stages", "profile", "products", "host_time", "overlap", "convergence")
"""Phases with a JSON of their own in place of rows."""


class Verdict(enum.Enum):
    """The verdict of a phase, as the record has it."""

    OK = "ok"
    SKIPPED = "skipped"
    FAILED = "failed"
    TIMED_OUT = "timed out"
    NOT_RUN = "not run"

    @property
    def passes(self) -> bool:
        return self in (Verdict.OK, Verdict.SKIPPED)


@dataclass(frozen=True)
class Outcome:
    """The end of a phase.

    Attributes:
        note: its last line of output, or why it did not run.
        skipped: reasons why tests of it were skipped.
        reported: figures beyond a tolerance that was never measured on a GPU. They do not fail the phase.
    """

    phase: str
    result: Verdict
    seconds: float
    note: str
    skipped: Sequence[str] = ()
    reported: Sequence[str] = ()


def verdict(code: int | None, said: Sequence[str]) -> Verdict:
    """Judge a phase by its output and its exit code, which is None where the phase was ended at its limit.

    A phase whose tests were all skipped has shown nothing, so it is not ok.
    """
    if code is None:
        return Verdict.TIMED_OUT
    last = said[-1] if said else ""
    skipped, ran = re.search(r"\b\d+ skipped", last), re.search(r"\b\d+ (passed|failed|xfailed|error)", last)
    if code == SKIP_CODE or (code in (0, NO_TESTS) and skipped and not ran):
        return Verdict.SKIPPED
    return Verdict.FAILED if code else Verdict.OK


def skips(said: Sequence[str]) -> list[str]:
    """Collect pytest's reasons for skipped tests, each once, in the order of its summary."""
    return _told(r"SKIPPED \[\d+\] \S+?:\d+: (.*)", said)


def reports(said: Sequence[str]) -> list[str]:
    """Collect a phase's lines about tolerances that were never measured."""
    return _told(r".*\bUncalibrated: (.*)", said)


def _told(pattern: str, said: Sequence[str]) -> list[str]:
    matches = (re.fullmatch(pattern, line.strip()) for line in said)
    return list(dict.fromkeys(match[1] for match in matches if match))


class Results:
    """The results of the phases so far, written after each change, so that a later failure loses nothing."""

    def __init__(self, device: Any, folder: Path, about: str) -> None:
        """``about``: the end of the file's name."""
        from zero_optim.bench import record

        self.folder, self._about = folder, about
        self.record: dict[str, Any] = {**record.make_record([], device, {}), "phases": []}
        self.path: Path | None = None
        self._write, self._write_anew = record.write, record.write_anew
        self._lock = threading.RLock()
        self._given: dict[str, dict[str, Any]] = {}  # by phase and file, what was written so far

    def result_of(self, phase: str) -> Verdict | None:
        """Find a phase's verdict; None: it is not among the results."""
        results = (Verdict(outcome["result"]) for outcome in self.record["phases"] if outcome["phase"] == phase)
        return next(results, None)

    def look(self, phase: Phase) -> None:
        """Read the files that the phase has written by now, and save their contents."""
        with self._lock:
            before = self._given.get(phase.name, {})
            if (now := before | _read(phase.folder)) != before:
                self._given[phase.name] = now
                self._fill()
                self.save()

    def take(self, phase: Phase, outcome: Outcome) -> Outcome:
        """Add the outcome, and the rows or results that the phase has written. Rows make its note."""
        with self._lock:
            self.look(phase)
            tables = [given for given in self._given.get(phase.name, {}).values() if phase.name not in OWN_RESULTS]
            rows = [row for given in tables for row in given["rows"]]
            if rows:
                outcome = replace(outcome, note=headline(rows))
            self.record["phases"].append({**asdict(outcome), "result": outcome.result.value})
            self.save()
        return outcome

    def _fill(self) -> None:
        self.record["rows"] = []
        for name, files in self._given.items():
            for given in files.values():
                if name in OWN_RESULTS:
                    self.record[name] = given
                else:
                    self.record["rows"] += given["rows"]
                    self.record["baselines"].update(given["baselines"])

    def save(self) -> Path:
        """Write the record: under a new name the first time, from then on over that file, in one rename."""
        with self._lock:
            if self.path is None:
                self.path = self._write(self.record, self.folder, self._about)
            else:
                self._write_anew(self.record, self.path)
            return self.path

    def draw(self) -> str:
        """Draw the plots, of speed and of stores. Returns their paths, or why there are none."""
        if not self.record["rows"]:
            return "no plot: nothing was measured"
        try:
            from zero_optim.bench.plot import draw

            return " ".join(map(str, draw(self.record, self.save().with_suffix(".png"))))
        except Exception as error:  # the figures are on disk already: a failed drawing must not fail the check
            return f"no plot: {type(error).__name__}: {error}"


def headline(rows: Sequence[Mapping[str, Any]]) -> str:
    """Write each backend's share of the yardstick, and its speed over torch's, at the first dtype's largest size."""
    from zero_optim.drawing.figures import elements

    if any(row["op"] == "offload" for row in rows):
        held = [row for row in rows if row["part"] in ("step", "sleep") and row["fraction"] is not None]
        return "of bound: " + ", ".join(f"{row['backend']} {row['fraction']:.2f} ({row['bound']})" for row in held)
    measured = [row for row in rows if row["fraction"] is not None and row["backend"] != row["yardstick"]]
    if not measured:
        return "no rows"
    dtype, numel = measured[0]["dtype"], max(row["numel"] for row in measured)
    shown = [row for row in measured if (row["dtype"], row["numel"]) == (dtype, numel)]
    figures = [f"{row['backend']} {row['fraction']:.2f} ({row['vs_torch']:.2f}x)" for row in shown]
    return f"{dtype}, {elements(numel)}, of {shown[0]['yardstick']} (vs torch): {', '.join(figures)}"


def summary(outcomes: Sequence[Outcome]) -> str:
    width = max([len(outcome.phase) for outcome in outcomes], default=5)
    lines = [f"{'phase':{width}}  {'':9}  {'seconds':>7}"]
    lines += [f"{o.phase:{width}}  {o.result.value:9}  {o.seconds:7.1f}  {o.note[:110]}" for o in outcomes]
    return "\n".join(lines)


def _read(folder: Path | None) -> dict[str, Any]:
    """Read the complete JSON files of a folder, by name."""
    found = {}
    for path in sorted(folder.glob("*.json")) if folder is not None else []:
        try:
            found[path.name] = json.loads(path.read_text())
        except ValueError:  # it is being written, or the phase was ended while it was
            continue
    return found
