"""What a client of a server can be told: times and bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from lmcache_persist.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Settings of a :class:`~lmcache_persist.connector.client.CacheClient`.

    Attributes:
        connect_timeout_s: how long an engine's start waits for the server.
        request_timeout_s: for one request; after it the server counts as gone.
        lookup_timeout_s: for a lookup to be decided, polls and disk reads included.
        heartbeat_s: between two pings, from the connection on.
        reconnect_min_s: before the second try to connect; doubles up to ``reconnect_max_s``.
        reconnect_max_s: before any further try.
        pool_idle_s: a dead server's pool is let go this long after the last load from it.
        max_in_flight: requests without an answer; beyond it they fail at once.
        touch_pool: fault the whole pool in when it is attached (first touch costs 6x).

    Raises:
        ConfigError: a time or a bound is not positive.
    """

    connect_timeout_s: float = 30.0
    request_timeout_s: float = 1.0
    lookup_timeout_s: float = 5.0
    heartbeat_s: float = 1.0
    reconnect_min_s: float = 0.05
    reconnect_max_s: float = 0.5
    pool_idle_s: float = 5.0
    max_in_flight: int = 4096
    touch_pool: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "touch_pool":
                continue
            if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
                raise ConfigError(f"{field.name} is {value!r}, expected a positive number")
