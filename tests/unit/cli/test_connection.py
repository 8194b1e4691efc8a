"""What verbs say when there is no server, a hung one, or none where it was looked for."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_persist.cli.connection import connected
from lmcache_persist.datadir import DataDir, DataDirLock, Holder
from lmcache_persist.errors import RequestTimeout, ServerUnreachable
from support.fake_server import FakeServer
from support.verbs import quiet

ON_FOLDERS = ("inspect", "verify", "prune", "backup", "reset", "recover", "rebind", "resize")


@pytest.fixture
def held(tmp_path: Path) -> Iterator[DataDir]:
    """A data dir whose server does nothing, not even listen."""
    paths = DataDir(tmp_path)
    with DataDirLock.acquire(tmp_path) as lock:
        lock.announce(
            Holder.of_process(boot_id="b" * 32, endpoint=paths.endpoint, started_at="2026")
        )
        yield paths


@contextlib.contextmanager
def mute(path: Path) -> Iterator[None]:
    """Connections are taken, and nothing is ever said."""
    with socket.socket(socket.AF_UNIX) as plug:
        plug.bind(os.fspath(path))
        plug.listen(8)
        yield


@pytest.mark.parametrize("verb", ["verify DIR", "flush DIR", "flush --server URL", "top DIR"])
def test_a_hung_server_is_named_with_its_process(verb: str, held: DataDir) -> None:
    """Nobody is told to start a second server: who holds the data dir, and what to do."""
    words = verb.replace("DIR", str(held.root)).replace("URL", held.endpoint).split()
    with mute(held.socket):
        code, _, err = quiet(*words, "--timeout", "0.2")
    assert code == 4
    assert f"pid {os.getpid()} on " in err
    assert "does not answer within 0.2 s [server_unreachable]" in err
    assert f"T is stopped, it goes on with: kill -CONT {os.getpid()};" in err
    assert f"kill -9 {os.getpid()}" in err
    assert "lmcache-persist serve" not in err


def test_a_held_data_dir_without_its_socket_is_no_place_for_a_start(held: DataDir) -> None:
    """The socket was removed, or is not there yet: the process is named."""
    code, _, err = quiet("verify", str(held.root), "--timeout", "0.2")
    assert code == 4
    assert f": no socket there, but pid {os.getpid()} on " in err
    assert "lmcache-persist serve" not in err


def test_a_lock_that_nobody_holds_names_nobody(tmp_path: Path) -> None:
    """After kill -9 the lock file still has a name in it: said at once, with what helps."""
    (tmp_path / "server.lock").write_text(
        f'{{"pid": 1, "host": "h", "boot_id": "b", "started_at": "t",'
        f' "endpoint": "ipc://{tmp_path}/server.sock"}}'
    )
    code, _, err = quiet("flush", str(tmp_path))
    assert code == 4
    assert err == (
        f"error: no server runs on {tmp_path} [server_unreachable]\n"
        f"hint: start one with: lmcache-persist serve --data-dir {tmp_path}\n"
    )


@pytest.mark.parametrize("reason", ["no socket there", "connection refused"])
def test_who_waits_says_once_for_what(
    reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a moment: the endpoint, what is in the way, until when, and the way out."""
    monkeypatch.setattr("lmcache_persist.cli.connection._PATIENCE_S", 0.05)
    path = tmp_path / "s.sock"
    if reason == "connection refused":
        with socket.socket(socket.AF_UNIX) as plug:
            plug.bind(os.fspath(path))
    code, _, err = quiet("flush", "--server", f"ipc://{path}", "--timeout", "0.2")
    assert code == 4
    waiting = f"waiting for ipc://{path}: {reason}; up to 200 ms, Ctrl-C ends\n"
    assert err.startswith(waiting)
    assert err.count("waiting") == 1


def test_who_is_heard_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No line about a wait that there was not."""
    url = f"ipc://{tmp_path}/s.sock"
    server = FakeServer(url, tmp_path)
    with connected(url, 20, "test"):
        pass
    server.close()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("form", ["{}", "ipc://{}", "{}/", "ipc://{}/"])
@pytest.mark.parametrize("verb", ["flush", "top", "bench", "negotiate --groups 64"])
def test_a_folder_is_no_endpoint(verb: str, form: str, held: DataDir) -> None:
    """The data dir was given to --server: both right forms are named, at once."""
    with mute(held.socket):
        code, _, err = quiet(*verb.split(), "--server", form.format(held.root))
    assert code == 2
    assert "is a folder, expected an endpoint [config]\n" in err
    assert f"without --server: {held.root}; or --server {held.endpoint}\n" in err


def test_a_folder_without_a_socket_names_none(tmp_path: Path) -> None:
    """Nothing is named that is not there."""
    _, _, err = quiet("flush", "--server", str(tmp_path))
    assert err.endswith(f"hint: give the data dir as DIR, without --server: {tmp_path}\n")


def test_what_ends_a_connection_later_has_a_hint(tmp_path: Path) -> None:
    """A server that is killed, or falls silent, while a verb uses it."""
    url = f"ipc://{tmp_path}/s.sock"
    server = FakeServer(url, tmp_path)
    with pytest.raises(RequestTimeout) as caught, connected(url, 20, "test"):
        raise RequestTimeout("server did not answer within 1 s")
    assert caught.value.hint is not None
    assert "The server hangs" in caught.value.hint
    server.close()
    with pytest.raises(ServerUnreachable) as gone, connected(url, 0.1, "test"):
        raise ServerUnreachable("connection was given up")
    assert gone.value.hint is not None


@pytest.mark.parametrize("verb", ["reset --yes", "recover --yes", "rebind --chunk-size 64 --yes"])
def test_verbs_on_files_do_not_send_to_the_server(verb: str, held: DataDir) -> None:
    """They cannot "use that server": it is to be stopped first."""
    name, *flags = verb.split()
    code, _, err = quiet(name, str(held.root), *flags)
    assert code == 5
    stop = f"stop that one (kill -TERM {os.getpid()})"
    assert f"hint: {name} works while no server runs: {stop}\n" in err


@pytest.mark.parametrize("verb", [*ON_FOLDERS, "top", "flush"])
def test_an_endpoint_is_no_folder(verb: str) -> None:
    """``inspect ipc://...`` is told which word was expected."""
    flags = {
        "rebind": ("--chunk-size", "64"),
        "resize": ("--capacity", "1GiB"),
        "prune": ("--stale",),
        "backup": ("/nowhere/copy",),
    }
    code, _, err = quiet(verb, "ipc:///srv/kv/server.sock", *flags.get(verb, ()))
    assert code == 2
    assert "expected a folder [config]\nhint: give the data dir: /srv/kv;" in err


@pytest.mark.parametrize("value", ["0", "0ms", "31d", "999999999999999999", "soon"])
@pytest.mark.parametrize("verb", ["inspect DIR", "verify DIR", "flush DIR", "bench DIR"])
def test_a_timeout_that_cannot_be_is_refused_by_its_flag(verb: str, value: str) -> None:
    """No internal name, no traceback; what is allowed is said."""
    code, _, err = quiet(*verb.split(), "--timeout", value)
    assert code == 2
    assert err.startswith("error: --timeout")
    assert "\nhint: " in err


def test_neither_folder_nor_server_has_an_example() -> None:
    """What to write is shown."""
    code, _, err = quiet("flush")
    assert code == 2
    assert "expected one, such as /var/lib/kv, or --server " in err
    assert err.endswith("[usage]\nhint: see lmcache-persist flush --help\n")


@pytest.mark.parametrize("name", ["absent", "foreign"])
def test_top_says_of_no_data_dir_what_inspect_says(name: str, tmp_path: Path) -> None:
    """One rule tells what is a data dir."""
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").touch()
    found = [quiet(verb, str(tmp_path / name)) for verb in ("inspect", "top", "flush")]
    assert found[0][0] == 5
    assert found[0] == found[1] == found[2]
