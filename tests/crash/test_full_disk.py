"""Full and read-only disks, short shared memory, objects that are too large."""

from __future__ import annotations

import os
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lmcache_persist.connector import ClientOptions
from lmcache_persist.errors import ChunkTooLarge, ManifestError
from support import mounts
from support.emulated import EmulatedEngine
from support.files import snapshot
from support.server import ServerProcess, inspect, run_cli
from support.waiting import wait_until

MakeServer = Callable[..., ServerProcess]
OPTIONS = ClientOptions(request_timeout_s=10.0)
CHUNK = 256
MIB = 1 << 20
CAPACITY = 48 * MIB


@pytest.fixture
def small(root: Path) -> Iterator[Path]:
    """A tmpfs of 64 MiB, for the data dir alone."""
    with mounts.tmpfs(root / "small", "64m") as folder:
        yield folder


@pytest.fixture
def server(make_server: MakeServer, small: Path) -> ServerProcess:
    """A server, not started, whose data dir is on the small disk and whose log is not."""
    server = make_server(name="small/d", pool_dir=small.parent / "shm", capacity=str(CAPACITY))
    server.log_path = small.parent / "server.log"
    return server


def engine_of(server: ServerProcess, object_bytes: int = MIB, **options: object) -> EmulatedEngine:
    """An engine that has joined."""
    options = {"object_bytes": object_bytes, "options": OPTIONS, **options}
    return EmulatedEngine(server.url, [CHUNK], **options).join()  # type: ignore[arg-type]


def store(engine: EmulatedEngine, prompt: int, num_chunks: int) -> list[bytes]:
    """Store a numbered prompt and flush it."""
    hashes = engine.hashes([prompt, *range(CHUNK * num_chunks)])
    assert engine.store(hashes) == num_chunks
    engine.client.flush(30)
    return list(hashes)


def hit(engine: EmulatedEngine, hashes: list[bytes]) -> int:
    """Chunks of a prompt that are hit, byte for byte."""
    return engine.lookup(hashes, CHUNK * len(hashes) + 1).tokens // CHUNK


def lines_of_trouble(log: str) -> list[str]:
    """Warnings and errors, but those about settings."""
    return [line for line in log.splitlines() if re.search(r" (WARNING|ERROR|CRITICAL) ", line)]


def test_full_before(server: ServerProcess, small: Path) -> None:
    """A disk without the room is refused with both numbers, and nothing is left on it."""
    mounts.fill(small, leave_bytes=20 * MIB)
    status, log = server.refused()
    assert status == 5
    assert log.count("error: ") == 1
    assert "[disk_too_small]" in log
    numbers = [int(number) for number in re.findall(r"\d{7,}", log.split("error: ")[1])]
    assert any(CAPACITY <= number <= CAPACITY + 2 * MIB for number in numbers)
    assert any(19 * MIB < number <= 20 * MIB for number in numbers)
    assert not (server.data_dir / "store").exists()
    assert "Traceback" not in log


def test_full_while_running_and_at_the_next_start(server: ServerProcess, small: Path) -> None:
    """A foreign file takes the last byte: stores, loads, a kill, a start, a stop, all go on."""
    server.start()
    with engine_of(server) as engine:
        first = store(engine, 1, 4)
        foreign = mounts.fill(small)
        assert os.statvfs(small).f_bavail == 0
        for prompt in range(2, 22):  # more than the capacity: evictions, too
            last = store(engine, prompt, 3)
            assert hit(engine, last) == 3
        found = engine.client.stats(20)
        assert (found["writer"]["failures"], found["counters"]["dropped_chunks"]) == (0, 0)
        assert inspect(server.data_dir)["store"]["objects"] > 10
        assert hit(engine, first) in range(5)
    for end in (server.kill, server.terminate, server.kill):
        end()
        server.start()
        with engine_of(server) as engine:
            assert hit(engine, last) == 3
    assert "Traceback" not in server.log()
    server.terminate()
    foreign.unlink()
    assert run_cli("verify", str(server.data_dir)).returncode == 0


def test_a_full_disk_says_little(server: ServerProcess, small: Path) -> None:
    """What the manifest cannot take costs no engine, and at most a line of each kind."""
    server.start()
    with engine_of(server) as engine:
        store(engine, 1, 2)
        mounts.fill(small)
        for number in range(300):
            # Each is a row for the manifest: a model that it has not seen.
            with engine_of(server, 4096, name=f"e{number}", changes={"weights": f"w{number}"}):
                pass
        other = engine_of(server, 4096, name="last", changes={"weights": "last"})
        with other:
            assert hit(other, store(other, 5, 2)) == 2
        assert engine.client.stats(20)["writer"]["failures"] == 0
    log = server.log()
    complaints = [line for line in lines_of_trouble(log) if "is not recorded" in line]
    assert 1 <= len(complaints) <= 2
    assert "Traceback" not in log
    assert server.terminate() == 0


def test_models_are_recorded_once_there_is_room(server: ServerProcess, small: Path) -> None:
    """A model that met a full disk is verified clean all the same."""
    server.start()
    with engine_of(server, 4096, changes={"weights": "bound"}):
        wait_until(lambda: len(inspect(server.data_dir)["models"]) == 1, "the first has its row")
    foreign = mounts.fill(small)
    with engine_of(server, 4096) as engine:
        store(engine, 1, 2)
    server.kill()
    foreign.unlink()
    assert run_cli("verify", str(server.data_dir)).returncode == 0
    server.start()
    with engine_of(server, 4096):
        wait_until(lambda: len(inspect(server.data_dir)["models"]) == 2, "the model has its row")


def test_a_bind_on_a_full_disk(server: ServerProcess, small: Path) -> None:
    """Bound is what is durable: the engine is told, and with room the same bind holds."""
    server.start()
    foreign = mounts.fill(small)
    with EmulatedEngine(server.url, [CHUNK], options=OPTIONS) as engine:
        engine.client.wait_connected(20)
        with pytest.raises(ManifestError, match="make room"):
            engine.client.bind(engine.groups, timeout_s=20)
        assert inspect(server.data_dir)["binding"] is None
        foreign.unlink()
        engine.join()
        assert hit(engine, store(engine, 1, 2)) == 2


def test_the_room_for_a_restart_is_kept(server: ServerProcess, small: Path) -> None:
    """The ballast is there while there is room, given up for a start, and made again."""
    server.start()
    ballast = server.data_dir / "ballast"
    assert ballast.stat().st_blocks * 512 >= MIB
    assert ballast.stat().st_mode & 0o777 == 0o600
    server.terminate()
    foreign = mounts.fill(small)
    server.start()
    assert not ballast.exists()
    server.terminate()
    foreign.unlink()
    server.start()
    assert ballast.exists()


def test_a_start_that_cannot_be_recorded(server: ServerProcess, small: Path) -> None:
    """Without even that room the server starts and serves; only its row is missing."""
    server.start()
    with engine_of(server) as engine:
        hashes = store(engine, 1, 2)
    server.kill()
    (server.data_dir / "ballast").unlink()
    foreign = mounts.fill(small)
    server.start()
    assert "this start is not recorded" in server.log()
    with engine_of(server) as engine:
        assert hit(engine, hashes) == 2
        assert hit(engine, store(engine, 2, 2)) == 2
    assert server.terminate() == 0
    assert "Traceback" not in server.log()
    foreign.unlink()
    server.start()
    assert inspect(server.data_dir)["store"]["objects"] == 4


def test_200_objects_through_64_mib(make_server: MakeServer, seed: int) -> None:
    """Case D1: 200 x 1 MiB, then mixed sizes: evicted, written, read, and never full."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    server = make_server(capacity="64MiB", pool_size="32MiB").start()
    written = objects = 0
    with engine_of(server) as engine:
        for prompt in range(50):
            hashes = store(engine, prompt, 4)
            assert hit(engine, hashes) == 4
            written += 4
    for number in range(12):
        size = rng.choice([8 * 1024, 100_000, MIB - 16, MIB, 3 * MIB + 7, 4 * MIB])
        with engine_of(server, size, name=f"e{number}", changes={"weights": str(size)}) as engine:
            for prompt in range(6):
                hashes = store(engine, 1000 * number + prompt, 2)
                assert hit(engine, hashes) == 2
                written += 2
            found = engine.client.stats(20)
    assert found["writer"]["failures"] == 0
    assert found["counters"]["dropped_chunks"] == 0
    assert found["counters"]["disk_evictions"] > 100
    document = inspect(server.data_dir)["store"]
    assert document["bytes"] <= 64 * MIB
    objects = document["objects"]
    server.kill()
    assert inspect(server.data_dir)["store"]["objects"] == objects
    assert run_cli("verify", str(server.data_dir)).returncode == 0
    assert [line for line in lines_of_trouble(server.log()) if "disk" in line] == []
    print(f"{written} chunks written, {objects} there at the end")


def test_an_object_larger_than_the_capacity_evicts_nothing(make_server: MakeServer) -> None:
    """Its engine is refused with both sizes before it stores; what was there stays."""
    server = make_server(capacity="16MiB", pool_size="96MiB").start()
    with engine_of(server) as engine:
        kept = store(engine, 1, 6)
        before = inspect(server.data_dir)["store"]["objects"]
        with (
            pytest.raises(ChunkTooLarge, match=r"takes 20.01 MiB .* capacity of 16MiB"),
            engine_of(server, 20 * MIB, name="big", changes={"weights": "big"}),
        ):
            pass
        assert engine.client.stats(20)["counters"]["disk_evictions"] == 0
        assert inspect(server.data_dir)["store"]["objects"] == before == 6
    server.kill()
    server.start()
    with engine_of(server) as engine:
        assert hit(engine, kept) == 6


def test_a_pool_larger_than_its_folder(make_server: MakeServer, root: Path) -> None:
    """Refused at start with both numbers, no signal; the data dir is as it was."""
    with mounts.tmpfs(root / "shm", "64m") as shm:
        server = make_server(pool_dir=shm, pool_size="32MiB").start()
        with engine_of(server):
            pass
        server.terminate()
        before = inspect(server.data_dir)
        server.command[server.command.index("--pool-size") + 1] = "256MiB"
        status, log = server.refused()
        assert status == 5
        assert "[pool_too_small]" in log
        assert str(256 * MIB) in log
        assert str(64 * MIB) in log
        assert "Traceback" not in log
        assert list(shm.glob("*.pool")) == []
        assert inspect(server.data_dir) == before


def test_a_pool_whose_room_is_taken(make_server: MakeServer, root: Path) -> None:
    """The start waits the bounded time, says for what, then names both numbers."""
    with mounts.tmpfs(root / "shm", "64m") as shm:
        foreign = mounts.fill(shm, leave_bytes=10 * MIB)
        server = make_server("--pool-wait", "0.5", pool_dir=shm, pool_size="32MiB")
        status, log = server.refused()
        assert status == 5
        assert "[pool_too_small]" in log
        assert str(32 * MIB) in log
        assert log.count("waiting up to 0.5 s") == 1
        foreign.unlink()
        server.start()


def test_room_taken_after_the_start(make_server: MakeServer, root: Path) -> None:
    """The pool is allocated in full: a foreign file in its folder costs nothing."""
    with mounts.tmpfs(root / "shm", "48m") as shm:
        server = make_server(pool_dir=shm, pool_size="32MiB").start()
        mounts.fill(shm)
        with engine_of(server) as engine:
            for prompt in range(12):
                assert hit(engine, store(engine, prompt, 4)) == 4


def test_a_read_only_mount(make_server: MakeServer, root: Path) -> None:
    """No server starts on it, in one line; inspect and verify read it as it is."""
    server = make_server().start()
    with engine_of(server) as engine:
        store(engine, 1, 3)
    server.kill()
    before = snapshot(server.data_dir)
    with mounts.read_only(server.data_dir):
        status, log = server.refused()
        assert status == 5
        assert "[data_dir_unusable]" in log
        assert "read-only" in log
        assert "Traceback" not in log
        assert inspect(server.data_dir)["store"]["objects"] == 3
        assert run_cli("verify", str(server.data_dir)).returncode == 0
    assert snapshot(server.data_dir) == before
    server.start()
    with engine_of(server) as engine:
        assert hit(engine, list(engine.hashes([1, *range(CHUNK * 3)]))) == 3


def test_a_disk_that_turns_read_only(make_server: MakeServer, root: Path) -> None:
    """As the kernel does after an error: what is in memory is served, the server lives."""
    image = root / "disk.img"
    mounts.make_image(image, 128 * MIB)
    with mounts.image_mounted(image, root / "disk"):
        server = make_server(name="disk/d", pool_dir=root / "shm")
        server.log_path = root / "server.log"
        server.start()
        with engine_of(server) as engine:
            hashes = store(engine, 1, 3)
            mounts.break_file_system(root / "disk")
            assert hit(engine, hashes) == 3
            for prompt in range(2, 6):
                assert engine.store(engine.hashes([prompt, *range(CHUNK)])) == 1
            engine.client.flush(30)
            found = engine.client.stats(20)
            assert found["writer"]["failures"] > 0
            assert found["counters"]["dropped_chunks"] > 0
            assert hit(engine, hashes) == 3
        assert len([line for line in lines_of_trouble(server.log()) if "disk tier" in line]) == 1
        assert "Traceback" not in server.log()
        assert server.terminate() == 1
        assert "Traceback" not in server.log()


NETWORK = """
import sys
from lmcache_persist import filesystems
from lmcache_persist.cli import main
real = filesystems.file_system_of
def stub(path):
    pool = path.name.endswith(".shm")
    return real(path) if pool else filesystems.FileSystem("nfs4", "/srv", False)
filesystems.file_system_of = stub
sys.argv = ["lmcache-persist", *sys.argv[1:]]
sys.exit(main())
"""


@pytest.mark.parametrize("allowed", [False, True])
def test_a_network_file_system(make_server: MakeServer, allowed: bool) -> None:
    """Refused before anything is made, naming the type and the flag; with it, one warning."""
    server = make_server(*(["--allow-network-fs"] if allowed else []))
    server.command = [sys.executable, "-c", NETWORK, *server.command[3:]]
    if allowed:
        server.start()
        assert server.log().count("nfs4") == 1
        return
    status, log = server.refused()
    assert status == 5
    assert "[data_dir_unusable]" in log
    assert "nfs4" in log
    assert "--allow-network-fs" in log
    assert not server.data_dir.exists()
