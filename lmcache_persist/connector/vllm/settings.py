"""The connector's settings: ``persist.*`` in ``kv_connector_extra_config``.

Names are a contract; an unknown one is refused with the nearest valid name.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lmcache_persist.errors import ConfigError, GeometryError
from lmcache_persist.geometry import check_base_chunk_size

PREFIX = "persist."

MAX_TIMEOUT_S = 3600.0
"""Seconds; a longer one is taken for a mistake."""


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """What an engine's operator may say, in the units of the names.

    Attributes:
        server: endpoint of the server, ``ipc://DIR/server.sock`` or ``tcp://HOST:PORT``.
        base_chunk_size: tokens, wished for if this engine is the first; None: the server's.
        expect_chunk_size: tokens; another bound size is refused. None: any.
        required: False runs without a cache, and keeps trying, where True would not start.
        connect_timeout: seconds to wait for the server at start.
        request_timeout: seconds until one request to the server counts as lost.
        lookup_timeout: seconds until an undecided lookup counts as a miss.
        cache_decode: whether chunks that hold sampled tokens are stored too. Off, since
            sampled output seldom comes back, and would fill the disk.
    """

    server: str
    base_chunk_size: int | None = None
    expect_chunk_size: int | None = None
    required: bool = True
    connect_timeout: float = 30.0
    request_timeout: float = 1.0
    lookup_timeout: float = 5.0
    cache_decode: bool = False

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, Any]) -> ConnectorSettings:
        """Read ``kv_connector_extra_config``.

        Raises:
            ConfigError: a name is unknown, a value has another type or is out of range,
                or ``persist.server`` is absent.
        """
        names = {PREFIX + field.name: field.name for field in fields(cls)}
        values: dict[str, Any] = {}
        for key, value in extra.items():
            if key not in names:
                raise _unknown(key, list(names))
            values[names[key]] = _check(key, names[key], value)
        if not values.get("server"):
            raise ConfigError(
                "setting persist.server is absent, expected the endpoint of a server",
                hint="lmcache-persist serve --data-dir DIR prints it: ready URL",
            )
        return cls(**values)


def _unknown(key: str, names: list[str]) -> ConfigError:
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.0)
    return ConfigError(
        f"setting {key!r} is unknown, expected one of {', '.join(sorted(names))}",
        hint=f"did you mean {near[0]!r}?" if near else None,
    )


def _check(key: str, name: str, value: Any) -> Any:
    if name == "server":
        if not isinstance(value, str):
            raise ConfigError(f"setting {key} is {value!r}, expected a text")
        return value
    if name in ("required", "cache_decode"):
        if not isinstance(value, bool):
            raise ConfigError(f"setting {key} is {value!r}, expected true or false")
        return value
    if name in ("base_chunk_size", "expect_chunk_size"):
        if value is None:
            return None
        try:
            return check_base_chunk_size(value)
        except GeometryError as error:
            raise ConfigError(f"setting {key} is {value!r}, expected a positive integer") from error
    return _check_seconds(key, value)


def _check_seconds(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"setting {key} is {value!r}, expected a number of seconds")
    if not 0 < value <= MAX_TIMEOUT_S:
        raise ConfigError(
            f"setting {key} is {value!r}, expected seconds above 0 up to {MAX_TIMEOUT_S:.0f}"
        )
    return float(value)
