"""The server's log: one line per event, on stderr, as text or as JSON.

Whatever a message holds (names of models and clients come from outside), a line stays a
line: control characters are written as escapes. Tokens and contents are never logged; chunk
keys are digests. How often one kind of event may be said is up to
:class:`~lmcache_persist.store.throttle.Throttle`.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import TextIO

from lmcache_persist.printable import plain


def configure(level: str, form: str, stream: TextIO | None = None) -> None:
    """Send the log to ``stream`` (stderr by default), replacing what was set up before.

    Args:
        level: one of :data:`lmcache_persist.config.LOG_LEVELS`.
        form: one of :data:`lmcache_persist.config.LOG_FORMATS`.
        stream: where to.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("alembic").setLevel(logging.WARNING)


def _utc(record: logging.LogRecord) -> str:
    at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{at}.{int(record.msecs):03d}Z"


class TextLines(logging.Formatter):
    """``2026-01-31T10:00:00.123Z WARNING lmcache_persist.server.loop: message``."""

    def format(self, record: logging.LogRecord) -> str:
        """The record's line; a defect's traceback follows it on lines of its own."""
        line = f"{_utc(record)} {record.levelname} {record.name}: {plain(record.getMessage())}"
        if record.exc_info:
            trace = self.formatException(record.exc_info)
            line += "".join(f"\n  {plain(part)}" for part in trace.splitlines())
        return line


class JsonLines(logging.Formatter):
    """One JSON object per line: ``at``, ``level``, ``logger``, ``message``, ``traceback``."""

    def format(self, record: logging.LogRecord) -> str:
        """The record's line; ``traceback`` is there for a defect only."""
        fields = {
            "at": _utc(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": plain(record.getMessage()),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields)
