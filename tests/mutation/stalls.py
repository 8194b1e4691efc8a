"""Mutations of what stands between a hanging disk, or a stranger, and everybody else."""

from __future__ import annotations

from mutation.catalog import CONVERGE, MEMORY, Mutation

_SERVER = "lmcache_persist/server/"
_STALLED = "tests/integration/test_stalled_disk.py::"
_REFUSALS = "tests/integration/test_refusals.py::"
_CLIENTS = "tests/integration/test_clients.py::"
_WRITER = "tests/unit/store/test_writer.py::"
_HTTP = "tests/integration/test_hostile_http.py::"

MUTATIONS = (
    Mutation(
        "silence-of-an-idle-server",
        _SERVER + "loop.py",
        "began_s = min(due_s, time.monotonic())",
        "began_s = time.monotonic()",
        (_STALLED + "test_an_idle_server_that_is_stopped_says_so_afterwards",),
    ),
    Mutation(
        "refused-for-its-address-too-late",
        _SERVER + "app.py",
        "        check_free(settings.listen)\n",
        "",
        (_REFUSALS + "test_a_refused_start_of_an_old_data_dir_changes_no_byte",),
    ),
    Mutation(
        "a-file-in-the-socket's-place-is-removed",
        _SERVER + "loop.py",
        "if not stat.S_ISSOCK(os.stat(path).st_mode):",
        "if False:",
        (_REFUSALS + "test_a_refused_start_of_an_old_data_dir_changes_no_byte",),
    ),
    Mutation(
        "durable-in-a-file-that-is-gone",
        "lmcache_persist/store/writer.py",
        "            if self._in_place():\n                outcome = written",
        "            if True:\n                outcome = written",
        (_WRITER + "test_what_goes_into_a_file_that_is_gone_is_not_durable",),
    ),
    Mutation(
        "durable-goes-on-without-the-store",
        _SERVER + "stores.py",
        "        self._state.sequence.hold()\n",
        "",
        ("tests/integration/test_gone_store.py::test_nothing_is_durable_until_it_is_moved_back",),
    ),
    Mutation(
        "a-copy-passes-for-the-store",
        _SERVER + "own_files.py",
        "if os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd)):",
        "if os.path.lexists(path):",
        ("tests/unit/server/test_own_files.py::test_a_copy_is_not_the_same_file",),
    ),
    Mutation(
        "searches-behind-reads",
        _SERVER + "finding.py",
        "self._state.run(self._state.finder,",
        "self._state.run(self._state.readers,",
        (_STALLED + "test_a_hanging_read_delays_its_own_load_only",),
    ),
    Mutation(
        "backlog-takes-the-pool",
        "lmcache_persist/store/memory.py",
        "fits = waiting + wanted <= STORE_SHARE * self.allocator.size_bytes",
        "fits = True",
        (
            MEMORY + "test_what_waits_for_the_disk_leaves_loads_their_room",
            _STALLED + "test_stores_outrun_a_hanging_disk",
        ),
    ),
    Mutation(
        "stop-waits-for-a-hanging-read",
        _SERVER + "running.py",
        "        if hangs:\n",
        "        if False:\n",
        (_STALLED + "test_a_stop_waits_for_no_hanging_read",),
    ),
    Mutation(
        "stop-waits-for-a-hanging-write",
        _SERVER + "running.py",
        "drained = state.writer.close(max(0.1, deadline - time.monotonic()))",
        "drained = state.writer.close(3600.0)",
        (_STALLED + "test_a_backlog_that_the_disk_does_not_take_is_cleanly_absent",),
    ),
    Mutation(
        "touches-pile-up",
        "lmcache_persist/store/writer.py",
        "self._touched_chunks > MAX_PENDING_TOUCHES",
        "False",
        ("tests/unit/store/test_writer.py::test_hits_during_a_hang_take_bounded_memory",),
    ),
    Mutation(
        "any-number-of-http-threads",
        _SERVER + "http.py",
        "MAX_CONNECTIONS = 32\n",
        "MAX_CONNECTIONS = 320\n",
        (_HTTP + "test_idle_connections_keep_nobody_out",),
    ),
    Mutation(
        "cut-head-is-whole",
        _SERVER + "http.py",
        '            raise LineTooLong("head")',
        '            return b""',
        (_HTTP + "test_a_long_head_is_refused",),
    ),
    Mutation(
        "log-lines-can-be-forged",
        _SERVER + "logs.py",
        "{record.name}: {plain(record.getMessage())}",
        "{record.name}: {record.getMessage()}",
        ("tests/unit/server/test_logs.py::test_a_log_line_is_one_line",),
    ),
    Mutation(
        "models-without-bound",
        "lmcache_persist/manifest/catalog.py",
        "if kept > MAX_IDLE_MODELS or kept_bytes > MAX_IDLE_MODEL_BYTES:",
        "if False:",
        ("tests/unit/manifest/test_manifest.py::test_idle_models_are_bounded",),
    ),
    Mutation(
        "used-models-go-too",
        "lmcache_persist/manifest/catalog.py",
        "        if fingerprint in used:\n            continue\n",
        "",
        ("tests/unit/manifest/test_manifest.py::test_idle_models_are_bounded",),
    ),
    Mutation(
        "refused-first-start-leaves-files",
        _SERVER + "first_start.py",
        "                self._undo(before)\n",
        "                pass\n",
        (_REFUSALS + "test_a_refused_first_start_leaves_nothing",),
    ),
    Mutation(
        "refused-start-takes-old-files",
        _SERVER + "first_start.py",
        "                if path in before:\n",
        "                if False:\n",
        (_REFUSALS + "test_a_refused_start_of_an_old_data_dir_takes_nothing_away",),
    ),
    Mutation(
        "refused-pool-leaves-its-lock",
        "lmcache_persist/store/pool.py",
        "                paths.clients.rmdir()\n",
        "                pass\n",
        (_REFUSALS + "test_a_refused_first_start_leaves_nothing",),
    ),
    Mutation(
        "first-run-taken-back",
        _SERVER + "first_start.py",
        "if not self._served:",
        "if True:",
        ("tests/unit/server/test_first_start.py::test_once_it_served_everything_stays",),
    ),
    Mutation(
        "round-in-a-circle",
        _SERVER + "upstream.py",
        "        self._check_circle(message.via)\n",
        "",
        (CONVERGE + "test_servers_that_go_round_in_a_circle_say_so",),
    ),
    Mutation(
        "stop-waits-for-a-hanging-manifest",
        _SERVER + "state.py",
        "self.clerk.shutdown(wait=done, cancel_futures=True)",
        "self.clerk.shutdown(wait=True, cancel_futures=True)",
        (_STALLED + "test_a_stop_waits_for_no_hanging_manifest",),
    ),
    Mutation(
        "searches-pile-up",
        _SERVER + "finding.py",
        "(waiting and waiting + len(unknown) > MAX_KEYS_SEARCHED)",
        "False",
        (_STALLED + "test_searches_of_a_hanging_disk_do_not_pile_up",),
    ),
    Mutation(
        "all-that-wait-try-for-each-bit-of-room",
        _SERVER + "lookups.py",
        "            if lookup.session.lock in full:\n",
        "            if False:\n",
        (_CLIENTS + "test_many_lookups_that_wait_do_not_keep_the_server_busy",),
    ),
    Mutation(
        "retry-for-each-bit-of-room",
        _SERVER + "lookups.py",
        "if self._waiting and not self._retry_due:",
        "if self._waiting:",
        (_CLIENTS + "test_many_lookups_that_wait_do_not_keep_the_server_busy",),
    ),
    Mutation(
        "shared-prefix-counts-for-each-request",
        _SERVER + "sessions.py",
        "self.held_bytes += max(0, nbytes - known)",
        "self.held_bytes += nbytes",
        (_CLIENTS + "test_a_prefix_that_many_requests_share_counts_once",),
    ),
    Mutation(
        "lost-by-the-disk-counts-as-there",
        "lmcache_persist/store/residents.py",
        "        entry.queued = 0\n        for place in places:\n",
        "        for place in places:\n",
        (MEMORY + "test_what_the_disk_lost_is_written_with_the_next_commit",),
    ),
    Mutation(
        "closed-under-a-read",
        "lmcache_persist/store/lmdb_gate.py",
        "if not self._state.wait_for(lambda: not self._reads, timeout_s):",
        "if False:",
        ("tests/unit/store/test_lmdb_disk.py::test_store_is_not_closed_under_a_read",),
    ),
    Mutation(
        "reservations-numbered-alike-at-every-boot",
        "lmcache_persist/store/memory.py",
        "itertools.count(1 + secrets.randbits(48))",
        "itertools.count(1)",
        (MEMORY + "test_a_reservation_of_an_earlier_boot_names_nothing",),
    ),
)
