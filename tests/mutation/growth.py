"""Mutations of a store's growth while it serves, and the tests that must notice."""

from __future__ import annotations

from mutation.catalog import Mutation

_STORE = "lmcache_persist/store/"
_LIVE = "lmcache_persist/server/live_grow.py"
_APP = "lmcache_persist/server/app.py"
GROW = "tests/unit/store/test_lmdb_grow.py::"
LIVE = "tests/integration/test_live_grow.py::"
CRASH = "tests/crash/test_grow_crash.py::"

MUTATIONS = (
    Mutation(
        "map-moves-under-a-read",
        _STORE + "lmdb_gate.py",
        "            ended = self._state.wait_for(lambda: not self._reads, timeout_s)\n",
        "            ended = True\n",
        (f"{GROW}test_a_read_that_begins_too_late_ends_the_wait",),
    ),
    Mutation(
        "reads-begin-while-the-map-moves",
        _STORE + "lmdb_gate.py",
        "            if self._held_up:\n",
        "            if False:\n",
        (f"{GROW}test_reads_wait_while_the_map_moves",),
    ),
    Mutation(
        "a-hang-holds-everybody-up",
        _STORE + "lmdb_gate.py",
        "        if not self.older_reads_ended(timeout_s):\n",
        "        if False:\n",
        (f"{GROW}test_a_read_that_hangs_delays_no_other",),
    ),
    Mutation(
        "reads-where-the-map-was",
        _STORE + "lmdb_grow.py",
        "            self._reader.moved(budget)\n",
        "            self._reader.budget = budget\n",
        (f"{GROW}test_a_store_grows_while_it_is_open",),
    ),
    Mutation(
        "writes-as-if-it-had-not-grown",
        _STORE + "lmdb_grow.py",
        "            self.capacity_bytes, self._budget = capacity_bytes, budget\n",
        "            self.capacity_bytes = capacity_bytes\n",
        (f"{GROW}test_a_store_grows_while_it_is_open",),
    ),
    Mutation(
        "longer-without-blocks",
        _STORE + "preallocation.py",
        "            os.posix_fallocate(fd, start, nbytes)\n",
        "            os.ftruncate(fd, start + nbytes)\n",
        (f"{GROW}test_a_store_grows_while_it_is_open",),
    ),
    Mutation(
        "keeps-room-that-is-not-durable",
        _STORE + "preallocation.py",
        "        os.fsync(fd)\n        sync_directory(path.parent)\n    except",
        "    except",
        (f"{GROW}test_room_that_cannot_be_made_durable_is_given_back",),
    ),
    Mutation(
        "allocates-where-the-map-is",
        _STORE + "preallocation.py",
        "    starts = range(held_bytes, length_bytes, _PIECE_BYTES)\n",
        "    starts = range(0, length_bytes, _PIECE_BYTES)\n",
        (f"{GROW}test_room_that_is_not_there_is_given_back",),
    ),
    Mutation(
        "maps-a-file-that-is-too-short",
        _STORE + "lmdb_grow.py",
        "    if found < capacity_bytes:\n",
        "    if False:\n",
        (f"{GROW}test_a_file_without_its_blocks_is_not_mapped",),
    ),
    Mutation(
        "grows-somebody-elses-file",
        _STORE + "preallocation.py",
        "    if not os.path.samestat(os.fstat(fd), os.fstat(in_use)):\n",
        "    if False:\n",
        (f"{GROW}test_another_file_in_its_place_is_left_alone",),
    ),
    Mutation(
        "unmaps-before-it-knows",
        _STORE + "lmdb_grow.py",
        "                _try_map(path, capacity_bytes)\n",
        "                pass\n",
        (f"{GROW}test_a_map_that_the_process_cannot_have_is_refused_before",),
    ),
    Mutation(
        "unmaps-what-is-somebody-elses",
        _STORE + "lmdb_disk.py",
        "                if not self._map_lost:\n",
        "                if True:\n",
        (f"{GROW}test_a_map_that_is_lost_is_errors_and_no_signal",),
    ),
    Mutation(
        "the-collector-unmaps-it",
        _STORE + "lmdb_grow.py",
        "        ctypes.pythonapi.Py_IncRef(ctypes.py_object(env))\n",
        "        ctypes.py_object(env)\n",
        (f"{GROW}test_a_map_that_is_lost_is_errors_and_no_signal",),
    ),
    Mutation(
        "keeps-the-room-of-a-growth-that-failed",
        _LIVE,
        "            disk.give_back()\n",
        "            pass\n",
        (f"{LIVE}test_a_read_that_hangs_makes_it_give_up",),
    ),
    Mutation(
        "grows-when-nobody-expects-it",
        _LIVE,
        "                    elif time.monotonic() > until_s and task.cancel():\n",
        "                    elif time.monotonic() > until_s:\n",
        (f"{LIVE}test_a_writer_that_hangs_makes_it_give_up",),
    ),
    Mutation(
        "cuts-the-file-under-the-writer",
        _LIVE,
        "        except StoreError:\n",
        "        except PersistError:\n",
        (f"{LIVE}test_a_stop_ends_a_growth",),
    ),
    Mutation(
        "grows-a-store-that-is-gone",
        _LIVE,
        "        self._state.files.require()\n        if",
        "        if",
        (f"{LIVE}test_what_a_live_server_cannot_do_is_refused",),
    ),
    Mutation(
        "grows-a-store-that-went-meanwhile",
        _LIVE,
        "            self._state.files.require()\n            disk.grow",
        "            disk.grow",
        (f"{LIVE}test_a_file_that_goes_while_room_is_taken_is_not_grown",),
    ),
    Mutation(
        "two-growths-at-once",
        _LIVE,
        "        elif last is None or last.result.done():\n",
        "        elif True:\n",
        (f"{LIVE}test_two_growths_at_once",),
    ),
    Mutation(
        "a-busy-store-is-a-failing-disk",
        _STORE + "writer.py",
        "            except (StoreFull, StoreBusy) as error:\n",
        "            except StoreFull as error:\n",
        (f"{LIVE}test_reads_in_the_way_are_waited_for",),
    ),
    Mutation(
        "refuses-the-setting-it-overtook",
        _APP,
        "    elif found.grown_over_bytes == settings.capacity_bytes < held:\n",
        "    elif False:\n",
        (f"{LIVE}test_a_start_with_the_setting_that_it_overtook",),
    ),
    Mutation(
        "any-smaller-setting-will-do",
        _APP,
        "    elif found.grown_over_bytes == settings.capacity_bytes < held:\n",
        "    elif settings.capacity_bytes < held:\n",
        (f"{LIVE}test_a_start_with_the_setting_that_it_overtook",),
    ),
    Mutation(
        "answered-before-it-is-noted",
        _STORE + "lmdb_grow.py",
        'self._transact(lambda txn: txn.note_grown(over_bytes), after="grow.after_note")',
        'failpoints.hit("grow.after_note")',
        (f"{CRASH}test_a_killed_growth_is_the_old_capacity_or_the_new_one",),
    ),
)
