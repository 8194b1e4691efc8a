"""What is in a store on LMDB, by its totals: nothing is walked."""

from __future__ import annotations

import lmdb

from lmcache_persist.errors import StoreDamaged
from lmcache_persist.store import capacity, lmdb_open
from lmcache_persist.store import format as fmt
from lmcache_persist.store.base import FingerprintUsage, Usage
from lmcache_persist.store.lmdb_open import Databases


def usage_of(
    txn: lmdb.Transaction[memoryview],
    dbs: Databases,
    binding_id: str,
    budget: capacity.PageBudget,
) -> Usage:
    """What is in a store, from its totals.

    Raises:
        StoreDamaged: the totals or the counters are damaged.
    """
    live, stale = fmt.Totals(), fmt.Totals()
    counters = lmdb_open.read_counters(txn, dbs)
    by_fingerprint: dict[str, FingerprintUsage] = {}
    for key, value in txn.cursor(db=dbs.totals):
        try:
            owner, fingerprint = fmt.decode_totals_key(bytes(key))
            totals = fmt.Totals.decode(bytes(value))
        except fmt.FormatError as error:
            raise StoreDamaged(f"the totals are damaged: {error}") from error
        into = live if owner == binding_id else stale
        into.chunks += totals.chunks
        into.objects += totals.objects
        into.nbytes += totals.nbytes
        if owner == binding_id:
            by_fingerprint[fingerprint] = FingerprintUsage(
                totals.chunks, totals.objects, totals.nbytes
            )
    return Usage(
        chunks=live.chunks,
        objects=live.objects,
        bytes=live.nbytes,
        capacity_bytes=budget.total * budget.page_bytes,
        used_bytes=lmdb_open.live_pages(txn, dbs) * budget.page_bytes,
        stale_objects=stale.objects,
        stale_bytes=stale.nbytes,
        by_fingerprint=by_fingerprint,
        evicted_chunks=counters.evicted,
        dropped_chunks=counters.dropped,
        pruned_chunks=counters.pruned,
    )
