"""What an installed package has: the style of the pages, beside the modules."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_style_is_installed(tmp_path: Path) -> None:
    """Builds what a wheel of this tree holds, without the kernels."""
    environment = {**os.environ, "ZERO_KERNELS_NO_BUILD": "1"}
    command = [
        sys.executable,
        "setup.py",
        "-q",
        "egg_info",
        "--egg-base",
        tmp_path,
        "build_py",
        "--build-lib",
        tmp_path / "lib",
    ]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=300)
    installed, source = tmp_path / "lib" / "zero_optim" / "report", ROOT / "python" / "zero_optim" / "report"
    names = {path.name for path in source.iterdir() if path.is_file()}
    assert {path.name for path in installed.iterdir()} == names >= {"style.css", "run_page.py"}
    assert (installed / "style.css").read_bytes() == (source / "style.css").read_bytes()
