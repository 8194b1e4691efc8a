"""Whoever is not the owner of a data dir changes nothing in it, root neither."""

from __future__ import annotations

import os
import pwd
import shutil
from pathlib import Path

import pytest

from lmcache_persist.store.aside import set_aside
from support.altering import alter_chunk
from support.data_dirs import key_of, make
from support.files import snapshot
from support.forked import NOBODY, as_nobody, forked
from support.hints import commands, hint_of
from support.verbs import quiet


def give_away(folder: Path) -> None:
    """Make a folder and all in it a service user's."""
    if os.geteuid() != 0:
        pytest.skip("needs root to give files away")
    folder.parent.chmod(0o755)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, NOBODY, NOBODY)


def owners(folder: Path) -> set[tuple[int, int]]:
    """Users and groups of a folder and all in it."""
    found = [path.stat() for path in (folder, *folder.rglob("*"))]
    return {(one.st_uid, one.st_gid) for one in found}


@pytest.fixture
def data_dir(root: Path) -> Path:
    """A service user's data dir with something to do for each verb; its name has to be quoted."""
    folder = make(root / "a dir", chunks=(5,), capacity_bytes=32 << 20)
    alter_chunk(folder, key_of(1))
    give_away(folder)
    return folder


VERBS: dict[str, tuple[str, ...]] = {
    "verify": ("--repair",),
    "resize": ("--capacity", "64MiB"),
    "shrink": ("--capacity", "16MiB", "--yes"),
    "prune": ("--down-to", "0B", "--yes"),
    "rebind": ("--chunk-size", "1088", "--yes"),
    "recover": (),
    "recover aside": ("--set-aside",),
    "reset": ("--yes",),
}
"""What changes a data dir while no server runs."""


@pytest.mark.parametrize("name", VERBS)
def test_root_is_sent_to_the_owner(data_dir: Path, name: str) -> None:
    """Nothing is changed; the hint's command does it, and all that it makes is the owner's."""
    verb, flags = {"shrink": "resize"}.get(name, name.partition(" ")[0]), VERBS[name]
    if name == "recover":
        (data_dir / "manifest.sqlite").unlink()
    if "aside" in name:
        shutil.copytree(set_aside(data_dir / "store"), data_dir / "store")
        give_away(data_dir)
    before = snapshot(data_dir)
    code, _, err = quiet(verb, str(data_dir), *flags)
    assert (code, f"belongs to user id {NOBODY}, expected 0" in err) == (5, True), err
    assert snapshot(data_dir) == before
    assert f"sudo -u {pwd.getpwuid(NOBODY).pw_name} lmcache-persist {verb} '{data_dir}'" in err
    [words] = commands(hint_of(err))
    assert words == [verb, str(data_dir), *flags]
    code, _, err = as_nobody(*words)
    assert code == 0, err
    assert owners(data_dir) == {(NOBODY, NOBODY)}


def test_root_restores_into_no_folder_of_another_user(data_dir: Path, root: Path) -> None:
    """A backup of it may be made by root; what is restored is for the owner to make."""
    before, backup, target = snapshot(data_dir), root / "b", root / "empty"
    assert quiet("backup", str(data_dir), str(backup))[0] == 0
    assert (snapshot(data_dir), owners(data_dir)) == (before, {(NOBODY, NOBODY)})
    give_away(backup)
    target.mkdir()
    give_away(target)
    code, _, err = quiet("restore", str(backup), str(target))
    assert code == 5
    assert not os.listdir(target)
    code, _, err = as_nobody(*commands(hint_of(err))[0])
    assert code == 0, err
    assert owners(target) == {(NOBODY, NOBODY)}


def test_root_does_not_serve_it(data_dir: Path) -> None:
    """As with the verbs."""
    before = snapshot(data_dir)
    code, _, err = forked("serve", "--data-dir", str(data_dir))
    assert code == 5
    assert commands(hint_of(err)) == [["serve", "--data-dir", str(data_dir)]]
    assert snapshot(data_dir) == before
