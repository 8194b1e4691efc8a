"""A store that goes away under a living server: no promise is made about it any more."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lmcache_persist.connector import ClientOptions
from lmcache_persist.errors import StoreGone
from support.emulated import EmulatedEngine
from support.server import ServerProcess, cli_here, json_here
from support.waiting import wait_until
from support.web import fetch, free_port

PATIENT = ClientOptions(request_timeout_s=10.0)
MakeServer = Callable[..., ServerProcess]


def store(engine: EmulatedEngine, first_token: int) -> list[bytes]:
    """One chunk; its hash."""
    hashes = list(engine.hashes([first_token, *range(255)]))
    assert engine.store(hashes) == 1
    return hashes


def test_nothing_is_durable_until_it_is_moved_back(make_server: MakeServer) -> None:
    """Flush refuses, durable_seq stands, stores are dropped, memory serves; then it goes on."""
    port = free_port()
    server = make_server("--http", f"127.0.0.1:{port}").start()
    folder, aside = server.data_dir / "store", server.data_dir / "aside"
    with EmulatedEngine(server.url, [256], options=PATIENT).join() as engine:
        first = store(engine, 1)
        durable = engine.client.flush()
        folder.rename(aside)
        lost = store(engine, 2)  # the writer finds out, if nobody else did
        wait_until(lambda: f"{folder} is not there any more; from now on" in server.log(), "told")
        wait_until(
            lambda: engine.client.stats()["dropped_stores"]["store_gone"] == 1, "it is counted"
        )
        assert engine.client.stats()["durable_seq"] == durable
        for wanted in (durable, None):
            with pytest.raises(StoreGone, match=str(folder)):
                engine.client.flush(seq=wanted)
        assert engine.lookup(first, 257).tokens == engine.lookup(lost, 257).tokens == 256
        _, page = fetch(port, "/readyz")
        assert f'"store_gone", "detail": "{folder} is not there any more"' in page
        assert cli_here("verify", str(server.data_dir))[0] == 6
        aside.rename(folder)
        wait_until(lambda: "are back in their place" in server.log(), "it is seen")
        assert engine.store(engine.hashes([3, *range(255)])) == 1
        assert engine.client.flush() > durable
    assert server.terminate() == 0
    assert [server.log().count(level) for level in (" ERROR ", "Traceback")] == [1, 0]
    assert json_here("inspect", str(server.data_dir))["store"]["objects"] == 2


@pytest.mark.parametrize("name", ["store", "manifest.sqlite"])
def test_what_was_removed_can_be_saved_before_the_end(
    make_server: MakeServer, root: Path, name: str
) -> None:
    """A backup still has it all; the stop says what is lost, and does not end well."""
    server = make_server().start()
    with EmulatedEngine(server.url, [256], options=PATIENT).join() as engine:
        store(engine, 1)
        engine.client.flush()
    path = server.data_dir / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    wait_until(lambda: "it was removed and cannot come back" in server.log(), "it is told")
    saved = json_here("backup", str(server.data_dir), str(root / "saved"))
    assert saved["objects"] == 1
    assert cli_here("verify", str(root / "saved"))[0] == 0
    assert server.terminate() == 1
    assert "with this stop 1 object (64.00 KiB) are lost\n" in server.log()
