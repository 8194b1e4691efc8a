"""Ctrl-C at any moment: the documented exit status, and no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = "import sys; from lmcache_persist.cli import main; sys.exit(main())"
"""What an installed program does."""

SENDER = """
import atexit, os, signal, sys

AT = os.environ["INTERRUPT_AT"]

def interrupt():
    with open(os.environ["INTERRUPT_NOTE"], "w") as note:
        note.write("sent")
    os.kill(os.getpid(), signal.SIGINT)

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == AT and self in sys.meta_path:
            sys.meta_path.remove(self)
            interrupt()

if AT == "the end":
    atexit.register(interrupt)
else:
    sys.meta_path.insert(0, Finder())
"""
"""A sitecustomize: the process interrupts itself when it imports a certain module."""

MOMENTS = {
    "lmcache_persist.cli.app": "inspect",
    "typer": "version",
    "lmcache_persist.server.offline": "inspect",
    "zmq": "flush",
    "lmcache_persist.server.app": "serve",
    "the end": "inspect",
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_interrupt_is_no_traceback(moment: str, root: Path) -> None:
    """In the program's own imports, in a verb's, and when the interpreter ends."""
    (root / "sitecustomize.py").write_text(SENDER)
    data_dir, note, verb = str(root / "d"), root / "note", MOMENTS[moment]
    words = {
        "serve": ["--data-dir", data_dir],
        "flush": ["--server", f"ipc://{root}/none.sock"],
        "version": [],
    }.get(verb, [data_dir])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, verb, *words],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(root), *filter(None, sys.path)]),
            "INTERRUPT_AT": moment,
            "INTERRUPT_NOTE": str(note),
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert note.exists(), f"{moment} is never imported: {done.stderr}"
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    assert "Interrupt" not in done.stderr
