"""What each message does: checks the session, hands it to the part that owns the duty."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from lmcache_persist import protocol
from lmcache_persist.errors import PersistError, StoreIOError
from lmcache_persist.manifest import SCHEMA_VERSION, ManifestSnapshot
from lmcache_persist.server.binder import Binder
from lmcache_persist.server.converge import Converger
from lmcache_persist.server.health import Probe, Problem, liveness, readiness
from lmcache_persist.server.listing import objects_page
from lmcache_persist.server.live_backup import LiveBackup
from lmcache_persist.server.live_check import LiveCheck
from lmcache_persist.server.live_grow import LiveGrow
from lmcache_persist.server.live_prune import LivePrune
from lmcache_persist.server.lookups import Lookups
from lmcache_persist.server.refusals import Refusals
from lmcache_persist.server.registration import Registry
from lmcache_persist.server.report import Seen, fit, inspect_document, matching
from lmcache_persist.server.sessions import Session, Sessions
from lmcache_persist.server.state import ServerState
from lmcache_persist.server.stats import StatsReport
from lmcache_persist.server.stores import Stores
from lmcache_persist.server.wire import Answer
from lmcache_persist.store.survey import survey
from lmcache_persist.store.unsynced import kernel_boot_id
from lmcache_persist.store.writer import Outcome

if TYPE_CHECKING:
    from lmcache_persist.server.upstream import Upstream

log = logging.getLogger(__name__)

MAX_NAME_CHARS = 200
"""Of a model's name beside each object of a page."""
MAX_DOCUMENT_BYTES = protocol.MAX_MESSAGE_BYTES - (64 << 10)
TICK_S = 0.5
"""Seconds between looks at client locks and at what rests."""

# Messages that make no sense under another binding than the client believes in. Bind is
# not among them: it is how a client learns of one.
_BOUND = (
    protocol.Register,
    protocol.Lookup,
    protocol.Reserve,
    protocol.Commit,
)


class Service:
    """All verbs of a server.

    Threads: the loop.
    """

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self.sessions = Sessions(state, self._session_ended)
        refusals = Refusals(state)
        self._binder = Binder(state, refusals)
        self.registry = Registry(state, refusals, self.sessions)
        self.lookups = Lookups(state, self.registry, self.sessions)
        self._stores = Stores(state, self.registry, self.sessions, self.lookups.retry_waiting)
        self._check = LiveCheck(state)
        self._probe = Probe(state)
        self._report = StatsReport(
            state, self.sessions, self.registry, self.lookups, self._stores, self._probe
        )
        self._prune = LivePrune(state)
        self.growing = LiveGrow(state)
        self._backup = LiveBackup(state)
        self._converger: Converger | None = None
        self._handlers: dict[type, Callable[[Session, Any, Answer], None]] = {
            protocol.Bind: lambda session, m, answer: self._binder.bind(m, answer),
            protocol.Register: self.registry.register,
            protocol.Lookup: self.lookups.lookup,
            protocol.Release: self._release,
            protocol.Reserve: lambda s, m, answer: answer(self._stores.reserve(s, m)),
            protocol.Commit: lambda s, m, answer: answer(self._stores.commit(s, m)),
            protocol.GiveBack: self._give_back,
            protocol.Flush: self._stores.flush,
            protocol.Ping: lambda s, m, answer: answer(protocol.Done()),
            protocol.Stats: lambda s, m, answer: answer(_json(self.stats())),
            protocol.AdminInspect: self._inspect,
            protocol.AdminObjects: self._objects,
            protocol.AdminVerify: lambda s, m, answer: self._check.verify(m, answer),
            protocol.AdminPrune: lambda s, m, answer: self._prune.prune(m, answer),
            protocol.AdminGrow: lambda s, m, answer: self.growing.grow(m, answer),
            protocol.AdminBackup: lambda s, m, answer: self._backup.store(m, answer),
            protocol.AdminManifest: lambda s, m, answer: self._backup.manifest(m, answer),
            protocol.Bye: self._bye,
        }
        state.files.on_change = lambda gone: state.mailbox.post(
            lambda: self._stores.files_changed(gone)
        )
        self._tick()

    def handle(self, message: protocol.Request, answer: Answer) -> None:
        """Do what a message asks; every refusal is answered, none is raised."""
        self._state.counters.requests[message.__struct_config__.tag] += 1  # type: ignore[index]
        try:
            if isinstance(message, protocol.Hello):
                answer(self.sessions.hello(message))
                return
            session = self.sessions.require(message, check_binding=isinstance(message, _BOUND))
            self._handlers[type(message)](session, message, answer)
        except PersistError as error:
            answer(error)

    def converge(self, first: Upstream | None) -> None:
        """Pass binds on to the first server while unbound, and compare with it from then on."""
        self._state.upstream = first
        if first is not None:
            self._converger = Converger(self._state, first, self._binder.adopt)

    def written(self, outcome: Outcome) -> None:
        """The writer finished a batch."""
        self._stores.written(outcome)

    def _tick(self) -> None:
        # Armed first: a defect in one round must not be the end of all rounds.
        self._state.timers.call_in(TICK_S, self._tick)
        self.sessions.tick()
        self._stores.tick()
        self._probe.tick()

    def _session_ended(self, session: Session) -> None:
        self.lookups.forget_session(session)
        self._stores.forget_session(session)
        self.registry.forget_session(session.token)

    def _release(self, session: Session, message: protocol.Release, answer: Answer) -> None:
        self.lookups.release(session, message.lookup, message.loaded_tokens)
        answer(protocol.Done())

    def _give_back(self, session: Session, message: protocol.GiveBack, answer: Answer) -> None:
        self._stores.give_back(session, message)
        answer(protocol.Done())

    def _bye(self, session: Session, message: protocol.Bye, answer: Answer) -> None:
        answer(protocol.Done())
        self.sessions.end(session)

    # -- numbers -----------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """The server's numbers as plain JSON; names are those of docs/metrics.md."""
        return self._report.make(self._converger, self.readiness())

    def liveness(self) -> list[Problem]:
        """Why only a restart helps; empty while the server lives. Threads: any."""
        return liveness(self._state)

    def readiness(self) -> list[Problem]:
        """Why the data path does not work; empty if it does. Threads: any."""
        differs = self._converger.disagreement if self._converger else ""
        return readiness(self._state, self._probe, self.registry.all(), differs)

    def _inspect(self, session: Session, message: protocol.AdminInspect, answer: Answer) -> None:
        live, state = self.stats(), self._state
        self._tell(answer, lambda: _document(state, live, message))

    def _objects(self, session: Session, message: protocol.AdminObjects, answer: Answer) -> None:
        state = self._state
        self._tell(answer, lambda: json.dumps(_page(state, message)).encode())

    def _tell(self, answer: Answer, look: Callable[[], bytes]) -> None:
        """Answer with a document that takes the manifest or the disk to make."""

        def then(done: Future[bytes]) -> None:
            try:
                answer(protocol.JsonReply(body=done.result()))
            except PersistError as error:
                answer(error)
            except OSError as error:
                answer(StoreIOError(f"inspect failed: {error}"))

        self._state.run(self._state.clerk, look, then)


def _json(value: object) -> protocol.JsonReply:
    return protocol.JsonReply(body=json.dumps(value).encode())


def _document(state: ServerState, live: dict[str, Any], message: protocol.AdminInspect) -> bytes:
    """What ``inspect`` shows of a live server: as from files, plus its live numbers."""
    boots = state.manifest.boots()
    earlier = [boot for boot in boots if boot.boot_id != state.boot_id]
    seen = Seen(
        ManifestSnapshot(
            schema_version=SCHEMA_VERSION,
            binding=state.manifest.binding(),
            models=state.manifest.models(),
            rejections=state.manifest.rejections(),
            boots=boots,
        ),
        state.disk.usage(),
        survey(state.disk, state.binding_id),
        clean_shutdown=bool(earlier[-1].clean) if earlier else None,
        corrupt_chunks=state.counters.corrupt_chunks,
        running=state.boot_id,
        kernel_boot_id=kernel_boot_id(),
    )
    document = inspect_document(seen, model=message.model, details=message.details)
    return fit({**document, "server": live}, MAX_DOCUMENT_BYTES)


def _page(state: ServerState, message: protocol.AdminObjects) -> dict[str, Any]:
    models = state.manifest.models()
    only = matching(models, state.disk.usage(), message.model) if message.model else None
    return objects_page(
        state.disk,
        state.binding_id,
        {row.fingerprint: row.name[:MAX_NAME_CHARS] for row in models},
        after=message.after,
        limit=message.limit,
        fingerprints=only,
    )
