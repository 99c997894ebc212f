"""An interpreter that has imported torch already: tests that start many processes start them with it.

To import torch, its compiler and the package takes five seconds of a core, in each rank of each command. The
interpreter that ``executable()`` names takes the arguments of ``python``, and gives its output, its signals and its
exit code::

    a test ── starts ──> client.py: a Python without torch, 20 ms
                            │   arguments, environment, folder, and its open files
                            v
                         server.py: has imported torch, and done nothing with it
                            │   forks
                            v
                         the program, with the client's files

What the program starts by ``sys.executable`` is started in the same way. The client becomes the usual interpreter in
two cases: the environment has something that is read as a process begins, and that the server does not have, such as
``LD_PRELOAD``; or there is an option of Python that is none of ``-u``, ``-c`` and ``-m``.

``os.getppid()`` of a program is the server. Tests that are about this, or about how a process begins, start
``sys.executable``.
"""

from __future__ import annotations

import atexit
import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@functools.cache
def executable() -> str:
    """The path of the interpreter. Its server starts with the first call, and ends with this process."""
    if sys.platform != "linux":
        return sys.executable
    directory = tempfile.TemporaryDirectory(prefix="warm-python-")
    folder = Path(directory.name)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -ISE "{HERE / "client.py"}" "{sys.executable}" "$0" "$@"\n')
    python.chmod(0o755)
    paths = [str(ROOT), str(ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])]
    server = subprocess.Popen(
        [sys.executable, str(HERE / "server.py"), str(folder / "socket")],
        stdin=subprocess.PIPE,  # it ends when this is closed, however this process ends
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    assert server.stdin is not None and server.stdout is not None
    assert server.stdout.readline() == b"ready\n", "the server did not start"

    def end() -> None:
        server.stdin.close()
        server.wait()
        directory.cleanup()

    atexit.register(end)
    return str(python)
