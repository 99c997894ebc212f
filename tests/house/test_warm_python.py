"""The interpreter that has imported torch already, against the usual one: what a program can see, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import warm_python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="passes on open files as Linux does")

SEEN = """
import os, random, sys, __main__
print(sys.argv, sys.path[:3], os.getcwd(), os.environ.get("GIVEN"), os.environ.get("PYTHONPATH"))
print(__name__, __main__.__dict__ is globals(), sys.stdin.read(), sys.stdout.isatty())
print("also said", file=sys.stderr)
"""
ENDINGS = {
    "by itself": "",
    "with a code": "raise SystemExit(7)",
    "with a message": "raise SystemExit('why')",
    "by an error": "def f(): 1 / 0\nf()",
    "by a signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "at once": "import os; print('shown where nothing is buffered'); os._exit(3)",
    "with what runs at exit": "import atexit; atexit.register(print, 'the last word'); print('before')",
    "within its threads": "import threading; threading.Thread(target=lambda: print('of a thread')).start()",
}


def _both(arguments: list[str], **more: object) -> list[tuple[int, str, str]]:
    ended = []
    for python in (warm_python.executable(), sys.executable):
        done = subprocess.run([python, *arguments], capture_output=True, text=True, timeout=120, **more)
        ended.append((done.returncode, done.stdout, done.stderr))
    return ended


@pytest.mark.parametrize("how", ["-c", "-m", "script"])
def test_a_program_sees_the_same(how: str, tmp_path: Path) -> None:
    (tmp_path / "seen.py").write_text(SEEN)
    words = {"-c": ["-c", SEEN], "-m": ["-u", "-m", "seen"], "script": [str(tmp_path / "seen.py")]}[how]
    environment = {**os.environ, "GIVEN": "é", "PYTHONPATH": os.pathsep.join([str(tmp_path), "/nowhere"])}
    warm, usual = _both([*words, "a", "b c"], env=environment, cwd=tmp_path, input="what was typed")
    assert warm == usual and "what was typed" in warm[1]


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_program_ends_the_same(ending: str) -> None:
    for options in ([], ["-u"]):
        warm, usual = _both([*options, "-c", ENDINGS[ending]])
        assert warm == usual


def test_it_has_torch_and_so_has_what_it_starts() -> None:
    program = "import sys; print('torch' in sys.modules)"
    nested = f"{program}; import subprocess; subprocess.run([sys.executable, '-c', {program!r}])"
    done = subprocess.run([warm_python.executable(), "-uc", program], capture_output=True, text=True)
    assert done.stdout == "False\n", "an option that it does not know: the usual interpreter"
    done = subprocess.run([warm_python.executable(), "-u", "-c", nested], capture_output=True, text=True)
    assert done.stdout == "True\nTrue\n"


def test_where_the_environment_is_read_early_it_is_the_usual_interpreter() -> None:
    command = [warm_python.executable(), "-c", "import sys; print('torch' in sys.modules)"]

    def has_torch(name: str) -> str:
        environment = {**os.environ, name: "1"}
        return subprocess.run(command, env=environment, capture_output=True, text=True).stdout

    assert [has_torch(name) for name in ("TRITON_INTERPRET", "PYTHONHASHSEED")] == ["False\n"] * 2
    assert has_torch("PYTHON") == "True\n", "what make hands on, which Python does not read"


WAITS = "import os, signal, sys\n{}\nprint(os.getpid(), flush=True)\nsignal.pause()"


@pytest.mark.parametrize(
    ("number", "handling", "code"),
    [
        (signal.SIGINT, "", -signal.SIGINT),
        (signal.SIGTERM, "", -signal.SIGTERM),
        (signal.SIGTERM, "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))", 5),
        (signal.SIGKILL, "", -signal.SIGKILL),
    ],
)
def test_signals_reach_the_program(number: int, handling: str, code: int) -> None:
    command = [warm_python.executable(), "-c", WAITS.format(handling)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) != process.pid
        process.send_signal(number)
        assert process.stdout.read() == "", "it is at its end when the program has ended"
        assert process.wait() == code


def test_other_open_files_are_passed_on() -> None:
    reading, writing = os.pipe()
    command = [warm_python.executable(), "-c", f"import os; os.write({writing}, b'through a pipe')"]
    subprocess.run(command, pass_fds=[writing], check=True)
    os.close(writing)
    with os.fdopen(reading) as file:
        assert file.read() == "through a pipe"
