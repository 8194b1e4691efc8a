"""``make mutate``: break the code in each listed way and see a named test go red.

The proof that the tests can fail. Each mutation replaces one piece of text, which must be
there exactly once, in a copy of the checkout, and runs the tests named beside it. Those
must fail as tests do (pytest's status 1): an error in collecting them proves nothing.

python -m mutation [NAME ...]   (from tests/)
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mutation import (
    catalog,
    client,
    connector_vllm,
    crashes,
    growth,
    hostile,
    hybrid,
    identity,
    maintenance,
    stalls,
    watch,
)
from mutation.catalog import Mutation

MUTATIONS = (
    *catalog.MUTATIONS,
    *crashes.MUTATIONS,
    *growth.MUTATIONS,
    *hostile.MUTATIONS,
    *client.MUTATIONS,
    *connector_vllm.MUTATIONS,
    *hybrid.MUTATIONS,
    *identity.MUTATIONS,
    *maintenance.MUTATIONS,
    *stalls.MUTATIONS,
    *watch.MUTATIONS,
)
PROJECT = Path(__file__).parents[2]
TIMEOUT_S = 600
MAX_JOBS = 4
"""At once, each with a core of its own; more would make tests miss their time-outs."""


def copy_checkout(target: Path) -> None:
    """The checkout's files as they are now, what git ignores left out."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        source = PROJECT / name
        if source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)


def run_tests(checkout: Path, tests: tuple[str, ...]) -> int:
    """Pytest's exit status on a checkout.

    Raises:
        TimeoutExpired: the tests did not end.
    """
    paths = [str(checkout), str(checkout / "tests")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests],
        cwd=checkout,
        env=env,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode not in (0, 1):
        print(done.stdout[-3000:], done.stderr[-3000:])
    return done.returncode


def try_one(mutation: Mutation, checkout: Path) -> str:
    """What became of a mutation: ``red``, or why not."""
    path = checkout / mutation.file
    original = path.read_text()
    if original.count(mutation.old) != 1:
        return f"text is there {original.count(mutation.old)} times, expected once"
    path.write_text(original.replace(mutation.old, mutation.new))
    try:
        status = run_tests(checkout, mutation.tests)
    except subprocess.TimeoutExpired:
        return f"the tests did not end within {TIMEOUT_S} s"
    finally:
        path.write_text(original)
    return {0: "SURVIVED", 1: "red"}.get(status, f"pytest ended with {status}")


def try_share(mutations: Sequence[Mutation]) -> int:
    """Try mutations one after the other, in a checkout of their own; how many survived."""
    survivors = 0
    with tempfile.TemporaryDirectory(prefix="lp-mutate-") as folder:
        checkout = Path(folder)
        checkout.chmod(0o755)  # servers of other users run from it, too
        copy_checkout(checkout)
        for mutation in mutations:
            begin = time.monotonic()
            outcome = try_one(mutation, checkout)
            survivors += outcome != "red"
            print(f"{outcome:10} {mutation.name} ({time.monotonic() - begin:.0f} s)", flush=True)
    return survivors


def main(names: list[str]) -> int:
    """Try all mutations, or the named ones; 1 if any was not turned red."""
    chosen = [m for m in MUTATIONS if not names or m.name in names]
    unknown = set(names) - {mutation.name for mutation in MUTATIONS}
    if unknown:
        print(f"unknown: {', '.join(sorted(unknown))}")
        return 2
    begin = time.monotonic()
    jobs = min(os.cpu_count() or 1, MAX_JOBS)
    with ThreadPoolExecutor(jobs) as pool:
        survivors = sum(pool.map(try_share, [chosen[job::jobs] for job in range(jobs)]))
    took_s = time.monotonic() - begin
    print(f"{len(chosen) - survivors} red, {survivors} not, in {took_s:.0f} s by {jobs} processes")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
