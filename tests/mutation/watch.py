"""Breaking what an operator watches: numbers, health, what verbs leave alone."""

from __future__ import annotations

from mutation.catalog import Mutation

_SERVER = "lmcache_persist/server/"
_HTTP = "tests/integration/test_http.py::"
_METRICS = "tests/unit/connector_vllm/test_metrics.py::"
_REFUSALS = "tests/integration/test_refusals.py::"
_CONNECTION = "tests/unit/cli/test_connection.py::"
_USAGE = "tests/unit/cli/test_usage.py::"
_UNREACHABLE = "tests/unit/connector/test_unreachable.py::"
_NARROW = "tests/unit/cli/test_narrow.py::"
_WATCH = "tests/integration/test_cli_watch.py::"

MUTATIONS = (
    Mutation(
        "a-misspelt-option-is-a-number",
        "lmcache_persist/cli/usage.py",
        '        odd = len(word) > 1 and word.startswith("-") and name not in known\n',
        "        odd = False\n",
        (_USAGE + "test_an_option_of_plan_is_never_taken_for_a_number",),
    ),
    Mutation(
        "words-too-many-are-passed-over",
        "lmcache_persist/cli/usage.py",
        "        if rest and not ctx.resilient_parsing:\n",
        "        if False:\n",
        (_USAGE + "test_a_word_too_many_is_named_with_what_fits",),
    ),
    Mutation(
        "a-refused-call-has-no-document",
        "lmcache_persist/cli/app.py",
        "as_json=wants_json(words)",
        "as_json=False",
        (_USAGE + "test_a_refusal_is_a_document_with_json",),
    ),
    Mutation(
        "a-second-server-beside-a-hung-one",
        "lmcache_persist/cli/connection.py",
        "    holder = _holder(root)\n",
        "    holder = None\n",
        (_CONNECTION + "test_a_hung_server_is_named_with_its_process",),
    ),
    Mutation(
        "a-dead-holder-is-named",
        "lmcache_persist/cli/connection.py",
        "        with ReaderLock.acquire(root):\n            return None\n",
        "        with ReaderLock.acquire(root):\n            return read_holder(root)\n",
        (_CONNECTION + "test_a_lock_that_nobody_holds_names_nobody",),
    ),
    Mutation(
        "missing-rights-taken-for-no-server",
        "lmcache_persist/connector/unreachable.py",
        '    if reason == "denied":',
        "    if False:",
        (_UNREACHABLE + "test_missing_rights_are_named_with_owner_and_mode",),
    ),
    Mutation(
        "hits-of-repeated-lookups-count",
        _SERVER + "tally.py",
        """        if not lookup.counted:
            return
        counters.hit_tokens""",
        "        counters.hit_tokens",
        (_HTTP + "test_polls_preemptions_and_failed_loads_are_not_counted_twice",),
    ),
    Mutation(
        "misses-do-not-count",
        _SERVER + "tally.py",
        "        counters.lookup_tokens += lookup.num_tokens\n",
        "        counters.lookup_tokens += lookup.num_tokens if lookup.keys[3:] else 0\n",
        (_HTTP + "test_every_prompt_counts_once_hit_or_miss",),
    ),
    Mutation(
        "promised-is-loaded",
        _SERVER + "lookups.py",
        "        if loaded_tokens and lookup.result is not None:\n",
        "        if lookup.result is not None:\n            loaded_tokens = 1\n",
        (_HTTP + "test_every_prompt_counts_once_hit_or_miss",),
    ),
    Mutation(
        "labels-without-bound",
        _SERVER + "metrics.py",
        "if len(self.models) >= MAX_MODELS:",
        "if len(self.models) < 0:",
        (_HTTP + "test_refusals_are_counted_by_reason_and_names_are_bounded",),
    ),
    Mutation(
        "ready-without-an-engine",
        _SERVER + "health.py",
        "    elif not any(engine.fingerprint for engine in engines):",
        "    elif not engines:",
        (_HTTP + "test_ready_is_what_works",),
    ),
    Mutation(
        "a-stalled-write-is-ready",
        _SERVER + "health.py",
        "    if busy_s > STALLED_S:",
        "    if busy_s < 0:",
        (_HTTP + "test_health_answers_while_everything_is_stalled",),
    ),
    Mutation(
        "health-asks-the-disk",
        _SERVER + "stats.py",
        "        state, usage = self._state, self._probe.usage\n",
        "        state, usage = self._state, self._probe.usage\n"
        "        state.readers.submit(lambda: None).result()\n",
        (_HTTP + "test_health_answers_while_everything_is_stalled",),
    ),
    Mutation(
        "a-chunk-too-large-for-the-disk-registers",
        _SERVER + "registration.py",
        "        if expected > allowed:",
        "        if expected < 0:",
        (_REFUSALS + "test_a_chunk_that_no_disk_tier_of_this_size_takes_is_refused",),
    ),
    Mutation(
        "every-rank-counts-the-load",
        "lmcache_persist/connector/vllm/metrics.py",
        "if amount and metric and (self._scheduler or name not in _SCHEDULERS_OWN):",
        "if amount and metric:",
        (_METRICS + "test_ranks_and_scheduler_are_summed_and_loads_counted_once",),
    ),
    Mutation(
        "reports-start-over-each-time",
        "lmcache_persist/connector/vllm/metrics.py",
        "        self._counts = dict(counts)\n",
        "",
        (_METRICS + "test_reports_hold_what_is_new_since_the_last_one",),
    ),
    Mutation(
        "bench-believes-the-slots",
        "lmcache_persist/cli/bench_worker.py",
        "        return found == content\n",
        "        return len(found) == len(content)\n",
        (_WATCH + "test_wrong_bytes_fail_the_bench",),
    ),
    Mutation(
        "bench-binds-in-silence",
        "lmcache_persist/cli/bench.py",
        "    if wanted is None or not bind:",
        "    if wanted is None:",
        (_WATCH + "test_bench_binds_nothing_unless_told",),
    ),
    Mutation(
        "rates-over-a-restart",
        "lmcache_persist/cli/rates.py",
        'if before is not None and before["boot_id"] != now["boot_id"]:',
        'if before is not None and before["boot_id"] == "":',
        ("tests/unit/cli/test_rates.py::test_another_life_has_no_rates_yet",),
    ),
    Mutation(
        "numbers-are-shortened-as-names",
        "lmcache_persist/cli/layout.py",
        "            bound = widest\n",
        "            bound = 4\n",
        (_NARROW + "test_inspect_fits_and_cuts_no_number",),
    ),
    Mutation(
        "progress-is-cut-anywhere",
        "lmcache_persist/cli/ticker.py",
        "wrap(plain(texts[-1]), max(1, width))[0]",
        "plain(texts[-1])[:width]",
        (_NARROW + "test_a_progress_line_is_never_cut_in_a_number",),
    ),
    Mutation(
        "bench-rounds-to-whole-prompts",
        "lmcache_persist/cli/bench_worker.py",
        "min(prompt_chunks, chunks - first) for first",
        "prompt_chunks for first",
        (_WATCH + "test_bench_compares_and_leaves_other_models_alone",),
    ),
    Mutation(
        "top-waits-with-a-new-size",
        "lmcache_persist/cli/top.py",
        "            if terminal.size(sys.stdout) != self._size:\n                self.draw()\n",
        "",
        ("tests/integration/test_terminals.py::test_top_follows_a_terminal_that_is_resized",),
    ),
    Mutation(
        "interrupts-in-imports-are-tracebacks",
        "lmcache_persist/cli/__init__.py",
        "\n        end_at_once()\n",
        "\n        del end_at_once\n",
        ("tests/integration/test_interrupt.py",),
    ),
    Mutation(
        "nobody-looks-for-a-server-that-went",
        "lmcache_persist/connector/calls.py",
        "raise session.missing()",
        "raise session.unreachable()",
        ("tests/unit/connector/test_reconnect.py::test_a_server_that_went_is_looked_for",),
    ),
)
