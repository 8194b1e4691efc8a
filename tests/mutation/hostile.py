"""Mutations of what stands against hostile peers, and of clean-up after the dead."""

from __future__ import annotations

from mutation.catalog import Mutation

_SERVER = "lmcache_persist/server/"
_CONNECTOR = "lmcache_persist/connector/"
_FUZZ = "tests/integration/test_fuzz_server.py::"
_CLIENTS = "tests/integration/test_clients.py::"
_CLEANUP = "tests/integration/test_cleanup.py::"
_SESSIONS = "tests/unit/server/test_sessions.py::"
_HOSTILE = "tests/unit/connector/test_fuzz_client.py::"

MUTATIONS = (
    Mutation(
        "surrogates-in-errors",
        _SERVER + "wire.py",
        'return short.encode("utf-8", "backslashreplace").decode()',
        "return short",
        (_FUZZ + "test_a_differing_surrogate_is_named",),
    ),
    Mutation(
        "endless-model-names-in-stats",
        _SERVER + "stats.py",
        'short(engine.identity.get("model", ""), MAX_NAME_CHARS)',
        'str(engine.identity.get("model", "")) * 20',
        (_FUZZ + "test_odd_identities_are_answered",),
    ),
    Mutation(
        "slots-before-masks",
        _SERVER + "stores.py",
        "for mask in message.masks:\n            if mask",
        "for mask in message.masks[:1]:\n            if mask",
        (_FUZZ + "test_a_refused_reserve_takes_no_slot",),
    ),
    Mutation(
        "commit-anybodys-slot",
        "lmcache_persist/store/memory.py",
        "if reservation is None or reservation.owner != owner:",
        "if reservation is None:",
        (_FUZZ + "test_other_clients_slots_and_leases",),
    ),
    Mutation(
        "flushes-pile-up",
        _SERVER + "stores.py",
        "if message.wait_ms == 0 or waiting >= MAX_FLUSHES_PER_SESSION:",
        "if message.wait_ms == 0:",
        (_FUZZ + "test_a_flood_of_waits_takes_little",),
    ),
    Mutation(
        "hellos-lock-others-out",
        _SERVER + "sessions.py",
        "lockless = [session for session in self.all() if not session.lock]",
        "lockless: list[Session] = []",
        (
            _FUZZ + "test_a_flood_of_hellos_locks_nobody_out",
            _SESSIONS + "test_room_is_made_for_newcomers",
        ),
    ),
    Mutation(
        "odd-lock-ends-the-round",
        _SERVER + "sessions.py",
        "        except OSError as error:\n            self._unseen.warning(",
        "        except ZeroDivisionError as error:\n            self._unseen.warning(",
        (_SESSIONS + "test_a_lock_that_cannot_be_looked_at",),
    ),
    Mutation(
        "lock-files-pile-up",
        _SERVER + "sessions.py",
        "if now - self._swept_s >= SWEEP_EVERY_S:",
        "if now < 0:",
        (_SESSIONS + "test_lock_files_that_nobody_needs_are_swept",),
    ),
    Mutation(
        "sweep-the-living",
        "lmcache_persist/store/pool.py",
        "and not fresh and client_is_dead(Path(entry.path)):",
        "and not fresh:",
        (_CLEANUP + "test_lock_files_of_clients_that_left_are_removed",),
    ),
    Mutation(
        "sweep-living-servers-pools",
        "lmcache_persist/store/pool.py",
        "if try_flock(fd) and os.path.samestat(os.fstat(fd), os.stat(lock)):\n"
        "            paths.pool.unlink(missing_ok=True)\n"
        "            shutil.rmtree(paths.clients, ignore_errors=True)\n"
        "            lock.unlink(missing_ok=True)\n",
        "if True:\n            paths.pool.unlink(missing_ok=True)\n",
        (_CLIENTS + "test_a_pool_of_a_server_in_another_pid_namespace_stays",),
    ),
    Mutation(
        "never-sweep-pools",
        "lmcache_persist/store/pool.py",
        "                sweep_dead_pools(paths.pool.parent)\n",
        "",
        (_CLEANUP + "test_pools_of_dead_servers_are_swept",),
    ),
    Mutation(
        "engine-name-taken",
        _SERVER + "registration.py",
        "        self._check_free(session, message)\n",
        "",
        (_FUZZ + "test_an_engine_name_belongs_to_its_process",),
    ),
    Mutation(
        "sizes-not-in-the-fingerprint",
        _SERVER + "registration.py",
        '{**rank.layout, "object_bytes": rank.object_bytes}',
        "{**rank.layout}",
        (_FUZZ + "test_sizes_are_part_of_what_is_shared",),
    ),
    Mutation(
        "lookup-sees-a-changed-engine",
        _SERVER + "lookups.py",
        "engine = replace(engine, ranks=dict(engine.ranks))",
        "engine = replace(engine, ranks=engine.ranks)",
        (_CLIENTS + "test_a_lookup_outlives_its_worker",),
    ),
    Mutation(
        "a-share-per-session",
        _SERVER + "sessions.py",
        "sessions = self._by_lock.get(session.lock) or {session.token: session}",
        "sessions = {session.token: session}",
        (_CLIENTS + "test_one_process_has_one_share",),
    ),
    Mutation(
        "no-share",
        _SERVER + "stores.py",
        "if self._sessions.held_bytes(session) + wanted > memory.share_bytes:",
        "if wanted > memory.share_bytes:",
        (_CLIENTS + "test_a_stopped_client_keeps_its_share_only",),
    ),
    Mutation(
        "silence-is-death",
        _SERVER + "sessions.py",
        "if not session.lock:\n                if now - session.last_seen_s > LOCKLESS_SILENCE_S:",
        "if True:\n                if now - session.last_seen_s > 0.8:",
        (_CLIENTS + "test_a_silent_client_is_not_reaped",),
    ),
    Mutation(
        "the-dead-keep-their-slots",
        _SERVER + "stores.py",
        "        self._state.memory.forget_owner(session.token, time.monotonic())\n",
        "",
        (_CLIENTS + "test_death_between_reserve_and_commit",),
    ),
    Mutation(
        "second-signal-is-heard",
        _SERVER + "running.py",
        "signal.signal(number, signal.SIG_IGN)",
        "signal.signal(number, signal.SIG_DFL)",
        (_CLEANUP + "test_a_backlog_is_flushed_at_the_end",),
    ),
    Mutation(
        "backlog-dropped",
        "lmcache_persist/store/writer.py",
        "        self._queue.put(None)\n",
        "        while not self._queue.empty():\n            self._queue.get()\n"
        "        self._queue.put(None)\n",
        (_CLEANUP + "test_a_backlog_is_flushed_at_the_end",),
    ),
    Mutation(
        "stop-in-a-start-leaves-the-pool",
        "lmcache_persist/store/pool.py",
        "        except BaseException as error:\n            path.unlink(missing_ok=True)\n",
        "        except BaseException as error:\n",
        ("tests/unit/store/test_pool.py",),
    ),
    Mutation(
        "pool-anywhere",
        "lmcache_persist/shm.py",
        'if not path.startswith("/") or',
        "if False and",
        (_HOSTILE + "test_a_pool_that_is_no_pool",),
    ),
    Mutation(
        "flood-keeps-the-thread",
        _CONNECTOR + "transport.py",
        "for _ in range(_REPLIES_PER_TURN):\n            frames = wire.receive()\n"
        "            if frames is None:\n                break",
        "while True:\n            frames = wire.receive()\n"
        "            if frames is None:\n                break",
        (_HOSTILE + "test_a_flood_on_a_given_up_connection",),
    ),
    Mutation(
        "fork-inherits-a-held-guard",
        "lmcache_persist/shm.py",
        "        cls._guard = threading.Lock()\n",
        "",
        ("tests/unit/test_shm.py::test_a_fork_while_a_lock_is_taken",),
    ),
    Mutation(
        "a-start-leaves-the-rights-wide",
        _SERVER + "app.py",
        "        rights.settle(paths, Modes.of(settings.group_id))\n",
        "        if settings.group_id is not None:\n"
        "            rights.settle(paths, Modes.of(settings.group_id))\n",
        (_CLIENTS + "test_the_group_may_look_at_a_server_that_is_gone",),
    ),
    Mutation(
        "given-up-connections-pile-up",
        _CONNECTOR + "transport.py",
        "            if len(self._retired) > _MAX_RETIRED:\n",
        "            if False:\n",
        (_HOSTILE + "test_few_given_up_connections_are_kept",),
    ),
    Mutation(
        "late-thread-writes-to-another-file",
        _SERVER + "mailbox.py",
        "            if not self._closed:\n",
        "            if True:\n",
        ("tests/unit/server/test_mailbox.py",),
    ),
    Mutation(
        "one-failure-holds-up-the-rest",
        _SERVER + "mailbox.py",
        "            run(self._queue.popleft())\n",
        "            self._queue.popleft()()\n",
        ("tests/unit/server/test_mailbox.py",),
    ),
    Mutation(
        "any-version",
        _CONNECTOR + "greeting.py",
        "if not MIN_PROTOCOL_VERSION <= reply.proto <= PROTOCOL_VERSION:",
        "if False:",
        (_HOSTILE + "test_a_version_nobody_asked_for",),
    ),
    Mutation(
        "pool-of-a-boot-changes",
        _CONNECTOR + "pool_map.py",
        "if (str(known.paths.pool), known.size_bytes) != (info.path, info.size_bytes):",
        "if False:",
        (_HOSTILE + "test_a_pool_that_changes",),
    ),
    Mutation(
        "endless-chunk-size",
        _CONNECTOR + "replies.py",
        "if not is_int or not 0 < number <= MAX_TOKENS_PER_BLOCK:",
        "if not is_int or not 0 < number:",
        (_HOSTILE + "test_a_chunk_size_out_of_range",),
    ),
    Mutation(
        "grants-outside-of-the-pool",
        _CONNECTOR + "replies.py",
        "0 <= offset <= pool_bytes - size",
        "0 <= offset",
        ("tests/unit/connector/test_replies.py",),
    ),
    Mutation(
        "runs-outside-of-the-pool",
        _CONNECTOR + "replies.py",
        "max(run.offsets) <= pool_bytes - run.object_bytes",
        "max(run.offsets) <= pool_bytes",
        ("tests/unit/connector/test_lookups.py",),
    ),
    Mutation(
        "decoder-lets-errors-through",
        "lmcache_persist/protocol/codec.py",
        'RecursionError, MemoryError) as error:\n        raise MalformedMessage(f"request',
        'MemoryError) as error:\n        raise MalformedMessage(f"request',
        ("tests/property/test_fuzz_protocol.py",),
    ),
    Mutation(
        "client-lock-for-its-user-only",
        "lmcache_persist/shm.py",
        "_let_server_open(self._fd, paths.clients)",
        "pass",
        (_CLIENTS + "test_an_engine_of_another_user_is_served_and_watched",),
    ),
    Mutation(
        "root-changes-anybodys-data-dir",
        "lmcache_persist/datadir.py",
        "                    if foreign is not None:\n                        raise foreign\n",
        "",
        ("tests/unit/test_datadir.py::test_only_its_owner_locks_a_data_dir_for_writing",),
    ),
    Mutation(
        "root-makes-a-lock-file-in-anybodys-data-dir",
        "lmcache_persist/datadir.py",
        "(0 if foreign else os.O_CREAT)",
        "os.O_CREAT",
        ("tests/unit/test_datadir.py::test_only_its_owner_locks_a_data_dir_for_writing",),
    ),
    Mutation(
        "root-is-not-sent-to-the-server",
        "lmcache_persist/datadir.py",
        "        foreign = _of_another_user(data_dir)\n        if modes",
        "        foreign = _of_another_user(data_dir)\n"
        "        if foreign is not None:\n"
        "            raise foreign\n"
        "        if modes",
        ("tests/unit/test_datadir.py::test_another_user_is_told_of_the_server_first",),
    ),
    Mutation(
        "root-changes-owners-in-a-group",
        "lmcache_persist/shm.py",
        "elif os.geteuid() == 0:",
        "if os.geteuid() == 0:",
        ("tests/integration/test_pod.py::test_the_example_serves_an_engine_in_another_pod",),
    ),
    Mutation(
        "flood-of-refusals-pushes-out-others",
        "lmcache_persist/manifest/catalog.py",
        "delete(RejectionRecord).where(of_reason, ",
        "delete(RejectionRecord).where(",
        ("tests/unit/manifest/test_manifest.py::test_a_flood_pushes_out_only_its_own_kind",),
    ),
    Mutation(
        "refusals-that-wait-are-lost",
        "lmcache_persist/server/refusals.py",
        "row = replace(row, count=row.count + known.count)",
        "pass",
        ("tests/integration/test_refusals.py::test_no_refusal_is_lost_in_a_flood",),
    ),
)
