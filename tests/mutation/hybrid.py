"""Mutations of what hybrid models need: states, windows, groups that come later."""

from __future__ import annotations

from mutation.catalog import Mutation

_HERE = "lmcache_persist/connector/vllm/"
_TESTS = "tests/unit/connector_vllm/"
_MEMORY = "lmcache_persist/store/memory.py"
_MEMORY_TESTS = ("tests/unit/store/test_memory.py",)
_GEOMETRY = "lmcache_persist/geometry.py"
_GEOMETRY_TESTS = ("tests/unit/test_geometry.py",)

MUTATIONS = (
    Mutation(
        "states-of-any-mode-pass",
        _HERE + "kv_geometry.py",
        'if spec.mamba_cache_mode != "align":',
        "if False:",
        (_TESTS + "test_kv_geometry.py",),
    ),
    Mutation(
        "replayed-windows-are-scratch",
        _HERE + "kv_geometry.py",
        "if group.kv_cache_spec.prefix_replay_tokens:",
        "if False:",
        (_TESTS + "test_kv_geometry.py",),
    ),
    Mutation(
        "retained-tokens-forgotten",
        _HERE + "kv_geometry.py",
        "int(spec.sliding_window) + int(spec.extra_retained_tokens)",
        "int(spec.sliding_window)",
        (_TESTS + "test_kv_geometry.py",),
    ),
    Mutation(
        "state-of-a-passed-boundary-believed",
        _HERE + "store_plan.py",
        "if tokens == steps.stop or is_checkpoint(group, steps, tokens):",
        "if tokens <= steps.stop:",
        (_TESTS + "test_store_plan.py",),
    ),
    Mutation(
        "state-taken-anywhere-in-a-chunk",
        _HERE + "store_plan.py",
        "if not computed or computed % chunk_size:",
        "if computed < chunk_size:",
        (_TESTS + "test_store_plan.py",),
    ),
    Mutation(
        "state-that-the-engine-held-left-out",
        _HERE + "store_plan.py",
        "in {steps.stop, steps.start} if admitted else {steps.stop}:",
        "in {steps.stop}:",
        (_TESTS + "test_store_plan.py",),
    ),
    Mutation(
        "state-of-an-earlier-step-believed",
        _HERE + "store_plan.py",
        "in {steps.stop, steps.start} if admitted else {steps.stop}:",
        "in {steps.stop, steps.start}:",
        (_TESTS + "test_store_plan.py",),
    ),
    Mutation(
        "stage-without-a-layer-leaves-its-slot",
        _HERE + "worker_side.py",
        "slot[:] = bytes(len(slot))",
        "pass",
        (_TESTS + "test_worker_side.py",),
    ),
    Mutation(
        "state-stored-twice",
        _HERE + "scheduler_side.py",
        "if c < end and c not in tracked.states",
        "if c < end",
        (_TESTS + "test_scheduler_side.py",),
    ),
    Mutation(
        "window-filled-from-the-wrong-block",
        _HERE + "worker_side.py",
        "held = first - (end - in_object)",
        "held = first - chunk * per_chunk",
        (_TESTS + "test_worker_side.py",),
    ),
    Mutation(
        "steps-cut-by-a-stale-size",
        _HERE + "connector.py",
        "self._vllm_config.cache_config.block_size = wanted",
        "pass",
        (_TESTS + "test_connector.py",),
    ),
    Mutation(
        "object-of-all-blocks-whatever-the-window",
        _GEOMETRY,
        "return max(1, min(blocks, window_blocks // group.tokens_per_block))",
        "return blocks",
        _GEOMETRY_TESTS,
    ),
    Mutation(
        "room-counted-in-whole-chunks",
        _GEOMETRY,
        "max(0, part.end - max(part.first, held)) * each",
        "max(0, part.end - held) * each",
        _GEOMETRY_TESTS,
    ),
    Mutation(
        "late-state-writes-its-chunk-again",
        _MEMORY,
        "fresh = entry.mask() & ~entry.queued",
        "fresh = entry.mask()",
        _MEMORY_TESTS,
    ),
    Mutation(
        "late-state-durable-with-an-earlier-write",
        _MEMORY,
        "        seqs, entry.seqs = tuple(entry.seqs), []\n",
        "        seqs, entry.seqs = (), []\n        self.sequence.settle(seq)\n",
        _MEMORY_TESTS,
    ),
    Mutation(
        "late-part-in-vain-drops-its-chunk",
        _MEMORY,
        "[place for place in entry.slots if not complete >> place.group & 1]",
        "list(entry.slots)",
        _MEMORY_TESTS,
    ),
    Mutation(
        "late-part-stays-evictable",
        _MEMORY,
        "            self._evictable.pop(entry.key, None)\n        if not fresh:",
        "        if not fresh:",
        _MEMORY_TESTS,
    ),
)
