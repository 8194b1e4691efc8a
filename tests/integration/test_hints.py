"""Hints are copied as they stand, run, and the problem is gone."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from lmcache_persist import hashing
from lmcache_persist.server.converge import disagreement
from lmcache_persist.server.upstream import Seen, Upstream
from lmcache_persist.store import data_file
from support import mounts
from support.altering import alter_chunk
from support.data_dirs import key_of, make, records_of
from support.files import snapshot
from support.forked import as_nobody, forked
from support.hints import commands, follow, hint_of
from support.manifest import binding
from support.server import ServerProcess
from support.verbs import in_process, quiet
from support.waiting import wait_until

CAPACITY = "32MiB"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a data dir of five chunks and a backup of it: quicker copied than made."""
    folder = tmp_path_factory.mktemp("hints")
    make(folder / "d", chunks=(5,), capacity_bytes=32 << 20)
    assert quiet("backup", str(folder / "d"), str(folder / "b"))[0] == 0
    return folder


@pytest.fixture
def data_dir(root: Path, prepared: Path) -> Path:
    """A data dir with five chunks, whose name has to be quoted."""
    return shutil.copytree(prepared / "d", root / "a dir")


@pytest.fixture
def backup(root: Path, prepared: Path) -> Path:
    """A backup of it."""
    return shutil.copytree(prepared / "b", root / "my backup")


def is_good(data_dir: Path) -> bool:
    """Whether verify finds nothing."""
    return quiet("verify", str(data_dir))[0] == 0


def cut(store: Path) -> None:
    """A data file that ends within its trees."""
    os.truncate(store / "data.mdb", 40960)


# -- verify ------------------------------------------------------------------------------------


def test_bad_bytes_are_dropped_by_the_hint(data_dir: Path) -> None:
    """What verify finds bad, the command that it names drops."""
    alter_chunk(data_dir, key_of(1))
    code, _, err = quiet("verify", str(data_dir))
    assert code == 1
    assert follow(hint_of(err))[0] == 0
    assert is_good(data_dir)


def test_a_lost_manifest_comes_back_by_the_hint(data_dir: Path) -> None:
    """The binding is rebuilt, and nothing stored is lost."""
    (data_dir / "manifest.sqlite").unlink()
    code, _, err = quiet("verify", str(data_dir))
    assert code == 1
    assert follow(hint_of(err))[0] == 0
    assert is_good(data_dir)
    assert len(records_of(data_dir)) == 5


@pytest.mark.parametrize("swapped", ["manifest.sqlite", "store"])
def test_swapped_files_have_the_refusal_of_a_start(
    data_dir: Path, root: Path, swapped: str
) -> None:
    """No repair is named, which would be refused: put back the other one, or start afresh."""
    make(root / "other", chunks=(1,))
    os.rename(data_dir / swapped, root / "mine")
    os.rename(root / "other" / swapped, data_dir / swapped)
    code, _, err = quiet("verify", str(data_dir))
    assert code == 1
    hint = hint_of(err)
    assert "put back" in hint
    assert commands(hint) == [["reset", str(data_dir)]]
    assert hint_of(quiet("verify", str(data_dir), "--repair")[2]) == hint
    os.rename(data_dir / swapped, root / "other" / swapped)
    os.rename(root / "mine", data_dir / swapped)
    assert is_good(data_dir)
    os.rename(root / "other" / swapped, root / "again")
    shutil.rmtree(data_dir / "store")
    shutil.copytree(root / "other", data_dir, dirs_exist_ok=True)
    assert follow(hint, "--yes")[0] == 0
    assert not (data_dir / "manifest.sqlite").exists()


def test_a_bad_backup_is_restored_without_what_is_bad(backup: Path, root: Path) -> None:
    """A backup is never mended; the hint makes a data dir of the rest of it."""
    alter_chunk(backup, key_of(1))
    before = snapshot(backup)
    code, _, err = quiet("verify", str(backup))
    assert code == 1
    [words] = commands(hint_of(err))
    assert words == ["restore", str(backup), "DIR"]
    assert quiet(*words[:-1], str(root / "new"))[0] == 0
    assert is_good(root / "new")
    assert len(records_of(root / "new")) == 4
    assert snapshot(backup) == before


def test_a_broken_backup_has_no_command_that_is_refused(backup: Path) -> None:
    """Of a backup that was cut nothing is to be had, and each verb says so."""
    cut(backup / "store")
    for verb in ("verify", "inspect"):
        code, _, err = quiet(verb, str(backup))
        assert code != 0
        assert commands(hint_of(err)) == []
        assert "backup is never mended" in hint_of(err)


@pytest.mark.parametrize("lost", ["gone", "noise"])
def test_a_backup_without_its_manifest_is_restored_by_the_hint(
    backup: Path, root: Path, lost: str
) -> None:
    """Whichever verb meets it: the way out is a restore, not a recover that is refused."""
    (backup / "manifest.sqlite").unlink()
    if lost == "noise":
        (backup / "manifest.sqlite").write_bytes(b"noise" * 1000)
    for verb in ("inspect", "verify"):
        code, _, err = quiet(verb, str(backup))
        assert code != 0
        [words] = commands(hint_of(err))
        assert words == ["restore", str(backup), "DIR"]
        code, _, err = quiet(*words[:-1], str(root / verb))
        assert (code, "warning: its manifest " in err) == (0, True)
        assert is_good(root / verb)
        assert len(records_of(root / verb)) == 5


@pytest.mark.parametrize(("damage", "objects"), [("tail", 5), ("cut", 0), ("noise", 0)])
def test_a_broken_store_is_set_aside_and_read_by_the_hint(
    data_dir: Path, damage: str, objects: int
) -> None:
    """Verify says that a repair sets it aside, and what takes back what can be read, if any."""
    if damage == "tail":
        os.truncate(data_dir / "store" / "data.mdb", 16 << 20)
    elif damage == "cut":
        cut(data_dir / "store")
    else:
        with (data_dir / "store" / "data.mdb").open("r+b") as file:
            file.seek(2 * 4096)
            file.write(b"noise" * 4000)
    code, _, err = quiet("verify", str(data_dir))
    assert code == 1
    hint = hint_of(err)
    assert "keep it aside" in hint
    assert commands(hint) == [
        ["verify", str(data_dir), "--repair"],
        ["recover", str(data_dir), "--set-aside"],
    ]
    assert follow(hint)[0] == 0
    code, _, err = follow(hint, number=1)
    assert (code == 0, "nothing can be had from" in err) == (objects > 0, objects == 0)
    assert is_good(data_dir)
    assert len(records_of(data_dir)) == objects


@pytest.mark.parametrize("verb", [("flush",), ("negotiate", "--groups", "544"), ("bench",)])
def test_a_backup_is_no_data_dir_to_ask(backup: Path, root: Path, verb: tuple[str, ...]) -> None:
    """The way to a server that can be asked begins with a restore."""
    code, _, err = quiet(verb[0], str(backup), *verb[1:])
    assert code != 0
    [words] = commands(hint_of(err))
    assert quiet(*words[:-1], str(root / "new"))[0] == 0
    assert is_good(root / "new")


# -- nobody serves it --------------------------------------------------------------------------


def test_a_stopped_server_is_named_so_and_started_by_the_hint(data_dir: Path) -> None:
    """No server runs: the hint starts one, with the data dir quoted."""
    code, _, err = quiet("negotiate", str(data_dir), "--groups", "544")
    assert code == 4
    assert f"no server runs on {data_dir}" in err
    [words] = commands(hint_of(err))
    assert words == ["serve", "--data-dir", str(data_dir)]
    with ServerProcess(Path(words[2]), capacity=CAPACITY):
        assert quiet("negotiate", str(data_dir), "--groups", "544")[0] == 0


@pytest.mark.parametrize("ended", ["stopped", "killed"])
def test_what_a_start_would_refuse_is_told_at_once(data_dir: Path, ended: str) -> None:
    """Without its manifest a data dir cannot be served: the first hint is what mends that."""
    with ServerProcess(data_dir, capacity=CAPACITY) as server:
        if ended == "stopped":
            assert server.terminate() == 0
        server.kill()
    for path in data_dir.glob("manifest*"):
        path.unlink()
    code, _, err = quiet("negotiate", str(data_dir), "--groups", "544", "--timeout", "0.2")
    assert code == 4
    assert "a start would be refused" in hint_of(err)
    assert follow(hint_of(err))[0] == 0
    assert is_good(data_dir)


# -- restore -----------------------------------------------------------------------------------


def test_a_folder_with_something_else_is_not_sent_to_reset(backup: Path, root: Path) -> None:
    """What no reset removes is named, and moving it away is the way; nothing is made there."""
    target = root / "target"
    target.mkdir()
    (target / "x").write_text("not ours")
    before = snapshot(target)
    code, _, err = quiet("restore", str(backup), str(target))
    assert code == 5
    assert commands(hint_of(err)) == []
    assert "'x'" in err
    assert snapshot(target) == before
    (target / "x").unlink()
    assert quiet("restore", str(backup), str(target))[0] == 0


def test_a_data_dir_in_the_way_is_reset_by_the_hint(backup: Path, data_dir: Path) -> None:
    """Then it takes the backup."""
    code, _, err = quiet("restore", str(backup), str(data_dir))
    assert code == 5
    assert follow(hint_of(err), "--yes")[0] == 0
    assert quiet("restore", str(backup), str(data_dir))[0] == 0
    assert is_good(data_dir)


def test_nothing_is_restored_into_its_own_backup(backup: Path, root: Path) -> None:
    """Nor by way of a link; the backup stays as it is."""
    (root / "link").symlink_to(backup)
    before = snapshot(backup)
    for target in (backup / "x", root / "link" / "x"):
        code, _, err = quiet("restore", str(backup), str(target))
        assert (code, "in the backup" in err) == (5, True)
    assert snapshot(backup) == before


def test_a_restore_tells_bad_from_no_room(root: Path) -> None:
    """Each has its line and its number."""
    make(root / "d", chunks=(40,), nbytes=500_000)
    assert quiet("backup", str(root / "d"), str(root / "b"))[0] == 0
    alter_chunk(root / "b", key_of(0))
    code, document = in_process("restore", str(root / "b"), str(root / "r"), "--capacity", "16MiB")
    assert code == 0
    assert document["bad_objects"] == 1
    assert document["no_room_objects"] == 40 - 1 - document["objects"]
    assert document["left_out_objects"] == 1 + document["no_room_objects"]
    _, out, _ = quiet("restore", str(root / "b"), str(root / "s"), "--capacity", "16MiB")
    assert "left out: 1 object that proved bad" in out
    assert f"left out: {document['no_room_objects']} objects for which there is no room" in out


# -- rights and mounts -------------------------------------------------------------------------


def refused_to_nobody(*words: str) -> str:
    """What a verb says that a user without any rights is refused."""
    code, _, err = as_nobody(*words)
    assert code == 5, err
    return err


def test_a_user_without_rights_is_told_whose_they_are(root: Path, data_dir: Path) -> None:
    """No verb is named that this user may not run either; where he may look, inspect is."""
    root.chmod(0o755)
    data_dir.chmod(0o700)
    serve = ("serve", "--data-dir", str(data_dir), "--pool-dir", str(root))
    hint = hint_of(refused_to_nobody(*serve))
    assert "run it as user root" in hint
    assert commands(hint) == []
    data_dir.chmod(0o755)
    for path in (data_dir / "server.lock", data_dir / "manifest.sqlite"):
        path.chmod(0o644)
    (data_dir / "store").chmod(0o755)
    (data_dir / "store" / "data.mdb").chmod(0o644)
    assert follow(hint_of(refused_to_nobody(*serve)))[0] == 0
    (data_dir / "server.lock").chmod(0o600)
    assert "run it as user root" in hint_of(refused_to_nobody("reset", str(data_dir), "--yes"))


def test_a_read_only_mount_is_named_by_every_verb(root: Path, prepared: Path) -> None:
    """As by serve: what is mounted so, and what may be looked at all the same."""
    data_dir = str(shutil.copytree(prepared / "d", root / "mnt" / "a dir"))
    hints = set()
    with mounts.read_only(root / "mnt"):
        for verb in (
            ("prune", data_dir, "--stale", "--yes"),
            ("rebind", data_dir, "--chunk-size", "1088", "--yes"),
            ("reset", data_dir, "--yes"),
            ("recover", data_dir),
            ("recover", data_dir, "--set-aside"),
            ("resize", data_dir, "--capacity", "128MiB"),
            ("verify", data_dir, "--repair"),
        ):
            code, _, err = quiet(*verb)
            assert code == 5, verb
            assert f"it lies on {root / 'mnt'}, which is mounted read-only" in err, verb
            hints.add(hint_of(err))
        [hint] = hints
        assert follow(hint)[0] == 0


# -- the data dir is named ---------------------------------------------------------------------


def test_a_disagreement_ends_with_the_hints_rebind(data_dir: Path) -> None:
    """With the size of the first server, which it names, both agree."""
    first = cast(Upstream, SimpleNamespace(url="ipc:///first"))
    held = in_process("inspect", str(data_dir))[1]["binding"]
    seen = Seen(640, hashing.boundary_id(640))
    error = disagreement(first, seen, binding(held["chunk_size"]), data_dir)
    assert error.hint is not None
    assert follow(error.hint, "--yes")[0] == 0
    found = in_process("inspect", str(data_dir))[1]["binding"]
    assert found["boundary_id"] == seen.boundary_id


def test_a_prune_of_everything_is_a_reset_by_the_hint(data_dir: Path) -> None:
    """The command has the data dir."""
    code, _, err = quiet("prune", str(data_dir))
    assert code == 2
    assert follow(hint_of(err), "--yes")[0] == 0
    assert not (data_dir / "store").exists()


def test_a_rebind_to_the_same_size_names_the_data_dir(data_dir: Path) -> None:
    """Its hint throws away what is stored."""
    code, _, err = quiet("rebind", str(data_dir), "--chunk-size", "544", "--yes")
    assert code == 0
    assert follow(hint_of(err), "--yes")[0] == 0
    assert not (data_dir / "store").exists()


def test_what_a_bench_stored_is_pruned_by_its_note(data_dir: Path) -> None:
    """The note's command removes the model that no engine has, and no other."""
    with ServerProcess(data_dir, capacity=CAPACITY):
        code, _, err = quiet("bench", str(data_dir), "--chunks", "4", "--object-size", "64KiB")
        assert code == 0, err
        assert quiet("flush", str(data_dir))[0] == 0
        assert in_process("inspect", str(data_dir))[1]["store"]["objects"] == 9
        assert follow(err, "--yes")[0] == 0
        assert in_process("inspect", str(data_dir))[1]["store"]["objects"] == 5


def test_a_smaller_capacity_is_resized_by_the_hint(data_dir: Path) -> None:
    """A start that is refused for its capacity names the verb that shrinks this store."""
    serve = ("serve", "--data-dir", str(data_dir), "--pool-dir", str(data_dir.parent))
    code, _, err = forked(*serve, "--pool-size", "64MiB", "--capacity", "16MiB")
    assert code == 2
    [words] = commands(hint_of(err))
    assert quiet(*words)[0] == 0
    assert (data_dir / "store" / data_file.DATA_NAME).stat().st_size == 16 << 20


# -- backup of what is bad ---------------------------------------------------------------------


def test_a_backup_tells_bad_from_evicted(data_dir: Path, root: Path) -> None:
    """A live server's log, the text and the document all say what became of bad chunks."""
    for number in (1, 3):
        alter_chunk(data_dir, key_of(number))
    copy = shutil.copytree(data_dir, root / "b dir")
    with ServerProcess(data_dir, capacity=CAPACITY) as server:
        code, document = in_process("backup", str(data_dir), str(root / "one"))
        assert code == 0
        assert document["left_out_chunks"] == document["left_out_bad_chunks"] == 2
        assert "backup found 2 bad chunks" in server.log()
        wait_until(lambda: is_good(data_dir), "the server has dropped them")
    code, _, err = quiet("backup", str(copy), str(root / "two"))
    assert code == 0
    assert not is_good(copy)
    assert follow(hint_of(err))[0] == 0
    assert is_good(copy)
