"""Imports what programs need, and forks one for each client. See this folder's ``__init__.py``.

Everything here runs in one thread, so that a fork has all there is. A client that is gone takes its program with it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import random
import runpy
import selectors
import signal
import socket
import sys
import types
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

IMPORTED = ("torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.run", "zero_optim.cli")
IMPORTED += ("zero_optim.train.loop", "zero_optim.bench.run")
READ_AT_THE_BEGINNING = ("LD_", "PYTHON", "ZERO_KERNELS", "TORCH", "TRITON", "CUDA", "MKL", "KMP", "MALLOC")
"""Beginnings of names in the environment. A client that has others than this process gets no program."""
MAY_DIFFER = ("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONWARNINGS", "TORCH_CPP_LOG_LEVEL", "TORCHELASTIC_", "TORCH_NCCL")
MAY_DIFFER += ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "ZERO_KERNELS_BACKEND", "ZERO_KERNELS_GPU_TESTS")
MAY_DIFFER += ("ZERO_KERNELS_ORDER_PROGRAMS",)
OF_MAKE = "PYTHON"  # `make gpu-check PYTHON=...` hands it on; names that Python reads go on behind it
MOST_FILES = 200

Program = Callable[[], None]


def main(path: str) -> Program | None:
    """Serves until stdin is closed. Returns in a forked process alone: what to run there."""
    gc.disable()  # see tests/uncollected.py
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(64)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    print("ready", flush=True)
    clients: dict[int, socket.socket] = {}  # by the process of its program
    with selectors.DefaultSelector() as selector:
        for source in (listener, woken, 0):
            selector.register(source, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj == 0:
                    for pid in clients:
                        os.kill(pid, signal.SIGKILL)
                    os._exit(0)
                elif key.fileobj == woken:
                    os.read(woken, 4096)
                    _tell_of_ends(clients, selector)
                elif key.fileobj is listener:
                    client, _ = listener.accept()
                    program = _start(client, clients)
                    if program is not None:
                        return program
                    if client in clients.values():
                        selector.register(client, selectors.EVENT_READ)
                    else:
                        client.close()
                else:
                    _end_program_of(key.fileobj, clients, selector)


def _end_program_of(gone: object, clients: dict[int, socket.socket], selector: selectors.BaseSelector) -> None:
    """End the program of a client that says nothing more, if it has not ended by itself a moment before."""
    for pid, client in clients.items():
        if client is gone:
            selector.unregister(client)
            os.kill(pid, signal.SIGKILL)


def _tell_of_ends(clients: dict[int, socket.socket], selector: selectors.BaseSelector) -> None:
    for pid in list(clients):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            client = clients.pop(pid)
            with contextlib.suppress(KeyError):
                selector.unregister(client)
            _say(client, status=status)
            client.close()


def _start(client: socket.socket, clients: dict[int, socket.socket]) -> Program | None:
    """Forks a program for a client, or tells it that there is none. Returns what to run, in the new process alone."""
    try:
        length = int.from_bytes(_receive(client, 8), "little")
        _, files, _, _ = socket.recv_fds(client, 1, MOST_FILES)
        about = json.loads(_receive(client, length))
    except (OSError, ValueError):
        return None
    kind = _kind_of(about)
    if kind is None:
        _say(client)
    elif pid := os.fork():
        clients[pid] = client
        _say(client, pid=pid)
    else:
        signal.set_wakeup_fd(-1)
        _become(about, files)
        return partial(_run, *kind)
    for file in files:
        os.close(file)
    return None


def _say(client: socket.socket, **words: int) -> None:
    with contextlib.suppress(OSError):  # it is gone, and will be seen to be
        client.sendall(json.dumps(words).encode() + b"\n")


def _receive(client: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        more = client.recv(length - len(data))
        if not more:
            raise OSError("the client is gone")
        data += more
    return data


def _kind_of(about: dict[str, Any]) -> tuple[str, str, list[str]] | None:
    """What to run (``-c``, ``-m`` or a script), and its arguments; None for what has to begin by itself."""

    def read_early(environment: dict[str, str]) -> dict[str, str]:
        return {
            name: value
            for name, value in environment.items()
            if name.startswith(READ_AT_THE_BEGINNING) and not name.startswith(MAY_DIFFER) and name != OF_MAKE
        }

    if read_early(about["environment"]) != read_early(_BEGAN_WITH) or len(about["files"]) >= MOST_FILES:
        return None
    arguments = list(about["arguments"])
    while arguments and arguments[0] in ("-u", "-B"):  # -B: multiprocessing's, where it is set here
        arguments.pop(0)
    if len(arguments) > 1 and arguments[0] in ("-c", "-m"):
        return arguments[0], arguments[1], arguments[2:]
    if arguments and not arguments[0].startswith("-"):
        return "script", arguments[0], arguments[1:]
    return None


def _become(about: dict[str, Any], files: list[int]) -> None:
    """A process as the client is one: its files by number, its environment and folder, signals as at the beginning."""
    for number in (signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    wanted = about["files"]
    aside = max([*files, *wanted]) + 1
    held = {
        number: os.dup2(file, aside + place) for place, (number, file) in enumerate(zip(wanted, files, strict=True))
    }
    os.closerange(0, aside)
    for number, file in held.items():
        os.dup2(file, number, inheritable=True)
    os.closerange(aside, aside + len(held))
    os.environ.clear()
    os.environ.update(about["environment"])
    os.chdir(about["folder"])
    unbuffered = "-u" in about["arguments"][:2] or bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = open(0, closefd=False) if 0 in held else None  # noqa: SIM115
    sys.stdout = _writer(1, unbuffered) if 1 in held else None
    sys.stderr = _writer(2, unbuffered, errors="backslashreplace") if 2 in held else None
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    sys.executable = about["executable"]
    if os.environ.get("PYTHONWARNINGS"):
        warnings._processoptions(os.environ["PYTHONWARNINGS"].split(","))
    random.seed()
    from multiprocessing import spawn

    import torch

    spawn.set_executable(sys.executable)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "0")) or len(os.sched_getaffinity(0)))


def _writer(file: int, unbuffered: bool, errors: str = "strict") -> Any:
    binary = open(file, "wb", 0 if unbuffered else -1, closefd=False)  # noqa: SIM115
    lines = os.isatty(file) or file == 2
    return io.TextIOWrapper(binary, errors=errors, line_buffering=lines, write_through=unbuffered)


def _run(kind: str, what: str, arguments: list[str]) -> None:
    """As Python does with its own arguments."""
    outside = [path for path in _ORIGINAL_PATH if path not in _FROM_ENVIRONMENT]
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    module = types.ModuleType("__main__")
    module.__builtins__ = __builtins__  # type: ignore[attr-defined]
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module  # two names, since multiprocessing was imported
    if kind == "script":
        sys.argv, first = [what, *arguments], os.path.dirname(os.path.abspath(what))
    else:
        sys.argv, first = [kind, *arguments], "" if kind == "-c" else os.getcwd()
    sys.path[:] = [first, *given, *outside]
    importlib.invalidate_caches()
    if kind == "-m":
        runpy._run_module_as_main(what)  # type: ignore[attr-defined]
        return
    if kind == "script":
        module.__file__ = what
        with open(what, "rb") as file:
            code = compile(file.read(), what, "exec")
    else:
        code = compile(what, "<string>", "exec")
    exec(code, module.__dict__)


def _without_own_frames(trace: types.TracebackType | None) -> types.TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    _FROM_ENVIRONMENT = [os.path.dirname(os.path.abspath(__file__)), *os.environ.get("PYTHONPATH", "").split(":")]
    _ORIGINAL_PATH = list(sys.path)
    _BEGAN_WITH = dict(os.environ)  # what is imported adds to it
    run = main(sys.argv[1])
    try:
        run()
    except SystemExit:
        raise
    except BaseException as error:
        sys.excepthook(type(error), error.with_traceback(trace := _without_own_frames(error.__traceback__)), trace)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        sys.exit(1)
