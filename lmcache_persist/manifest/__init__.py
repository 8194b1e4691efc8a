"""The manifest: binding, models, rejections and boots of a data dir, in SQLite.

SQLAlchemy and Alembic stay in here.
"""

from lmcache_persist.manifest.catalog import (
    MAX_BOOTS,
    MAX_REJECTIONS,
    BootRow,
    ModelRow,
    RejectionRow,
)
from lmcache_persist.manifest.manifest import Manifest
from lmcache_persist.manifest.models import SCHEMA_VERSION
from lmcache_persist.manifest.snapshot import ManifestSnapshot, peek, read_snapshot, serialized

__all__ = [
    "MAX_BOOTS",
    "MAX_REJECTIONS",
    "SCHEMA_VERSION",
    "BootRow",
    "Manifest",
    "ManifestSnapshot",
    "ModelRow",
    "RejectionRow",
    "peek",
    "read_snapshot",
    "serialized",
]
