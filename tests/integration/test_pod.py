"""The Kubernetes example, run as a pod would: its command line, user, rights and mounts."""

from __future__ import annotations

import json
import shutil
import socket
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.client_child import ClientProcess
from support.mounts import need_root, tmpfs
from support.server import ServerProcess
from support.waiting import wait_until

EXAMPLE = Path(__file__).parents[2] / "deploy" / "kubernetes" / "daemonset.yaml"
OBJECT = 1 << 20

NAMESPACE = """
set -e
mount --make-rprivate /
mount --rbind {root} {root}
cp /etc/group {root}/group && echo "pod:x:{gid}:" >> {root}/group
mount --bind {root}/group /etc/group
mount -o remount,bind,ro /
exec setpriv --reuid={uid} --regid={gid} --clear-groups --no-new-privs \
    --bounding-set=-all --inh-caps=-all "$@"
"""
"""A read-only root file system, a user without rights."""


@pytest.fixture
def pod() -> dict[str, Any]:
    """The server's container of the example."""
    daemons, _ = yaml.safe_load_all(EXAMPLE.read_text())
    container: dict[str, Any] = daemons["spec"]["template"]["spec"]["containers"][0]
    return container


@pytest.fixture
def shared(root: Path) -> Iterator[Path]:
    """The node's shared memory."""
    need_root("unshare", "setpriv")
    with tmpfs(root / "shared", "64m") as folder:
        yield folder


def command_line(pod: dict[str, Any], root: Path, port: int) -> list[str]:
    """The container's arguments, with the folders, sizes and port of this test."""
    places = {"/data": f"{root}/data", "/run/lmcache-persist": f"{root}/shared"}
    sizes = {"--capacity": "64MiB", "--pool-size": "32MiB", "--http": f"0.0.0.0:{port}"}
    found = []
    for argument in pod["args"]:
        flag, equals, value = argument.partition("=")
        for place, there in places.items():
            value = value.replace(place, there)
        found.append(flag + equals + sizes.get(flag, value))
    return found


def test_the_example_serves_an_engine_in_another_pod(
    pod: dict[str, Any], root: Path, shared: Path, make_server: Callable[..., ServerProcess]
) -> None:
    """No right, a read-only root, other users: stores, dies, starts again, hits, stops cleanly."""
    uid, gid = (pod["securityContext"][key] for key in ("runAsUser", "runAsGroup"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert "/tmp" in {mount["mountPath"] for mount in pod["volumeMounts"]}
    for folder in (root / "data", shared, root / "tmp"):  # the first two by the init container
        folder.mkdir(exist_ok=True)
        shutil.chown(folder, uid, gid)
        folder.chmod(0o750)
    root.chmod(0o711)
    server = make_server(name="data", env={"TMPDIR": str(root / "tmp")})
    script = NAMESPACE.format(root=root, uid=uid, gid=gid)
    program = [*server.command[:3], *command_line(pod, root, port)]
    server.command = ["unshare", "-m", "sh", "-c", script, "sh", *program]
    server.start()
    # The engine is root in its pod, as images have it, and may not change owners.
    prefix = ["setpriv", f"--groups={gid}", "--bounding-set=-chown", "--inh-caps=-all"]
    engine = ClientProcess(server.url, prefix)
    try:
        engine.call("join", "engine", OBJECT)
        assert engine.call("store", 1, 3) == 3
        engine.call("flush")
        assert get(port, "/healthz") == {"alive": True, "reasons": []}
        assert get(port, "/readyz")["ready"]
        server.kill()
        server.start()
        wait_until(lambda: engine.call("lookup", 1, 3) == 3, "what was stored hits again")
    finally:
        engine.kill()
    assert server.terminate() == 0
    assert list(shared.iterdir()) == []


def get(port: int, path: str) -> dict[str, Any]:
    """A page of the server."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as answer:
        body: dict[str, Any] = json.load(answer)
    return body
