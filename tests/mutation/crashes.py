"""Mutations of what stands between a crash, a bad disk and wrong or lost bytes."""

from __future__ import annotations

from mutation.catalog import Mutation

_STORE = "lmcache_persist/store/"
_SERVER = "lmcache_persist/server/"
_POWER = "tests/crash/test_power_cut.py::"
_DAMAGE = "tests/crash/test_damage_table.py::"
_FAULT = "tests/crash/test_nth_fault.py::"
_FULL = "tests/crash/test_full_disk.py::"

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
        _STORE + "data_file.py",
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
        _STORE + "data_file.py",
        "        raise FormatTooNew(",
        "        raise StoreDamaged(",
        (_DAMAGE + "test_foreign_bytes_are_refused",),
    ),
    Mutation(
        "counters-not-looked-at",
        _STORE + "offline.py",
        "        lmdb_open.read_counters(txn, dbs)  # without them nothing can be written\n",
        "",
        (_DAMAGE + "test_lost_bytes_are_lost_cache",),
    ),
    Mutation(
        "damage-at-opening-ends-the-start",
        _SERVER + "recovery.py",
        "        if decision.binding is None:\n            raise\n",
        "        raise\n",
        (_DAMAGE + "test_noise_in_a_tree_never_loops",),
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
        _SERVER + "recovery.py",
        "        if gone is None:\n            raise\n",
        "        raise\n",
        (_DAMAGE + "test_one_store_is_kept_aside_and_makes_room_when_needed",),
    ),
    Mutation(
        "no-ballast",
        _SERVER + "app.py",
        "            ballast.give_up_if_full(paths)\n",
        "",
        (_FULL + "test_the_room_for_a_restart_is_kept",),
    ),
    Mutation(
        "start-needs-its-row",
        _SERVER + "app.py",
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
        "bad-record-found-again",
        _STORE + "lmdb_reader.py",
        "if record.serial in (self._bad.get(key), self._taken.get(key)):",
        "if False:",
        (_DAMAGE + "test_a_bad_value_is_a_miss",),
    ),
)
