"""Refusals by a real server: what they say, and that they change nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from lmcache_persist.cli import main
from lmcache_persist.connector import CacheClient, ClientOptions
from lmcache_persist.errors import (
    ChunkTooLarge,
    GeometryError,
    IncompatibleAlignment,
    ManifestBusy,
    NoCacheableGroup,
)
from lmcache_persist.geometry import Group, GroupKind
from lmcache_persist.server.metrics import REJECTION_CODES
from lmcache_persist.server.refusals import MAX_WAITING, WAYS_OUT
from support.emulated import EmulatedEngine
from support.files import snapshot
from support.in_process import local_server
from support.server import ServerProcess, inspect, run_cli
from support.waiting import wait_until

PATIENT = ClientOptions(request_timeout_s=5.0)
MakeServer = Callable[..., ServerProcess]


def negotiate(server: ServerProcess, groups: str, *flags: str) -> tuple[int, dict[str, object]]:
    """The verb's exit status and document."""
    done = run_cli("negotiate", "--server", server.url, "--groups", groups, "--json", *flags)
    return done.returncode, json.loads(done.stdout)


def test_negotiation_binds_once(make_server: MakeServer) -> None:
    """The first geometry wins, the divisor of its size is compatible, another is refused."""
    server = make_server().start()
    code, document = negotiate(server, "640,0,640,640,640,640", "--dry-run")
    assert (code, document["outcome"]) == (0, "bound")
    assert inspect(server.data_dir)["binding"] is None
    code, document = negotiate(server, "640,0,640,640,640,640")
    assert (code, document["outcome"]) == (0, "bound")
    assert inspect(server.data_dir)["binding"]["chunk_size"] == 640
    code, document = negotiate(server, "320")
    assert (code, document["outcome"]) == (0, "compatible")
    code, document = negotiate(server, "544")
    assert (code, document["outcome"]) == (3, "refused")
    assert "640" in str(document["error"])
    assert "544" in str(document["error"])
    rejections = inspect(server.data_dir)["rejections"]
    assert [(row["reason"], row["count"]) for row in rejections] == [("incompatible_alignment", 1)]
    assert negotiate(server, "544")[0] == 3
    assert [row["count"] for row in inspect(server.data_dir)["rejections"]] == [2]


@pytest.mark.parametrize(
    ("groups", "base", "size"),
    [("400", 256, 400), ("544", 1024, 1088), ("400", 1024, 1200), ("32", 256, 256)],
)
def test_sizes_from_the_field(make_server: MakeServer, groups: str, base: int, size: int) -> None:
    """A fresh server rounds the base up to the geometry's alignment."""
    server = make_server().start()
    code, document = negotiate(server, groups, "--base", str(base))
    assert (code, document["outcome"]) == (0, "bound")
    assert inspect(server.data_dir)["binding"]["chunk_size"] == size


def test_nonsense_geometries_are_recorded_and_bind_nothing(make_server: MakeServer) -> None:
    """Inspect lists each refusal that the metric counts, with a way out; a good one binds."""
    server = make_server().start()
    for groups in ("0,0", "640,-16", "0,0", "16.5"):  # the last one is not even sent
        assert negotiate(server, groups)[0] in (2, 3)
    document = inspect(server.data_dir)
    assert document["binding"] is None
    found = {row["reason"]: row["count"] for row in document["rejections"]}
    assert found == {"no_cacheable_group": 2, "invalid_tokens_per_block": 1}
    assert {code: n for code, n in document["server"]["rejections"].items() if n} == found
    assert all(row["hint"] for row in document["rejections"])
    assert negotiate(server, "640")[1]["outcome"] == "bound"


def test_no_refusal_is_lost_in_a_flood(root: Path) -> None:
    """More of them than may wait, also while the manifest fails: each one counted in the end."""
    flood = MAX_WAITING + 9
    with local_server(root) as server, CacheClient(server.url, kind="cli") as client:
        client.wait_connected(20)
        hold = threading.Event()
        server.state.clerk.submit(hold.wait, 60)
        try:
            with mock.patch.object(
                server.state.manifest, "record_rejections", side_effect=ManifestBusy("locked")
            ) as failing:
                for number in range(1, flood + 1):
                    with pytest.raises(GeometryError):
                        client.bind([Group(GroupKind.FULL, -number)], timeout_s=20)
                with pytest.raises(NoCacheableGroup):
                    client.bind([Group(GroupKind.SCRATCH, 0)], timeout_s=20)
                hold.set()
                wait_until(lambda: failing.called, "the clerk tries")
                server.state.clerk.submit(lambda: None).result(20)
        finally:
            hold.set()
        with pytest.raises(NoCacheableGroup):
            client.bind([Group(GroupKind.SCRATCH, 0)], timeout_s=20)

        def recorded() -> dict[str, int]:
            rows = server.state.manifest.rejections()
            assert len(rows) <= MAX_WAITING + 2
            sums = Counter[str]()
            for row in rows:
                sums[row.reason] += row.count
            return dict(sums)

        expected = {"invalid_tokens_per_block": flood, "no_cacheable_group": 2}
        wait_until(lambda: recorded() == expected, "each one is recorded")
        counted = server.service.stats()["rejections"]
        assert {code: count for code, count in counted.items() if count} == expected


def test_a_refusal_tells_both_alignments_apart(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The asker's and the server's alignment have a line each, and the hint's size is plan's."""
    with local_server(root) as server:
        words = ["negotiate", "--server", server.url, "--groups"]
        assert main([*words, "544"]) == 0
        capsys.readouterr()
        assert main([*words, "640", "--base", "1000"]) == 3
        out, talk = capsys.readouterr()
        assert "chunk size: 544 tokens (auto)\n" in out
        assert "required alignment of these groups: 640 tokens\n" in out
        assert "required alignment of the binding: 544 tokens\n" in out
        assert "would bind it to 1280)" in talk
        assert main([*words, "0"]) == 3
        assert "of these groups" not in capsys.readouterr().out


def test_every_refusal_has_a_way_out() -> None:
    """Of each error that a bind or a registration ends with, inspect can say what to do."""
    assert [code for code in REJECTION_CODES if not WAYS_OUT.get(code)] == []


def test_fixed_sizes_stay_fixed(make_server: MakeServer) -> None:
    """--chunk-size N is bound at start; what does not divide it is refused, the rest served."""
    server = make_server("--chunk-size", "256").start()
    assert inspect(server.data_dir)["binding"]["mode"] == "fixed"
    with EmulatedEngine(server.url, [544], options=PATIENT) as engine:
        with pytest.raises(IncompatibleAlignment, match=r"256.*544.*group 0"):
            engine.join()
    with EmulatedEngine(server.url, [64], options=PATIENT) as engine:
        engine.join()
        hashes = engine.hashes(list(range(257)))
        assert engine.store(hashes) == 1
        assert engine.lookup(hashes, 257).tokens == 256
    assert inspect(server.data_dir)["rejections"][0]["reason"] == "incompatible_alignment"


def test_another_fixed_size_is_refused_at_start(make_server: MakeServer) -> None:
    """A start with another --chunk-size ends, names both numbers, changes not one byte."""
    server = make_server().start()
    assert negotiate(server, "544")[0] == 0
    server.kill()
    before = snapshot(server.data_dir)
    server.command += ["--chunk-size", "256"]
    code, log = server.refused()
    assert code == 5
    assert "256" in log
    assert "544" in log
    assert "Traceback" not in log
    assert snapshot(server.data_dir) == before
    del server.command[-2:]
    server.command += ["--chunk-size", "544"]
    server.start()
    assert inspect(server.data_dir)["binding"]["mode"] == "auto"


def test_another_base_does_not_move_a_binding(make_server: MakeServer) -> None:
    """A restart with another base keeps the bound size and warns once."""
    server = make_server().start()
    assert negotiate(server, "640")[0] == 0
    bound = inspect(server.data_dir)["binding"]
    server.terminate()
    server.command += ["--base-chunk-size", "1024"]
    server.start()
    assert inspect(server.data_dir)["binding"] == bound
    assert server.log().count("it stays at chunk size 640") == 1
    assert negotiate(server, "1280")[0] == 3


def test_a_second_server_is_refused(make_server: MakeServer, root: Path) -> None:
    """Also through a symlink the second server names the first, which still answers."""
    first = make_server().start()
    (root / "link").symlink_to(first.data_dir)
    for name in ("d", "link"):
        second = make_server(name=name, pool_dir=first.pool_dir)
        second.log_path = root / "second.log"
        code, log = second.refused()
        assert code != 0
        assert first.url in log
        assert re.search(r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ", log)
        assert "Traceback" not in log
    assert negotiate(first, "544")[0] == 0


def test_a_chunk_larger_than_half_the_pool_is_refused(make_server: MakeServer) -> None:
    """Registration, not the first load, says that the pool is too small, and how large."""
    server = make_server(pool_size="4MiB").start()
    with EmulatedEngine(server.url, [256], object_bytes=3 << 20, options=PATIENT) as engine:
        with pytest.raises(ChunkTooLarge, match="--pool-size"):
            engine.join()


def test_a_chunk_that_no_disk_tier_of_this_size_takes_is_refused(make_server: MakeServer) -> None:
    """Registration, not every store for ever, says that the capacity is too small."""
    server = make_server(pool_size="64MiB", capacity="16MiB").start()
    with EmulatedEngine(server.url, [256, 256], object_bytes=7 << 20, options=PATIENT) as engine:
        with pytest.raises(ChunkTooLarge, match="--capacity of 16MiB"):
            engine.join()
    assert inspect(server.data_dir)["rejections"][0]["reason"] == "chunk_too_large"


@pytest.fixture
def small_mount(root: Path) -> Iterator[Path]:
    """A tmpfs of 64 MiB."""
    folder = root / "mount"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a tmpfs needs root")
    subprocess.run(command, check=True, timeout=20)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True, timeout=20)


def test_a_pool_larger_than_its_file_system_is_refused(
    make_server: MakeServer, small_mount: Path
) -> None:
    """The refusal has both numbers; it is no signal."""
    server = make_server(pool_dir=small_mount, pool_size="256MiB")
    code, log = server.refused()
    assert code > 0
    assert str(256 << 20) in log
    assert str(64 << 20) in log


def test_a_store_larger_than_its_file_system_is_refused(
    make_server: MakeServer, small_mount: Path
) -> None:
    """Capacity beyond the disk ends the start with both numbers and leaves no half store."""
    server = make_server(name="mount/d", pool_dir=small_mount.parent / "shm", capacity="256MiB")
    server.log_path = small_mount.parent / "server.log"
    code, log = server.refused()
    assert code > 0
    assert str(256 << 20) in log or str((256 << 20) + (1 << 20)) in log
    assert not (server.data_dir / "store" / "data.mdb").exists()


@pytest.mark.parametrize(
    ("code", "there"),
    [
        ("disk_too_small", "absent"),
        ("disk_too_small", "foreign"),
        ("pool_too_small", "empty"),
        ("config", "foreign"),
    ],
)
def test_a_refused_first_start_leaves_nothing(
    make_server: MakeServer, server: ServerProcess, root: Path, code: str, there: str
) -> None:
    """No disk, no memory, no endpoint: a data dir that was new is as it was, or not there."""
    folder = root / "parent" / "new"
    folder.parent.mkdir()
    if there != "absent":
        folder.mkdir(mode=0o755)
    if there == "foreign":
        (folder / "notes.txt").write_text("not ours")
    options = {"disk_too_small": {"capacity": "32TiB"}, "pool_too_small": {"pool_size": "32TiB"}}
    flags = ("--listen", server.url, "--chunk-size", "512") if code == "config" else ()
    pool = root / "pool"
    refused = make_server(*flags, name="parent/new", pool_dir=pool, **options.get(code, {}))
    refused.log_path = root / "refused.log"
    before = snapshot(folder.parent)
    status, log = refused.refused()
    assert status > 0
    assert f"[{code}]" in log
    after = snapshot(folder.parent)
    if there != "absent":
        # Names were made and removed in it; all else is the same.
        assert after["new"][0] == before["new"][0]
        after["new"] = before["new"]
    assert after == before
    assert list(refused.pool_dir.iterdir()) == []


def test_a_refused_start_of_an_old_data_dir_takes_nothing_away(make_server: MakeServer) -> None:
    """What a server had before, bound or not, stays through a refusal."""
    server = make_server().start()
    assert server.terminate() == 0
    names = {path.name for path in server.data_dir.rglob("*")}
    server.command[server.command.index("--pool-size") + 1] = "32TiB"
    status, log = server.refused()
    assert status == 5
    assert "[pool_too_small]" in log
    assert {path.name for path in server.data_dir.rglob("*")} == names


def test_a_refused_start_of_an_old_data_dir_changes_no_byte(
    make_server: MakeServer, root: Path
) -> None:
    """An address or memory that is not to be had: no start is noted, nothing opened to write."""
    other = make_server("--listen", "tcp://127.0.0.1:0", name="other").start()
    old = make_server("--chunk-size", "544", name="old").start()
    assert old.terminate() == 0
    (root / "plain").write_text("not a socket")
    before, command = snapshot(old.data_dir), list(old.command)
    with socket.create_server(("127.0.0.1", 0)) as web, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(root / "taken"))
        unix.listen()
        for flags in (
            ("--http", f"127.0.0.1:{web.getsockname()[1]}"),
            ("--listen", f"ipc://{root}/taken"),
            ("--listen", other.url),
            ("--listen", f"ipc://{root}/nowhere/s"),
            ("--listen", f"ipc://{root}/plain"),
            ("--capacity", "32TiB"),
            ("--capacity", "16MiB"),
            ("--pool-size", "32TiB"),
        ):
            old.command = [*command, *flags]
            status, log = old.refused()
            assert status in (2, 5), flags
            assert "error: " in log, flags
            after = snapshot(old.data_dir)
            if flags[0] == "--pool-size":
                # It may take a while, so it says who starts; and takes that back.
                assert after["server.lock"][2] == before["server.lock"][2]
                after["server.lock"] = before["server.lock"]
            assert after == before, flags
    assert (root / "plain").read_text() == "not a socket"
    assert len(inspect(old.data_dir)["boots"]) == 1


def test_a_copy_without_its_store_gets_none_while_the_first_is_served(
    make_server: MakeServer, root: Path
) -> None:
    """The pool of the same store says no before a store is made; what was made is taken back."""
    first = make_server().start()
    assert negotiate(first, "544")[0] == 0
    copy = make_server(name="copy", pool_dir=first.pool_dir)
    copy.data_dir.mkdir(mode=0o700)
    first.terminate()
    shutil.copy2(first.data_dir / "manifest.sqlite", copy.data_dir)
    first.start()
    before = snapshot(copy.data_dir)
    status, log = copy.refused()
    assert status == 5
    assert "[data_dir_locked]" in log
    assert snapshot(copy.data_dir) == before


def test_left_over_bytes_without_their_manifest_are_refused(make_server: MakeServer) -> None:
    """A store with a binding beside no manifest is refused and left alone."""
    server = make_server().start()
    assert negotiate(server, "544")[0] == 0
    server.terminate()
    kept = (server.data_dir / "manifest.sqlite").read_bytes()
    (server.data_dir / "manifest.sqlite").unlink()
    before = snapshot(server.data_dir)
    code, log = server.refused()
    assert code == 5
    assert "manifest" in log
    assert snapshot(server.data_dir) == before
    (server.data_dir / "manifest.sqlite").write_bytes(kept)
    server.start()


def test_a_lost_or_broken_store_starts_empty_under_the_same_binding(
    make_server: MakeServer,
) -> None:
    """Without its store, or with one cut short, the server says so and keeps the binding."""
    server = make_server().start()
    assert negotiate(server, "544")[0] == 0
    bound = inspect(server.data_dir)["binding"]
    server.terminate()
    shutil.rmtree(server.data_dir / "store")
    server.start()
    assert inspect(server.data_dir)["binding"] == bound
    assert "the store is gone" in server.log()
    assert "nothing tells how large" not in server.log()  # --capacity is set
    server.terminate()
    os.truncate(server.data_dir / "store" / "data.mdb", 4096)
    server.start()
    assert inspect(server.data_dir)["binding"] == bound
    assert "set aside" in server.log()
    with EmulatedEngine(server.url, [544], options=PATIENT) as engine:
        engine.join()
        hashes = engine.hashes(list(range(545)))
        assert engine.store(hashes) == 1
        assert engine.lookup(hashes, 545).tokens == 544


def test_a_store_without_its_meta_pages_keeps_its_size(make_server: MakeServer) -> None:
    """Set aside by a start without --capacity, it is replaced by one of the same size."""
    server = make_server(capacity="32MiB").start()
    assert negotiate(server, "544")[0] == 0
    server.terminate()
    with (server.data_dir / "store" / "data.mdb").open("r+b") as file:
        file.write(b"x" * 8192)
    at = server.command.index("--capacity")
    del server.command[at : at + 2]
    server.start()
    assert inspect(server.data_dir)["store"]["capacity_bytes"] == 32 << 20
    assert "capacity = 32MiB (not set: the store keeps its size)" in server.log()


def test_a_lost_store_that_has_no_room_by_default_is_refused_with_the_flag(
    make_server: MakeServer, small_mount: Path
) -> None:
    """Nobody set a capacity: a warning has the default, and the hint says which flag sets one."""
    server = make_server(
        "--log-format",
        "json",
        name="mount/d",
        pool_dir=small_mount.parent / "shm",
        capacity="16MiB",
    )
    server.log_path = small_mount.parent / "server.log"
    server.start()
    assert negotiate(server, "544")[0] == 0
    server.terminate()
    shutil.rmtree(server.data_dir / "store")
    at = server.command.index("--capacity")
    del server.command[at : at + 2]
    code, log = server.refused()
    assert code == 5
    assert "nothing tells how large the store" in log
    assert "hint: set --capacity" in log
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    assert ["[disk_too_small]" in one["message"] for one in lines if one["level"] == "error"] == [
        True
    ]


def test_an_endpoint_in_use_is_not_taken_over(make_server: MakeServer, root: Path) -> None:
    """A server told to listen where another one does ends; that one still answers."""
    first = make_server("--listen", f"ipc://{root}/shared.sock").start()
    second = make_server("--listen", first.url, name="other")
    code, log = second.refused()
    assert code != 0
    assert "another process listens" in log
    assert negotiate(first, "544")[0] == 0
    first.kill()
    second.start()
    assert negotiate(second, "640")[1]["outcome"] == "bound"
