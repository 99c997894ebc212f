"""Runs a script on several ranks, each a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple


class Ended(NamedTuple):
    code: int
    output: str
    errors: str


def run_script(text: str, world_size: int, folder: Path, *arguments: str) -> list[Ended]:
    """How each rank ended. Its arguments are its rank, ``world_size``, a file to meet at, and ``arguments``."""
    script = folder / "script.py"
    script.write_text(text)
    # Warnings are not what this is about. PyTorch's C++ code warns of its own as processes leave at different times.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(world_size), str(folder / "store"), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [rank.communicate(timeout=300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [
        Ended(rank.returncode, _without_gloo(output), errors)
        for rank, (output, errors) in zip(ranks, outputs, strict=True)
    ]


def _without_gloo(output: str) -> str:
    """torch 2.10's gloo prints its connections."""
    return re.sub(r"^\[Gloo\] .*\n", "", output, flags=re.MULTILINE)
