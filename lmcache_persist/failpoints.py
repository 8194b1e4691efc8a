"""Named failpoints: inert unless ``LMCACHE_PERSIST_FAILPOINTS`` switches them on.

The variable holds ``name=action`` pairs, separated by commas. Actions:

``kill``
    SIGKILL to the own process: what a crash at this instruction leaves behind.
``error``
    raise ``OSError(EIO)``.
``pause``, ``pause:FILE``
    hold the thread until ``FILE`` is there, at most :data:`MAX_PAUSE_S`: a disk that hangs.
``kill@N``, ``error@N``, ``pause@N``, ``pause:FILE@N``
    the same at the Nth pass only (counted from 1).

Every name that the code passes is listed in :data:`NAMES`; passing or switching on
another one is an error, so that a test never waits for a point that is not there.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from dataclasses import dataclass

from lmcache_persist.errors import ConfigError

NAMES: dict[str, str] = {
    "bind.before_commit": "the manifest transaction of a bind is written, not committed",
    "bind.after_commit": "the binding is in the manifest, not yet in the store",
    "bind.after_stamp": "the store is stamped, the binding not yet in use",
    "commit.before_write": "a batch of chunks is about to be written",
    "commit.after_extents": "extents are put, the record is not",
    "commit.before_sync": "the batch is written, its transaction not committed",
    "commit.after_sync": "the batch is durable, durable_seq not yet published",
    "evict.before_sync": "an evicting transaction is written, not committed",
    "evict.after_sync": "an evicting transaction is durable",
    "repair.before_sync": "a transaction of a repair is written, not committed",
    "repair.after_sync": "a transaction of a repair is durable",
    "repair.after_set_aside": "the damaged store is moved away, no empty one is made yet",
    "rebind.before_stamp": "a rebind's new stamp is written to the store, not committed",
    "rebind.after_stamp": "the store has the new binding, the manifest the old one",
    "rebind.before_commit": "the manifest transaction of a rebind is written, not committed",
    "rebind.after_commit": "the manifest has the new binding, the store still a note of the old",
    "recover.after_set_aside": "the unreadable manifest is moved away, no new one is made yet",
    "reset.before_mark": "a reset is decided, nothing says so on disk",
    "reset.after_mark": "the data dir is marked as being reset, all is still there",
    "reset.after_manifest": "the manifest is removed, the store is still there",
    "reset.after_store": "the store is removed, the mark is still there",
    "salvage.before_removal": "the good chunks set aside are copied, their old store is there",
    "load.before_read": "an object is about to be read from disk",
    "resize.after_preallocate": "the data file is longer, the store has the old capacity still",
    "resize.before_rename": "the smaller store is complete under a hidden name",
    "resize.after_rename": "the smaller store is in place",
    "grow.while_allocating": "a live store's data file has another piece of its new blocks",
    "grow.after_allocate": "it has all of them, the store has the old capacity still",
    "grow.after_map": "the map is larger, the store does not say so yet",
    "grow.after_note": "the store says that it is larger",
    "backup.before_descriptor": "manifest and store of a backup are complete, nothing says so",
    "backup.before_rename": "a backup is complete under the name of a partial one",
    "backup.after_rename": "a backup has its name",
    "restore.after_mark": "the folder is marked, nothing is restored yet",
    "restore.after_store": "the store is restored, the manifest is not",
    "restore.after_manifest": "all is restored, the mark is still there",
    "migrate.before_commit": "a schema migration ran, its transaction is not committed",
}
"""Every failpoint with what holds at it."""

ENV = "LMCACHE_PERSIST_FAILPOINTS"

MAX_PAUSE_S = 60.0
"""Seconds after which a pause ends by itself."""
_PAUSE_STEP_S = 0.01
_VERBS = ("kill", "error", "pause")


@dataclass(frozen=True, slots=True)
class _Action:
    """What a point does: ``until`` is a pause's file, ``nth`` the only pass that counts."""

    verb: str
    until: str
    nth: int | None


_lock = threading.Lock()
_passes: dict[str, int] = {}
_active: dict[str, _Action] = {}


def configure(spec: str) -> None:
    """Switch on the failpoints of ``spec`` (see the module's text) and reset all counts.

    Raises:
        ConfigError: a name or an action is unknown.
    """
    active: dict[str, _Action] = {}
    for item in filter(None, (part.strip() for part in spec.split(","))):
        name, _, action = item.partition("=")
        done, _, nth = action.partition("@")
        verb, _, until = done.partition(":")
        known = name in NAMES and verb in _VERBS and not (until and verb != "pause")
        if not known or (nth and not nth.isdigit()):
            raise ConfigError(
                f"failpoint {item!r} is unknown, expected name=kill|error|pause[:FILE][@N]",
                hint=f"names: {', '.join(sorted(NAMES))}",
            )
        active[name] = _Action(verb, until, int(nth) if nth else None)
    with _lock:
        _active.clear()
        _active.update(active)
        _passes.clear()


def hit(name: str) -> None:
    """Pass the failpoint ``name``.

    Raises:
        OSError: the point is switched on with ``error``.
    """
    if name not in NAMES:
        raise ValueError(f"failpoint {name!r} is not in NAMES")
    if not _active:
        return
    with _lock:
        _passes[name] = _passes.get(name, 0) + 1
        action = _active.get(name)
        if action is None or action.nth not in (None, _passes[name]):
            return
    if action.verb == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action.verb == "pause":
        _pause(action.until)
        return
    raise OSError(errno.EIO, f"failpoint {name}")


def _pause(until: str) -> None:
    deadline = time.monotonic() + MAX_PAUSE_S
    while time.monotonic() < deadline and not (until and os.path.exists(until)):
        time.sleep(_PAUSE_STEP_S)


if os.environ.get(ENV):
    configure(os.environ[ENV])
