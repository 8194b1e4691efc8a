"""A tiny model, a real engine and a server, started and killed: what a restart leaves of a KV."""

from lmcache_persist.demo.run import run

__all__ = ["run"]
