"""The integrations as modules: their clients are imported by them alone, and one that is missing is named."""

from __future__ import annotations

import subprocess
import sys

import pytest

CLIENTS = ("accelerate", "lightning", "transformers")


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    return done.stdout + done.stderr


def test_zero_optim_imports_no_client() -> None:
    assert run(f"import sys, zero_optim; print([name for name in {CLIENTS} if name in sys.modules])") == "[]\n"


@pytest.mark.parametrize("client", CLIENTS)
def test_a_missing_client_is_named_with_its_command(client: str) -> None:
    said = run(f"import sys; sys.modules[{client!r}] = None; import zero_optim.integrations.{client}")
    assert f"ImportError: zero_optim.integrations.{client} needs {client}: pip install {client}" in said
