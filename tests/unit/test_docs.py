"""The documents name everything that exists, and nothing that does not."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest
import typer

from lmcache_persist import errors, failpoints, protocol
from lmcache_persist.cli.app import app
from lmcache_persist.cli.exit_codes import ExitCode
from lmcache_persist.config import SETTINGS, Settings
from lmcache_persist.config_sources import OTHER_VARIABLES
from lmcache_persist.geometry import groups_from_sizes, plan
from lmcache_persist.store.capacity import MIN_CAPACITY_BYTES, PageBudget

DOCS = Path(__file__).parents[2] / "docs"
MESSAGES = [*get_args(protocol.Request), *get_args(protocol.Reply)]
PARTS = [
    protocol.GroupSpec,
    protocol.PoolInfo,
    protocol.SlotRun,
    protocol.Grant,
    protocol.StorePart,
]
REFUSALS = {
    kind
    for kind in errors.ERRORS_BY_CODE.values()
    if issubclass(kind, errors.StartupRefused) and kind is not errors.StartupRefused
}
VERBS = typer.main.get_command(app).commands
COMMON_FIELDS = {"boot", "session", "binding", "durable_seq"}


def words(name: str) -> set[str]:
    """Everything that a document shows as code."""
    text = re.sub(r"```.*?```", "", (DOCS / name).read_text(), flags=re.DOTALL)
    return set(re.findall(r"`([^`\n]+)`", text))


def rows(name: str) -> dict[str, str]:
    """Table rows of a document by the code in their first cell."""
    found = re.findall(r"^\| `([^`]+)` [^|]*\|(.*)\|$", (DOCS / name).read_text(), re.MULTILINE)
    return dict(found)


def tag_of(message: type[msgspec.Struct]) -> str:
    """A message's type on the wire."""
    return str(message.__struct_config__.tag)


@pytest.mark.parametrize("message", MESSAGES, ids=tag_of)
def test_every_message_is_described_with_all_of_its_fields(message: type[msgspec.Struct]) -> None:
    """docs/protocol.md has a row per message that names each field of its own."""
    row = rows("protocol.md")[tag_of(message)]
    common = (
        COMMON_FIELDS
        if message not in (protocol.Hello, protocol.Welcome)
        else {
            "boot",
            "durable_seq",
        }
    )
    common = common - ({"binding"} if message is protocol.BindReply else set())
    for field in message.__struct_fields__:
        assert field in common or f"`{field}`" in row, field


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_the_parts_of_messages_are_described(part: type[msgspec.Struct]) -> None:
    """Groups, slots and grants are described field by field."""
    missing = set(part.__struct_fields__) - words("protocol.md") - {"kind"}
    assert not missing


def test_the_bounds_of_messages_are_the_documented_ones() -> None:
    """Who changes a bound changes the document."""
    text = (DOCS / "protocol.md").read_text()
    assert f"Version {protocol.PROTOCOL_VERSION}." in text
    assert f"at most {protocol.MAX_MESSAGE_BYTES >> 20} MiB" in text
    assert f"up to {protocol.MAX_CHUNKS_PER_LOOKUP} chunks" in text
    assert f"up to {protocol.MAX_KEYS_PER_RESERVE} keys" in text
    assert f"*ms* 0 to {protocol.MAX_WAIT_MS}" in text
    assert f"1 to {protocol.MAX_RANKS})" in text
    assert f"A request id is {protocol.REQUEST_ID_BYTES} bytes" in " ".join(text.split())


def test_every_error_code_is_described_and_no_other() -> None:
    """docs/errors.md is the list of codes."""
    assert set(rows("errors.md")) == set(errors.ERRORS_BY_CODE)


def test_every_refusal_of_a_start_has_its_way_out() -> None:
    """The second table of docs/errors.md: each code of a refusal, what was found, what to do."""
    section = (DOCS / "errors.md").read_text().split("\n## Refusals of a start\n")[1]
    table = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    assert all(len(row) == 3 and all(cell.strip() for cell in row) for row in table)
    named = {row[1].strip(" `") for row in table[2:]}
    assert named <= set(errors.ERRORS_BY_CODE)
    refusals = {code for code, kind in errors.ERRORS_BY_CODE.items() if kind in REFUSALS}
    assert refusals <= named


def test_every_refusal_has_a_hint() -> None:
    """Wherever the code refuses a start or a verb, it says the way out."""
    names = {kind.__name__ for kind in REFUSALS}
    calls = [
        (path, node)
        for path in (DOCS.parent / "lmcache_persist").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names
    ]
    assert len(calls) > 30
    without = [
        f"{path.name}:{node.lineno}"
        for path, node in calls
        if "hint" not in [keyword.arg for keyword in node.keywords]
    ]
    assert without == []


def test_errors_named_by_the_protocol_exist() -> None:
    """The last column of the requests holds error codes."""
    for tag, row in rows("protocol.md").items():
        cells = re.split(r"(?<!\\)\|", row)
        if len(cells) == 4:
            assert set(re.findall(r"`([^`]+)`", cells[-1])) <= set(errors.ERRORS_BY_CODE), tag


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_and_flag_is_described(verb: str) -> None:
    """docs/cli.md has a section per verb that names all of its flags."""
    text = (DOCS / "cli.md").read_text()
    assert f"\n## {verb}\n" in text
    section = text.split(f"\n## {verb}\n")[1].split("\n## ")[0]
    for param in VERBS[verb].params:
        if param.param_type_name == "option":
            assert re.search(rf"{param.opts[0]}\b", section), param.opts


def test_every_exit_code_is_described() -> None:
    """docs/cli.md lists the exit codes, and no other."""
    found = re.findall(r"^\| (\d+) \|", (DOCS / "cli.md").read_text(), re.MULTILINE)
    assert [int(code) for code in found] == sorted(ExitCode)


def test_every_setting_is_described_with_its_flag_variable_and_default() -> None:
    """docs/configuration.md has a row per setting; what it says of defaults is so."""
    table = rows("configuration.md")
    defaults = Settings(data_dir=Path("/x")).effective()
    for setting in SETTINGS:
        row = table[setting.name]
        assert f"`{setting.flag}` |" in row
        assert f"`{setting.variable}` |" in row
        if setting.name not in ("data_dir", "listen"):
            shown = f"`{defaults[setting.name]}`" if defaults[setting.name] else "none"
            assert f"| {shown} |" in row, setting.name
    assert words("configuration.md") >= OTHER_VARIABLES


def test_every_failpoint_is_described_and_no_other() -> None:
    """docs/configuration.md lists the failpoints."""
    names = {name for name in rows("configuration.md") if "." in name}
    assert names == set(failpoints.NAMES)


def test_the_table_of_bindings_is_what_the_rules_give() -> None:
    """docs/binding.md: alignment and chunk sizes of each geometry."""
    found = re.findall(
        r"^\| ([\d, ]+)(?: \(.*\))? \| (\d+) \| (\d+) \| (\d+) \|$",
        (DOCS / "binding.md").read_text(),
        re.MULTILINE,
    )
    assert len(found) == 5
    for sizes, *numbers in found:
        groups = groups_from_sizes([int(size) for size in sizes.split(",")])
        plans = [plan(groups, base) for base in (256, 1024)]
        expected = [plans[0].required_alignment, *(one.chunk_size for one in plans)]
        assert [int(number) for number in numbers] == expected, sizes


def rows_of_sizes(text: str) -> list[list[int]]:
    """The numbers of the table of small capacities."""
    found = re.findall(r"\| (\d+)MiB \| (\d+) % \| (\d+) % \| (\d+) MiB \|", text)
    return [[int(number) for number in row] for row in found]


def test_the_sizing_page_has_the_marks_of_eviction() -> None:
    """docs/sizing.md: where eviction begins and stops, what is held back, the largest chunk."""
    text = " ".join((DOCS / "sizing.md").read_text().split())
    budget = PageBudget.of(256 << 30)
    begin, stop = (100 * mark // budget.total for mark in (budget.high, budget.low))
    assert f"begins at {begin} % and stops at {stop} %" in text
    assert f"{100 * budget.reserve / budget.total:.1f} % is held back" in text
    assert round(3 * budget.largest_chunk / budget.total) == 2  # "two thirds"
    table = rows_of_sizes((DOCS / "sizing.md").read_text())
    assert table[0][0] == MIN_CAPACITY_BYTES >> 20
    for capacity, *numbers in table:
        small = PageBudget.of(capacity << 20)
        shares = [100 * mark // small.total for mark in (small.high, small.low)]
        assert numbers == [*shares, small.largest_chunk * small.page_bytes >> 20]
    assert numbers[:2] == [begin, stop]
    per_token = 2 * 8 * 128 * 2 * 32
    assert f"{per_token // 1024} KiB per token, and {256 * per_token >> 20} MiB" in text
    assert round(budget.low * budget.page_bytes / per_token / 1e6, 1) == 1.9


def test_links_between_documents_lead_somewhere() -> None:
    """No document points at a file that is not there."""
    for page in [DOCS.parent / "README.md", *DOCS.glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"
