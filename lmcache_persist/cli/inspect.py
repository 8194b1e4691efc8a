"""``inspect``: what a data dir holds, from its server or from its files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from lmcache_persist.cli.connection import ask_json, connected, seconds
from lmcache_persist.cli.exit_codes import ExitCode, exit_code_of
from lmcache_persist.cli.output import (
    ending,
    plain,
    say,
    say_error,
    write,
    write_json,
    write_table,
)
from lmcache_persist.datadir import DataDir, Holder, read_holder
from lmcache_persist.errors import DataDirLocked, PersistError, ServerUnreachable, TransportError
from lmcache_persist.units import approximate_size


@ending
def inspect(
    data_dir: Annotated[str, typer.Argument(metavar="DIR", help="A server's data dir.")],
    models: Annotated[
        bool, typer.Option("--models", help="Also say how models of one name differ.")
    ] = False,
    timeout: Annotated[
        str, typer.Option(metavar="SECONDS", help="For a live server's answer.")
    ] = "5",
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Show binding, models, store and rejections of a data dir. Changes nothing.

    A live server is asked; else the files are read. If the server does not answer, the
    manifest is shown, the store is "unavailable" and the exit code is 4.

    Example: lmcache-persist inspect /var/lib/kv --json
    """
    from lmcache_persist.server.report import without_differences

    document, problem = read(Path(os.path.abspath(os.path.expanduser(data_dir))), seconds(timeout))
    if not models:
        document = without_differences(document)
    if json_output:
        write_json(document)
    else:
        _write_text(document, models)
    if problem is None:
        return ExitCode.OK
    say_error(problem)
    return exit_code_of(problem)


def read(root: Path, timeout_s: float) -> tuple[dict[str, Any], PersistError | None]:
    """The document, and why a part of it is unavailable."""
    from lmcache_persist.server.offline import look, look_at_manifest

    try:
        return look(root)
    except DataDirLocked as error:
        locked = error
    try:
        return ask_server(root, timeout_s), None
    except TransportError as error:
        hung = error
    try:
        return look(root)  # it may have ended just now
    except DataDirLocked:
        say(f"note: {plain(locked.message)}")
        return look_at_manifest(root), hung


def ask_server(root: Path, timeout_s: float) -> dict[str, Any]:
    """The document from the server that holds the data dir.

    Raises:
        TransportError: it does not answer, or another one does.
    """
    from lmcache_persist.protocol import AdminInspect

    holder = holder_of(root)
    with connected(reachable_endpoint(root, holder), timeout_s, "inspect") as client:
        if client.boot_id != holder.boot_id:
            raise ServerUnreachable(
                f"the server at {holder.endpoint} has boot id {client.boot_id}, expected"
                f" {holder.boot_id}, which holds {root}"
            )
        return ask_json(client, AdminInspect, timeout_s)


def holder_of(root: Path) -> Holder:
    """The server that holds the data dir. Raises ``ServerUnreachable`` if it is yet unnamed."""
    holder = read_holder(root)
    if holder is None:
        raise ServerUnreachable(
            f"the server that holds {root} has not said where it listens", hint="try again"
        )
    return holder


def reachable_endpoint(root: Path, holder: Holder) -> str:
    """The holder's endpoint as seen from here: its path may have another name in a container."""
    path = holder.endpoint.removeprefix("ipc://")
    if path != holder.endpoint and not os.path.exists(path) and DataDir(root).socket.exists():
        return DataDir(root).endpoint
    return holder.endpoint


def _write_text(document: dict[str, Any], with_differences: bool) -> None:
    binding = document["binding"]
    write(f"schema version: {document['schema_version']}")
    if binding is None:
        write("binding: none yet")
    else:
        write_table("binding", ("field", "value"), _binding_rows(binding))
    store = document["store"]
    if isinstance(store, dict):
        write_table("store", ("field", "value"), _store_rows(store))
    else:
        write(f"store: {plain(store)}")
    write_table(
        "models",
        ("name", "fingerprint", "tokens per block", "alignment", "objects", "size", "last seen"),
        [_model_row(model) for model in document["models"]],
    )
    if with_differences:
        for model in document["models"]:
            _write_difference(model)
    write_table(
        "rejections",
        ("last at", "count", "reason", "detail"),
        [(row["at"], row["count"], row["reason"], row["detail"]) for row in document["rejections"]],
    )


def _binding_rows(binding: dict[str, Any]) -> list[tuple[str, object]]:
    rows: list[tuple[str, object]] = []
    for key, value in binding.items():
        if isinstance(value, dict):
            rows.extend((f"{key} {inner}", item) for inner, item in value.items())
        else:
            rows.append((key, value))
    return rows


def _store_rows(store: dict[str, Any]) -> list[tuple[str, object]]:
    clean = {True: "yes", False: "no", None: "not known"}[store["clean_shutdown"]]
    return [
        ("objects", store["objects"]),
        ("size", approximate_size(store["bytes"])),
        ("capacity", approximate_size(store["capacity_bytes"])),
        ("stale objects", store["stale_objects"]),
        ("clean shutdown", clean),
    ]


def _model_row(model: dict[str, Any]) -> tuple[object, ...]:
    known = model["bytes"] is not None
    return (
        model["name"],
        model["fingerprint"][:12],
        " ".join(str(group["tokens_per_block"]) for group in model["groups"]),
        model["required_alignment"],
        model["objects"] if known else "?",
        approximate_size(model["bytes"]) if known else "?",
        model["last_seen"],
    )


def _write_difference(model: dict[str, Any]) -> None:
    differs = model["differs_from"]
    if differs is not None:
        fields = ", ".join(plain(field) for field in differs["fields"]) or "nothing"
        write(
            f"{plain(model['name'])} {model['fingerprint'][:12]} differs from"
            f" {differs['fingerprint'][:12]} in: {fields}"
        )
