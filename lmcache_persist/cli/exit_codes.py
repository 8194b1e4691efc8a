"""Exit codes of every verb. docs/cli.md lists them for people."""

from __future__ import annotations

from enum import IntEnum

from lmcache_persist.cli import interrupt
from lmcache_persist.errors import (
    BindingError,
    ConfigError,
    GeometryError,
    ObjectCorrupt,
    PersistError,
    RegistrationError,
    StartupRefused,
    TransportError,
)


class ExitCode(IntEnum):
    """What an exit status says. The numbers are a contract."""

    OK = 0
    """Done."""
    BAD_DATA = 1
    """``verify`` found something bad, or ``bench`` loaded other bytes than it stored."""
    REFUSED_INPUT = 2
    """A flag, setting, geometry or usage is refused."""
    REFUSED_BIND = 3
    """The server refused the geometry, the binding or the registration."""
    NO_SERVER = 4
    """Nobody answers, or not in time."""
    DATA_DIR = 5
    """The data dir cannot be used or read as it is, or somebody else holds it."""
    FAILED = 6
    """Something broke while the verb ran: disk, manifest, protocol, output."""
    INTERRUPTED = interrupt.INTERRUPTED
    """Ctrl-C."""
    BROKEN_PIPE = 141
    """The reader of stdout went away; what the verb found is not told by this."""


_BY_CLASS: tuple[tuple[type[PersistError], ExitCode], ...] = (
    (ConfigError, ExitCode.REFUSED_INPUT),
    (GeometryError, ExitCode.REFUSED_INPUT),
    (BindingError, ExitCode.REFUSED_BIND),
    (RegistrationError, ExitCode.REFUSED_BIND),
    (TransportError, ExitCode.NO_SERVER),
    (StartupRefused, ExitCode.DATA_DIR),
    (ObjectCorrupt, ExitCode.BAD_DATA),
)


def exit_code_of(error: PersistError) -> ExitCode:
    """The exit code for an error that ends a verb."""
    for cls, code in _BY_CLASS:
        if isinstance(error, cls):
            return code
    return ExitCode.FAILED
