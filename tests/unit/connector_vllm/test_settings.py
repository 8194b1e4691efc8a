"""The connector's settings."""

import pytest

from lmcache_persist.connector.vllm.settings import ConnectorSettings
from lmcache_persist.errors import ConfigError


def test_defaults() -> None:
    """Only the server has to be named."""
    settings = ConnectorSettings.from_extra_config({"persist.server": "ipc:///tmp/s"})
    assert settings.server == "ipc:///tmp/s"
    assert settings.required
    assert not settings.cache_decode
    assert settings.base_chunk_size is None


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("persist.sever", "persist.server"),
        ("server", "persist.server"),
        ("persist.chunk_size", "persist.base_chunk_size"),
        ("persist.connect_timeout_s", "persist.connect_timeout"),
    ],
)
def test_unknown_name_is_refused_with_the_nearest_valid_one(key: str, near: str) -> None:
    """A misspelt setting never passes in silence."""
    with pytest.raises(ConfigError) as caught:
        ConnectorSettings.from_extra_config({"persist.server": "ipc:///tmp/s", key: 1})
    assert repr(key) in str(caught.value)
    assert f"did you mean {near!r}" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("persist.base_chunk_size", 0),
        ("persist.base_chunk_size", -1),
        ("persist.base_chunk_size", "256"),
        ("persist.base_chunk_size", 256.0),
        ("persist.expect_chunk_size", True),
        ("persist.connect_timeout", 0),
        ("persist.connect_timeout", float("nan")),
        ("persist.connect_timeout", "30"),
        ("persist.required", "false"),
        ("persist.cache_decode", 1),
        ("persist.server", 5),
    ],
)
def test_value_of_another_kind_is_refused_by_its_name(key: str, value: object) -> None:
    """No value is converted or passed over."""
    with pytest.raises(ConfigError, match=key):
        ConnectorSettings.from_extra_config({"persist.server": "ipc:///tmp/s", key: value})


def test_server_is_required() -> None:
    """Without an endpoint there is no start."""
    with pytest.raises(ConfigError, match=r"persist\.server is absent"):
        ConnectorSettings.from_extra_config({})
