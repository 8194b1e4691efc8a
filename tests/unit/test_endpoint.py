"""Endpoints as people write them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_persist.endpoint import MAX_IPC_PATH_BYTES, Endpoint, parse_endpoint
from lmcache_persist.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tcp://localhost:5555", Endpoint("tcp://localhost:5555", host="localhost", port=5555)),
        ("localhost:5555", Endpoint("tcp://localhost:5555", host="localhost", port=5555)),
        ("TCP://cache_1.local:1", Endpoint("tcp://cache_1.local:1", host="cache_1.local", port=1)),
        ("127.0.0.1:0", Endpoint("tcp://127.0.0.1:0", host="127.0.0.1", port=0)),
        ("*:7", Endpoint("tcp://*:7", host="*", port=7)),
        ("[::1]:5555", Endpoint("tcp://[::1]:5555", host="::1", port=5555)),
        ("tcp://[fe80::1]:65535", Endpoint("tcp://[fe80::1]:65535", host="fe80::1", port=65535)),
        ("ipc:///run/a b.sock", Endpoint("ipc:///run/a b.sock", path="/run/a b.sock")),
        ("  ipc:///run/s  ", Endpoint("ipc:///run/s", path="/run/s")),
    ],
)
def test_good_endpoints(text: str, expected: Endpoint) -> None:
    """Every accepted spelling has one form."""
    assert parse_endpoint(text) == expected
    assert parse_endpoint(str(expected)) == expected
    assert expected.ipv6 is ("[" in text)


@pytest.mark.parametrize(
    ("text", "found", "hint"),
    [
        ("", "empty", "tcp://HOST:PORT"),
        ("   ", "empty", "tcp://HOST:PORT"),
        ("localhost", "no port", "tcp://localhost:PORT, or ipc:///"),
        ("tcp://localhost", "no port", "tcp://localhost:PORT"),
        ("tcp://localhost:", "no port", "tcp://localhost:PORT"),
        ("[::1]", "no port", r"tcp://\[::1\]:PORT"),
        ("::1:5555", "more than one colon", r"tcp://\[::1\]:PORT"),
        ("[::1:5555", "unclosed bracket", ""),
        ("[::1]5555", "unclosed bracket", ""),
        ("[localhost]:5555", "expected an IPv6 address", ""),
        ("host:port", "port 'port'", ""),
        ("host:-1", "port '-1'", ""),
        ("host:65536", "port '65536'", ""),
        ("host:\u0665", "port", ""),
        (":5555", "host ''", ""),
        ("a host:5555", "host 'a host'", ""),
        ("host:5555/path", "port '5555/path'", ""),
        ("/run/s.sock", "no scheme", "ipc:///run/s.sock"),
        ("ipc://run/s.sock", "no absolute path", "ipc:///run/s.sock"),
        ("ipc://@abstract", "no absolute path", "ipc:///abstract"),
        ("ipc://", "no absolute path", "ipc:///ABSOLUTE/PATH"),
        ("ipc:///run/", "names a folder", ""),
        ("http://localhost:1", "scheme 'http'", "tcp or ipc|tcp://HOST"),
        ("inproc://x", "scheme 'inproc'", ""),
        ("tcp://host:1\n", "", ""),
        ("tcp://ho\nst:1", "control characters", ""),
        ("ipc:///run/\0s", "control characters", ""),
    ],
)
def test_bad_endpoints(text: str, found: str, hint: str) -> None:
    """Every refused spelling says what was found, and where there is a way out, that."""
    if text.endswith("\n"):
        assert parse_endpoint(text).url == text.strip()
        return
    with pytest.raises(ConfigError, match=found) as caught:
        parse_endpoint(text, what="listen")
    assert caught.value.message.startswith("listen ")
    assert not hint or re.search(hint, str(caught.value))


def test_longest_ipc_path() -> None:
    """A socket's path may have 107 bytes, counted as bytes, and not one more."""
    longest = "/" + "x" * (MAX_IPC_PATH_BYTES - 1)
    assert parse_endpoint(f"ipc://{longest}").path == longest
    with pytest.raises(ConfigError, match=r"108 bytes, expected at most 107.*--listen"):
        parse_endpoint(f"ipc://{longest}x")
    umlauts = "/" + "\u00e4" * 53
    assert parse_endpoint(f"ipc://{umlauts}").path == umlauts
    with pytest.raises(ConfigError, match="109 bytes"):
        parse_endpoint(f"ipc://{umlauts}\u00e4")


@given(st.text(max_size=200))
def test_any_text_parses_or_is_refused(text: str) -> None:
    """Any text is an endpoint, or refused as a setting; nothing else comes out."""
    try:
        endpoint = parse_endpoint(text)
    except ConfigError:
        return
    assert endpoint.url.startswith(("tcp://", "ipc:///"))
    assert parse_endpoint(endpoint.url) == endpoint
