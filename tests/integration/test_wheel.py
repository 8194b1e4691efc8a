"""The built wheel, installed elsewhere, has all that ``serve`` needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.server import ServerProcess, inspect

PROJECT = Path(__file__).parents[2]
TIMEOUT_S = 300


def run(*command: str, **options: object) -> str:
    """A command's stdout; its stderr shows if it fails."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        **options,  # type: ignore[call-overload]
    )
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder into which the wheel was installed, without the checkout."""
    python = sys.executable
    run(python, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(PROJECT))
    [wheel] = tmp_path.glob("*.whl")
    target = tmp_path / "site"
    run(python, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target), str(wheel))
    return target


def test_the_wheel_serves(installed: Path, root: Path) -> None:
    """Installed from the wheel, the server migrates a manifest, binds, and restarts."""
    env = {**os.environ, "PYTHONPATH": str(installed)}
    where = run(
        sys.executable, "-c", "import lmcache_persist; print(lmcache_persist.__file__)",
        env=env, cwd="/",
    )  # fmt: skip
    assert where.startswith(str(installed))
    server = ServerProcess(root / "d", env={"PYTHONPATH": str(installed)}, cwd=Path("/"))
    with server.start():
        cli = [sys.executable, "-m", "lmcache_persist.cli"]
        run(*cli, "negotiate", "--server", server.url, "--groups", "640,0,640", env=env, cwd="/")
        server.terminate()
        server.start()
        assert inspect(server.data_dir)["binding"]["chunk_size"] == 640
