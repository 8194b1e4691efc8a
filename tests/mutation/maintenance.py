"""Mutations of prune, backup, restore and resize, and the tests that must notice."""

from __future__ import annotations

from mutation.catalog import Mutation

SELECTION = "tests/unit/store/test_selection.py::"
PIECES = "tests/unit/store/test_pieces.py::"
MEMORY = "tests/unit/store/test_memory.py::"
PRUNE = "tests/integration/test_prune.py::"
BACKUP = "tests/integration/test_backup.py::"
REBIND = "tests/integration/test_rebind.py::"
RESIZE = "tests/integration/test_resize.py::"
CRASH = "tests/crash/test_maintenance_crash.py::"
SALVAGE = "tests/integration/test_salvage.py::"
_WRITER = "tests/unit/store/test_writer.py::"
_GONE = _WRITER + "test_what_goes_into_a_file_that_is_gone_is_not_durable"
HINTS = "tests/integration/test_hints.py::"

MUTATIONS = (
    Mutation(
        "start-grows-to-the-default",
        "lmcache_persist/config.py",
        "        if self.capacity_is_set or not store_bytes:\n",
        "        if True:\n",
        ("tests/unit/test_config.py::test_a_store_keeps_its_size_unless_a_capacity_is_set",),
    ),
    Mutation(
        "prune-what-is-in-use",
        "lmcache_persist/store/selection.py",
        "            self.done = record.stored_at <= self._now\n",
        "            self.done = False\n",
        (f"{SELECTION}test_what_was_used_after_a_late_store_is_not_old",),
    ),
    Mutation(
        "prune-below-the-size",
        "lmcache_persist/store/selection.py",
        "            self.done = self._surplus <= 0\n",
        "            self.done = self._surplus < 0\n",
        (f"{SELECTION}test_down_to_a_size_stops_at_it",),
    ),
    Mutation(
        "prune-everything",
        "lmcache_persist/server/live_prune.py",
        "    if selection.is_everything:\n",
        "    if False:\n",
        (f"{PRUNE}test_a_message_without_a_selector_is_refused",),
    ),
    Mutation(
        "prune-does-not-ask",
        "lmcache_persist/cli/prune.py",
        "        ask([_loss(total, whole), *per_model(_losses(total), known)])\n",
        "",
        (f"{PRUNE}test_it_says_what_goes_and_asks",),
    ),
    Mutation(
        "half-a-yes-confirms",
        "lmcache_persist/cli/confirm.py",
        'if answer.strip().lower() != "yes":',
        'if not answer.strip().lower().startswith("y"):',
        ("tests/unit/cli/test_confirm.py::test_anything_else_is_a_no",),
    ),
    Mutation(
        "prune-of-unlocked-files",
        "lmcache_persist/server/prune.py",
        "    with DataDirLock.acquire(paths.root):\n        backup_file",
        "    if True:\n        backup_file",
        (f"{PRUNE}test_files_are_locked_while_it_asks",),
    ),
    Mutation(
        "prune-counts-for-ever",
        "lmcache_persist/cli/prune.py",
        "            if time.monotonic() >= until_s:\n",
        "            if False:\n",
        (f"{PRUNE}test_counting_ends_in_time",),
    ),
    Mutation(
        "a-beginning-of-several-fingerprints",
        "lmcache_persist/server/naming.py",
        "    if len(found) > 1:\n",
        "    if False:\n",
        ("tests/unit/server/test_naming.py::test_an_unclear_beginning_lists_what_it_may_be",),
    ),
    Mutation(
        "rebind-to-the-same-size",
        "lmcache_persist/server/rebind.py",
        "        if chunk_size == binding.chunk_size and not force:\n",
        "        if False:\n",
        (f"{REBIND}test_the_size_that_it_has_is_left_alone",),
    ),
    Mutation(
        "prune-the-disk-alone",
        "lmcache_persist/server/live_prune.py",
        "            state.memory.prune(picked.keys)\n",
        "",
        (f"{PRUNE}test_what_is_leased_stays_in_its_slots",),
    ),
    Mutation(
        "prune-forgets-the-leased",
        "lmcache_persist/store/residents.py",
        "                entry.unwanted = True\n",
        "                entry.unwanted = not entry.leases\n",
        (f"{MEMORY}test_a_pruned_chunk_is_dropped_when_nobody_holds_it",),
    ),
    Mutation(
        "backup-believes-what-it-is-sent",
        "lmcache_persist/store/pieces.py",
        "                if extent_digest(extent) != digests[at : at + EXTENT_DIGEST_BYTES]:\n",
        "                if False:\n",
        (f"{PIECES}test_altered_parts_are_refused",),
    ),
    Mutation(
        "backup-of-what-came-later",
        "lmcache_persist/store/pieces.py",
        "            if record.serial <= at.last_serial:\n",
        "            if record.serial:\n",
        (f"{PIECES}test_a_busy_store_is_cut_once",),
    ),
    Mutation(
        "a-copy-in-another-order",
        "lmcache_persist/store/copying.py",
        "        order = self._first_order + record.order\n",
        "        order = self._first_order + record.serial\n",
        (f"{PIECES}test_a_copy_is_a_store_in_good_order",),
    ),
    Mutation(
        "salvage-over-the-order-there-is",
        "lmcache_persist/store/copying.py",
        "        order = self._first_order + record.order\n",
        "        order = record.order\n",
        (f"{SALVAGE}test_what_the_new_store_has_stays",),
    ),
    Mutation(
        "salvage-removes-what-has-no-room",
        "lmcache_persist/server/salvage.py",
        "        removed = not salvaged.no_room.total.chunks\n",
        "        removed = True\n",
        (f"{SALVAGE}test_what_has_no_room_stays_aside_until_there_is",),
    ),
    Mutation(
        "settled-at-every-start-again",
        "lmcache_persist/store/repair.py",
        "                txn.delete(fmt.META_UNSETTLED, db=self._dbs.meta)\n",
        "                pass\n",
        ("tests/unit/store/test_lmdb_disk.py::test_a_death_between_two_pieces_is_made_up_for",),
    ),
    Mutation(
        "dropped-though-it-stays",
        "lmcache_persist/store/lmdb_touch.py",
        "ended(SLOW_READ_S):\n                    raise StoreFull(",
        "ended(SLOW_READ_S):\n                    return []\n                    raise StoreFull(",
        ("tests/unit/store/test_lmdb_disk.py::test_what_cannot_be_dropped_is_said",),
    ),
    Mutation(
        "refused-for-room-after-all-is-thrown-away",
        "lmcache_persist/server/recovery.py",
        "paths.root, settings.capacity_bytes - back, way_out",
        "paths.root, 0 * back, way_out",
        (f"{SALVAGE}test_a_start_that_is_refused_for_room_keeps_what_is_aside",),
    ),
    Mutation(
        "throws-away-what-makes-too-little-room",
        "lmcache_persist/server/opening.py",
        '        if not back or error.fields["available"] + back < error.fields["needed"]:\n',
        "        if not back:\n",
        (f"{SALVAGE}test_what_is_aside_goes_only_if_that_makes_room",),
    ),
    Mutation(
        "evicted-in-silence-while-the-file-is-away",
        "lmcache_persist/store/writer.py",
        "                outcome = replace(outcome, evicted=written.evicted)\n",
        "                pass\n",
        (_GONE,),
    ),
    Mutation(
        "salvage-takes-what-is-stale",
        "lmcache_persist/store/salvage.py",
        "            if record.binding_id != copy.binding_id:\n",
        "            if False:\n",
        (f"{SALVAGE}test_what_is_of_another_binding_is_not_taken",),
    ),
    Mutation(
        "stops-at-a-linked-store",
        "lmcache_persist/store/aside.py",
        "    if not folder.is_symlink():\n",
        "    if True:\n",
        (f"{SALVAGE}test_a_linked_store_is_taken_back_and_reset",),
    ),
    Mutation(
        "salvage-leaves-a-file-longer",
        "lmcache_persist/store/salvage.py",
        "        if problem and found < told:\n",
        "        if False:\n",
        (f"{SALVAGE}test_what_can_be_had_of_a_store_set_aside",),
    ),
    Mutation(
        "salvage-loses-in-silence",
        "lmcache_persist/server/salvage.py",
        "        salvaged.dropped = dropped\n",
        "",
        (f"{SALVAGE}test_what_is_lost_is_said",),
    ),
    Mutation(
        "a-store-aside-goes-in-silence",
        "lmcache_persist/server/opening.py",
        "    if aside.has_set_aside(paths.store):\n",
        "    if False:\n",
        (f"{SALVAGE}test_a_second_store_aside_takes_the_first_ones_place_aloud",),
    ),
    Mutation(
        "salvage-of-another-store",
        "lmcache_persist/server/salvage.py",
        "        if source.meta.uuid != found.uuid:\n",
        "        if False:\n",
        (f"{SALVAGE}test_another_store_is_not_taken_nor_removed",),
    ),
    Mutation(
        "a-repaired-store-is-set-aside-all-the-same",
        "lmcache_persist/server/repair.py",
        "    clear_unsynced(paths.store)\n",
        "    pass\n",
        (f"{SALVAGE}test_a_repair_before_the_start_keeps_a_relaxed_store",),
    ),
    Mutation(
        "hints-are-not-quoted",
        "lmcache_persist/printable.py",
        "    return shlex.join([",
        '    return " ".join([',
        (f"{HINTS}test_bad_bytes_are_dropped_by_the_hint",),
    ),
    Mutation(
        "a-repair-is-named-that-is-refused",
        "lmcache_persist/cli/verify.py",
        "        if refusal is not None and refusal.hint:\n",
        "        if False:\n",
        (f"{HINTS}test_swapped_files_have_the_refusal_of_a_start",),
    ),
    Mutation(
        "what-a-start-refuses-comes-later",
        "lmcache_persist/cli/connection.py",
        "    if refusal is not None:\n",
        "    if False:\n",
        (f"{HINTS}test_what_a_start_would_refuse_is_told_at_once",),
    ),
    Mutation(
        "a-backup-hides-what-was-bad",
        "lmcache_persist/cli/backup.py",
        "            self.bad_chunks += piece.bad_chunks\n",
        "            pass\n",
        (f"{HINTS}test_a_backup_tells_bad_from_evicted",),
    ),
    Mutation(
        "a-lost-manifest-is-rebuilt-from-any-store",
        "lmcache_persist/server/restore.py",
        "        if found.stamp is None or found.stamp.binding_id != descriptor.binding_id:\n",
        "        if found.stamp is None:\n",
        (f"{BACKUP}test_a_lost_manifest_is_not_rebuilt_from_another_store",),
    ),
    Mutation(
        "restore-into-its-own-backup",
        "lmcache_persist/server/restore.py",
        '    check_apart(backup, data_dir, "backup")\n',
        "",
        (f"{HINTS}test_nothing_is_restored_into_its_own_backup",),
    ),
    Mutation(
        "restore-of-an-altered-backup",
        "lmcache_persist/server/backup_file.py",
        "    _check_files(folder, descriptor)\n",
        "",
        (f"{BACKUP}test_what_is_no_whole_backup_is_refused",),
    ),
    Mutation(
        "restore-without-mark",
        "lmcache_persist/server/restore.py",
        "    reset.mark(paths)\n",
        "",
        (f"{CRASH}test_a_killed_restore_counts_for_nothing",),
    ),
    Mutation(
        "backup-under-its-own-name",
        "lmcache_persist/server/backup.py",
        "    partial = partial_name(dest)\n",
        "    partial = dest\n",
        (f"{CRASH}test_a_killed_backup_is_none_or_a_whole_one",),
    ),
    Mutation(
        "resize-forgets-a-rebind",
        "lmcache_persist/server/resize.py",
        "        _finish_rebind(paths, found)\n",
        "",
        (f"{RESIZE}test_a_rebind_that_stopped_half_way_is_completed",),
    ),
    Mutation(
        "shrink-to-what-was-used-first",
        "lmcache_persist/store/copying.py",
        "                found.first_order = found.first_order or record.order + 1\n",
        "                pass\n",
        (f"{RESIZE}test_shrinking_keeps_what_was_used_last",),
    ),
)
