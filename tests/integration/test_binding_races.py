"""Racing binds: all requests are in before the first answer goes out, one of them wins.

The test holds the manifest's lock: the first bind waits for it, the others queue up behind
that one, and only when the server has counted all of them is the lock let go.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import zmq

from lmcache_persist import protocol
from lmcache_persist.connector.replies import decode_binding
from lmcache_persist.geometry import Group, groups_from_sizes
from lmcache_persist.manifest import read_snapshot
from support.files import manifest_held
from support.raw import ask, hello, receive, send
from support.server import ServerProcess
from support.waiting import wait_until

GEOMETRIES: list[tuple[Group, ...]] = [groups_from_sizes([544]), groups_from_sizes([400, 400])]
RACERS = 32
ROUNDS = 20

RACER = """
import json, sys
from lmcache_persist.connector import CacheClient
from lmcache_persist.errors import PersistError
from lmcache_persist.geometry import groups_from_sizes
with CacheClient(sys.argv[1], kind="cli") as client:
    client.wait_connected(60)
    print("connected", flush=True)
    sys.stdin.readline()
    try:
        outcome = client.bind(groups_from_sizes(json.loads(sys.argv[2])), timeout_s=60)
        answer = [outcome.outcome, outcome.binding.binding_id]
    except PersistError as error:
        answer = [error.code, error.fields.get("chunk_size")]
    print(json.dumps(answer), flush=True)
"""


def judge(answers: list[tuple[str, object]], data_dir: Path) -> None:
    """One binding in the manifest; every racer got it, or the refusal that names it."""
    binding = read_snapshot(data_dir / "manifest.sqlite").binding
    assert binding is not None
    assert binding.chunk_size in (544, 400)
    assert len(answers) == RACERS
    outcomes = [outcome for outcome, _ in answers]
    assert outcomes.count("bound") == 1
    for outcome, named in answers:
        if outcome in ("bound", "compatible"):
            assert named == binding.binding_id
        else:
            assert (outcome, named) == ("incompatible_alignment", binding.chunk_size)
    assert outcomes.count("incompatible_alignment") == RACERS // 2


def test_racing_clients_see_one_winner(make_server: Callable[..., ServerProcess]) -> None:
    """20 rounds of 32 connections with two geometries: exactly one binding each time."""
    for round_number in range(ROUNDS):
        server = make_server(name=f"d{round_number}", capacity="16MiB", pool_size="4MiB").start()
        with zmq.Context() as context:
            sockets = [context.socket(zmq.DEALER) for _ in range(RACERS)]
            try:
                answers = race(server, sockets)
            finally:
                for socket in sockets:
                    socket.close(linger=0)
        judge(answers, server.data_dir)
        server.kill()


def race(server: ServerProcess, sockets: list[zmq.Socket[bytes]]) -> list[tuple[str, object]]:
    """Let all sockets bind at once; what each was told."""
    welcomes = []
    for socket in sockets:
        socket.connect(server.url)
        welcomes.append(hello(socket))
    with manifest_held(server.data_dir / "manifest.sqlite"):
        for index, (socket, welcome) in enumerate(zip(sockets, welcomes, strict=True)):
            groups = GEOMETRIES[index % 2]
            send(
                socket,
                protocol.Bind(
                    boot=welcome.boot,
                    session=welcome.session,
                    groups=[protocol.GroupSpec.of(group) for group in groups],
                    who=f"racer {index}",
                ),
            )
        wait_all_in(server)
    answers: list[tuple[str, object]] = []
    for socket in sockets:
        _, reply = receive(socket)
        if isinstance(reply, protocol.BindReply):
            binding = decode_binding(reply.binding)
            assert binding is not None
            answers.append((reply.outcome, binding.binding_id))
        else:
            assert isinstance(reply, protocol.ErrorReply)
            answers.append((reply.code, json.loads(reply.fields)["chunk_size"]))
    return answers


def wait_all_in(server: ServerProcess) -> None:
    """Until the server has counted every racer's bind; none is answered before."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(server.url)
        welcome = hello(socket)
        assert welcome.binding == b""

        def count() -> bool:
            reply = ask(socket, protocol.Stats(boot=welcome.boot, session=welcome.session))
            assert isinstance(reply, protocol.JsonReply)
            stats = json.loads(reply.body)
            assert stats["chunk_size"] is None
            return bool(stats["counters"]["binds"] == RACERS)

        wait_until(count, "all binds are in", 60)


def test_racing_processes_see_one_winner(make_server: Callable[..., ServerProcess]) -> None:
    """32 processes with two geometries: exactly one binding, the same for all."""
    server = make_server(capacity="16MiB", pool_size="4MiB").start()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, server.url, ["[544]", "[400, 400]"][index % 2]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        for index in range(RACERS)
    ]
    try:
        for racer in racers:
            assert racer.stdout is not None
            assert racer.stdout.readline().strip() == "connected"
        with manifest_held(server.data_dir / "manifest.sqlite"):
            for racer in racers:
                assert racer.stdin is not None
                racer.stdin.write("go\n")
                racer.stdin.flush()
            wait_all_in(server)
        answers = [tuple(json.loads(racer.communicate(timeout=60)[0])) for racer in racers]
    finally:
        for racer in racers:
            racer.kill()
            racer.wait(20)
    judge(answers, server.data_dir)
