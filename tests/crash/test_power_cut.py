"""A power cut: an ext4 image, copied while a real server works on it, is all that is left.

The server is stopped for the copy, so that the image is of one moment; what the kernel has
not written to it by then is what a power cut loses.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lmcache_persist.manifest import read_snapshot
from lmcache_persist.server.offline import check
from lmcache_persist.store.offline import OfflineStore
from support import mounts
from support.load import CHUNK, Ledger, Worker, judge, running
from support.results import SOAKING, kept_on_failure
from support.server import ServerProcess, cli_here, inspect

MakeServer = Callable[..., ServerProcess]
CUTS = 20 if SOAKING else 3
IMAGE_BYTES = 192 << 20
OTHER_BOOT = "00000000-0000-4000-8000-000000000000"


@pytest.fixture
def image(root: Path) -> Path:
    """An empty ext4 image."""
    path = root / "disk.img"
    mounts.make_image(path, IMAGE_BYTES)
    return path


@contextmanager
def server_on(make_server: MakeServer, image: Path, *flags: str) -> Iterator[ServerProcess]:
    """A running server whose data dir lies on the image."""
    root = image.parent
    with mounts.image_mounted(image, root / "disk"):
        server = make_server(*flags, name="disk/d", pool_dir=root / "shm", pool_size="24MiB")
        server.log_path = root / "server.log"
        try:
            yield server.start()
        finally:
            server.kill()


def cut(server: ServerProcess, image: Path) -> Path:
    """Stop everything and keep what has reached the disk."""
    assert server.process is not None
    os.kill(server.process.pid, signal.SIGSTOP)
    left = image.with_name("left.img")
    mounts.copy_as_a_power_cut_leaves_it(image, left)
    return left


@pytest.mark.timeout(90 * CUTS)
def test_nothing_durable_is_lost(make_server: MakeServer, image: Path, seed: int) -> None:
    """By default the binding and every flushed object are on the disk at any moment."""
    rng = random.Random(f"power {seed}")
    print(f"seed {seed}, {CUTS} cuts")
    root, ledger = image.parent, Ledger()
    with kept_on_failure(root, f"power-cut-{seed}"):
        for _ in range(CUTS):
            with server_on(make_server, image) as server:
                binding = bind(server, ledger, seed)
                with running(server.url, ledger, rng.randrange(1 << 30)):
                    threading.Event().wait(rng.uniform(0.1, 1.0))
                    left = cut(server, image)
                    # Confirmed after the cut can only be what was answered before it.
                    server.kill()
            os.replace(left, image)
            with mounts.image_mounted(image, root / "disk"):
                assert read_snapshot(root / "disk" / "d" / "manifest.sqlite").binding == binding
                judge(root / "disk" / "d", ledger)
        assert ledger.durable
        with server_on(make_server, image) as server:
            assert serve_all(server, ledger) > 0
            assert "set aside" not in server.log()
    print(
        f"{CUTS} power cuts: {len(ledger.known)} chunks offered, {len(ledger.durable)} confirmed"
        f" durable, all there; {ledger.checked_objects} objects checked"
    )


def bind(server: ServerProcess, ledger: Ledger, seed: int) -> object:
    """Bind, and store a prompt to begin with; the binding."""
    worker = Worker(server.url, 0, ledger, seed)
    try:
        worker.join()
        worker.flush([worker.store(2)])
        return worker.engine.client.binding
    finally:
        worker.stop()


def serve_all(server: ServerProcess, ledger: Ledger) -> int:
    """The tokens that the first engine hits, each byte compared."""
    worker = Worker(server.url, 0, ledger, 1)
    try:
        worker.join()
        return worker.look_up(20)
    finally:
        worker.stop()


def test_a_cut_right_after_the_bind(make_server: MakeServer, image: Path, seed: int) -> None:
    """A bind that was answered is in manifest and store, nothing stored yet."""
    root = image.parent
    with server_on(make_server, image) as server:
        worker = Worker(server.url, 0, Ledger(), seed)
        try:
            worker.engine.client.wait_connected(30)
            outcome = worker.engine.client.bind(worker.engine.groups, who="cut", timeout_s=20)
            left = cut(server, image)
        finally:
            server.kill()
            worker.stop()
    os.replace(left, image)
    with mounts.image_mounted(image, root / "disk"):
        data_dir = root / "disk" / "d"
        assert read_snapshot(data_dir / "manifest.sqlite").binding == outcome.binding
        with OfflineStore.open(data_dir / "store") as store:
            assert store.meta.stamp == outcome.binding
        assert [str(violation) for violation in check(data_dir)] == []


def test_a_cut_right_after_a_growth(make_server: MakeServer, image: Path, seed: int) -> None:
    """A growth that was answered is on the disk, with all of its blocks, and nothing is lost."""
    root, ledger = image.parent, Ledger()
    with server_on(make_server, image) as server:
        binding = bind(server, ledger, seed)
        assert cli_here("resize", str(server.data_dir), "--capacity", "96MiB")[0] == 0
        left = cut(server, image)
        server.kill()
    os.replace(left, image)
    with mounts.image_mounted(image, root / "disk"):
        data_dir = root / "disk" / "d"
        assert read_snapshot(data_dir / "manifest.sqlite").binding == binding
        stat = (data_dir / "store" / "data.mdb").stat()
        assert stat.st_size == 96 << 20
        assert stat.st_blocks * 512 >= 96 << 20
        judge(data_dir, ledger)
        with OfflineStore.open(data_dir / "store") as store:
            assert store.usage().capacity_bytes == 96 << 20


def test_without_syncs_the_loss_is_seen(make_server: MakeServer, image: Path, seed: int) -> None:
    """The control: relaxed durability loses what was flushed, and the next start is not fooled."""
    root, ledger = image.parent, Ledger()
    with server_on(make_server, image, "--durability", "relaxed") as server:
        worker = Worker(server.url, 0, ledger, seed)
        try:
            worker.join()
            for _ in range(6):
                worker.flush([worker.store(6)])
            left = cut(server, image)
        finally:
            server.kill()
            worker.stop()
    assert ledger.durable
    os.replace(left, image)
    with mounts.image_mounted(image, root / "disk"):
        data_dir = root / "disk" / "d"
        with pytest.raises(AssertionError):
            judge(data_dir, ledger)
        # The same kernel still runs: tell the note that it does not.
        note = data_dir / "store" / "unsynced"
        assert note.exists(), "the note was durable before the first commit"
        note.write_text(OTHER_BOOT)
    with server_on(make_server, image, "--durability", "relaxed") as server:
        assert "lost power" in server.log()
        assert inspect(server.data_dir)["store"]["objects"] == 0
        worker = Worker(server.url, 0, ledger, seed + 1)
        try:
            worker.join()
            hashes = worker.store(3)
            worker.flush([hashes])
            assert worker.engine.lookup(hashes, 3 * CHUNK + 1).tokens == 3 * CHUNK
        finally:
            worker.stop()


def test_relaxed_survives_a_kill(make_server: MakeServer, seed: int) -> None:
    """SIGKILL alone loses nothing of a relaxed store; sync mode then makes it durable."""
    server = make_server("--durability", "relaxed").start()
    ledger = Ledger()
    bind(server, ledger, seed)
    server.kill()
    note = server.data_dir / "store" / "unsynced"
    assert note.exists()
    judge(server.data_dir, ledger)
    server.command[server.command.index("relaxed")] = "sync"
    server.start()
    assert "set aside" not in server.log()
    assert not note.exists()
    assert serve_all(server, ledger) > 0


@pytest.mark.parametrize("durability", ["relaxed", "sync"])
def test_relaxed_is_not_trusted_after_a_cut(
    make_server: MakeServer, seed: int, durability: str
) -> None:
    """Another kernel since a relaxed server died: emptied, under the same binding."""
    server = make_server("--durability", "relaxed").start()
    ledger = Ledger()
    binding = bind(server, ledger, seed)
    server.kill()
    (server.data_dir / "store" / "unsynced").write_text(OTHER_BOOT)
    server.command[server.command.index("relaxed")] = durability
    server.start()
    assert "lost power" in server.log()
    assert read_binding_id(server) == getattr(binding, "binding_id", None)
    assert inspect(server.data_dir)["store"]["objects"] == 0
    assert server.terminate() == 0
    server.start()
    assert server.log().count("lost power") == 1


def test_a_relaxed_server_that_stopped_well_is_trusted(make_server: MakeServer, seed: int) -> None:
    """A clean end syncs; what the kernel did afterwards is of no interest."""
    server = make_server("--durability", "relaxed").start()
    ledger = Ledger()
    bind(server, ledger, seed)
    assert server.terminate() == 0
    assert not (server.data_dir / "store" / "unsynced").exists()
    server.start()
    assert serve_all(server, ledger) > 0


def test_an_unbound_relaxed_store_starts_after_a_cut(make_server: MakeServer) -> None:
    """Nothing was bound and nothing is stored, so nothing is refused."""
    server = make_server("--durability", "relaxed").start()
    server.kill()
    (server.data_dir / "store" / "unsynced").write_text(OTHER_BOOT)
    server.start()
    assert inspect(server.data_dir)["binding"] is None


def test_a_foreign_store_is_refused_even_after_a_cut(make_server: MakeServer, seed: int) -> None:
    """The note of a power loss is no reason to set somebody else's store aside."""
    servers = [make_server("--durability", "relaxed", name=name) for name in ("a", "b")]
    for server in servers:
        server.start()
        bind(server, Ledger(), seed)
        server.kill()
    stores = [server.data_dir / "store" for server in servers]
    os.rename(stores[0], stores[0].with_name("mine"))
    os.rename(stores[1], stores[0])
    (stores[0] / "unsynced").write_text(OTHER_BOOT)
    code, log = servers[0].refused()
    assert code == 5
    assert "uuid" in log
    assert (stores[0] / "data.mdb").exists()


def read_binding_id(server: ServerProcess) -> str:
    """As ``inspect`` shows it."""
    return str(inspect(server.data_dir)["binding"]["binding_id"])
