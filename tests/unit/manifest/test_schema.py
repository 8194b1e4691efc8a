"""Models and migrations are one schema."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine

from lmcache_persist.errors import (
    DataDirUnusable,
    ManifestBusy,
    ManifestError,
    ManifestUnreadable,
    PersistError,
)
from lmcache_persist.manifest import SCHEMA_VERSION, Manifest
from lmcache_persist.manifest.models import HEAD_REVISION, Base
from lmcache_persist.manifest.schema import SCRIPTS
from lmcache_persist.manifest.session import make_engine, map_sqlite_error


def tables(path: Path) -> dict[str, str]:
    """Every table's CREATE statement, without differences of spacing and order."""
    raw = sqlite3.connect(path)
    rows = raw.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
    raw.close()
    found = {}
    for name, sql in rows:
        parts = re.split(r",\s*\n", sql.strip().removesuffix(")"))
        found[name] = "\n".join(sorted(" ".join(part.split()) for part in parts))
    found.pop("alembic_version", None)
    return found


def test_migrations_make_the_models(tmp_path: Path) -> None:
    """Alembic finds no difference, and every constraint (which it does not compare) is there."""
    Manifest.open(tmp_path / "migrated").close()
    engine = make_engine(tmp_path / "migrated", 1.0)
    with engine.begin() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []
    engine.dispose()
    direct = create_engine(f"sqlite:///{tmp_path / 'direct'}")
    Base.metadata.create_all(direct)
    direct.dispose()
    assert tables(tmp_path / "migrated") == tables(tmp_path / "direct")
    assert len(tables(tmp_path / "direct")) == 4


def test_revisions_are_numbers_in_one_line() -> None:
    """Revision ids count up from 0001 and the newest is the schema version."""
    config = Config()
    config.set_main_option("script_location", str(SCRIPTS))
    scripts = ScriptDirectory.from_config(config)
    line = [script.revision for script in scripts.walk_revisions()][::-1]
    assert line == [f"{number:04d}" for number in range(1, SCHEMA_VERSION + 1)]
    assert scripts.get_current_head() == HEAD_REVISION


SQLITE_CODES = {
    name: getattr(sqlite3, name)
    for name in dir(sqlite3)
    if re.fullmatch(r"SQLITE_[A-Z_]+", name) and isinstance(getattr(sqlite3, name), int)
}
SPECIAL = {
    "SQLITE_BUSY": ManifestBusy,
    "SQLITE_LOCKED": ManifestBusy,
    "SQLITE_CORRUPT": ManifestUnreadable,
    "SQLITE_NOTADB": ManifestUnreadable,
    "SQLITE_CANTOPEN": DataDirUnusable,
    "SQLITE_PERM": DataDirUnusable,
    "SQLITE_READONLY": DataDirUnusable,
}
PRIMARY = [
    "ABORT", "AUTH", "BUSY", "CANTOPEN", "CONSTRAINT", "CORRUPT", "ERROR", "FULL", "INTERNAL",
    "INTERRUPT", "IOERR", "LOCKED", "MISMATCH", "MISUSE", "NOLFS", "NOMEM", "NOTADB", "PERM",
    "PROTOCOL", "READONLY", "SCHEMA", "TOOBIG",
]  # fmt: skip


@pytest.mark.parametrize("short", PRIMARY)
@pytest.mark.parametrize("extended", [0, 3])
def test_every_code_of_sqlite_is_mapped(short: str, extended: int) -> None:
    """Each of SQLite's errors becomes one of ours, by its primary code."""
    error = sqlite3.OperationalError("text that means nothing")
    error.sqlite_errorcode = SQLITE_CODES[f"SQLITE_{short}"] | extended << 8
    found = map_sqlite_error(error, Path("m"))
    assert isinstance(found, PersistError)
    assert type(found) is SPECIAL.get(f"SQLITE_{short}", ManifestError)


def test_error_without_a_code() -> None:
    """An error that the driver made up itself is mapped too."""
    assert type(map_sqlite_error(sqlite3.ProgrammingError("x"), Path("m"))) is ManifestError
