"""What a failed test leaves behind: its files, its seed, its log."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ENV = "RESULTS_DIR"

SOAKING = bool(os.environ.get("SOAK"))
"""Whether the long forms are wanted: ``make soak``."""


def results_dir() -> Path:
    """Where failed tests leave their files; a folder of the system's by default."""
    return Path(os.environ.get(ENV) or Path(tempfile.gettempdir()) / "lmcache-persist-results")


@contextmanager
def kept_on_failure(folder: Path, name: str) -> Iterator[None]:
    """Copy ``folder`` to ``RESULTS_DIR/name`` if the body fails, and say so."""
    try:
        yield
    except BaseException as error:
        target = results_dir() / name
        shutil.rmtree(target, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            ["cp", "-r", "--sparse=always", str(folder), str(target)],
            capture_output=True,
            check=False,
            timeout=120,
        )
        error.add_note(f"files are kept in {target}")
        raise
