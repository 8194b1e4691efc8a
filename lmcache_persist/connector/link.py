"""The snapshot of a session that callers make messages from, and what is remembered."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Self, TypedDict

from lmcache_persist.binding import Binding
from lmcache_persist.connector.results import Registration
from lmcache_persist.errors import PersistError, UnexpectedChunkSize
from lmcache_persist.geometry import Group
from lmcache_persist.identity import canonical_json
from lmcache_persist.protocol import Bind, GroupSpec, PoolInfo, Register

WishKey = tuple[str, int] | None
"""What is remembered: the bind (None), or the registration of an engine's rank."""


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
        refusals: of what is remembered, each until the server agrees to it.
        generation: counts connections.
    """

    boot: str
    session: str
    version: str = ""
    pool: PoolInfo | None = None
    binding: Binding | None = None
    refusals: tuple[tuple[WishKey, PersistError], ...] = ()
    generation: int = 0

    @property
    def cold(self) -> PersistError | None:
        """Why lookups and stores are not served: the bind's refusal, else the first one."""
        return self.refusal(None) or next((error for _, error in self.refusals), None)

    def refusal(self, key: WishKey) -> PersistError | None:
        """The refusal of one wish, None if there is none."""
        return next((error for known, error in self.refusals if known == key), None)

    def refused(self, key: WishKey, error: PersistError) -> Self:
        """The link after the server refused one wish."""
        return replace(self, refusals=(*self.agreed(key).refusals, (key, error)))

    def agreed(self, key: WishKey) -> Self:
        """The link after the server agreed to one wish."""
        return replace(self, refusals=tuple(one for one in self.refusals if one[0] != key))

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
    """What is bound again after every connection.

    Attributes:
        groups: the geometry.
        base: tokens, None for the server's.
        who: for the binding's winner.
        server: its endpoint, for people.
        expect: the only chunk size that is agreed to, tokens; None for any.
    """

    groups: tuple[Group, ...]
    base: int | None
    who: str
    server: str = ""
    expect: int | None = None

    key: ClassVar[WishKey] = None

    def check(self, chunk_size: int) -> None:
        """Refuse a server of another chunk size than the expected one.

        Raises:
            UnexpectedChunkSize: names both.
        """
        if self.expect is not None and chunk_size != self.expect:
            raise UnexpectedChunkSize(
                f"server {self.server} has a chunk size of {chunk_size}, expected {self.expect}",
                hint="connect to the server that is meant, or change the expectation"
                " (persist.expect_chunk_size)",
                chunk_size=chunk_size,
                expected=self.expect,
            )

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
