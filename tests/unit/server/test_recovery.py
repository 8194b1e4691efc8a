"""What a start decides from what it finds (the table of rule 6)."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from lmcache_persist.binding import Binding
from lmcache_persist.cli.app import app
from lmcache_persist.config import Settings
from lmcache_persist.datadir import DataDir
from lmcache_persist.errors import BindingMismatch, DiskTooSmall, FormatTooNew, StoreMismatch
from lmcache_persist.manifest import ManifestSnapshot
from lmcache_persist.server.recovery import (
    Decision,
    Found,
    StoreState,
    check_room,
    decide,
    look,
    warn_of_size,
)
from lmcache_persist.store.lmdb_disk import LmdbDisk

UUID = "a" * 32
AT = "2026-01-01T00:00:00.000000+00:00"


def binding(size: int = 544, uuid: str = UUID, at: str = AT, backend: str = "lmdb") -> Binding:
    """A binding; another ``at`` makes another one of the same size."""
    return Binding.make(
        chunk_size=size,
        required_alignment=size,
        base_chunk_size=256,
        mode="auto",
        bound_at=at,
        winner="test",
        backend=backend,
        store_uuid=uuid,
        store_format_version=1,
    )


def found(
    bound: Binding | None,
    store: StoreState = StoreState.PRESENT,
    *,
    uuid: str = UUID,
    stamp: Binding | None = None,
    has_objects: bool = False,
) -> Found:
    """What is on disk, with a manifest."""
    return Found(
        ManifestSnapshot(1, bound, [], [], []),
        store,
        "length" if store is StoreState.DAMAGED else "",
        uuid if store is StoreState.PRESENT else "",
        stamp,
        has_objects,
        1,
    )


def settings(**changes: object) -> Settings:
    """Settings with some changed."""
    return replace(Settings(data_dir=Path("/nowhere")), **changes)  # type: ignore[arg-type]


AUTO = settings()


def test_nothing_at_all_is_a_fresh_start() -> None:
    """No manifest and no store: start unbound."""
    assert decide(Found(None, StoreState.ABSENT), AUTO) == Decision(None)


def test_an_unbound_manifest_takes_an_empty_store() -> None:
    """A start that died before the first bind goes on."""
    assert decide(found(None), AUTO) == Decision(None)


@pytest.mark.parametrize("manifest", [True, False])
@pytest.mark.parametrize("what", ["stamp", "objects", "damage"])
def test_bytes_without_their_manifest_are_refused(manifest: bool, what: str) -> None:
    """A used or broken store beside no binding is never written over."""
    state = StoreState.DAMAGED if what == "damage" else StoreState.PRESENT
    seen = found(
        None,
        state,
        stamp=binding() if what == "stamp" else None,
        has_objects=what == "objects",
    )
    seen = seen if manifest else replace(seen, snapshot=None)
    with pytest.raises(StoreMismatch, match="manifest"):
        decide(seen, AUTO)


def test_manifest_and_store_that_agree_start() -> None:
    """The binding holds on, silently."""
    bound = binding()
    assert decide(found(bound, stamp=bound, has_objects=True), AUTO) == Decision(bound)


def test_a_missing_stamp_is_completed() -> None:
    """A crash between manifest and stamp is finished by the next start."""
    bound = binding()
    assert decide(found(bound), AUTO) == Decision(bound, complete_stamp=True)


@pytest.mark.parametrize("state", [StoreState.ABSENT, StoreState.DAMAGED])
def test_a_lost_store_starts_empty_under_the_same_binding(state: StoreState) -> None:
    """Lost bytes are lost cache: same uuid, same binding, one loud line."""
    bound = binding()
    decision = decide(found(bound, state), AUTO)
    assert (decision.binding, decision.store_uuid) == (bound, UUID)
    assert decision.complete_stamp
    assert decision.set_aside is (state is StoreState.DAMAGED)
    assert len(decision.notes) == 1
    assert "starting empty" in decision.notes[0]


def test_a_damaged_store_still_tells_how_large_it_was(tmp_path: Path) -> None:
    """So the empty one that takes its place is no larger, unless a capacity is set."""
    paths = DataDir(tmp_path)
    LmdbDisk.open(paths.store, 16 << 20).close()
    os.truncate(paths.store / "data.mdb", 3 * 4096)
    seen = look(paths, deep=False)
    assert (seen.store, seen.capacity_bytes) == (StoreState.DAMAGED, 16 << 20)
    assert AUTO.for_store(seen.capacity_bytes).capacity_bytes == 16 << 20


def test_the_length_of_a_damaged_store_tells_its_size(tmp_path: Path) -> None:
    """Where its meta pages are gone: its file was allocated in full."""
    paths = DataDir(tmp_path)
    LmdbDisk.open(paths.store, 32 << 20).close()
    with (paths.store / "data.mdb").open("r+b") as file:
        file.write(b"x" * 8192)
    seen = look(paths, deep=False)
    assert (seen.store, seen.capacity_bytes) == (StoreState.DAMAGED, 32 << 20)


@pytest.mark.parametrize(
    ("seen", "ballast", "warned"),
    [
        (found(binding(), StoreState.ABSENT), False, True),
        (found(binding(), StoreState.DAMAGED), False, True),
        (found(None, StoreState.ABSENT), True, True),
        (found(None, StoreState.ABSENT), False, False),
        (replace(found(binding(), StoreState.DAMAGED), capacity_bytes=1 << 25), True, False),
        (found(binding(), StoreState.PRESENT), True, False),
    ],
)
def test_a_size_that_nothing_tells_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, seen: Found, ballast: bool, warned: bool
) -> None:
    """The default is said loudly where a store of another size may have been; never if set."""
    paths = DataDir(tmp_path)
    if ballast:
        paths.ballast.touch()
    warn_of_size(seen, paths, settings(capacity_bytes=64 << 20))
    assert not caplog.records
    warn_of_size(seen, paths, AUTO)
    assert ["8GiB" in one.getMessage() for one in caplog.records] == [True] * warned


def test_nobody_is_told_to_lower_what_he_has_not_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No room: the hint says `set` to whoever set no capacity, also of a store that is known."""
    seen = found(binding(), StoreState.ABSENT)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=1, f_frsize=4096))
    for given in (AUTO, AUTO.for_store(1 << 30)):
        with pytest.raises(DiskTooSmall) as caught:
            check_room(seen, DataDir(tmp_path), given)
        assert str(caught.value.hint).startswith("set --capacity")
    with pytest.raises(DiskTooSmall) as caught:
        check_room(seen, DataDir(tmp_path), settings(capacity_bytes=64 << 20))
    assert str(caught.value.hint).startswith("lower --capacity")


FOREIGN = {
    "another uuid": found(binding(), uuid="b" * 32, stamp=binding(uuid="b" * 32)),
    "another uuid, never bound": found(binding(), uuid="b" * 32),
    "another binding": found(binding(), stamp=binding(at="2026-02-02T00:00:00.000000+00:00")),
    "another size": found(binding(), stamp=binding(640)),
    "objects without a stamp": found(binding(), has_objects=True),
    "another backend": found(binding(backend="other"), stamp=binding(backend="other")),
    "another hash": found(
        replace(binding(), hash_version=2), stamp=replace(binding(), hash_version=2)
    ),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_foreign_bytes_are_refused(what: str) -> None:
    """Whatever does not belong together is refused, with a way out."""
    with pytest.raises(StoreMismatch) as refusal:
        decide(FOREIGN[what], AUTO)
    assert refusal.value.hint


def test_another_fixed_size_is_refused() -> None:
    """--chunk-size N on a data dir bound to M names both."""
    bound = binding()
    with pytest.raises(BindingMismatch, match=r"256.*544 since 2026-01-01 00:00:00Z "):
        decide(found(bound, stamp=bound), settings(chunk_size=256))
    decide(found(bound, stamp=bound), settings(chunk_size=544))


def test_another_base_is_only_a_note() -> None:
    """The manifest wins over the base, with one warning."""
    bound = binding()
    decision = decide(found(bound, stamp=bound), settings(base_chunk_size=1024))
    assert decision.binding == bound
    assert len(decision.notes) == 1


def rebound() -> Found:
    """A rebind that stopped after the store's stamp."""
    new = binding(640, at="2026-02-02T00:00:00.000000+00:00")
    return replace(found(binding(), stamp=new, has_objects=True), replaced=binding().binding_id)


def test_a_rebind_between_its_two_writes_is_completed() -> None:
    """The stamp that says what it replaced holds, and the manifest has to follow."""
    seen = rebound()
    assert seen.binding == seen.stamp
    decision = decide(seen, AUTO)
    assert decision.binding == seen.stamp
    assert decision.replaces == binding().binding_id
    assert "rebind" in decision.notes[0]
    # Flags are judged by the new size.
    decide(seen, settings(chunk_size=640))
    with pytest.raises(BindingMismatch):
        decide(seen, settings(chunk_size=544))


def test_a_finished_rebind_is_an_ordinary_start() -> None:
    """A note of the old binding that is still in the store says nothing any more."""
    seen = rebound()
    assert seen.stamp is not None
    done = replace(seen, snapshot=ManifestSnapshot(1, seen.stamp, [], [], []))
    assert decide(done, AUTO) == Decision(seen.stamp)


@pytest.mark.parametrize("what", ["another manifest", "another store"])
def test_the_note_of_a_rebind_speaks_of_one_binding_of_one_store(what: str) -> None:
    """A stamp that replaced something else than what the manifest has is foreign."""
    seen = rebound()
    if what == "another manifest":
        other = binding(at="2026-03-03T00:00:00.000000+00:00")
        seen = replace(seen, snapshot=ManifestSnapshot(1, other, [], [], []))
    else:
        seen = replace(seen, uuid="b" * 32, stamp=binding(640, uuid="b" * 32))
    with pytest.raises(StoreMismatch):
        decide(seen, AUTO)


@pytest.mark.parametrize(
    ("seen", "verb"),
    [
        (found(None, stamp=binding()), "recover"),
        (found(None, StoreState.DAMAGED), "reset"),
        (found(None, has_objects=True), "reset"),
        (found(binding(), has_objects=True), "reset"),
        (found(binding(), stamp=binding(640)), "reset"),
        (found(binding(), uuid="b" * 32), "reset"),
    ],
)
def test_refusals_name_the_verb_that_resolves_them(seen: Found, verb: str) -> None:
    """Each hint holds a command to copy."""
    with pytest.raises(StoreMismatch) as refusal:
        decide(seen, AUTO)
    assert f"lmcache-persist {verb} /nowhere" in str(refusal.value.hint)


LOST_POWER = "the machine lost power while durability was relaxed"


def test_a_power_loss_is_no_reason_to_set_foreign_bytes_aside() -> None:
    """Of a store that can still be read, uuid and stamp count before its damage does."""
    other = binding(uuid="b" * 32)
    seen = found(binding(), uuid="b" * 32, stamp=other)
    with pytest.raises(StoreMismatch, match="uuid"):
        decide(replace(seen, store=StoreState.DAMAGED, damage=LOST_POWER), AUTO)
    own = found(binding(), stamp=binding(), has_objects=True)
    decision = decide(replace(own, store=StoreState.DAMAGED, damage=LOST_POWER), AUTO)
    assert (decision.set_aside, decision.binding) == (True, binding())


def test_an_empty_unbound_store_may_lose_power() -> None:
    """Nothing was bound, nothing is stored: it is set aside and made anew, unbound."""
    seen = replace(found(None), store=StoreState.DAMAGED, damage=LOST_POWER)
    decision = decide(seen, AUTO)
    assert (decision.set_aside, decision.binding, decision.store_uuid) == (True, None, None)


@pytest.mark.parametrize("state", list(StoreState))
def test_a_binding_of_a_newer_store_format_is_refused(state: StoreState) -> None:
    """Also when the store itself is gone: it would be made in a format that is too old."""
    newer = replace(binding(), store_format_version=2)
    with pytest.raises(FormatTooNew, match="format 2"):
        decide(found(newer, state, stamp=newer), AUTO)


REFUSED = {
    "no manifest": replace(found(None, stamp=binding()), snapshot=None),
    "unbound": found(None, stamp=binding()),
    "unbound, no stamp": found(None, has_objects=True),
    "unbound, damaged": found(None, StoreState.DAMAGED),
    "another store": found(binding(), uuid="b" * 32),
    "another binding": found(binding(), stamp=binding(at="2027-01-01T00:00:00.000000+00:00")),
    "objects without stamp": found(binding(), has_objects=True),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_the_verb_that_mends_it(name: str) -> None:
    """The hint of every refusal for what is on disk is a command of this program to copy."""
    with pytest.raises(StoreMismatch) as caught:
        decide(REFUSED[name], AUTO)
    verbs = {str(info.callback.__name__) for info in app.registered_commands if info.callback}
    named = re.findall(r"lmcache-persist (\w+) /nowhere", caught.value.hint or "")
    assert named
    assert set(named) <= verbs & {"recover", "reset", "verify", "rebind"}
    assert ("recover" in named) == (REFUSED[name].snapshot is None or name == "unbound")


def test_another_size_names_the_verb_that_gives_what_is_stored_up() -> None:
    """A fixed size that is not the bound one: start with that, or rebind."""
    with pytest.raises(BindingMismatch) as caught:
        decide(found(binding(), stamp=binding()), settings(chunk_size=640))
    assert "lmcache-persist rebind /nowhere --chunk-size 640" in (caught.value.hint or "")


def test_another_size_names_what_sets_it(tmp_path: Path) -> None:
    """A file that was forgotten in a rebind is named, not a flag that nobody gave."""
    file = tmp_path / "kv.yaml"
    file.write_text("chunk_size: 256\n")
    for flags, env, source in (
        ({"config": str(file)}, {}, str(file)),
        ({}, {"LMCACHE_PERSIST_CHUNK_SIZE": "256"}, "LMCACHE_PERSIST_CHUNK_SIZE"),
        ({"chunk_size": "256"}, {}, "--chunk-size"),
    ):
        given = Settings.load({"data_dir": "/nowhere", **flags}, env=env)
        with pytest.raises(BindingMismatch) as caught:
            decide(found(binding(), stamp=binding()), given)
        assert caught.value.message.startswith(f"chunk_size ({source}) is 256, but")
        assert "set it to 544 or auto there" in (caught.value.hint or "")
