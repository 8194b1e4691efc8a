"""What the manifest's tests share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from lmcache_persist.binding import Binding

AT = "2026-01-02T03:04:05.000006Z"


def binding(chunk_size: int = 544, **changes: Any) -> Binding:
    """A binding to ``chunk_size``; two of them with equal arguments are equal."""
    fields: dict[str, Any] = {
        "chunk_size": chunk_size,
        "required_alignment": chunk_size,
        "base_chunk_size": 256,
        "mode": "auto",
        "bound_at": AT,
        "winner": f"engine of {chunk_size}",
        "backend": "lmdb",
        "store_uuid": "0123456789abcdef" * 2,
        "store_format_version": 1,
    }
    return Binding.make(**{**fields, **changes})


def folder_state(folder: Path) -> dict[str, tuple[int, int, int, bytes]]:
    """Every file of a folder: inode, mode, mtime and bytes."""
    return {
        path.name: (status.st_ino, status.st_mode, status.st_mtime_ns, path.read_bytes())
        for path in sorted(folder.iterdir())
        for status in [path.stat()]
    }


CHILD = """
import sys
from pathlib import Path
from support.manifest import binding
from lmcache_persist.manifest import Manifest

path, verb = Path(sys.argv[1]), sys.argv[2]
if verb == "race":
    sys.stdin.readline()
manifest = Manifest.open(path)
if verb == "open":
    print("opened", flush=True)
elif verb == "bind-then-wait":
    print(manifest.bind(binding(int(sys.argv[3]))), flush=True)
    sys.stdin.readline()
else:
    held, won = manifest.bind(binding(int(sys.argv[3])))
    print(held.binding_id, won, flush=True)
manifest.close()
"""


def child(*arguments: object, failpoints: str = "") -> subprocess.Popen[str]:
    """A process that opens a manifest: arguments are path, verb and chunk size."""
    tests = Path(__file__).parent.parent
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tests}{os.pathsep}{tests.parent}",
        "LMCACHE_PERSIST_FAILPOINTS": failpoints,
    }
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
