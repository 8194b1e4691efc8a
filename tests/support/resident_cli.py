"""The command line with its imports done: each command is a fork, in a tenth of the time.

``python -m support.resident_cli SOCKET`` listens there; the program that
:func:`write_program` makes hands it a command's arguments, folder and standard streams,
and ends with its exit status.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAM = """#!{python} -IS
import json, os, socket, sys
link = socket.socket(socket.AF_UNIX)
link.connect({path!r})
socket.send_fds(link, [json.dumps([os.getcwd(), sys.argv[1:]]).encode()], [0, 1, 2])
sys.exit(int(link.recv(16)))
"""
MAX_BYTES = 1 << 16
FAILED = 70
"""Exit status of a command that ended with an exception, which no verb does."""


def write_program(program: Path, path: Path) -> None:
    """Make an executable that is run by the resident at a socket."""
    program.write_text(PROGRAM.format(python=sys.executable, path=str(path)))
    program.chmod(0o755)


@contextmanager
def resident(path: Path) -> Iterator[Path]:
    """A resident that listens at a socket."""
    child = subprocess.Popen(
        [sys.executable, "-m", "support.resident_cli", str(path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        if child.stdout is None or child.stdout.readline() != "ready\n":
            raise RuntimeError("the resident command line did not start")
        yield path
    finally:
        child.kill()
        child.communicate()


def import_all() -> None:
    """What verbs import when they run."""
    for name in ("cli", "server", "connector", "manifest", "store"):
        package = importlib.import_module(f"lmcache_persist.{name}")
        for module in pkgutil.iter_modules(package.__path__):
            if module.name not in ("vllm", "pages", "__main__", "demo", "migrations"):
                importlib.import_module(f"{package.__name__}.{module.name}")


def _run(message: bytes, fds: list[int]) -> int:
    """One command in a child; its exit status."""
    child = os.fork()
    if child:
        for fd in fds:
            os.close(fd)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = FAILED
    try:
        from lmcache_persist.cli import main

        folder, arguments = json.loads(message)
        os.chdir(folder)
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
            os.close(fd)
        # Python's own know what the resident's streams could do.
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
        status = main(arguments)
        sys.stdout.flush()
    finally:
        if status == FAILED:
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(status)


def _serve(path: str) -> None:
    import_all()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while True:
            link, _ = listener.accept()
            with link:
                message, fds, _, _ = socket.recv_fds(link, MAX_BYTES, 3)
                link.sendall(str(_run(message, fds)).encode())


if __name__ == "__main__":
    _serve(sys.argv[1])
