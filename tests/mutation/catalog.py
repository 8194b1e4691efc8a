"""The mutations: what is broken, and which tests must notice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutation:
    """One way to break the code.

    Attributes:
        name: short, for the command line.
        file: in the checkout.
        old: text that is there exactly once.
        new: what it becomes.
        tests: pytest ids, at least one of which must fail.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


ROUND_TRIP = "tests/integration/test_round_trip.py::"
MEMORY = "tests/unit/store/test_memory.py::"
REBIND = "tests/integration/test_rebind.py::"
REBIND_CRASH = "tests/crash/test_rebind_crash.py::"
CONVERGE = "tests/integration/test_converge.py::"

MUTATIONS = (
    Mutation(
        "lcm-to-max",
        "lmcache_persist/geometry.py",
        "return math.lcm(*(group.tokens_per_block for group in groups if group.cacheable))",
        "return max(group.tokens_per_block for group in groups if group.cacheable)",
        ("tests/unit/test_geometry.py",),
    ),
    Mutation(
        "round-down",
        "lmcache_persist/geometry.py",
        "return -(-value // multiple) * multiple",
        "return max(1, value // multiple) * multiple",
        ("tests/unit/test_geometry.py",),
    ),
    Mutation(
        "no-token-left-to-compute",
        "lmcache_persist/geometry.py",
        "limit = min(len(present), max(0, num_tokens - 1) // chunk_size)",
        "limit = min(len(present), max(0, num_tokens) // chunk_size)",
        ("tests/unit/test_geometry.py", "tests/property/test_geometry.py"),
    ),
    Mutation(
        "window-one-short",
        "lmcache_persist/geometry.py",
        "first_token = max(0, prefix_tokens - group.window + 1)",
        "first_token = max(0, prefix_tokens - group.window + 2)",
        ("tests/unit/test_geometry.py", "tests/property/test_geometry.py"),
    ),
    Mutation(
        "hash-without-parent",
        "lmcache_persist/hashing.py",
        'hasher = blake3(parent + struct.pack("<I", len(extra)) + extra)',
        'hasher = blake3(struct.pack("<I", len(extra)) + extra)',
        ("tests/unit/test_hashing.py",),
    ),
    Mutation(
        "hash-without-extra",
        "lmcache_persist/hashing.py",
        'hasher = blake3(parent + struct.pack("<I", len(extra)) + extra)',
        'hasher = blake3(parent + struct.pack("<I", 0))',
        ("tests/unit/test_hashing.py",),
    ),
    Mutation(
        "fingerprint-without-layouts",
        "lmcache_persist/identity.py",
        '"layouts": list(layouts),',
        '"layouts": [],',
        ("tests/unit/test_identity.py",),
    ),
    Mutation(
        "bind-without-compare",
        "lmcache_persist/manifest/binding.py",
        "if holding is not None:",
        "if False:",
        ("tests/unit/manifest/test_race.py", "tests/unit/manifest/test_manifest.py"),
    ),
    Mutation(
        "unwritten-slots-pass",
        "lmcache_persist/store/memory.py",
        "if self.pool.still_stamped(slot.offset, slot.nbytes, reservation.stamps[group]):",
        "if False:",
        (MEMORY + "test_an_unwritten_slot_is_refused_at_any_extent",),
    ),
    Mutation(
        "only-the-first-extent-is-stamped",
        "lmcache_persist/store/pool.py",
        "if self._whole[head : head + width] == stamp[:width]:",
        "if head == offset and self._whole[head : head + width] == stamp[:width]:",
        (MEMORY + "test_an_unwritten_slot_is_refused_at_any_extent",),
    ),
    Mutation(
        "leases-do-not-hold",
        "lmcache_persist/store/residents.py",
        "        if entry.leases:\n            return\n",
        "",
        (
            MEMORY + "test_a_leased_chunk_is_not_evicted",
            ROUND_TRIP + "test_one_token_is_left_to_compute",
        ),
    ),
    Mutation(
        "dead-slots-do-not-rest",
        "lmcache_persist/store/memory.py",
        "self._resting.append((now_s + REST_S, slot.offset))",
        "self._resting.append((now_s, slot.offset))",
        (MEMORY + "test_a_dead_owners_slots_rest_before_they_are_used_again",),
    ),
    Mutation(
        "reservations-are-anybodys",
        "lmcache_persist/store/memory.py",
        "if reservation is None or reservation.owner != owner:",
        "if reservation is None:",
        (MEMORY + "test_reservations_are_their_owners_and_used_once",),
    ),
    Mutation(
        "one-rank-is-enough",
        "lmcache_persist/store/slots.py",
        "for group, count in self._ready().items() if count == self.world_size)",
        "for group, count in self._ready().items() if count)",
        (MEMORY + "test_a_chunk_waits_for_all_its_ranks",),
    ),
    Mutation(
        "seq-settled-at-commit",
        "lmcache_persist/store/memory.py",
        "            entry.seqs.append(seq)\n            self.sequence.add(seq)\n",
        "            self.sequence.add(seq)\n            self.sequence.settle(seq)\n",
        (MEMORY + "test_a_committed_chunk_is_visible_and_pinned_until_written",),
    ),
    Mutation(
        "stale-messages-pass",
        "lmcache_persist/server/sessions.py",
        "if message.boot != self._state.boot_id or session is None:",
        "if session is None:",
        (ROUND_TRIP + "test_a_message_of_another_boot_is_stale",),
    ),
    Mutation(
        "foreign-store-starts",
        "lmcache_persist/server/recovery.py",
        "if found.uuid != binding.store_uuid:",
        "if False:",
        ("tests/unit/server/test_recovery.py",),
    ),
    Mutation(
        "fixed-size-ignored",
        "lmcache_persist/server/recovery.py",
        "if settings.chunk_size is not None and settings.chunk_size != binding.chunk_size:",
        "if False:",
        ("tests/unit/server/test_recovery.py",),
    ),
    Mutation(
        "rebind-not-completed",
        "lmcache_persist/server/opening.py",
        "        manifest.rebind(decision.replaces, decision.binding)\n",
        "        pass\n",
        (REBIND_CRASH + "test_a_rebind_is_all_or_nothing",),
    ),
    Mutation(
        "rebind-note-ignored",
        "lmcache_persist/binding.py",
        "        return stamp\n",
        "        return self\n",
        (REBIND_CRASH + "test_a_rebind_is_all_or_nothing", "tests/unit/server/test_recovery.py"),
    ),
    Mutation(
        "rebind-note-of-any-binding",
        "lmcache_persist/binding.py",
        "replaced != self.binding_id or ",
        "not replaced or ",
        ("tests/unit/server/test_recovery.py",),
    ),
    Mutation(
        "rebind-clock-repeats",
        "lmcache_persist/server/rebind.py",
        "        if datetime.fromisoformat(now) >= earliest:\n            return now\n",
        "        return now\n",
        ("tests/unit/server/test_rebind.py",),
    ),
    Mutation(
        "sweep-takes-all",
        "lmcache_persist/store/lmdb_txn.py",
        "if record is None or record.binding_id == self._binding_id:",
        "if record is None:",
        ("tests/unit/store/test_disk_tiers.py",),
    ),
    Mutation(
        "no-sweep",
        "lmcache_persist/store/writer.py",
        "                self._sweep()\n",
        "                pass\n",
        ("tests/unit/store/test_writer.py",),
    ),
    Mutation(
        "reset-without-mark",
        "lmcache_persist/server/reset.py",
        "        mark(paths)\n",
        "",
        (REBIND_CRASH + "test_a_reset_is_all_or_nothing",),
    ),
    Mutation(
        "reset-not-finished-at-start",
        "lmcache_persist/server/app.py",
        "            reset.finish(paths)\n",
        "",
        (REBIND_CRASH + "test_a_reset_is_all_or_nothing",),
    ),
    Mutation(
        "recover-overwrites",
        "lmcache_persist/manifest/files.py",
        "if not files_of(target))",
        "if True)",
        ("tests/integration/test_recover.py::test_two_set_aside_manifests_are_both_kept",),
    ),
    Mutation(
        "bind-to-a-guess",
        "lmcache_persist/server/binder.py",
        "            if state.upstream is not None:",
        "            if state.upstream is not None and state.upstream.seen:",
        (CONVERGE + "test_the_first_is_down",),
    ),
    Mutation(
        "first-not-followed",
        "lmcache_persist/server/converge.py",
        "                self._adopt(seen.chunk_size)\n",
        "                pass\n",
        (CONVERGE + "test_a_bind_at_the_first_reaches_the_second",),
    ),
    Mutation(
        "one-bad-answer-ends-the-questions",
        "lmcache_persist/server/converge.py",
        "        finally:\n            # Whatever",
        "        else:\n            # Whatever",
        ("tests/unit/server/test_converge.py::test_no_error_is_the_last_question",),
    ),
    Mutation(
        "disagreement-starts",
        "lmcache_persist/server/converge.py",
        "    raise disagreement(upstream, seen, binding, data_dir)\n",
        "",
        (CONVERGE + "test_servers_that_disagree_are_told",),
    ),
    Mutation(
        "stale-message-accepted",
        "lmcache_persist/server/sessions.py",
        "if check_binding and message.binding",
        "if False and message.binding",
        (REBIND + "test_an_old_binding_id_is_told_so",),
    ),
)
