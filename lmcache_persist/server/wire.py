"""Turning our values and errors into messages."""

from __future__ import annotations

import json
from collections.abc import Callable

from lmcache_persist import protocol
from lmcache_persist.binding import Binding
from lmcache_persist.errors import PersistError

Answer = Callable[["protocol.Reply | PersistError"], None]
"""How a handler answers, at once or later; a second answer to one request is ignored."""


def binding_bytes(binding: Binding | None) -> bytes:
    """A binding as messages carry it; empty for none."""
    return json.dumps(binding.to_json()).encode() if binding else b""


MAX_ERROR_CHARS = 4000


def sendable(text: str, limit: int = MAX_ERROR_CHARS) -> str:
    """Text as it can be sent and kept: no lone surrogates (JSON may bring them), not endless."""
    short = text if len(text) <= limit else f"{text[:limit]}..."
    return short.encode("utf-8", "backslashreplace").decode()


def error_reply(error: PersistError) -> protocol.ErrorReply:
    """A refusal as a message."""
    return protocol.ErrorReply(
        code=error.code,
        message=sendable(error.message),
        hint=sendable(error.hint or ""),
        fields=json.dumps(error.fields, default=str).encode(),
    )
