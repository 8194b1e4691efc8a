"""Puts the parts of one server together; who opened them closes them."""

from __future__ import annotations

from typing import NamedTuple

from lmcache_persist.config import Settings
from lmcache_persist.manifest import Manifest
from lmcache_persist.server.loop import Loop
from lmcache_persist.server.mailbox import Mailbox
from lmcache_persist.server.own_files import OwnFiles
from lmcache_persist.server.service import Service
from lmcache_persist.server.state import ServerState, utc_now
from lmcache_persist.store.base import DiskTier
from lmcache_persist.store.memory import MemoryTier
from lmcache_persist.store.pool import Pool
from lmcache_persist.store.sequence import CommitSequence
from lmcache_persist.store.writer import Outcome, Writer


class Assembly(NamedTuple):
    """A server that does not listen yet; its writer thread runs."""

    state: ServerState
    service: Service
    loop: Loop


def assemble(
    settings: Settings,
    boot_id: str,
    manifest: Manifest,
    disk: DiskTier,
    pool: Pool,
    files: OwnFiles,
    *,
    started_at: str = "",
) -> Assembly:
    """A server over what is open already.

    Args:
        settings: its settings.
        boot_id: 32 hex digits that no other start has.
        manifest: open.
        disk: open; nobody else writes to it from now on.
        pool: made for it.
        files: that have to stay in their place.
        started_at: UTC, ISO 8601; now if empty.
    """
    sequence, mailbox = CommitSequence(), Mailbox()
    service: Service

    def deliver(outcome: Outcome) -> None:
        mailbox.post(lambda: service.written(outcome))

    state = ServerState(
        settings=settings,
        boot_id=boot_id,
        manifest=manifest,
        disk=disk,
        pool=pool,
        memory=MemoryTier(pool, sequence),
        sequence=sequence,
        mailbox=mailbox,
        writer=Writer(disk, deliver, files.look),
        files=files,
        binding=None,
        endpoint=settings.listen,
        started_at=started_at or utc_now(),
    )
    service = Service(state)
    return Assembly(state, service, Loop(state, service.handle))
