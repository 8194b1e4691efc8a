"""``negotiate``: send a bind to a server, as an engine would."""

from __future__ import annotations

import contextlib
from typing import Annotated, Any

import typer

from lmcache_persist.cli.connection import DEFAULT_TIMEOUT, connected, seconds
from lmcache_persist.cli.exit_codes import ExitCode, exit_code_of
from lmcache_persist.cli.live import endpoint_of
from lmcache_persist.cli.options import DryRun, Json, ServedDir, Server, VerbTimeout
from lmcache_persist.cli.output import (
    add_help_hint,
    ending,
    error_document,
    plain,
    say,
    say_error,
    write,
    write_json,
)
from lmcache_persist.cli.plan import integer_or_text
from lmcache_persist.errors import (
    BindingError,
    GeometryError,
    InvalidTokensPerBlock,
    PersistError,
)
from lmcache_persist.geometry import MAX_TOKENS_PER_BLOCK, Group, GroupKind, required_alignment


def parse_groups(text: str) -> list[Group]:
    """Groups of ``640,0,640``. Any integer may be sent: the server is the judge.

    Raises:
        InvalidTokensPerBlock: an entry is no integer, or none that a message can hold.
    """
    groups = []
    for index, part in enumerate(text.split(",") if text.strip() else []):
        size = integer_or_text(part.strip())
        if isinstance(size, str) or abs(size) > MAX_TOKENS_PER_BLOCK:
            raise InvalidTokensPerBlock(
                f"group {index} has tokens_per_block {part.strip()!r}, expected an integer from"
                f" 0 to {MAX_TOKENS_PER_BLOCK}",
                hint="for example --groups 640,0,640",
            )
        groups.append(Group(GroupKind.FULL if size else GroupKind.SCRATCH, size, max(size, 0)))
    return groups


@ending
def negotiate(
    groups: Annotated[
        str, typer.Option(metavar="N,N,...", help="tokens_per_block of each group, 0 for scratch.")
    ],
    data_dir: ServedDir = None,
    server: Server = None,
    base: Annotated[
        str | None,
        typer.Option(metavar="TOKENS", help="Chunk size wished for. [default: the server's]"),
    ] = None,
    dry_run: DryRun = False,
    timeout: VerbTimeout = DEFAULT_TIMEOUT,
    json_output: Json = False,
) -> int:
    """Bind a server to a chunk size that fits these groups, or ask whether it fits.

    Exit code 0: bound or compatible; 3: refused; 4: no server.

    Example: lmcache-persist negotiate /var/lib/kv --groups 640,0,640
    """
    result: dict[str, Any] = {
        "outcome": None,
        "required_alignment": None,
        "binding": None,
        "error": None,
    }
    code = ExitCode.OK
    try:
        wanted, base_tokens = parse_groups(groups), _base(base)
        limit = seconds(timeout)
        with contextlib.suppress(GeometryError):  # the server says so, too, and is the judge
            result["required_alignment"] = required_alignment(wanted)
        url, root = endpoint_of(data_dir, server)
        with connected(url, limit, "negotiate", root=root) as client:
            held = client.binding
            result["binding"] = held.summary() if held else None
            try:
                outcome = client.bind(
                    wanted,
                    base=base_tokens,
                    dry_run=dry_run,
                    who="lmcache-persist negotiate",
                    timeout_s=limit,
                )
            except (GeometryError, BindingError) as error:
                code = ExitCode.REFUSED_BIND
                result.update(outcome="refused", error=error_document(error))
                say_error(error)
            else:
                result.update(outcome=outcome.outcome, binding=outcome.binding.summary())
                for warning in outcome.warnings:
                    say(f"warning: {plain(warning)}")
    except PersistError as error:
        add_help_hint(error, "negotiate")
        code = exit_code_of(error)
        refused = isinstance(error, GeometryError)
        result.update(outcome="refused" if refused else None, error=error_document(error))
        say_error(error)
    if json_output:
        write_json(result)
    elif result["outcome"] is not None:
        _write_text(result, dry_run)
    return code


def _base(text: str | None) -> int | None:
    if text is None:
        return None
    value = integer_or_text(text)
    if isinstance(value, str) or not 0 < value <= MAX_TOKENS_PER_BLOCK:
        raise InvalidTokensPerBlock(f"base chunk size is {text!r}, expected a positive integer")
    return value


def _write_text(result: dict[str, Any], dry_run: bool) -> None:
    binding = result["binding"]
    suffix = " (dry run: nothing was bound)" if dry_run else ""
    write(f"outcome: {result['outcome']}{suffix}")
    if binding is not None:
        write(f"chunk size: {binding['chunk_size']} tokens ({binding['mode']})")
        if result["required_alignment"] is not None:
            write(f"required alignment of these groups: {result['required_alignment']} tokens")
        write(f"required alignment of the binding: {binding['required_alignment']} tokens")
        write(f"boundary id: {binding['boundary_id']}")
