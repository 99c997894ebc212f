"""``zero-optim report``: the choice of the page that a path asks for."""

from __future__ import annotations

from pathlib import Path

from ..errors import UsageError
from ..train.run_dir import LOG
from .bench_page import results_in, write_bench_page
from .run_page import write_run_page


def write_report(source: Path, out: Path | None) -> Path:
    """Write the page of a run's folder, of a result of the bench, or of a folder of results. Returns its path.

    Raises UsageError for any other path, or where the page can't be written.
    """
    try:
        if (source / LOG).is_file():
            return write_run_page(source, out)
        if source.is_file() or results_in(source):
            return write_bench_page(source, out)
    except OSError as error:
        where = ": give --out a file in a folder that is there" if isinstance(error, FileNotFoundError) else ""
        raise UsageError(f"{error.filename or source}: {error.strerror}{where}") from error
    if not source.exists():
        raise UsageError(f"{source}: no such file or folder")
    raise UsageError(
        f"{source}: holds no {LOG}, which every run of zero-optim train writes, and no JSON file of zero-optim bench"
    )
