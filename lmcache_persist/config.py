"""Settings of the server: one table, one way to read each value, wherever it comes from.

Precedence: flags, then ``LMCACHE_PERSIST_*`` variables, then the ``--config`` file (YAML),
then defaults. Everything arrives as text, also from YAML, whose own ideas of numbers
(``010`` is 8, ``1:30`` is 90, ``no`` is false) are left out. An unknown name is refused
with the nearest valid one; nothing is silently passed over.
"""

from __future__ import annotations

import grp
import hashlib
import ipaddress
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from lmcache_persist import units
from lmcache_persist.config_sources import (
    CONFIG_NAME,
    Given,
    nearest,
    read_environment,
    read_file,
    read_flags,
    variable_of,
)
from lmcache_persist.datadir import DataDir
from lmcache_persist.endpoint import MAX_IPC_PATH_BYTES, parse_endpoint
from lmcache_persist.errors import ConfigError
from lmcache_persist.geometry import (
    DEFAULT_BASE_CHUNK_SIZE,
    DEFAULT_MAX_CHUNK_SIZE,
    MAX_TOKENS_PER_BLOCK,
)

MIN_CAPACITY_BYTES: Final = 16 << 20
"""Below this the pages held back for eviction leave no room for objects."""
DEFAULT_CAPACITY_BYTES: Final = 8 << 30
"""Of a new store; one that is there keeps its size."""
MIN_POOL_BYTES: Final = 1 << 20
MAX_SIZE_BYTES: Final = 1 << 46
"""64 TiB: what a process can map on x86-64, with room to spare."""
_KEPT: Final = "not set: the store keeps its size"
LOG_LEVELS: Final = ("debug", "info", "warning", "error")
LOG_FORMATS: Final = ("text", "json")
DURABILITIES: Final = ("sync", "relaxed")


def _integer(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = units.parse_integer(text)
        if not low <= value <= high:
            raise ConfigError(f"is {value}, expected {low} to {high}")
        return value

    return parse


def _chunk_size(text: str) -> int | None:
    if text == "auto":
        return None
    try:
        return _integer(1, MAX_TOKENS_PER_BLOCK)(text)
    except ConfigError as error:
        raise ConfigError(f"{error.message} or auto", hint=error.hint) from None


def _size(low: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = units.parse_size(text)
        if not low <= value <= MAX_SIZE_BYTES:
            raise ConfigError(
                f"is {units.format_size(value)}, expected {units.format_size(low)}"
                f" to {units.format_size(MAX_SIZE_BYTES)}"
            )
        return units.whole_pages(value)

    return parse


def _seconds(text: str) -> float:
    value = units.parse_duration_s(text)
    if value > 3600:
        raise ConfigError(f"is {value:g} s, expected 0 to 3600")
    return value


def _choice(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in words:
            expected = ", ".join(words[:-1]) + f" or {words[-1]}"
            raise ConfigError(f"is {text!r}, expected {expected}", hint=nearest(text, words))
        return text

    return parse


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ConfigError(f"is {text!r}, expected true or false")
    return text.lower() == "true"


def _path(text: str) -> Path:
    if "\0" in text:
        raise ConfigError("holds a NUL byte")
    path = Path(text)
    if text.startswith("~"):
        try:
            path = path.expanduser()
        except RuntimeError:
            raise ConfigError(f"is {text!r}, and that user has no home folder") from None
    if not path.is_absolute():
        raise ConfigError(
            f"is the relative path {text!r}, expected an absolute one",
            hint=f"from here it would be {os.path.abspath(path)}",
        )
    return Path(os.path.normpath(path))


def _group(text: str) -> str:
    try:
        if text.isascii() and text.isdigit():
            grp.getgrgid(int(text))
        else:
            grp.getgrnam(text)
    except (KeyError, OverflowError):
        raise ConfigError(f"is {text!r}, expected an existing group") from None
    return text


def _endpoint(text: str) -> str:
    return parse_endpoint(text, what="endpoint").url


def _host_and_port(text: str) -> str:
    host, colon, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    bracketed = host != bare
    if not colon or not bare or (":" in bare) != bracketed or "/" in text:
        raise ConfigError(
            f"is {text!r}, expected HOST:PORT",
            hint="for example 127.0.0.1:9090 or [::1]:9090",
        )
    if not (port.isascii() and port.isdigit() and int(port[:6]) <= 65535):
        raise ConfigError(f"is {text!r}, expected a port from 0 to 65535")
    return text


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: the name in the file, from which flag and variable follow.

    Attributes:
        name: the key in the file.
        field: the field of :class:`Settings`.
        parse: text to value; raises ConfigError whose message continues the subject.
        help: one line for people.
    """

    name: str
    field: str
    parse: Callable[[str], Any]
    help: str

    @property
    def flag(self) -> str:
        """On the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """In the environment."""
        return variable_of(self.name)


_CHUNK = _integer(1, MAX_TOKENS_PER_BLOCK)
SETTINGS: Final = (
    Setting("data_dir", "data_dir", _path, "folder of manifest and store; made if absent"),
    Setting("chunk_size", "chunk_size", _chunk_size, "auto, or the tokens of a chunk"),
    Setting("chunk_size_from", "chunk_size_from", _endpoint, "take a running server's"),
    Setting("base_chunk_size", "base_chunk_size", _CHUNK, "tokens wished for in auto mode"),
    Setting("max_chunk_size", "max_chunk_size", _CHUNK, "tokens; larger geometries are refused"),
    Setting("capacity", "capacity_bytes", _size(MIN_CAPACITY_BYTES), "size of the disk tier"),
    Setting("pool_size", "pool_size_bytes", _size(MIN_POOL_BYTES), "size of the memory tier"),
    Setting("pool_dir", "pool_dir", _path, "shared-memory folder of the pool"),
    Setting("listen", "listen", _endpoint, "endpoint, ipc:// or tcp://"),
    Setting("http", "http", _host_and_port, "HOST:PORT for metrics and health"),
    Setting("group", "group", _group, "group that may connect, beside the owner"),
    Setting("durability", "durability", _choice(*DURABILITIES), "sync, or relaxed (lossy)"),
    Setting("allow_network_fs", "allow_network_fs", _boolean, "accept a network data dir"),
    Setting("allow_remote", "allow_remote", _boolean, "listen beyond this machine"),
    Setting("pool_wait", "pool_wait_s", _seconds, "wait so long for pool memory at start"),
    Setting("shutdown_timeout", "shutdown_timeout_s", _seconds, "flush so long at the end"),
    Setting("log_level", "log_level", _choice(*LOG_LEVELS), "debug, info, warning or error"),
    Setting("log_format", "log_format", _choice(*LOG_FORMATS), "text, or json lines"),
)
"""Every setting."""

_CONFIG = Setting(CONFIG_NAME, "", _path, "YAML file with settings")
_BY_NAME = {setting.name: setting for setting in SETTINGS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a server runs with; make it with :meth:`load`, which checks.

    Attributes:
        data_dir: absolute.
        chunk_size: tokens, or None for auto.
        chunk_size_from: endpoint of the server whose size is taken, or None.
        base_chunk_size: tokens.
        max_chunk_size: tokens.
        capacity_bytes: of the disk tier's file, see :meth:`for_store`.
        pool_size_bytes: of the memory tier.
        pool_dir: where the pool's file lies.
        listen: endpoint URL, never empty.
        http: ``HOST:PORT`` or None for no HTTP.
        group: name or number, or None for the owner only.
        durability: ``sync`` or ``relaxed``.
        allow_network_fs: whether a network file system is accepted.
        allow_remote: whether ``listen`` and ``http`` may go beyond loopback.
        pool_wait_s: seconds.
        shutdown_timeout_s: seconds.
        log_level: one of :data:`LOG_LEVELS`.
        log_format: one of :data:`LOG_FORMATS`.
        sources: for each field that is no default, where it came from.
        overtaken_bytes: the capacity that was set, if a store that grew live has more; else 0.
    """

    data_dir: Path
    chunk_size: int | None = None
    chunk_size_from: str | None = None
    base_chunk_size: int = DEFAULT_BASE_CHUNK_SIZE
    max_chunk_size: int = DEFAULT_MAX_CHUNK_SIZE
    capacity_bytes: int = DEFAULT_CAPACITY_BYTES
    pool_size_bytes: int = 1 << 30
    pool_dir: Path = Path("/dev/shm")  # noqa: S108 - the place for POSIX shared memory
    listen: str = ""
    http: str | None = None
    group: str | None = None
    durability: str = "sync"
    allow_network_fs: bool = False
    allow_remote: bool = False
    pool_wait_s: float = 30.0
    shutdown_timeout_s: float = 10.0
    log_level: str = "info"
    log_format: str = "text"
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    overtaken_bytes: int = field(default=0, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.listen:
            object.__setattr__(self, "listen", _default_listen(self.data_dir))
        self._check_chunk_sizes()
        self._check_reach()

    @classmethod
    def load(
        cls,
        flags: Mapping[str, str | bool | None],
        *,
        env: Mapping[str, str] | None = None,
    ) -> Settings:
        """Settings from flags, environment and file.

        Args:
            flags: by setting name (``data_dir``, ..., and ``config`` for the file); text as
                it was typed, None for a flag that was not given. A relative ``data_dir`` or
                ``pool_dir`` is taken from the current folder here, and only here.
            env: the environment, ``os.environ`` by default.

        Raises:
            ConfigError: names the setting, where it came from, what was found and expected.
        """
        given: Given = {}
        names = list(_BY_NAME)
        variables = read_environment(os.environ if env is None else env, names)
        typed = read_flags(flags, names)
        file = typed.pop(CONFIG_NAME, variables.pop(CONFIG_NAME, None))
        if file is not None:
            given.update(read_file(_parse(_CONFIG, *file), names))
        given.update(variables)
        given.update(typed)
        if "data_dir" not in given:
            raise ConfigError(
                "data_dir is not set, expected a folder for the cache",
                hint="give --data-dir DIR, LMCACHE_PERSIST_DATA_DIR, or data_dir in --config FILE",
            )
        values = {
            _BY_NAME[name].field: _parse(_BY_NAME[name], *item) for name, item in given.items()
        }
        sources = {_BY_NAME[name].field: source for name, (_, source) in given.items()}
        return cls(**values, sources=sources)

    @property
    def capacity_is_set(self) -> bool:
        """Whether somebody said how large the store is to be."""
        return "capacity_bytes" in self.sources or self.capacity_bytes != DEFAULT_CAPACITY_BYTES

    @property
    def capacity_set_by(self) -> str | None:
        """Where somebody said how large the store is to be; None if nobody did."""
        source = self.sources.get("capacity_bytes", "code")
        return source if self.capacity_is_set and source != _KEPT else None

    @property
    def capacity_set_bytes(self) -> int | None:
        """What somebody set, though the store may have grown since; None if nobody did."""
        if self.capacity_set_by is None:
            return None
        return self.overtaken_bytes or self.capacity_bytes

    def for_grown_store(self, store_bytes: int) -> Settings:
        """With the capacity of a store that grew beyond the one that is set."""
        return replace(self, capacity_bytes=store_bytes, overtaken_bytes=self.capacity_bytes)

    def for_store(self, store_bytes: int) -> Settings:
        """With the capacity that holds: the one that is set, else the size of the store.

        Args:
            store_bytes: capacity of the store that is there, 0 if there is none.
        """
        if self.capacity_is_set or not store_bytes:
            return self
        sources = {**self.sources, "capacity_bytes": _KEPT}
        return replace(self, capacity_bytes=store_bytes, sources=sources)

    @property
    def group_id(self) -> int | None:
        """The numeric id of ``group``; ``ConfigError`` if it vanished since."""
        if self.group is None:
            return None
        _group(self.group)
        return int(self.group) if self.group.isdigit() else grp.getgrnam(self.group).gr_gid

    def warnings(self) -> list[str]:
        """Sentences for the operator about settings that are allowed and unwise."""
        found = [
            f"{where} reaches beyond this machine and nobody is asked who he is:"
            f" whoever can connect can {_REACH[where.partition(' ')[0]]}"
            for where in _beyond_loopback(self)
        ]
        if self.durability == "relaxed":
            found.append(
                "durability is relaxed: after a power loss the store may be lost as a whole"
            )
        return found

    def effective(self) -> dict[str, str]:
        """Every setting by name as text that :meth:`load` reads back; unset ones as ``""``."""
        return {setting.name: _text(setting, getattr(self, setting.field)) for setting in SETTINGS}

    def describe(self) -> list[str]:
        """Lines ``name = value (source)``, for printing once at start.

        Without a capacity that nobody set: what it is only the store can tell.
        """
        return [
            f"{setting.name} = {text or '-'} ({self._source(setting)})"
            for setting, text in zip(SETTINGS, self.effective().values(), strict=True)
            if setting.name != "capacity" or self.capacity_is_set
        ]

    def where(self, name: str) -> str:
        """The setting with what set it, as errors name it: ``chunk_size (--chunk-size)``."""
        return f"{name} ({self._source(_BY_NAME[name])})"

    def _source(self, setting: Setting) -> str:
        if setting.name == "capacity" and not self.capacity_is_set:
            return "default of a new store"
        return self.sources.get(setting.field, "default")

    def _check_chunk_sizes(self) -> None:
        if self.chunk_size_from is not None and self.chunk_size is not None:
            raise ConfigError(
                f"chunk_size is {self.chunk_size} and chunk_size_from is {self.chunk_size_from},"
                " expected one of them",
                hint="leave out the one that is not meant",
            )
        if self.chunk_size_from == self.listen:
            raise ConfigError(
                f"chunk_size_from is {self.listen}, this server's own endpoint, expected another",
                hint="give the endpoint of the server that is to decide",
            )
        for name, value in (
            ("base_chunk_size", self.base_chunk_size),
            ("chunk_size", self.chunk_size),
        ):
            if value is not None and value > self.max_chunk_size:
                raise ConfigError(
                    f"{name} is {value}, expected at most max_chunk_size, {self.max_chunk_size}",
                    hint="lower it, or raise --max-chunk-size",
                )

    def _check_reach(self) -> None:
        beyond = _beyond_loopback(self)
        if beyond and not self.allow_remote:
            http_alone = beyond[0].startswith("http ")
            expected = "a loopback address" if http_alone else "ipc:// or a loopback address"
            way_out = "127.0.0.1:PORT" if http_alone else "ipc:// or 127.0.0.1"
            raise ConfigError(
                f"{' and '.join(beyond)} reaches beyond this machine, expected {expected}",
                hint=f"use {way_out}; --allow-remote opens it to the network",
            )


_REACH = {"listen": "read and fill the cache", "http": "read metrics and health"}
"""What an open setting gives away."""


def _beyond_loopback(settings: Settings) -> list[str]:
    found = []
    host = parse_endpoint(settings.listen).host
    if host and not _is_loopback(host):
        found.append(f"listen {settings.listen}")
    if settings.http is not None and not _is_loopback(settings.http.rpartition(":")[0]):
        found.append(f"http {settings.http}")
    return found


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        # Names are not resolved here: what one means may change after this check.
        return host == "localhost"


def _default_listen(data_dir: Path) -> str:
    path = os.fsencode(DataDir(data_dir).socket)
    if len(path) <= MAX_IPC_PATH_BYTES:
        return parse_endpoint(DataDir(data_dir).endpoint, what="the default endpoint").url
    short = hashlib.sha256(os.fsencode(data_dir)).hexdigest()[:12]
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    folder = runtime if runtime.startswith("/") and len(runtime) < 60 else "/tmp"  # noqa: S108
    raise ConfigError(
        f"the default endpoint in {data_dir} has a path of {len(path)} bytes, expected at most"
        f" {MAX_IPC_PATH_BYTES}, the limit of the system",
        hint=f"--listen ipc://{folder}/lmcache-persist-{short}.sock",
    )


def _text(setting: Setting, value: object) -> str:
    if setting.name == "chunk_size" and value is None:
        return "auto"
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if setting.name in ("capacity", "pool_size") and isinstance(value, int):
        return units.format_size(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _parse(setting: Setting, text: str, source: str) -> Any:
    if not text:
        raise ConfigError(
            f"{setting.name} ({source}) is empty, expected a value",
            hint="give a folder: it has no default"
            if setting.name == "data_dir"
            else "leave it out to get the default",
            setting=setting.name,
        )
    try:
        return setting.parse(text)
    except ConfigError as error:
        raise ConfigError(
            f"{setting.name} ({source}) {error.message}", hint=error.hint, setting=setting.name
        ) from None
