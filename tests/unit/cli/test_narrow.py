"""What people see on terminals of any width: nothing wrapped, nothing cut that is a number."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
from rich.cells import cell_len

from lmcache_persist.cli import inspect_state, layout, output, top_view
from lmcache_persist.cli.inspect_text import write_document
from lmcache_persist.cli.layout import Column, Kind
from lmcache_persist.cli.ticker import Ticker
from lmcache_persist.cli.top import _Lines
from lmcache_persist.cli.verify import verify
from support.screens import Terminal, without_sequences

WIDTHS = (16, 20, 30, 40, 60, 80, 120, 250)
HOSTILE = ("a" * 90, "模型/größe-\x1b[31mred\n" * 3, "m")
AT = "2026-01-31T10:00:01.123456+00:00"


def watched(monkeypatch: pytest.MonkeyPatch, encoding: str = "utf-8") -> Terminal:
    """A terminal in place of stdout and stderr."""
    made = Terminal(encoding)
    monkeypatch.setattr(sys, "stdout", made)
    monkeypatch.setattr(sys, "stderr", made)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return made


def model(number: int, name: str) -> dict[str, Any]:
    """A model of ``inspect``."""
    group = {"group": 1, "kind": "full", "tokens_per_block": 544, "objects": 123_456, "bytes": 1}
    return {
        "name": name,
        "fingerprint": f"{number:064x}",
        "groups": [{"tokens_per_block": 544}, {"tokens_per_block": 0}],
        "required_alignment": 1088,
        "objects": 123_456_789,
        "bytes": 987_654_321_987,
        "first_seen": AT,
        "last_seen": AT,
        "chunks": 12_345_678,
        "hits": 99_999_999,
        "by_group": [group],
    }


def document(*, server: bool = True, **changes: Any) -> dict[str, Any]:
    """Of ``inspect``, with large numbers and hostile names."""
    part = {"chunks": 99_999, "bytes": 1 << 40, "hit_chunks": 1234, "hits": 999_999}
    found: dict[str, Any] = {
        "schema_version": 1,
        "binding": {
            "chunk_size": 1088,
            "boundary_id": "9" * 64,
            "bound_at": AT,
            "store": {"uuid": "7" * 32},
            "winner": HOSTILE[1],
        },
        "models": [model(number, name) for number, name in enumerate(HOSTILE)],
        "unregistered": [{"fingerprint": "5" * 64, "chunks": 1, "objects": 2, "bytes": 3}],
        "rejections": [
            {"at": AT, "reason": "incompatible_alignment", "detail": "d " * 90, "count": 1234}
        ],
        "boots": [{"started_at": AT, "ended_at": None, "end": "running", "version": "0", "pid": 9}],
        "store": {
            "objects": 123_456_789,
            "bytes": 987_654_321_987,
            "capacity_bytes": 999 << 40,
            "stale_objects": 12_345,
            "stale_bytes": 54_321,
            "clean_shutdown": None,
            "chunks": 12_345_678,
            "used_bytes": 998 << 40,
            "evicted_chunks": 1_234_567,
            "dropped_chunks": 7_654_321,
            "pruned_chunks": 1,
            "corrupt_chunks": 12,
            "estimated_from": {"seen_chunks": 4096, "of_chunks": 12_345_678},
            "ages": [{"from_s": 0, "to_s": 60, "objects": 1, **part}],
            "order": [{"oldest_at": 1, "newest_at": 100_000_000, **part}],
        },
    }
    if server:
        found["server"] = {
            "endpoint": "ipc:///var/lib/kv/server.sock",
            "version": "0.1.0",
            "started_at": AT,
            "uptime_s": 123_456.7,
            "problems": [],
            "clients": 12,
            "counters": {"lookup_tokens": 4000, "hit_tokens": 3000, "stored_chunks": 98_765},
            "dropped_stores": {"no_slot": 12_345, "disk_error": 0},
            "pool": {"free_bytes": 123_456_789, "size_bytes": 987_654_321},
            "writer": {"backlog": 4321},
            "longest_turn_s": 0.0123,
            "chunk_size_from": None,
            "engines": [
                {
                    "engine": name,
                    "model": name,
                    "fingerprint": "f" * 64,
                    "world_size": 16,
                    "missing_ranks": list(range(16)),
                }
                for name in HOSTILE
            ],
        }
    return found | changes


def shown(monkeypatch: pytest.MonkeyPatch, width: int, **parts: Any) -> list[str]:
    """The lines of ``inspect`` on a terminal of that width."""
    monkeypatch.setenv("COLUMNS", str(width))
    term = watched(monkeypatch)
    write_document(document(**parts))
    return without_sequences(term.text()).splitlines()


def numbers(lines: list[str]) -> set[str]:
    """The numbers in them, those in shortened names left out."""
    words = " ".join(lines).split()
    return {word for word in words if re.fullmatch(r"[0-9][0-9.]*", word)}


@pytest.mark.parametrize("width", WIDTHS)
def test_inspect_fits_and_cuts_no_number(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """No line is wider than the terminal, and each number is one of the widest page's."""
    lines = shown(monkeypatch, width)
    assert [line for line in lines if cell_len(line) > width] == []
    assert [line for line in lines if not line.isprintable()] == []
    whole = shown(monkeypatch, 1000)
    # Ids of digits alone are folded where nothing else helps; they are no amounts.
    cut = {one for one in numbers(lines) - numbers(whole) if len(one) < width - 2}
    assert {one for one in cut if set(one) not in ({"7"}, {"9"})} == set()
    if width >= 30:
        assert {"123456789", "12345", "7654321"} <= numbers(lines)


def test_the_first_lines_answer_what_is_asked_at_night(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs, well, hits, drops, full, refusals: in ten lines of 80 columns, before all else."""
    top = shown(monkeypatch, 80)[:11]
    assert top[0] == "state"
    assert top[1].split(maxsplit=1) == ["server", "runs, ready, up 1 d 10 h, 3 engines"]
    assert "75.0 % of 4000 tokens" in top[2]
    assert "12345 no_slot" in top[3]
    assert "99.9 % full" in top[4]
    words = " ".join(" ".join(top).split())
    assert "and 12345 stale" in words
    assert "12 met and dropped since the start; verify looks at all" in words
    assert "1234, the last" in words


@pytest.mark.parametrize(
    ("boots", "problem", "said"),
    [
        ([], None, "does not run; never started"),
        ([{"end": "running", "ended_at": None}], "no answer", "holds the data dir and does not"),
        ([{"end": "killed", "ended_at": None}], None, "does not run; the last one was killed"),
        ([{"end": "clean", "ended_at": AT}], None, "does not run; the last one ended cleanly"),
    ],
)
def test_no_server_is_said_first(
    monkeypatch: pytest.MonkeyPatch,
    boots: list[dict[str, Any]],
    problem: str | None,
    said: str,
) -> None:
    """Never started, hung, killed, stopped: the first line says which."""
    term = watched(monkeypatch)
    monkeypatch.setenv("COLUMNS", "100")
    filled = [{"started_at": AT, "version": "0", "pid": 1, **boot} for boot in boots]
    unavailable = {} if problem is None else {"store": "unavailable"}
    write_document(document(server=False, boots=filled, **unavailable), problem)
    lines = without_sequences(term.text()).splitlines()
    assert said in lines[1]
    assert (problem is None) or problem in lines[2]


def test_a_manifest_made_anew_is_not_one_that_never_had_a_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After recover no start is on record, while the store knows of its last one."""
    found = document(server=False, boots=[])
    found["store"]["clean_shutdown"] = True
    told = dict(inspect_state.rows(found, 0, None))
    assert told["server"] == "does not run; no start is on record"


@pytest.mark.parametrize(
    ("corrupt", "said"),
    [
        (0, "none met since the start; verify looks at all"),
        (4, "4 met and dropped since the start; verify looks at all"),
    ],
)
def test_bad_chunks_are_those_that_were_met(corrupt: int, said: str) -> None:
    """Nothing is said of chunks that nobody has looked at, so that verify is not denied."""
    found = document()
    found["store"]["corrupt_chunks"] = corrupt
    assert dict(inspect_state.rows(found, 0, None))["bad chunks"] == said


def test_the_disk_tier_is_as_full_as_in_top(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little is not a percent, and stale objects are no part of the others."""
    found = document()
    found["store"].update(used_bytes=24 << 10, capacity_bytes=8 << 30, objects=0, stale_objects=40)
    told = dict(inspect_state.rows(found, 0, None))["disk tier"]
    assert told == "0.1 % full, 24.00 KiB of 8.00 GiB; 0 objects, and 40 stale"


def test_what_is_to_be_compared_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The boundary id, on 60 columns: folded it may be, never shortened."""
    monkeypatch.setenv("COLUMNS", "60")
    term = watched(monkeypatch)
    found = document()
    found["binding"]["boundary_id"] = "0123456789abcdef" * 4
    write_document(found)
    assert found["binding"]["boundary_id"] in "".join(without_sequences(term.text()).split())


def test_a_server_that_is_not_ready_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """The problem is the second line."""
    term = watched(monkeypatch)
    monkeypatch.setenv("COLUMNS", "80")
    found = document()
    found["server"]["problems"] = [{"reason": "disk_stalled", "detail": "the disk hangs"}]
    write_document(found)
    lines = without_sequences(term.text()).splitlines()
    assert "runs, not ready" in lines[1]
    assert lines[2].split(maxsplit=1) == ["problem", "the disk hangs"]


@pytest.mark.parametrize(("term_name", "no_color"), [("dumb", ""), ("xterm", "1")])
def test_no_sequence_reaches_a_terminal_that_wants_none(
    monkeypatch: pytest.MonkeyPatch, term_name: str, no_color: str
) -> None:
    """TERM=dumb and NO_COLOR: the same table without a single escape."""
    term = watched(monkeypatch)
    monkeypatch.setenv("TERM", term_name)
    monkeypatch.setenv("NO_COLOR", no_color)
    output.write_table("things", ("name",), [("\x1b[2Jx",)])
    assert "\x1b" not in term.text()
    if term_name == "dumb":
        Ticker().show("far")
        assert "far" not in term.text()


def test_a_terminal_without_wide_characters_keeps_its_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Escapes are counted as wide as they will be, and the ellipsis is three dots."""
    made = watched(monkeypatch, "ascii")
    monkeypatch.setenv("COLUMNS", "40")
    column = Column("name", Kind.NAME)
    output.write_table("things", (column, "n"), [("模型" * 20, 12345)])
    lines = without_sequences(made.text()).splitlines()
    assert max(map(len, lines)) <= 40
    assert "..." in lines[2]
    assert lines[2].endswith("12345")


def test_the_least_important_columns_go_first() -> None:
    """Names are shortened, then columns go, then rows become lists; no cell is lost silently."""
    columns = [
        Column("name", Kind.NAME),
        Column("much", Kind.NUMBER),
        Column("less", Kind.NUMBER, drop=1),
        Column("least", Kind.NUMBER, drop=2),
    ]
    rows = [["n" * 40, "1" * 9, "2" * 9, "3" * 9]]
    assert layout.table(columns, rows, 80).dropped == []
    assert layout.table(columns, rows, 80).lines == [f"{'n' * 40}  {'1' * 9}  {'2' * 9}  {'3' * 9}"]
    shortened = layout.table(columns, rows, 60)
    assert (shortened.dropped, "…" in shortened.lines[0]) == ([], True)
    assert layout.table(columns, rows, 40).dropped == ["least"]
    assert layout.table(columns, rows, 30).dropped == ["less", "least"]
    records = layout.table(columns, rows, 20)
    assert records.header is None
    assert "3" * 9 in " ".join(records.lines)


def test_a_sentence_keeps_numbers_with_their_units() -> None:
    """It is wrapped at blanks, not between 64.00 and MiB, and long words go on below."""
    assert layout.wrap("in use 64.00 MiB of it", 12) == ["in use", "64.00 MiB of", "it"]
    assert layout.wrap("x" * 25, 10) == ["x" * 10, "x" * 10, "x" * 5]
    assert layout.wrap("", 10) == [""]


# -- top -----------------------------------------------------------------------------------


def top_document() -> dict[str, Any]:
    """A busy interval of ``top``."""
    rates = dict.fromkeys(
        (
            *("lookups", "lookup_tokens", "hit_tokens", "loaded_tokens", "loaded_bytes"),
            *("disk_read_bytes", "committed_bytes", "stored_bytes", "dropped_stores"),
            *("memory_evictions", "disk_evictions"),
        ),
        123_456_789.5,
    )
    return {
        "at": "2026-01-31T10:00:01.000Z",
        "server": "ipc:///var/lib/a/long/path/to/a/data/dir/server.sock",
        "connected": True,
        "version": "0.1.0",
        "uptime_s": 99_999.0,
        "ready": False,
        "problems": ["the disk takes 17 s for a write\x07 " * 3],
        "chunk_size": 1088,
        "hit_rate": 0.99999,
        "hit_rate_since_start": 0.5,
        "per_second": rates,
        "mean_ms": {"lookup": 0.123, "durable": 12_345.6},
        "memory": {"size_bytes": 1 << 40, "free_bytes": 1, "leased_bytes": 1 << 39},
        "disk": {"capacity_bytes": 1 << 44, "used_bytes": 1 << 43, "chunks": 12_345_678},
        "leases": 12_345,
        "queues": {"lookups": 12_345, "reads": 12_345, "writes": 12_345},
        "clients": 123,
        "engines": [
            {
                "engine": name,
                "model": name,
                "ready": name == "m",
                "world_size": 16,
                "hit_rate": 0.5,
                "per_second": rates,
            }
            for name in HOSTILE
        ],
    }


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("height", [5, 10, 24, 60])
def test_top_fits_every_terminal_and_cuts_no_number(width: int, height: int) -> None:
    """Never wider or longer than the screen; the hit rate is there; numbers are whole ones."""
    whole = {
        word
        for line in top_view.screen(top_document(), None, 500, 100)
        for word in line.plain.split()
    }
    away = {"connected": False, "error": {"message": "nobody answers\n" * 9}}
    for now, last in ((top_document(), None), (top_document() | away, top_document())):
        lines = [line.plain for line in top_view.screen(now, last, width, height)]
        assert len(lines) <= height
        assert [line for line in lines if cell_len(line) > width or not line.isprintable()] == []
        told = [line for line in lines[1:] if not line.startswith("and ")]  # "and 2 more engines"
        amounts = {word for line in told for word in line.split() if word[0].isdigit()}
        assert {one for one in amounts - whole if "…" not in one} == set()
        if height >= 10 and width >= 20 and last is None:
            assert any(line.startswith("hit rate") for line in lines)
        if height >= 24 and width >= 40 and last is None:
            assert any("engine" in line for line in lines)


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_lines_of_top_fit_too(width: int) -> None:
    """On a terminal that draws no screen: whole columns, the same ones in header and line."""
    header, line = top_view.header_line(width), top_view.line(top_document(), width)
    assert len(header) == len(line) <= width or width == 40
    assert header.split()[:2] == ["time", "hit"]


def test_a_problem_has_a_line_when_it_comes_and_when_it_goes() -> None:
    """Not one per interval."""
    bad = top_document() | {"problems": ["the store is gone", "x\x07"]}
    lines = top_view.problem_lines(bad, [])
    assert lines == ["10:00:01 problem: the store is gone", "10:00:01 problem: x\\x07"]
    assert top_view.problem_lines(bad, bad["problems"]) == []
    well = top_document() | {"problems": []}
    assert top_view.problem_lines(well, bad["problems"]) == ["10:00:01 no problem any more"]
    assert top_view.problem_lines(well, []) == []


def test_lines_of_top_show_problems_when_they_change(capsys: pytest.CaptureFixture[str]) -> None:
    """Also the only line of ``--once``; an interval without an answer changes nothing."""
    bad, well = (top_document() | {"problems": one} for one in (["the store is gone"], []))
    away = bad | {"connected": False, "error": {"message": "nobody answers"}}
    lines = _Lines()
    told = []
    for shown_now in (bad, bad, away, bad, well, well):
        lines.show(shown_now)
        out = capsys.readouterr().out
        told.append([line[9:] for line in out.splitlines() if "problem" in line])
    assert told == [["problem: the store is gone"], [], [], [], ["no problem any more"], []]


@pytest.mark.parametrize("problems", [[], ["no engine is registered"]])
def test_a_screen_says_once_that_there_is_no_engine(problems: list[str]) -> None:
    """As a problem, or in the engines' place."""
    found = top_document() | {"engines": [], "problems": problems}
    lines = [line.plain for line in top_view.screen(found, None, 80, 40)]
    assert lines.count("no engine is registered") == 1


# -- progress ------------------------------------------------------------------------------


def test_an_interrupted_verify_leaves_a_clean_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C: the progress line is wiped, then it says how far it came; exit code 130."""
    term = watched(monkeypatch)

    def interrupted(root: object, *, progress: Any) -> Any:
        progress.total_bytes = 1 << 40
        progress.advance(3, 1 << 30)
        raise KeyboardInterrupt
        yield

    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("lmcache_persist.server.offline.check", interrupted)
    monkeypatch.setattr("lmcache_persist.cli.ticker._EVERY_S", 0.0)
    with pytest.raises(BaseException, match="130"):
        verify("/nowhere")
    *drawn, rest = term.text().split("\r\x1b[K")
    assert rest == "interrupted: 3 objects checked, 0 violations so far\n"
    assert any("%" in line for line in drawn)
    assert [line for line in drawn if cell_len(line) >= 40] == []


@pytest.mark.parametrize("width", [16, 20, 40, 60, 120])
def test_a_progress_line_is_never_cut_in_a_number(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """Of the texts, the longest that fits; of one that does not, whole words."""
    term = watched(monkeypatch)
    monkeypatch.setenv("COLUMNS", str(width))
    with Ticker() as ticker:
        ticker.show("copied 123456 chunks, 1.00 GiB, 123.00 MiB/s", "1.00 GiB, 123.00 MiB/s")
    line = term.text().split("\r\x1b[K")[1]
    assert line in (
        "copied 123456 chunks, 1.00 GiB, 123.00 MiB/s",
        "1.00 GiB, 123.00 MiB/s",
        "1.00 GiB,",
    )
