"""Mutations of the connector for vLLM; each needs a few seconds to import vLLM."""

from __future__ import annotations

from mutation.catalog import Mutation

_HERE = "lmcache_persist/connector/vllm/"
_TESTS = "tests/unit/connector_vllm/"

MUTATIONS = (
    Mutation(
        "asks-for-the-whole-prompt",
        _HERE + "scheduler_side.py",
        "num_chunks = (request.num_tokens - 1) // hasher.chunk_size",
        "num_chunks = request.num_tokens // hasher.chunk_size",
        (_TESTS + "test_scheduler_side.py",),
    ),
    Mutation(
        "held-blocks-overwritten",
        _HERE + "scheduler_side.py",
        "first_blocks.append(begin // size)",
        "first_blocks.append(0)",
        (_TESTS + "test_scheduler_side.py",),
    ),
    Mutation(
        "null-blocks-stored",
        _HERE + "store_plan.py",
        "return () if len(table) < end or null_block in ids else ids",
        "return () if len(table) < end else ids",
        (_TESTS + "test_store_plan.py",),
    ),
    Mutation(
        "failed-load-tried-again",
        _HERE + "scheduler_side.py",
        "tracked.may_load, tracked.next_store = False, 0",
        "pass",
        (_TESTS + "test_scheduler_side.py",),
    ),
    Mutation(
        "drafts-count-as-computed",
        _HERE + "scheduler_side.py",
        "certain = num_scheduled - len(drafts.get(request_id, ()))",
        "certain = num_scheduled",
        (_TESTS + "test_scheduler_side.py",),
    ),
    Mutation(
        "old-hashes-under-a-new-binding",
        _HERE + "scheduler_side.py",
        "            tracked.hashes.clear()\n",
        "",
        (_TESTS + "test_scheduler_side.py",),
    ),
    Mutation(
        "lease-kept-without-a-load",
        _HERE + "scheduler_side.py",
        "                self._skip_known_chunks(tracked)\n                tracked.drop_lookup()",
        "                self._skip_known_chunks(tracked)",
        (_TESTS + "test_scheduler_side.py",),
    ),
    Mutation(
        "loaded-chunks-stored-again",
        _HERE + "scheduler_side.py",
        "            self._skip_known_chunks(tracked)\n            tracked.lookup",
        "            tracked.lookup",
        (_TESTS + "test_scheduler_side.py",),
    ),
    Mutation(
        "stored-before-the-last-token",
        _HERE + "scheduler_side.py",
        "steps = range(computed, computed + certain)",
        "steps = range(computed, computed + certain + 1)",
        (_TESTS + "test_scheduler_side.py",),
    ),
    Mutation(
        "lease-kept-after-the-load",
        _HERE + "scheduler_side.py",
        "            if load.handle is not None:\n"
        "                load.handle.release(loaded_tokens=loaded_tokens)",
        "            pass",
        (_TESTS + "test_scheduler_side.py",),
    ),
    Mutation(
        "held-blocks-scattered",
        _HERE + "worker_side.py",
        "skip_blocks=max(0, held)",
        "skip_blocks=0",
        (_TESTS + "test_worker_side.py",),
    ),
    Mutation(
        "null-blocks-loaded",
        _HERE + "worker_side.py",
        "null_block=job.null_block_id",
        "null_block=None",
        (_TESTS + "test_worker_side.py",),
    ),
    Mutation(
        "slots-not-given-back",
        _HERE + "worker_side.py",
        "            self._client.give_back(numbers)\n",
        "",
        (_TESTS + "test_worker_side.py",),
    ),
    Mutation(
        "another-rank-s-slots",
        _HERE + "worker_side.py",
        "if run.rank == self._rank and run.group == group",
        "if run.group == group",
        (_TESTS + "test_worker_side.py",),
    ),
    Mutation(
        "stores-of-another-binding",
        _HERE + "worker_side.py",
        "binding.binding_id != step.binding_id or ",
        "",
        (_TESTS + "test_worker_side.py",),
    ),
    Mutation(
        "stores-of-another-size",
        _HERE + "worker_side.py",
        " or binding.chunk_size != self._registered_for",
        "",
        (_TESTS + "test_worker_side.py",),
    ),
    Mutation(
        "failed-load-not-reported",
        _HERE + "worker_side.py",
        "                self._failed.add(job.request_id)\n",
        "",
        (_TESTS + "test_worker_side.py",),
    ),
    Mutation(
        "dcp-ignored",
        _HERE + "kv_geometry.py",
        "(dcp_size if spec.dcp_sharded else 1)",
        "1",
        (_TESTS + "test_kv_geometry.py",),
    ),
    Mutation(
        "later-pool-not-pinned",
        _HERE + "worker_side.py",
        "self._registered_for == chunk_size:\n                    self._pin_pool()",
        "self._registered_for == chunk_size:\n                    return",
        (_TESTS + "test_worker_side.py",),
    ),
)
