"""The command line: one file per verb, see docs/cli.md."""

from __future__ import annotations

__all__ = ["main"]


def main(args: list[str] | None = None) -> int:
    """Run a verb: the program's entry point.

    Args:
        args: as :func:`lmcache_persist.cli.app.main` takes them; None is the process's own,
            whose handling of Ctrl-C is set, for good.

    Returns:
        The exit code (:class:`lmcache_persist.cli.exit_codes.ExitCode`).
    """
    if args is None:
        from lmcache_persist.cli.interrupt import end_at_once

        end_at_once()
    # Half a second of imports, in which Ctrl-C is no traceback any more.
    from lmcache_persist.cli.app import main as run

    return run(args)
