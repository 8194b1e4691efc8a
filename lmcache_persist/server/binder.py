"""The bind: one-shot negotiation of the chunk size (design section 4).

Order of writes: manifest row (the one transaction) -> stamp in the store -> in use. The
clerk does the first two, one bind after the other, so any number of racing binds sees one
winner; whoever comes later is judged against it.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from typing import TYPE_CHECKING

from lmcache_persist import geometry, protocol
from lmcache_persist.binding import MODE_AUTO, MODE_FIXED, Binding
from lmcache_persist.config import Settings
from lmcache_persist.errors import (
    AlignmentTooLarge,
    BindingError,
    GeometryError,
    PersistError,
    StoreIOError,
)
from lmcache_persist.geometry import Group
from lmcache_persist.manifest import Manifest
from lmcache_persist.server.refusals import Refusals
from lmcache_persist.server.state import ServerState, utc_now
from lmcache_persist.server.wire import Answer, binding_bytes
from lmcache_persist.store.base import DiskTier
from lmcache_persist.store.throttle import Throttle

if TYPE_CHECKING:
    from lmcache_persist.server.upstream import Passed, Upstream

log = logging.getLogger(__name__)


def check_start_size(settings: Settings, first: Upstream | None) -> tuple[int, str] | None:
    """The size that a start asks for, and who says so; None to wait for an engine.

    Args:
        settings: for ``--chunk-size N``.
        first: the server whose size is taken, asked before.

    Raises:
        AlignmentTooLarge: the size is above the maximum.
    """
    if settings.chunk_size is not None:
        return _check_size(settings, settings.chunk_size, "--chunk-size")
    if first is not None and first.seen is not None and first.seen.chunk_size is not None:
        return _check_size(settings, first.seen.chunk_size, _source(settings))
    return None


def start_candidate(settings: Settings, disk: DiskTier, first: Upstream | None) -> Binding | None:
    """The binding that a start asks for; arguments and errors as :func:`check_start_size`."""
    wanted = check_start_size(settings, first)
    return None if wanted is None else _fixed(disk, *wanted)


def adopted_candidate(settings: Settings, disk: DiskTier, size: int) -> Binding:
    """The binding to a size that ``--chunk-size-from URL`` found: fixed from elsewhere.

    Raises:
        AlignmentTooLarge: it is above the maximum.
    """
    return _fixed(disk, *_check_size(settings, size, _source(settings)))


def _source(settings: Settings) -> str:
    return f"--chunk-size-from {settings.chunk_size_from}"


def _check_size(settings: Settings, size: int, source: str) -> tuple[int, str]:
    geometry.check_base_chunk_size(size)
    if size > settings.max_chunk_size:
        raise AlignmentTooLarge(
            f"{source} is {size}, above the maximum of {settings.max_chunk_size}",
            hint="choose a smaller one, or raise --max-chunk-size",
        )
    return size, source


def _fixed(disk: DiskTier, size: int, source: str) -> Binding:
    return _candidate(disk, size, size, size, MODE_FIXED, source)


def _candidate(
    disk: DiskTier, chunk_size: int, alignment: int, base: int, mode: str, winner: str
) -> Binding:
    return Binding.make(
        chunk_size=chunk_size,
        required_alignment=alignment,
        base_chunk_size=base,
        mode=mode,
        bound_at=utc_now(),
        winner=winner,
        backend=disk.backend,
        store_uuid=disk.uuid,
        store_format_version=disk.format_version,
    )


def settle(manifest: Manifest, disk: DiskTier, candidate: Binding) -> Binding:
    """Bind in manifest and store; returns the binding that holds, whoever won it.

    Durable: both, on return. A crash between the two leaves a row without a stamp, which
    the next start completes.
    """
    binding, _ = manifest.bind(candidate)
    disk.write_stamp(binding)
    return binding


class Binder:
    """Answers binds.

    Threads: the loop.
    """

    def __init__(self, state: ServerState, refusals: Refusals) -> None:
        self._state = state
        self._refusals = refusals
        self._failed = Throttle(log)

    def bind(self, message: protocol.Bind, answer: Answer) -> None:
        """Bind, find compatible, or refuse."""
        groups = [spec.group() for spec in message.groups]
        state = self._state
        state.counters.binds += 1
        base = message.base or state.settings.base_chunk_size
        try:
            if state.binding is not None:
                answer(self._judge(state.binding, groups, base))
                return
            if state.upstream is not None:
                self._pass_on(state.upstream, message, groups, answer)
                return
            plan = geometry.plan(groups, base, state.settings.max_chunk_size)
        except (GeometryError, BindingError) as error:
            self._refuse(error, message.who, answer)
            return
        candidate = _candidate(
            state.disk, plan.chunk_size, plan.required_alignment, base, MODE_AUTO, message.who
        )
        if message.dry_run:
            answer(
                protocol.BindReply(
                    outcome="bound",
                    binding=binding_bytes(candidate),
                    warnings=list(plan.warnings),
                )
            )
            return
        state.run(
            state.clerk,
            lambda: self._settle(candidate),
            lambda done: self._bound(done, candidate, groups, plan.warnings, message, answer),
        )

    def _settle(self, candidate: Binding) -> Binding:
        """As :func:`settle`, on the clerk; not into files that nobody will find again."""
        self._state.files.require()
        return settle(self._state.manifest, self._state.disk, candidate)

    def _bound(
        self,
        done: Future[Binding],
        candidate: Binding,
        groups: list[Group],
        warnings: tuple[str, ...],
        message: protocol.Bind,
        answer: Answer,
    ) -> None:
        binding = self._settled(done, answer)
        if binding is None:
            return
        if binding == candidate:
            for warning in warnings:
                log.warning("%s", warning)
            answer(
                protocol.BindReply(
                    outcome="bound", binding=binding_bytes(binding), warnings=list(warnings)
                )
            )
            return
        try:
            answer(self._judge(binding, groups, candidate.base_chunk_size))
        except (GeometryError, BindingError) as error:
            self._refuse(error, message.who, answer)

    def _settled(self, done: Future[Binding], answer: Answer) -> Binding | None:
        """The binding that holds now; None, and answered, if the disk failed."""
        try:
            binding = done.result()
        except PersistError as error:
            self._failed.error(f"bind failed: {error}")
            answer(error)
            return None
        except OSError as error:
            self._failed.error(f"bind failed: {error}")
            answer(StoreIOError(f"bind failed: {error}", hint="mend the disk, then try again"))
            return None
        if self._state.binding is None:
            self._state.binding = binding
            log.info(
                "bound to chunk size %d (alignment %d, base %d, mode %s) by %s",
                binding.chunk_size,
                binding.required_alignment,
                binding.base_chunk_size,
                binding.mode,
                binding.winner or "a client",
            )
        return binding

    # -- --chunk-size-from ---------------------------------------------------------------

    def adopt(self, chunk_size: int) -> None:
        """Bind to the first server's size; who asks later is judged by it.

        Raises:
            AlignmentTooLarge: it is above this server's maximum.
        """
        state = self._state
        candidate = adopted_candidate(state.settings, state.disk, chunk_size)
        state.run(state.clerk, lambda: self._settle(candidate), self._adopted)

    def _adopted(self, done: Future[Binding]) -> None:
        self._settled(done, lambda reply: None)

    def _pass_on(
        self, upstream: Upstream, message: protocol.Bind, groups: list[Group], answer: Answer
    ) -> None:
        self._state.run(
            upstream.executor,
            lambda: upstream.pass_on(message),
            lambda done: self._passed(done, message, groups, answer),
        )

    def _passed(
        self, done: Future[Passed], message: protocol.Bind, groups: list[Group], answer: Answer
    ) -> None:
        if done.cancelled():
            return  # this server stops
        state = self._state
        try:
            passed = done.result()
            candidate = adopted_candidate(state.settings, state.disk, passed.chunk_size)
        except (GeometryError, BindingError) as error:
            self._refuse(error, message.who, answer)
            return
        except PersistError as error:
            answer(error)
            return
        if message.dry_run:
            self._answer_passed(state.binding or candidate, passed, message, groups, answer)
            return

        def settled(done: Future[Binding]) -> None:
            binding = self._settled(done, answer)
            if binding is not None:
                self._answer_passed(binding, passed, message, groups, answer)

        state.run(state.clerk, lambda: self._settle(candidate), settled)

    def _answer_passed(
        self,
        binding: Binding,
        passed: Passed,
        message: protocol.Bind,
        groups: list[Group],
        answer: Answer,
    ) -> None:
        try:
            geometry.check_compatible(binding.chunk_size, groups)
        except (GeometryError, BindingError) as error:
            self._refuse(error, message.who, answer)
            return
        answer(
            protocol.BindReply(
                outcome=passed.outcome,
                binding=binding_bytes(binding),
                warnings=list(passed.warnings),
            )
        )

    def _judge(self, binding: Binding, groups: list[Group], base: int) -> protocol.BindReply:
        geometry.check_compatible(binding.chunk_size, groups, base)
        return protocol.BindReply(outcome="compatible", binding=binding_bytes(binding))

    def _refuse(self, error: PersistError, who: str, answer: Answer) -> None:
        answer(error)
        self._refusals.note(error, who)
