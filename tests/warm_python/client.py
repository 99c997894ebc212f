"""Hands a program to the server beside ``$0``, with all that a process has; passes on signals, and ends as it does.

Started as ``python -ISE client.py PYTHON SELF ARGUMENTS``: what it imports decides how long it takes.
"""

import array
import contextlib
import json
import os
import signal
import socket
import sys

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def main(python: str, myself: str, arguments: list[str]) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # until there is somebody to pass them on to
    files = [file for file in sorted(int(name) for name in os.listdir("/proc/self/fd")) if is_open(file)]
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        server.connect(os.path.join(os.path.dirname(myself), "socket"))
    except OSError:
        become(python, arguments)
    about = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "files": files,
        "executable": myself,
    }
    text = json.dumps(about).encode()
    server.sendall(len(text).to_bytes(8, "little"))
    server.sendmsg([b"f"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))])
    server.sendall(text)
    answers = server.makefile("r")
    first = json.loads(answers.readline() or "{}")
    if "pid" not in first:
        server.close()
        become(python, arguments)
    for number in FORWARDED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: pass_on(first["pid"], number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    for file in files:
        with contextlib.suppress(OSError):
            os.close(file)  # who waits for the end of what the program writes waits for the program alone
    status = json.loads(answers.readline() or '{"status": 9}')["status"]
    end_like(status)


def become(python: str, arguments: list[str]) -> None:
    """The usual interpreter takes the place of this process."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    os.execv(python, [python, *arguments])


def is_open(file: int) -> bool:
    try:
        os.fstat(file)
    except OSError:
        return False
    return True


def pass_on(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def end_like(status: int) -> None:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
