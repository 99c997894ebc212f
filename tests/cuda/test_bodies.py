"""The CUDA kernels' bodies on this processor: the program of every thread, under AddressSanitizer and UBSan."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from toolchain import BODIES

HERE = Path(__file__).parent
COMPILE = ["g++", "-std=c++20", "-O0", "-g1", "-fPIC", "-shared", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(shutil.which("g++") is None or sys.platform != "linux", reason="g++'s sanitizers, on Linux"),
]


@pytest.fixture(scope="module")
def bodies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bodies")

    def compile_source(name: str) -> None:
        command = [*COMPILE, *SANITIZE, str(HERE / f"host/{name}.cpp"), "-o", str(folder / f"{name}.so")]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.fail(done.stderr)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_source, BODIES))
    return folder


def run_bodies(folder: Path, *ops: str) -> subprocess.CompletedProcess:
    found = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip("g++ has no AddressSanitizer here")
    sanitizers = {"LD_PRELOAD": found, "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    command = [sys.executable, str(HERE / "bodies.py"), str(folder), *ops]
    return subprocess.run(command, env=os.environ | sanitizers, capture_output=True, text=True)


def test_every_thread_keeps_to_its_memory_and_to_the_bits(bodies: Path) -> None:
    """In one process: to import torch under the sanitizers takes longer than the cases of an op."""
    cases = {"one_shard": 252, "foreach_step": 63, "encoded_step": 150}
    cases |= {"ema": 600, "pack": 85, "grad_stats": 352, "hyper_table": 10}
    done = run_bodies(bodies, *cases)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [f"{op} {count}" for op, count in cases.items()]


def test_an_overrun_would_be_seen(bodies: Path) -> None:
    done = run_bodies(bodies, "overrun")
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr


def test_the_quick_way_has_the_bits_of_the_usual_one(tmp_path: Path) -> None:
    """All fractions of roots and divisors; rows as in a training, of any magnitude, with planted values, of zeros."""
    flags = ["-std=c++20", "-O2", "-march=native", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["g++", *flags, str(HERE / "host/quick.cpp"), "-o", str(tmp_path / "quick")], check=True)
    done = subprocess.run([str(tmp_path / "quick"), "2000"], capture_output=True, text=True, check=True)
    wrong, *kinds = done.stdout.splitlines()
    rows = [tuple(map(int, kind.split())) for kind in kinds]
    assert wrong == "0" and [of_kind for *_, of_kind in rows] == [0] * 4, done.stdout
    for quick, ways in zip(rows[0], (2, 3, 3), strict=False):  # of fp32, bf16 and int8 moments
        assert quick > 0.85 * ways * 5 * 2000, done.stdout
    assert min(min(quick) for *quick, _ in rows) > 1000, done.stdout
