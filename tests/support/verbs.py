"""A verb of the command line, run within the test's own process: quicker than a child."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from typing import Any

from lmcache_persist.cli import main


def in_process(*args: str) -> tuple[int, dict[str, Any]]:
    """Exit code and document of a verb with ``--json``."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main([*args, "--json"])
    return code, json.loads(out.getvalue())


def quiet(*args: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a verb; nothing is at its stdin."""
    out, err = io.StringIO(), io.StringIO()
    before, sys.stdin = sys.stdin, io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(list(args))
    finally:
        sys.stdin = before
    return code, out.getvalue(), err.getvalue()
