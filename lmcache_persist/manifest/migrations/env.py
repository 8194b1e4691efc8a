"""Alembic's environment: runs revisions on a connection that somebody else opened.

The manifest hands in its own connection, inside its own transaction. On the command line
the database is named with ``-x database=PATH``.
"""

from __future__ import annotations

from pathlib import Path

from alembic import context
from sqlalchemy import Connection

from lmcache_persist.errors import ConfigError
from lmcache_persist.manifest.models import Base
from lmcache_persist.manifest.session import make_engine

_BUSY_TIMEOUT_S = 10.0


def _run(connection: Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        # SQLite can roll back a schema change, once BEGIN is ours.
        transactional_ddl=True,
        compare_server_default=True,
        render_as_batch=True,
    )
    with context.begin_transaction():
        context.run_migrations()


def _main() -> None:
    if context.is_offline_mode():
        raise ConfigError("a manifest is migrated online only, found offline mode")
    connection = context.config.attributes.get("connection")
    if connection is not None:
        _run(connection)
        return
    database = context.get_x_argument(as_dictionary=True).get("database")
    if not database:
        raise ConfigError("no database is named", hint="alembic -x database=PATH ...")
    engine = make_engine(Path(database), _BUSY_TIMEOUT_S)
    with engine.begin() as own:
        _run(own)
    engine.dispose()


_main()
