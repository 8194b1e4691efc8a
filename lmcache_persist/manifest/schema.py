"""Which schema a database has, and bringing it to the newest one by Alembic."""

from __future__ import annotations

import threading
from pathlib import Path

from sqlalchemy import Connection, inspect, text

from lmcache_persist import failpoints
from lmcache_persist.errors import SchemaTooNew
from lmcache_persist.manifest.models import HEAD_REVISION, SCHEMA_VERSION, VERSION_TABLE
from lmcache_persist.manifest.session import Database, unreadable

SCRIPTS = Path(__file__).parent / "migrations"
"""Folder of Alembic's environment and revisions; part of the package."""

_alembic = threading.Lock()
"""Alembic's environment is one per process."""


def schema_version(connection: Connection, path: Path) -> int:
    """The schema of an open database; 0 for one without any table.

    Raises:
        SchemaTooNew: a newer version than :data:`SCHEMA_VERSION` wrote it.
        ManifestUnreadable: it is somebody else's database.
    """
    tables = inspect(connection).get_table_names()
    if not tables:
        return 0
    if VERSION_TABLE not in tables:
        raise unreadable(path, f"it has tables {', '.join(tables)} and no {VERSION_TABLE}")
    found = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}"))  # noqa: S608
    revisions = [str(row[0]) for row in found]
    if len(revisions) != 1:
        raise unreadable(path, f"{VERSION_TABLE} has {len(revisions)} rows, expected 1")
    revision = revisions[0]
    if not (len(revision) == 4 and revision.isascii() and revision.isdigit()) or not (
        1 <= int(revision) <= SCHEMA_VERSION
    ):
        raise SchemaTooNew(
            f"manifest {path} has schema {revision!r}, expected at most {HEAD_REVISION}",
            hint="start the newer version of lmcache-persist that wrote it; nothing was changed",
            path=str(path),
            found=revision,
            expected=HEAD_REVISION,
        )
    return int(revision)


def upgrade(database: Database) -> bool:
    """Bring a database to the newest schema, in one transaction; False if it was.

    Durable: on return.
    Threads: any.

    Raises:
        SchemaTooNew: nothing was changed.
        ManifestError: nothing was changed.
    """
    with database.write() as session:
        connection = session.connection()
        if schema_version(connection, database.subject) == SCHEMA_VERSION:
            return False
        _run_alembic(connection)
        failpoints.hit("migrate.before_commit")
    return True


def _run_alembic(connection: Connection) -> None:
    # Imported here: most starts find the newest schema and need none of it.
    from alembic import command
    from alembic.config import Config

    config = Config()
    # A bare % would be taken for an interpolation.
    config.set_main_option("script_location", str(SCRIPTS).replace("%", "%%"))
    config.attributes["connection"] = connection
    with _alembic:
        command.upgrade(config, "head")
