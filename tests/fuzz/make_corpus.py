"""Writes ``corpus/``: one good message of each type, and bodies that once were trouble.

``python tests/fuzz/make_corpus.py`` from the root of the repository. The files are
committed: a fuzzer starts from them, and a test reads them all.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import msgspec

from lmcache_persist import protocol
from lmcache_persist.geometry import GroupKind
from support.emulated import identity
from support.fake_server import BOOT_A, binding_bytes, make_binding

CORPUS = Path(__file__).parent / "corpus"
HEAD = {"boot": "a" * 32, "session": "c" * 32, "binding": "d" * 64}
GROUPS = [
    protocol.GroupSpec(GroupKind.FULL, 640, 640),
    protocol.GroupSpec(GroupKind.SCRATCH, 0),
    protocol.GroupSpec(GroupKind.SLIDING, 128, 128, 512),
]


def requests() -> dict[str, protocol.Request]:
    """A good request of each type."""
    made: list[protocol.Request] = [
        protocol.Hello(proto_min=1, proto_max=1, kind="worker", label="w", lock="e" * 32),
        protocol.Bind(**HEAD, groups=GROUPS, base=256, who="rank 0", via=["d" * 32]),
        protocol.Register(
            **HEAD,
            engine="engine-0",
            rank=0,
            world_size=2,
            identity=json.dumps(identity()).encode(),
            layout=b'{"layers": [{"bytes": 4096}]}',
            groups=GROUPS,
            object_bytes=[4096, 0, 8192],
        ),
        protocol.Lookup(
            **HEAD, lookup=7, engine="engine-0", num_tokens=1281, hashes=b"h" * 64, wait_ms=100
        ),
        protocol.Release(**HEAD, lookup=7),
        protocol.Reserve(**HEAD, engine="engine-0", rank=0, hashes=b"h" * 64, masks=[5, 5]),
        protocol.Commit(**HEAD, reservations=[1, 2]),
        protocol.GiveBack(**HEAD, reservations=[3]),
        protocol.Flush(**HEAD, seq=4, wait_ms=100),
        protocol.Ping(**HEAD),
        protocol.Stats(**HEAD),
        protocol.AdminInspect(**HEAD, model="m", details=True),
        protocol.AdminObjects(**HEAD, after=b"k" * 64, limit=10, model="m"),
        protocol.AdminVerify(**HEAD, cursor=b"c" + b"k" * 64, repair=True),
        protocol.AdminPrune(**HEAD, fingerprints=["f" * 64], dry_run=True, cursor=b"k" * 64),
        protocol.AdminGrow(**HEAD, capacity_bytes=1 << 40, growth=1),
        protocol.AdminBackup(**HEAD, cursor=b"k" * 64),
        protocol.AdminManifest(**HEAD, offset=4096),
        protocol.Bye(**HEAD),
    ]
    return {type(message).__name__: message for message in made}


def replies() -> dict[str, protocol.Reply]:
    """A good reply of each type."""
    tail = {"boot": BOOT_A, "durable_seq": 3}
    pool = protocol.PoolInfo(path=f"/dev/shm/lmcache-persist-{'ab' * 16}.pool", size_bytes=1 << 20)
    made: list[protocol.Reply] = [
        protocol.Welcome(
            **tail,
            proto=1,
            session="c" * 32,
            version="1",
            pool=pool,
            binding=binding_bytes(make_binding()),
        ),
        protocol.BindReply(**tail, outcome="bound", binding=binding_bytes(make_binding())),
        protocol.Registered(**tail, fingerprint="f" * 64, missing_ranks=[1]),
        protocol.Found(
            **tail, tokens=128, runs=[protocol.SlotRun(0, 0, 0, 4096, [0, 4096])], disk_chunks=1
        ),
        protocol.NotYet(**tail),
        protocol.Reserved(**tail, grants=[protocol.Grant(0, 1, [0])], stored=[1]),
        protocol.Committed(**tail, seq=4, refused=[2]),
        protocol.Done(**tail),
        protocol.Flushed(**tail, dropped_chunks=1),
        protocol.StorePiece(**tail, parts=[protocol.StorePart(b"r", 0, [b"x"])], cursor=b"k" * 64),
        protocol.ManifestPiece(**tail, data=b"SQLite", total_bytes=6, digest="f" * 64),
        protocol.JsonReply(**tail, body=b'{"committed_seq": 4}'),
        protocol.ErrorReply(
            **tail, code="stale", message="another boot", hint="hello", fields=b'{"found": 1}'
        ),
    ]
    return {type(message).__name__: message for message in made}


def trouble() -> dict[str, bytes]:
    """Bodies that are meant to hurt."""
    pack = msgspec.msgpack.encode
    register = msgspec.to_builtins(requests()["Register"], builtin_types=(bytes,))
    welcome = msgspec.to_builtins(replies()["Welcome"], builtin_types=(bytes,))
    return {
        "empty": b"",
        "huge-list": b"\xdd\xff\xff\xff\xff",
        "huge-map": b"\xdf\xff\xff\xff\xff",
        "huge-text-in-field": b"\x82\xa1t\xa4ping\xa4boot\xdb\xff\xff\xff\xff",
        "nested": b"\x82\xa1t\xa4ping\xa1x" + b"\x91" * 4096,
        "nested-in-hello": protocol.encode(requests()["Hello"]).replace(b"\x87", b"\x88", 1)
        + b"\xa4more"
        + b"\x91" * 4096,
        "duplicate-key": b"\x83\xa1t\xa4ping\xa1t\xa5bye..\xa4boot\xc0",
        "bad-utf8": b"\x81\xa1t\xa2\xff\xfe",
        "surrogate-identity": pack({**register, "identity": b'{"\\ud800": 1}'}),
        "nested-identity": pack({**register, "identity": b"[" * 5000}),
        "long-number-identity": pack({**register, "identity": b'{"model": ' + b"1" * 5000 + b"}"}),
        "pool-without-name": pack({**welcome, "pool": {"path": "/", "size_bytes": 1}}),
        "pool-with-nul": pack({**welcome, "pool": {"path": "/a\0b", "size_bytes": 1}}),
        "pool-elsewhere": pack({**welcome, "pool": {"path": "/etc/passwd", "size_bytes": 1}}),
        "binding-huge": pack({**welcome, "binding": b'{"chunk_size": ' + b"9" * 4000 + b"}"}),
    }


def bodies() -> dict[str, bytes]:
    """The corpus by file name."""
    made = {f"request-{name}": protocol.encode(message) for name, message in requests().items()}
    made |= {f"reply-{name}": protocol.encode(message) for name, message in replies().items()}
    return made | {f"trouble-{name}": body for name, body in trouble().items()}


def main() -> None:
    """Write the files, remove those that are no longer made."""
    CORPUS.mkdir(exist_ok=True)
    made = bodies()
    for path in CORPUS.iterdir():
        if path.name not in made:
            path.unlink()
    for name, body in made.items():
        (CORPUS / name).write_bytes(body)


if __name__ == "__main__":
    main()
