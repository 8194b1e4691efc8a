"""The connector's own duties: nothing raises in service, start-up refusals do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorTransferResults,
    SupportsHMA,
)

from lmcache_persist.connector import BindOutcome
from lmcache_persist.connector.vllm import PersistConnector, startup
from lmcache_persist.connector.vllm.counters import Counters, logger
from lmcache_persist.connector.vllm.metadata import StepMetadata
from lmcache_persist.connector.vllm.settings import ConnectorSettings
from lmcache_persist.errors import (
    IncompatibleAlignment,
    PersistError,
    ServerUnreachable,
    UnexpectedChunkSize,
    UnsupportedVersion,
)
from lmcache_persist.geometry import groups_from_sizes

REQUEST = SimpleNamespace(request_id="r")


class Broken:
    """Fails whatever it is asked to do."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name} is broken")


@pytest.fixture
def broken() -> PersistConnector:
    """A connector both of whose sides fail."""
    made = object.__new__(PersistConnector)
    made._counters = Counters()
    made._worker = made._scheduler = Broken()  # type: ignore[assignment]
    made._step_block_size = 0
    return made


@pytest.mark.parametrize(
    ("method", "arguments", "fallback"),
    [
        ("bind_connector_metadata", (StepMetadata(),), None),
        ("start_load_kv", (None,), None),
        ("wait_for_layer_load", ("layer",), None),
        ("save_kv_layer", ("layer", None, None), None),
        ("wait_for_save", (), None),
        ("get_transfer_results", (set(),), KVConnectorTransferResults()),
        ("on_new_request", (REQUEST,), None),
        ("get_num_new_matched_tokens", (REQUEST, 0), (0, False)),
        ("update_state_after_alloc", (REQUEST, None, 8), None),
        ("get_external_cache_hit_sources", (REQUEST, 8), {}),
        ("build_connector_meta", (None,), StepMetadata()),
        ("update_connector_output", (SimpleNamespace(),), None),
        ("request_finished", (REQUEST, []), (False, None)),
        ("request_finished_all_groups", (REQUEST, ([],)), (False, None)),
        ("reset_cache", (), False),
        ("get_kv_connector_stats", (), None),
    ],
)
def test_nothing_raises_in_service(
    broken: PersistConnector, method: str, arguments: tuple[Any, ...], fallback: Any
) -> None:
    """Whatever breaks inside is a miss and a count: an exception would end the engine."""
    assert getattr(broken, method)(*arguments) == fallback


def test_failures_are_counted_by_method(
    broken: PersistConnector, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every one is counted, one line of them logged per interval."""
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(logger.parent, "propagate", True)
    for _ in range(5):
        broken.get_num_new_matched_tokens(REQUEST, 0)
    assert broken.counters == {"failed_get_num_new_matched_tokens": 5}
    assert len(caplog.records) == 1


def test_it_is_a_best_effort_cache_for_hybrid_allocators(broken: PersistConnector) -> None:
    """A lost store is a later miss; groups keep their own block tables."""
    assert not broken.requires_kv_delivery
    assert issubclass(PersistConnector, SupportsHMA)


class StartingClient:
    """A client whose start ends as the test wants it."""

    def __init__(self, connects: PersistError | None, binds: PersistError) -> None:
        self._connects, self._binds = connects, binds
        self.remembered: list[Any] = []
        self.closed = False

    def __call__(self, *_: Any, **__: Any) -> StartingClient:
        return self

    def wait_connected(self, timeout_s: float) -> None:
        if self._connects:
            raise self._connects

    def bind(self, groups: Any, expect: int, **_: Any) -> BindOutcome:
        self.remembered.append((groups, expect))
        raise self._binds

    def close(self) -> None:
        self.closed = True


GONE = ServerUnreachable("nobody is there")
OTHER_VERSION = UnsupportedVersion("server speaks 7 to 9, this client 1")
REFUSED = IncompatibleAlignment("bound to 256, requires 544")


@pytest.mark.parametrize(
    ("client", "error"),
    [
        (StartingClient(GONE, GONE), ServerUnreachable),
        (StartingClient(OTHER_VERSION, OTHER_VERSION), UnsupportedVersion),
        (StartingClient(None, REFUSED), IncompatibleAlignment),
        (StartingClient(None, UnexpectedChunkSize("256, not 544")), UnexpectedChunkSize),
    ],
)
@pytest.mark.parametrize("required", [True, False])
def test_start_is_refused_or_cold(
    client: StartingClient,
    error: type[PersistError],
    required: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A required cache that cannot be had stops the engine; else it runs, and goes on trying."""
    client.closed, client.remembered = False, []
    monkeypatch.setattr(startup, "CacheClient", client)
    settings = ConnectorSettings("ipc:///s", required=required, expect_chunk_size=544)
    groups = groups_from_sizes([544])
    counters = Counters()

    def begin() -> Any:
        return startup.start_client(settings, counters, groups, kind="worker", label="", who="")

    if required:
        with pytest.raises(error):
            begin()
        assert client.closed
    else:
        assert begin() is client
        assert not client.closed
        assert client.remembered == [(groups, 544)]
        assert counters.snapshot() == {"start_without_cache": 1}


def test_steps_end_where_blocks_of_states_end(broken: PersistConnector) -> None:
    """A size that has gone stale is put right, whenever that was; others are left alone."""
    cache_config = SimpleNamespace(block_size=128)
    broken._vllm_config = SimpleNamespace(cache_config=cache_config)
    for wanted, expected in ((0, 128), (640, 640), (640, 640)):
        broken._step_block_size = wanted
        broken._mend_block_size()
        assert cache_config.block_size == expected
