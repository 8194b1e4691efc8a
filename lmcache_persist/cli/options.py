"""Arguments and options that several verbs have: one declaration each, so that they are alike."""

from __future__ import annotations

from typing import Annotated, Any

import typer

DATA_DIR_HELP = "A server's data dir."
SERVER_HELP = "Endpoint of the server, instead of DIR."


def _timeout(what: str) -> Any:
    return typer.Option("--timeout", metavar="SECONDS", help=f"{what}; also 500ms, 2min.")


DataDir = Annotated[str, typer.Argument(metavar="DIR", help=DATA_DIR_HELP)]
"""Of verbs that are about a folder."""

ServedDir = Annotated[str | None, typer.Argument(metavar="DIR", help=DATA_DIR_HELP)]
"""Of verbs that talk to a server: this, or :data:`Server`."""

Server = Annotated[str | None, typer.Option("--server", metavar="URL", help=SERVER_HELP)]

AnswerTimeout = Annotated[str, _timeout("For each answer of a live server")]
VerbTimeout = Annotated[str, _timeout("For the whole verb")]
FirstTimeout = Annotated[str, _timeout("To find the server at first")]

MaxChunkSize = Annotated[
    str, typer.Option("--max-chunk-size", metavar="TOKENS", help="Refuse a larger chunk size.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Only say what would come of it; change nothing.")
]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
JsonLines = Annotated[
    bool, typer.Option("--json", help="Print a JSON document per line and interval.")
]
