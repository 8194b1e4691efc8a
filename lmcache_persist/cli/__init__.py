"""The command line: one file per verb, see docs/cli.md."""

from lmcache_persist.cli.app import main

__all__ = ["main"]
