"""``bench``: a server put to work by an emulated worker, every byte compared."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmcache_persist.cli.connection import connected, seconds
from lmcache_persist.cli.exit_codes import ExitCode
from lmcache_persist.cli.layout import Column, Kind
from lmcache_persist.cli.live import endpoint_of
from lmcache_persist.cli.negotiate import parse_groups
from lmcache_persist.cli.options import AnswerTimeout, Json, ServedDir, Server
from lmcache_persist.cli.output import ending, plain, say, write, write_json, write_table
from lmcache_persist.cli.plan import positive
from lmcache_persist.errors import ConfigError, PersistError, Unbound
from lmcache_persist.geometry import Group, check_compatible, groups_from_sizes
from lmcache_persist.printable import command
from lmcache_persist.units import (
    approximate_duration,
    approximate_size,
    counted,
    exact_size,
    format_size,
    parse_size,
    size_rate,
)

if TYPE_CHECKING:
    from pathlib import Path

    from lmcache_persist.cli.bench_worker import BenchWorker
    from lmcache_persist.connector import CacheClient

PROMPT_CHUNKS = 16
_MAX_SHARE = 0.9
"""Of the capacity: what stays below evicts nobody's objects."""
MAX_OBJECTS = 1_000_000
"""Of one run: each takes a moment, and some memory here."""


@ending
def bench(
    data_dir: ServedDir = None,
    server: Server = None,
    chunks: Annotated[str, typer.Option(metavar="N", help="Chunks to store and load.")] = "64",
    object_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Bytes of one chunk of one group.")
    ] = "1MiB",
    groups: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...", help="tokens_per_block of each group. [default: one that fits]"
        ),
    ] = None,
    bind: Annotated[
        bool, typer.Option("--bind", help="Bind an unbound server to --groups, for good.")
    ] = False,
    evict: Annotated[
        bool, typer.Option("--evict", help="Also if others' objects may have to go.")
    ] = False,
    timeout: AnswerTimeout = "30",
    json_output: Json = False,
) -> int:
    """Store, look up and load through a running server, and compare every byte.

    A worker without an engine, under a name and weights of its own: no other model's objects
    are touched. What it stores stays, as model lmcache-persist-bench, until it is evicted or
    pruned. Exit code 1 if any byte is wrong.

    Example: lmcache-persist bench --server ipc:///var/lib/kv/server.sock

    Example: lmcache-persist bench /var/lib/kv --groups 544,64 --chunks 512
    """
    wanted = parse_groups(groups) if groups is not None else None
    number, nbytes, limit = positive("chunks", chunks), parse_size(object_size), seconds(timeout)
    if nbytes < 1:
        raise ConfigError(f"--object-size is {object_size!r}, expected at least one byte")
    url, root = endpoint_of(data_dir, server)
    with connected(url, limit, "bench", kind="client", root=root) as client:
        geometry = _geometry(client, wanted, bind=bind, timeout_s=limit)
        worker = _worker(client, geometry, number, nbytes, limit, evict=evict)
        with _saying_how_far(worker):
            document = _run(client, worker, limit)
    document = {"server": url, **document}
    if json_output:
        write_json(document)
    else:
        _write_text(document, root)
    return ExitCode.OK if document["ok"] else ExitCode.BAD_DATA


def _geometry(
    client: CacheClient, wanted: Sequence[Group] | None, *, bind: bool, timeout_s: float
) -> tuple[Group, ...]:
    """The groups to work with, which the server's binding fits.

    Raises:
        Unbound: the server is not bound, and nobody said that it may be.
        IncompatibleAlignment: its chunk size does not fit ``wanted``. Found here, so that the
            server records no rejection.
    """
    binding = client.binding
    if binding is not None:
        found = tuple(wanted) if wanted else groups_from_sizes([binding.required_alignment])
        check_compatible(binding.chunk_size, found)
        return found
    if wanted is None or not bind:
        given = " (--groups without --bind binds nothing)" if wanted else ""
        raise Unbound(
            f"server {client.endpoint} is not bound, expected one that is{given}",
            hint="start an engine first, or: lmcache-persist negotiate --server"
            f" {client.endpoint} --groups N,N,...; or give bench both --groups N,N,... and --bind."
            " Each of them binds it for good",
        )
    found = tuple(wanted)
    outcome = client.bind(found, who="lmcache-persist bench", timeout_s=timeout_s)
    if outcome.outcome == "bound":
        say(f"note: the server is bound to chunk size {outcome.binding.chunk_size} now")
    return found


def _worker(
    client: CacheClient,
    groups: Sequence[Group],
    chunks: int,
    object_bytes: int,
    timeout_s: float,
    *,
    evict: bool,
) -> BenchWorker:
    """A registered worker whose prompts fit the pool.

    Raises:
        ConfigError: what it would store may cost others' objects.
        RegistrationError: the server refuses a chunk of this size.
    """
    from lmcache_persist.cli.bench_worker import BenchWorker
    from lmcache_persist.store.capacity import LMDB_PAGE_BYTES, chunk_pages
    from lmcache_persist.store.objects import Place

    binding = client.binding
    if binding is None:
        raise Unbound(f"server {client.endpoint} is not bound any more")
    members = sum(group.cacheable for group in groups)
    stats = client.stats(timeout_s)
    _check_amounts(chunks, members, object_bytes, stats["pool"]["size_bytes"])
    # A quarter of the pool: half of what one client may hold.
    fitting = stats["pool"]["size_bytes"] // 4 // (members * object_bytes)
    worker = BenchWorker(
        client,
        groups,
        binding.chunk_size,
        object_bytes=object_bytes,
        chunks=chunks,
        prompt_chunks=max(1, min(PROMPT_CHUNKS, chunks, fitting)),
        timeout_s=timeout_s,
    )
    # Small objects cost more than their bytes.
    chunk = {Place(0, group): nbytes for group, nbytes in worker.object_bytes.items()}
    on_disk = max(worker.total_bytes, chunks * chunk_pages(chunk) * LMDB_PAGE_BYTES)
    _check_room(stats["disk"], on_disk, evict=evict)
    worker.register()
    return worker


def _check_amounts(chunks: int, members: int, object_bytes: int, pool_bytes: int) -> None:
    """Refuse what no server of this size could do, before anything is asked of it."""
    if chunks * members > MAX_OBJECTS:
        raise ConfigError(
            f"--chunks {chunks} over {counted(members, 'group')} is {chunks * members} objects,"
            f" expected at most {MAX_OBJECTS}",
            hint=f"give --chunks {MAX_OBJECTS // members} or less; a larger --object-size stores"
            " more bytes",
        )
    chunk_bytes = members * object_bytes
    if chunk_bytes > pool_bytes // 2:
        most = format_size(max(1, pool_bytes // 2 // members // 4096 * 4096))
        raise ConfigError(
            f"one chunk over {counted(members, 'group')} takes {exact_size(chunk_bytes)}, more than"
            f" half of the server's pool of {exact_size(pool_bytes)}",
            hint=f"give --object-size {most} or less, or start the server with --pool-size"
            f" {format_size(2 * chunk_bytes)} or more",
        )


def _check_room(disk: dict[str, Any], wanted_bytes: int, *, evict: bool) -> None:
    used, capacity = disk["used_bytes"], disk["capacity_bytes"]
    # What is stale nobody can find, and it is the oldest, so that it is evicted first.
    taken = None if used is None else used - disk["stale_bytes"] if disk["objects"] else 0
    room = None if taken is None else int(_MAX_SHARE * capacity) - taken
    if evict or (room is not None and wanted_bytes <= room):
        return
    free = "an unknown part" if room is None else approximate_size(max(0, room))
    raise ConfigError(
        f"the bench may take {approximate_size(wanted_bytes)} on disk, of the disk tier's"
        f" {approximate_size(capacity)} there is {free} to spare: others' objects might be evicted",
        hint="lower --chunks or --object-size, or give --evict if that does not matter",
    )


@contextlib.contextmanager
def _saying_how_far(worker: BenchWorker) -> Iterator[None]:
    """Around a run: what was done, if an error ends it."""
    try:
        yield
    except PersistError:
        stored, loaded = worker.figures.stored_bytes, worker.figures.loaded_bytes
        say(
            f"stored {approximate_size(stored)} of {approximate_size(worker.total_bytes)},"
            f" loaded and compared {approximate_size(loaded)} before this:"
        )
        raise


def _run(client: CacheClient, worker: BenchWorker, timeout_s: float) -> dict[str, Any]:
    begin_s = time.monotonic()
    worker.store()
    store_s = time.monotonic() - begin_s
    client.flush(timeout_s)
    durable_s = time.monotonic() - begin_s
    worker.load()
    figures, binding = worker.figures, client.binding
    return {
        "ok": figures.mismatches == 0,
        "run": worker.run,
        "model": "lmcache-persist-bench",
        "fingerprint": worker.fingerprint,
        "chunk_size": binding.chunk_size if binding else None,
        "chunk_bytes": worker.chunk_bytes,
        "store": {
            "bytes": figures.stored_bytes,
            "seconds": round(store_s, 6),
            "gib_per_s": _gib_per_s(figures.stored_bytes, sum(figures.store_ms) / 1000),
            "ms_per_prompt": percentiles(figures.store_ms),
            "waits_for_disk": figures.waits,
        },
        "durable": {
            "seconds": round(durable_s, 6),
            "gib_per_s": _gib_per_s(figures.stored_bytes, durable_s),
        },
        "lookup": {"count": len(figures.lookup_ms), "ms": percentiles(figures.lookup_ms)},
        "load": {
            "bytes": figures.loaded_bytes,
            "gib_per_s": _gib_per_s(figures.loaded_bytes, figures.load_s),
            "memory_chunks": figures.memory_chunks,
            "disk_chunks": figures.disk_chunks,
            "missing_chunks": figures.missing_chunks,
        },
        "restore": {
            tier: {"bytes": nbytes, "gib_per_s": _gib_per_s(nbytes, seconds_)}
            for tier, (seconds_, nbytes) in sorted(figures.restore_s.items())
        },
        "mismatches": figures.mismatches,
    }


def _gib_per_s(nbytes: int, elapsed_s: float) -> float | None:
    return nbytes / elapsed_s / 2**30 if elapsed_s > 0 else None


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """p50, p95, p99 and max by nearest rank; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    found = {
        f"p{share}": ordered[max(0, math.ceil(share / 100 * len(ordered)) - 1)]
        for share in (50, 95, 99)
    }
    return {name: round(value, 3) for name, value in {**found, "max": ordered[-1]}.items()}


def _write_text(document: dict[str, Any], root: Path | None) -> None:
    store, load, lookup = document["store"], document["load"], document["lookup"]
    rows: list[tuple[str, object, object, object]] = [
        ("store into memory", store["bytes"], store["gib_per_s"], store["ms_per_prompt"]),
        ("until durable", store["bytes"], document["durable"]["gib_per_s"], None),
        ("lookup", None, None, lookup["ms"]),
        ("load (copies only)", load["bytes"], load["gib_per_s"], None),
    ]
    for tier, found in document["restore"].items():
        rows.append((f"lookup and load, {tier}", found["bytes"], found["gib_per_s"], None))
    write_table(
        f"bench of {plain(document['server'])}, chunks of {document['chunk_size']} tokens and"
        f" {approximate_size(document['chunk_bytes'])}",
        (
            Column("what", Kind.WORDS, least=14),
            Column("size", Kind.NUMBER),
            Column("rate", Kind.NUMBER),
            Column("p50", Kind.NUMBER, drop=3),
            Column("p95", Kind.NUMBER, drop=1),
            Column("p99", Kind.NUMBER, drop=2),
            Column("max", Kind.NUMBER, drop=4),
        ),
        [_row(*row) for row in rows],
    )
    if store["waits_for_disk"]:
        times = counted(store["waits_for_disk"], "time")
        write(f"stores waited for the disk {times}: the pool was full")
    if load["missing_chunks"]:
        missing = counted(load["missing_chunks"], "chunk")
        write(f"stored and not found: {missing}, evicted or dropped")
    total = load["memory_chunks"] + load["disk_chunks"]
    wrong = document["mismatches"]
    verdict = f"WRONG: {counted(wrong, 'object')}" if wrong else "every byte as stored"
    write(f"{counted(total, 'chunk')} compared: {verdict}")
    prune = command("prune", root or "DIR", "--model", document["model"])
    say(f"note: what was stored stays until it is evicted, or pruned with: {plain(prune)}")


def _row(what: str, size: object, gib_per_s: object, times_ms: object) -> list[str]:
    shown = times_ms if isinstance(times_ms, dict) else {}
    return [
        what,
        approximate_size(size) if isinstance(size, int) else "-",
        size_rate(gib_per_s * 2**30 if isinstance(gib_per_s, float) else None),
        *(
            approximate_duration(shown[name] / 1000 if name in shown else None)
            for name in ("p50", "p95", "p99", "max")
        ),
    ]
