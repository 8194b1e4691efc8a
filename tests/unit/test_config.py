"""Settings: precedence, refusals with a way out, what is printed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lmcache_persist.config import SETTINGS, Settings
from lmcache_persist.errors import ConfigError


def load(
    *, env: dict[str, str] | None = None, file: Path | None = None, **flags: str | bool | None
) -> Settings:
    """Settings with a data dir unless one is given."""
    flags.setdefault("data_dir", "/srv/kv")
    if file is not None:
        flags["config"] = str(file)
    return Settings.load(flags, env=env or {})


def refusal(**kwargs: object) -> ConfigError:
    """The error that these settings are refused with."""
    with pytest.raises(ConfigError) as caught:
        load(**kwargs)  # type: ignore[arg-type]
    return caught.value


def yaml_file(folder: Path, text: str) -> Path:
    """A config file."""
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def test_flags_beat_variables_beat_file_beat_defaults(tmp_path: Path) -> None:
    """Each source overrides the weaker ones, setting by setting, and is named."""
    file = yaml_file(tmp_path, "capacity: 1GiB\npool_size: 2MiB\nbase_chunk_size: 32\n")
    env = {"LMCACHE_PERSIST_CAPACITY": "2GiB", "LMCACHE_PERSIST_POOL_SIZE": "3MiB"}
    settings = load(env=env, file=file, capacity="3GiB")
    assert settings.capacity_bytes == 3 << 30
    assert settings.pool_size_bytes == 3 << 20
    assert settings.base_chunk_size == 32
    assert settings.max_chunk_size == 16384
    assert settings.sources["capacity_bytes"] == "--capacity"
    assert settings.sources["pool_size_bytes"] == "LMCACHE_PERSIST_POOL_SIZE"
    assert settings.sources["base_chunk_size"] == str(file)


def test_the_file_may_be_named_by_a_variable(tmp_path: Path) -> None:
    """LMCACHE_PERSIST_CONFIG is --config."""
    file = yaml_file(tmp_path, "log-level: debug\n")
    assert load(env={"LMCACHE_PERSIST_CONFIG": str(file)}).log_level == "debug"


def test_defaults_are_those_of_the_documentation() -> None:
    """Nothing but a data dir gives the documented server."""
    settings = load()
    assert settings.chunk_size is None
    assert settings.base_chunk_size == 256
    assert settings.capacity_bytes == 8 << 30
    assert settings.pool_size_bytes == 1 << 30
    assert settings.listen == "ipc:///srv/kv/server.sock"
    assert settings.durability == "sync"
    assert settings.warnings() == []


@pytest.mark.parametrize(
    ("misspelt", "nearest"),
    [("capacty", "capacity"), ("chunksize", "chunk_size"), ("capacity_bytes", "capacity")],
)
def test_an_unknown_key_is_refused_with_the_nearest_name(
    tmp_path: Path, misspelt: str, nearest: str
) -> None:
    """A misspelt key in the file never passes in silence."""
    error = refusal(file=yaml_file(tmp_path, f"{misspelt}: 5\n"))
    assert misspelt in error.message
    assert error.hint == f"did you mean {nearest}?"


def test_a_name_that_is_near_to_none_is_refused_with_all(tmp_path: Path) -> None:
    """A guess that helps nobody is not made."""
    error = refusal(file=yaml_file(tmp_path, "zzz: 5\n"))
    assert all(setting.name in str(error.hint) for setting in SETTINGS)


def test_a_hint_is_one_that_the_setting_takes(tmp_path: Path) -> None:
    """No default where there is none, no ipc:// for HTTP, no piece of the file in the error."""
    assert "no default" in str(refusal(data_dir="").hint)
    assert "default" in str(refusal(capacity="").hint)
    for value in ("0.0.0.0:1", "ipc:///tmp/x"):
        error = refusal(http=value)
        assert "127.0.0.1:" in str(error.hint)
        assert "ipc://" not in str(error.hint)
    assert "ipc://" in str(refusal(listen="tcp://0.0.0.0:1").hint)
    message = refusal(file=yaml_file(tmp_path, "capacity: [1\nfoo")).message
    assert message.endswith("(line 2, column 4)")
    assert "^" not in message


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [
        ("LMCACHE_PERSIST_CAPCITY", "LMCACHE_PERSIST_CAPACITY"),
        ("LMCACHE_PERSIST_DATADIR", "LMCACHE_PERSIST_DATA_DIR"),
        ("lmcache_persist_capacity", "LMCACHE_PERSIST_CAPACITY"),
    ],
)
def test_an_unknown_variable_with_our_prefix_is_refused(variable: str, nearest: str) -> None:
    """A misspelt variable never passes in silence; the nearest valid one is named."""
    error = refusal(env={variable: "1GiB"})
    assert variable in error.message
    if variable.isupper():
        assert f"did you mean {nearest}?" in str(error.hint)
    assert nearest in str(error.hint)


def test_variables_that_are_not_settings_pass() -> None:
    """The failpoints' variable is known, other prefixes are none of ours."""
    env = {"LMCACHE_PERSIST_FAILPOINTS": "", "LMCACHE_CHUNK_SIZE": "256", "PATH": "/bin"}
    assert load(env=env).capacity_bytes == 8 << 30


@pytest.mark.parametrize("value", ["0", "-1", "256.0", "yes", "2147483648", "[256]", "null", ""])
def test_an_odd_base_chunk_size_is_refused(tmp_path: Path, value: str) -> None:
    """Zero, negative, fractional, empty: refused wherever it stands in the file."""
    error = refusal(file=yaml_file(tmp_path, f"base_chunk_size: {value}\n"))
    assert "base_chunk_size" in error.message or "line 1" in error.message


@pytest.mark.parametrize(("value", "tokens"), [('"256"', 256), ("256", 256), ("0256", 256)])
def test_a_base_chunk_size_in_digits_is_taken_as_written(
    tmp_path: Path, value: str, tokens: int
) -> None:
    """Quoted digits count, and YAML's octal does not."""
    assert load(file=yaml_file(tmp_path, f"base_chunk_size: {value}\n")).base_chunk_size == tokens


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("capacity", "1MiB", "16MiB"),
        ("capacity", "0", "16MiB"),
        ("capacity", "8G", "GiB"),
        ("capacity", "1PiB", "unit"),
        ("pool_size", "4096", "1MiB"),
        ("chunk_size", "0", "auto"),
        ("chunk_size", "640.5", "auto"),
        ("chunk_size", "Auto", "auto"),
        ("pool_wait", "-3", "duration"),
        ("shutdown_timeout", "99999", "3600"),
        ("durability", "fast", "relaxed"),
        ("log_level", "loud", "debug"),
        ("log_format", "yaml", "json"),
        ("group", "no-such-group-here", "existing group"),
        ("http", "9090", "HOST:PORT"),
        ("http", "::1:9090", "HOST:PORT"),
        ("http", "127.0.0.1:99999", "65535"),
        ("listen", "udp://127.0.0.1:1", "tcp"),
        ("data_dir", "", "value"),
        ("data_dir", "~no-such-user-here/kv", "home"),
    ],
)
def test_values_out_of_range_are_refused_by_name(name: str, value: str, expected: str) -> None:
    """The refusal names the setting, what was found, and what was expected."""
    error = refusal(**{name: value})
    assert name in error.message
    assert expected in str(error)


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("log_level", "warn", "warning"),
        ("log_level", "INFO", "info"),
        ("log_format", "JSON", "json"),
        ("durability", "synch", "sync"),
        ("log_level", "loud", None),
    ],
)
def test_a_word_that_is_nearly_valid_is_asked_back(
    name: str, value: str, meant: str | None
) -> None:
    """As with names: the nearest one; without one, what is expected says it all."""
    assert refusal(**{name: value}).hint == (f"did you mean {meant}?" if meant else None)


def test_a_size_above_the_maximum_is_refused() -> None:
    """Base and fixed chunk size must be within max_chunk_size."""
    assert "max_chunk_size" in refusal(chunk_size="16385").message
    assert "max_chunk_size" in refusal(base_chunk_size="512", max_chunk_size="511").message
    assert load(chunk_size="16385", max_chunk_size="20000").chunk_size == 16385


def test_the_chunk_size_comes_from_one_place() -> None:
    """A number and another server's size, or the own one's, contradict each other."""
    url = "tcp://127.0.0.1:5"
    assert load(chunk_size_from=url, chunk_size="auto").chunk_size_from == url
    assert "one of them" in refusal(chunk_size_from=url, chunk_size="256").message
    assert "own endpoint" in refusal(chunk_size_from=url, listen=url).message


def test_a_home_folder_is_expanded_and_a_typed_relative_path_made_absolute(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What a shell would have done is done, and shown as an absolute path."""
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.chdir(tmp_path)
    assert load(data_dir="~/kv").data_dir == Path("/home/somebody/kv")
    assert load(data_dir="kv/../other").data_dir == tmp_path / "other"


def test_a_relative_path_in_file_or_variable_is_refused(tmp_path: Path) -> None:
    """Where a service's current folder is, nobody knows."""
    error = refusal(data_dir=None, env={"LMCACHE_PERSIST_DATA_DIR": "kv"})
    assert "absolute" in error.message
    assert os.path.abspath("kv") in str(error.hint)
    file = yaml_file(tmp_path, "data_dir: kv\n")
    assert "absolute" in refusal(data_dir=None, file=file).message


def test_no_data_dir_is_refused() -> None:
    """There is no default place for a cache."""
    assert "data_dir is not set" in refusal(data_dir=None).message


@pytest.mark.parametrize(
    "text",
    [
        "- a\n",
        "capacity: [1]\n",
        "capacity: {a: 1}\n",
        "a: b: c\n",
        "just words\n",
        "\x00",
        "x: &a 1\ny: *b\n",
    ],
)
def test_a_file_that_is_no_flat_mapping_is_refused(tmp_path: Path, text: str) -> None:
    """Broken or nested YAML is a clear error, never a default."""
    error = refusal(file=yaml_file(tmp_path, text))
    assert "config.yaml" in error.message
    assert error.hint is not None
    assert "'capacity: 64GiB'" in error.hint


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    """YAML would let the last one win in silence; so would two spellings of one name."""
    twice = "capacity: 1GiB\ncapacity: 2GiB\n"
    assert "twice" in refusal(file=yaml_file(tmp_path, twice)).message
    spelt = "pool_size: 1GiB\npool-size: 2GiB\n"
    assert "twice" in refusal(file=yaml_file(tmp_path, spelt)).message


def test_an_absent_or_oversized_file_is_refused(tmp_path: Path) -> None:
    """A config file that was asked for must be there, and be one."""
    assert "cannot be read" in refusal(file=tmp_path / "absent.yaml").message
    big = yaml_file(tmp_path, "# " + "x" * 70_000)
    assert "larger than" in refusal(file=big).message


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    """Comments alone are fine."""
    assert load(file=yaml_file(tmp_path, "# nothing yet\n")) == load()


def test_a_data_dir_too_long_for_a_socket_is_refused_with_the_flag_to_use() -> None:
    """The hint's --listen is accepted for the same data dir."""
    deep = "/srv/" + "x" * 100
    error = refusal(data_dir=deep)
    assert "107" in error.message
    flag, _, url = str(error.hint).partition(" ")
    assert flag == "--listen"
    assert load(data_dir=deep, listen=url).listen == url
    one_too_long = "/" + "x" * (108 - len("//server.sock"))
    assert str(refusal(data_dir=one_too_long).hint).startswith("--listen ipc://")
    just_fits = "/" + "x" * (107 - len("//server.sock"))
    assert len(load(data_dir=just_fits).listen) == len("ipc://") + 107


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("listen", "tcp://0.0.0.0:5555"),
        ("listen", "tcp://*:5555"),
        ("listen", "tcp://[::]:5555"),
        ("listen", "tcp://192.0.2.1:5555"),
        ("listen", "tcp://some-host:5555"),
        ("http", "0.0.0.0:9090"),
        ("http", "[::]:9090"),
    ],
)
def test_beyond_loopback_takes_a_flag_and_warns(name: str, value: str) -> None:
    """Nothing but an explicit flag opens the cache to the network, and then it is said."""
    assert "--allow-remote" in str(refusal(**{name: value}).hint)
    settings = load(allow_remote=True, **{name: value})
    assert any(value in warning for warning in settings.warnings())
    gives = "can read metrics" if name == "http" else "can read and fill the cache"
    assert any(gives in warning for warning in settings.warnings())


@pytest.mark.parametrize(
    "value", ["tcp://127.0.0.1:0", "tcp://127.8.9.1:5", "tcp://[::1]:5", "tcp://localhost:5"]
)
def test_loopback_needs_no_flag(value: str) -> None:
    """This machine may always talk to itself."""
    assert load(listen=value, http="127.0.0.1:0").warnings() == []


def test_relaxed_durability_warns() -> None:
    """Who gives up safety is told what that means."""
    assert any("power loss" in warning for warning in load(durability="relaxed").warnings())


def test_effective_settings_read_back_the_same(tmp_path: Path) -> None:
    """What is printed is complete, and as a file gives the same settings again."""
    settings = load(chunk_size="640", capacity="1GiB", http="127.0.0.1:1", pool_wait="1.5")
    shown = settings.effective()
    assert list(shown) == [setting.name for setting in SETTINGS]
    text = "".join(f"{name}: '{value}'\n" for name, value in shown.items() if value)
    assert load(data_dir=None, file=yaml_file(tmp_path, text)) == settings


def test_each_effective_setting_is_described_with_its_source() -> None:
    """One line per setting says the value and where it came from."""
    lines = load(capacity="1GiB").describe()
    assert len(lines) == len(SETTINGS)
    assert "capacity = 1GiB (--capacity)" in lines
    assert "pool_size = 1GiB (default)" in lines


def test_a_store_keeps_its_size_unless_a_capacity_is_set() -> None:
    """The default is a new store's; what is set holds, also where it is the default's number."""
    unset = load()
    assert not [line for line in unset.describe() if line.startswith("capacity")]
    assert unset.for_store(0) == unset
    kept = unset.for_store(256 << 20)
    assert kept.capacity_bytes == 256 << 20
    assert "capacity = 256MiB (not set: the store keeps its size)" in kept.describe()
    for given in (load(capacity="8GiB"), load(env={"LMCACHE_PERSIST_CAPACITY": "8GiB"})):
        assert given.for_store(256 << 20).capacity_bytes == 8 << 30


def test_every_setting_can_be_given_as_a_variable() -> None:
    """No setting is known to the flags alone."""
    shown = load().effective()
    values = {"http": "127.0.0.1:1", "group": "0", "chunk_size_from": "tcp://127.0.0.1:1"}
    for setting in SETTINGS:
        value = values.get(setting.name) or shown[setting.name]
        env = {"LMCACHE_PERSIST_DATA_DIR": "/srv/kv", setting.variable: value}
        assert load(data_dir=None, env=env).effective()[setting.name] == value


def test_an_unknown_flag_name_is_refused() -> None:
    """Programs that load settings are held to the names, too."""
    assert "did you mean capacity?" in str(refusal(capasity="1GiB").hint)


def test_a_size_is_rounded_down_to_whole_pages() -> None:
    """Nobody counts 10GB in pages of 4096: what is used is shown, and the least is still that."""
    settings = load(capacity="10GB", pool_size="100MB")
    assert settings.capacity_bytes == 10**10 // 4096 * 4096
    assert settings.pool_size_bytes == 10**8 // 4096 * 4096
    shown = settings.effective()["capacity"]
    assert f"capacity = {shown} (--capacity)" in settings.describe()
    assert load(capacity=shown).capacity_bytes == settings.capacity_bytes
    refusal(capacity=str((16 << 20) - 1))
