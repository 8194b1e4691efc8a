"""The client of a cache server. Nothing here loads torch or an engine.

``CacheClient`` speaks to the server; :mod:`lmcache_persist.connector.pages` moves pages
between an engine's tensors and slots (torch); :mod:`lmcache_persist.connector.vllm` is the
connector for vLLM.
"""

from lmcache_persist.connector.client import CacheClient
from lmcache_persist.connector.lookups import LookupHandle
from lmcache_persist.connector.options import ClientOptions
from lmcache_persist.connector.pool_map import PoolMap
from lmcache_persist.connector.results import BindOutcome, Change, LookupResult, Registration

__all__ = [
    "BindOutcome",
    "CacheClient",
    "Change",
    "ClientOptions",
    "LookupHandle",
    "LookupResult",
    "PoolMap",
    "Registration",
]
