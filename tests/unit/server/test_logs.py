"""Text from outside cannot pass for ours."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from lmcache_persist.printable import plain
from lmcache_persist.server.logs import JsonLines, TextLines, configure

FORGED = "org/model\n2026-01-01 00:00:00 CRITICAL lmcache_persist: pay\x1b[2J\x07\u202e\u2028\x85"


def logged(
    message: str,
    *args: object,
    failed: Exception | None = None,
    form: type[logging.Formatter] = TextLines,
) -> str:
    """What a log of ours shows."""
    info = (type(failed), failed, None) if failed else None
    record = logging.LogRecord(
        "lmcache_persist.test", logging.ERROR, __file__, 1, message, args, info
    )
    return form().format(record)


def test_nothing_that_steers_a_terminal_is_left() -> None:
    """Line breaks of all kinds, escapes, bells and direction marks are written out."""
    shown = plain(FORGED)
    assert shown.isprintable()
    assert shown.splitlines() == [shown]
    assert "\\n2026" in shown
    assert plain("org/modèle 模型") == "org/modèle 模型"


def test_a_log_line_is_one_line() -> None:
    """A name with line breaks does not make a second one."""
    shown = logged("engine %s registered", FORGED)
    assert " ERROR lmcache_persist.test: engine org/model\\n2026" in shown
    assert shown.isprintable()
    shown = logged("engine %s registered", FORGED, failed=ValueError(FORGED), form=JsonLines)
    assert shown.isprintable()
    assert json.loads(shown)["message"].isprintable()


def test_no_line_of_a_traceback_passes_for_one_of_the_log() -> None:
    """What an exception quotes is indented and escaped."""
    lines = logged("defect", failed=ValueError(FORGED)).splitlines()
    assert lines[0].endswith(" ERROR lmcache_persist.test: defect")
    assert len(lines) > 1
    assert all(line.startswith("  ") and line.isprintable() for line in lines[1:])


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    """The root logger, which is as it was afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield root
    root.handlers[:], root.level = handlers, level


@pytest.mark.usefixtures("root_logger")
def test_a_server_logs_from_its_level_on_in_its_form() -> None:
    """Text has UTC to the millisecond; JSON the documented keys; what is below is not there."""
    shown = {}
    for form in ("text", "json"):
        stream = io.StringIO()
        configure("warning", form, stream)
        logging.getLogger("lmcache_persist.test").info("not wanted")
        logging.getLogger("lmcache_persist.test").warning("engine %s", FORGED)
        (shown[form],) = stream.getvalue().splitlines()
    at = shown["text"].split(" ")[0]
    assert (len(at), at[-1]) == (len("2026-01-31T10:00:00.123Z"), "Z")
    event = json.loads(shown["json"])
    assert set(event) == {"at", "level", "logger", "message"}
    assert (event["level"], event["logger"]) == ("warning", "lmcache_persist.test")
