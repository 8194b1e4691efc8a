"""Mutations of the engine-neutral client: what it insists on, and what ends a refusal."""

from __future__ import annotations

from mutation.catalog import CONVERGE, Mutation

_HERE = "lmcache_persist/connector/"
_CLIENT = "tests/unit/connector/test_client.py::"
_SCHEDULER = "tests/unit/connector_vllm/test_scheduler_side.py::"
_RECONNECT = "tests/unit/connector/test_reconnect.py::"

MUTATIONS = (
    Mutation(
        "expectation-after-the-bind",
        _HERE + "waiting.py",
        "            if expect is not None and not dry_run:",
        "            if False:",
        (CONVERGE + "test_an_expected_size_is_insisted_on",),
    ),
    Mutation(
        "expectation-not-checked",
        _HERE + "link.py",
        "if self.expect is not None and chunk_size != self.expect:",
        "if False:",
        (_CLIENT + "test_expected_size_is_asked_for_before_it_is_bound",),
    ),
    Mutation(
        "expectation-forgotten-after-a-reconnect",
        _HERE + "restoring.py",
        "                if self._bind.expect is not None:",
        "                if False:",
        (_RECONNECT + "test_server_of_another_size_that_comes_later_is_refused",),
    ),
    Mutation(
        "size-bound-meanwhile-taken",
        _HERE + "restoring.py",
        "            wish.check(binding.chunk_size if binding is not None else 0)\n",
        "            pass\n",
        (_RECONNECT + "test_server_of_another_size_that_comes_later_is_refused",),
    ),
    Mutation(
        "unbound-server-asked-once",
        _HERE + "session.py",
        "        if self._awaits_binding(link):",
        "        if False:",
        (_RECONNECT + "test_unbound_server_is_used_once_somebody_binds_it_as_expected",),
    ),
    Mutation(
        "dry-run-taken-for-a-binding",
        _HERE + "restoring.py",
        'dry and outcome.outcome == "bound"',
        "False",
        (_RECONNECT + "test_unbound_server_is_used_once_somebody_binds_it_as_expected",),
    ),
    Mutation(
        "wrong-server-not-remembered",
        _HERE + "waiting.py",
        "            self._session.remembered.bind(wish)",
        "            self._session.remembered.bind(wish) if expect is None else None",
        (_RECONNECT + "test_start_at_the_wrong_server_is_remembered",),
    ),
    Mutation(
        "any-agreement-ends-the-cold",
        _HERE + "session.py",
        "                self.link = self.link.agreed(key)",
        "                self.link = replace(self.link, refusals=())",
        (_CLIENT + "test_agreement_to_what_was_refused_ends_the_cold",),
    ),
    Mutation(
        "registration-does-not-end-the-cold",
        _HERE + "waiting.py",
        "        self._session.set_registered(reply.boot, wish.key)\n",
        "",
        (_CLIENT + "test_agreement_to_what_was_refused_ends_the_cold",),
    ),
    Mutation(
        "registered-without-a-bind",
        _HERE + "waiting.py",
        "            raise refusal\n",
        "            pass\n",
        (_CLIENT + "test_refused_bind_registers_nothing",),
    ),
    Mutation(
        "refused-server-asked-all-the-same",
        _HERE + "vllm/scheduler_side.py",
        "        return cold is not None\n",
        "        return False\n",
        (_SCHEDULER + "test_refused_server_is_not_used_until_it_agrees",),
    ),
    Mutation(
        "server-replaced-within-a-greeting",
        _HERE + "greeting.py",
        "if (link.boot, link.pool) != (first.boot, first.pool):",
        "if False:",
        (_RECONNECT + "test_server_that_is_replaced_within_a_greeting",),
    ),
    Mutation(
        "two-connections-after-a-time-out",
        _HERE + "session.py",
        "if self._closing or self._reconnecting:",
        "if self._closing:",
        (_RECONNECT + "test_greeting_that_times_out_is_tried_again_once",),
    ),
    Mutation(
        "unheard-commit-keeps-its-slots",
        _HERE + "client.py",
        "        future.add_done_callback(given_up)\n",
        "",
        (_RECONNECT + "test_slots_of_an_unheard_commit_are_given_back",),
    ),
    Mutation(
        "poll-after-the-release",
        _HERE + "lookups.py",
        "        with self._guard:\n            if not self._released:\n",
        "        if True:\n            if not self._released:\n",
        ("tests/unit/connector/test_lookups.py::test_release_during_a_poll_comes_after_it",),
    ),
    Mutation(
        "load-of-another-length",
        _HERE + "vllm/scheduler_side.py",
        "        if end != result.tokens:\n",
        "        if False:\n",
        (_SCHEDULER + "test_load_that_ends_elsewhere_than_promised_is_broken",),
    ),
    Mutation(
        "refused-size-remembered-as-registered",
        _HERE + "vllm/worker_side.py",
        "        self._registered_for = 0\n        self._client.register(",
        "        self._client.register(",
        ("tests/unit/connector_vllm/test_worker_side.py::test_refused_chunk_size_is_not_the_end",),
    ),
)
