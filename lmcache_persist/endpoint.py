"""Endpoints: where a server listens and a client connects. Pure.

Two forms exist: ``tcp://HOST:PORT`` (an IPv6 address in brackets) and ``ipc:///ABSOLUTE/PATH``.
``HOST:PORT`` alone is taken for TCP; everything else is refused with what to write instead.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from lmcache_persist.errors import ConfigError

MAX_IPC_PATH_BYTES = 107
"""Bytes of a socket's path. Source: ``sun_path`` in <linux/un.h>, 108 with its last zero."""

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)://(.*)$", re.DOTALL)
_HOST = re.compile(r"^(\*|[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252}))$")
_EXAMPLES = "write tcp://HOST:PORT, tcp://[::1]:PORT or ipc:///ABSOLUTE/PATH"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A checked endpoint.

    Attributes:
        url: the one spelling that is used from here on.
        path: of an ipc endpoint, else empty.
        host: of a tcp endpoint, without brackets, else empty.
        port: of a tcp endpoint, else 0. A server may ask for 0 and gets a free one.
    """

    url: str
    path: str = ""
    host: str = ""
    port: int = 0

    @property
    def ipv6(self) -> bool:
        """Whether the host is an IPv6 address."""
        return ":" in self.host

    def __str__(self) -> str:
        return self.url


def parse_endpoint(text: str, *, what: str = "endpoint") -> Endpoint:
    """Check an endpoint and give it its one spelling.

    Args:
        text: as a person wrote it.
        what: the setting's name, for the error.

    Raises:
        ConfigError: it is no endpoint; the hint says what to write.
    """
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"{what} is empty, expected an address", hint=_EXAMPLES)
    text = text.strip()
    if any(ord(char) < 32 or ord(char) == 127 for char in text):
        raise ConfigError(f"{what} {text!r} has control characters", hint=_EXAMPLES)
    match = _SCHEME.match(text)
    if match is None:
        if text.startswith("/"):
            raise ConfigError(f"{what} {text!r} has no scheme", hint=f"write ipc://{text}")
        return _tcp(text, text, what)
    scheme, rest = match[1].lower(), match[2]
    if scheme == "tcp":
        return _tcp(rest, text, what)
    if scheme == "ipc":
        return _ipc(rest, text, what)
    raise ConfigError(f"{what} {text!r} has scheme {scheme!r}, expected tcp or ipc", hint=_EXAMPLES)


def _ipc(path: str, text: str, what: str) -> Endpoint:
    if not path.startswith("/"):
        raise ConfigError(
            f"{what} {text!r} has no absolute path",
            hint=f"three slashes in a row: ipc:///{path.lstrip('@') or 'ABSOLUTE/PATH'}",
        )
    if path.endswith("/"):
        raise ConfigError(f"{what} {text!r} names a folder, expected a socket's path")
    nbytes = len(path.encode("utf-8", "surrogateescape"))
    if nbytes > MAX_IPC_PATH_BYTES:
        raise ConfigError(
            f"{what} {text!r} has a path of {nbytes} bytes, expected at most {MAX_IPC_PATH_BYTES}",
            hint="a shorter path, such as --listen ipc:///tmp/lmcache-persist.sock"
            " at the server and the same address at its clients",
            path_bytes=nbytes,
        )
    return Endpoint(f"ipc://{path}", path=path)


def _tcp(rest: str, text: str, what: str) -> Endpoint:
    if rest.startswith("["):
        host, closed, tail = rest[1:].partition("]")
        if not closed or (tail and not tail.startswith(":")):
            raise ConfigError(f"{what} {text!r} has an unclosed bracket", hint=_EXAMPLES)
        port = tail[1:]
    elif rest.count(":") > 1:
        raise ConfigError(
            f"{what} {text!r} has more than one colon",
            hint="an IPv6 address goes into brackets: tcp://[::1]:PORT",
        )
    else:
        host, _, port = rest.partition(":")
    _check_host(host, rest.startswith("["), text, what)
    if not port:
        shown = f"[{host}]" if rest.startswith("[") else host
        socket = "" if text.startswith("tcp:") else ", or ipc:///ABSOLUTE/PATH for a socket's file"
        raise ConfigError(f"{what} {text!r} has no port", hint=f"write tcp://{shown}:PORT{socket}")
    if not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ConfigError(f"{what} {text!r} has port {port!r}, expected 0 to 65535")
    shown = f"[{host}]" if ":" in host else host
    return Endpoint(f"tcp://{shown}:{int(port)}", host=host, port=int(port))


def _check_host(host: str, bracketed: bool, text: str, what: str) -> None:
    if not bracketed:
        if not _HOST.match(host):
            raise ConfigError(f"{what} {text!r} has host {host!r}, expected a name", hint=_EXAMPLES)
        return
    try:
        ipaddress.IPv6Address(host)
    except ValueError as error:
        raise ConfigError(
            f"{what} {text!r} has {host!r} in brackets, expected an IPv6 address", hint=_EXAMPLES
        ) from error
