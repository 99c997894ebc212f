"""The integrations as modules: their clients are imported by them alone, and one that is missing is named."""

from __future__ import annotations

import subprocess
import sys

CLIENTS = ("accelerate", "lightning", "transformers")


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    return done.stdout + done.stderr


PROGRAM = f"""
import importlib, sys
import zero_optim

print([client for client in {CLIENTS} if client in sys.modules])
for client in {CLIENTS}:
    sys.modules[client] = None
    try:
        importlib.import_module("zero_optim.integrations." + client)
    except ImportError as error:
        print(error)
    del sys.modules[client]
"""


def test_clients_are_imported_by_their_integration_which_names_a_missing_one() -> None:
    said = run(PROGRAM).splitlines()
    assert said[0] == "[]"
    for line, client in zip(said[1:], CLIENTS, strict=True):
        assert line == f"zero_optim.integrations.{client} needs {client}: pip install {client}"
