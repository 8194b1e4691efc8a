"""A cache server that keeps an LLM engine's KV cache on disk, across every restart."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmcache_persist.server.offline import check

__version__ = "0.1.0"

__all__ = ["__version__", "check"]


def __getattr__(name: str) -> object:
    # Lazily, so that importing the package costs nothing.
    if name == "check":
        from lmcache_persist.server.offline import check

        return check
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
