"""Mutations of what stands between a crash, a bad disk and wrong or lost bytes."""

from __future__ import annotations

from mutation.catalog import Mutation

_STORE = "lmcache_persist/store/"
_SERVER = "lmcache_persist/server/"
_POWER = "tests/crash/test_power_cut.py::"
_DAMAGE = "tests/crash/test_damage_table.py::"
_FAULT = "tests/crash/test_nth_fault.py::"
_LMDB = "tests/unit/store/test_lmdb_disk.py::"
_STALLED = "tests/integration/test_stalled_disk.py::"
_FULL = "tests/crash/test_full_disk.py::"
_REPAIR = "tests/unit/store/test_repair.py::"
_REPAIR_CRASH = "tests/crash/test_repair_crash.py::"
_VERIFY = "tests/integration/test_verify_repair.py::"
_INSPECT = "tests/integration/test_inspect.py::"

MUTATIONS = (
    Mutation(
        "commit-without-sync",
        _STORE + "lmdb_open.py",
        "            sync=sync,\n            metasync=sync,",
        "            sync=False,\n            metasync=False,",
        (_POWER + "test_nothing_durable_is_lost",),
    ),
    Mutation(
        "trust-relaxed-after-a-power-cut",
        _STORE + "unsynced.py",
        "    return noted != kernel_boot_id()",
        "    return False",
        (_POWER + "test_relaxed_is_not_trusted_after_a_cut",),
    ),
    Mutation(
        "power-cut-note-beats-foreign-store",
        _SERVER + "recovery.py",
        "    if found.uuid:\n        _check_belongs(found, binding, settings.data_dir)\n",
        "",
        (_POWER + "test_a_foreign_store_is_refused_even_after_a_cut",),
    ),
    Mutation(
        "newer-lmdb-is-damage",
        _STORE + "meta_page.py",
        "        raise FormatTooNew(",
        "        raise StoreDamaged(",
        (_DAMAGE + "test_foreign_bytes_are_refused",),
    ),
    Mutation(
        "counters-not-looked-at",
        _STORE + "offline.py",
        '            unsound=_unsound(txn, dbs, env.info()["map_size"]),\n',
        "",
        ("tests/unit/store/test_peek_child.py::test_what_must_be_mended_is_told",),
    ),
    Mutation(
        "damage-at-opening-ends-the-start",
        _SERVER + "opening.py",
        "        if decision.binding is None:\n            error.hint",
        "        if True:\n            error.hint",
        (_DAMAGE + "test_what_cannot_be_mended_is_set_aside",),
    ),
    Mutation(
        "repair-drops-what-the-disk-does-not-read",
        _STORE + "repair.py",
        "        if problem.fault is Fault.UNREADABLE:\n",
        "        if False:\n",
        (_REPAIR + "test_a_disk_that_fails_proves_nothing",),
    ),
    Mutation(
        "repair-drops-a-chunk-and-not-its-count",
        _STORE + "repair.py",
        "        self._subtract(txn, record)\n\n",
        "\n",
        (_REPAIR_CRASH + "test_a_drop_leaves_right_totals_right",),
    ),
    Mutation(
        "repair-leaves-orphans",
        _STORE + "repair.py",
        "        if extents:\n            serials",
        "        if False:\n            serials",
        (_REPAIR + "test_each_way_is_noticed_mended_and_clean_afterwards",),
    ),
    Mutation(
        "repair-of-a-foreign-store",
        _SERVER + "repair.py",
        "        recovery.check_together(found, data_dir)\n",
        "",
        (_VERIFY + "test_what_no_repair_can_know_is_refused",),
    ),
    Mutation(
        "live-verify-drops-what-it-finds",
        _SERVER + "live_check.py",
        "BUDGET_S, note=repair)",
        "BUDGET_S, note=True)",
        (_VERIFY + "test_a_live_server_names_and_mends_it",),
    ),
    Mutation(
        "inspect-maps-a-broken-store-itself",
        _SERVER + "looking.py",
        "in_child(_reading(paths.store, snapshot, wish))",
        "_reading(paths.store, snapshot, wish)()",
        (_INSPECT + "test_broken_pages_cannot_end_inspect",),
    ),
    Mutation(
        "deaths-never-forgotten",
        _SERVER + "crashes.py",
        "    if anew:\n",
        "    if False:\n",
        (_DAMAGE + "test_the_third_death_in_ten_minutes_empties_the_store",),
    ),
    Mutation(
        "no-third-strike",
        _SERVER + "crashes.py",
        "LIMIT = 3\n",
        "LIMIT = 30\n",
        (_DAMAGE + "test_the_third_death_in_ten_minutes_empties_the_store",),
    ),
    Mutation(
        "damage-while-running-not-noted",
        _STORE + "writer.py",
        "                self.on_damage(error.message)",
        "                pass",
        (_DAMAGE + "test_damage_found_while_running_is_told_to_the_next_start",),
    ),
    Mutation(
        "set-aside-keeps-its-room",
        _SERVER + "opening.py",
        "        if not back or",
        "        if True or",
        (_DAMAGE + "test_one_store_is_kept_aside_and_makes_room_when_needed",),
    ),
    Mutation(
        "no-ballast",
        _SERVER + "app.py",
        "        ballast.give_up_if_full(paths)\n",
        "",
        (_FULL + "test_the_room_for_a_restart_is_kept",),
    ),
    Mutation(
        "start-needs-its-row",
        _SERVER + "running.py",
        '        except ManifestError as error:\n            log.warning("this start',
        '        except ZeroDivisionError as error:\n            log.warning("this start',
        (_FULL + "test_a_start_that_cannot_be_recorded",),
    ),
    Mutation(
        "a-line-for-each-model",
        _STORE + "throttle.py",
        "if self._said >= self._burst:",
        "if self._said < 0:",
        (_FULL + "test_a_full_disk_says_little", "tests/unit/store/test_throttle.py"),
    ),
    Mutation(
        "environment-left-open",
        _STORE + "lmdb_open.py",
        "        except OSError:\n            env.close()\n            raise\n        return env\n",
        "        except OSError:\n            raise\n        return env\n",
        (_FAULT + "test_every_call_of_the_store_fails_in_turn",),
    ),
    Mutation(
        "what-can-be-mended-is-set-aside",
        _SERVER + "app.py",
        "            mends=True,\n",
        "",
        (_DAMAGE + "test_what_only_counts_or_orders_is_mended",),
    ),
    Mutation(
        "leftovers-in-one-transaction",
        _STORE + "repair.py",
        "        self._step = budget.chunks_per_eviction\n",
        "        self._step = 1 << 30\n",
        (_LMDB + "test_many_lost_records_take_bounded_transactions",),
    ),
    Mutation(
        "leftovers-forgotten-by-a-death",
        _STORE + "lmdb_txn.py",
        "        if self.lost:\n",
        "        if False:\n",
        (_LMDB + "test_a_death_between_two_pieces_is_made_up_for",),
    ),
    Mutation(
        "late-verdict-drops-the-new-copy",
        "lmcache_persist/server/loading.py",
        "            state.writer.drop({entry.key: serial})\n",
        "            state.writer.drop(dict.fromkeys([entry.key]))\n",
        (_STALLED + "test_a_late_verdict_on_an_old_copy_spares_the_new_one",),
    ),
    Mutation(
        "bad-record-found-again",
        _STORE + "lmdb_reader.py",
        "if record.serial in (self._bad.get(key), self._taken.get(key)):",
        "if False:",
        (_DAMAGE + "test_a_bad_value_is_a_miss",),
    ),
)
