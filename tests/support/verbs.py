"""A verb of the command line, run within the test's own process: quicker than a child."""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any

from lmcache_persist.cli import main


def in_process(*args: str) -> tuple[int, dict[str, Any]]:
    """Exit code and document of a verb with ``--json``."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main([*args, "--json"])
    return code, json.loads(out.getvalue())
