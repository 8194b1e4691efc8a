"""The snapshot of a session that callers make messages from, and what is remembered."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypedDict

from lmcache_persist.binding import Binding
from lmcache_persist.connector.results import Registration
from lmcache_persist.errors import PersistError
from lmcache_persist.geometry import Group
from lmcache_persist.identity import canonical_json
from lmcache_persist.protocol import Bind, GroupSpec, PoolInfo, Register


class Header(TypedDict):
    """What every request carries."""

    boot: str
    session: str
    binding: str


@dataclass(frozen=True, slots=True)
class Link:
    """A session that is up.

    Attributes:
        boot: the server's boot id.
        session: the session's token.
        version: the server's, for people.
        pool: where its pool is, None if it has none for this kind of client.
        binding: the server's, None while it is unbound.
        cold: the refusal of what is remembered, else None.
        generation: counts connections.
    """

    boot: str
    session: str
    version: str = ""
    pool: PoolInfo | None = None
    binding: Binding | None = None
    cold: PersistError | None = None
    generation: int = 0

    def header(self) -> Header:
        """The fields that every request carries."""
        return {
            "boot": self.boot,
            "session": self.session,
            "binding": self.binding.binding_id if self.binding else "",
        }

    @property
    def pool_bytes(self) -> int:
        """Size of the pool, 0 without one."""
        return self.pool.size_bytes if self.pool else 0


@dataclass(frozen=True, slots=True)
class BindWish:
    """What is bound again after every connection."""

    groups: tuple[Group, ...]
    base: int | None
    who: str

    def message(self, link: Link, *, dry_run: bool = False) -> Bind:
        """As a message of that session."""
        return Bind(
            **link.header(),
            groups=[GroupSpec.of(group) for group in self.groups],
            base=self.base,
            dry_run=dry_run,
            who=self.who,
        )


@dataclass(frozen=True, slots=True)
class RegisterWish:
    """What is registered again after every connection.

    Raises:
        IdentityUnknown: identity or layout has no canonical form.
    """

    registration: Registration
    identity: bytes = field(init=False)
    layout: bytes = field(init=False)

    def __post_init__(self) -> None:
        for name in ("identity", "layout"):
            text = canonical_json(getattr(self.registration, name))
            object.__setattr__(self, name, text.encode("ascii"))

    @property
    def key(self) -> tuple[str, int]:
        """One registration per engine and rank."""
        return self.registration.engine, self.registration.rank

    def message(self, link: Link) -> Register:
        """As a message of that session."""
        it = self.registration
        return Register(
            **link.header(),
            engine=it.engine,
            rank=it.rank,
            world_size=it.world_size,
            identity=self.identity,
            layout=self.layout,
            groups=[GroupSpec.of(group) for group in it.groups],
            object_bytes=list(it.object_bytes),
        )
