"""Every command in README and docs is run as it stands, or is listed here with what covers it.

A page is run from top to bottom, as a reader would, in a folder of its own. Paths, the port
and sizes are replaced (:data:`PLACES`, :data:`SIZES`); the unit of systemd is played by a
server that is started and stopped here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer
import yaml

from lmcache_persist.cli.app import app
from lmcache_persist.cli.exit_codes import exit_code_of
from lmcache_persist.connector import ClientOptions
from lmcache_persist.errors import ERRORS_BY_CODE
from support.command_line import parse_verb
from support.connector_settings import read_extra_config
from support.doc_commands import Command, code_spans, commands, fences, hidden_commands
from support.emulated import EmulatedEngine
from support.resident_cli import resident, write_program
from support.server import ServerProcess, short_folder

REPOSITORY = Path(__file__).parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
PREPARED = {"operations.md", "sizing.md", "troubleshooting.md"}
"""Pages that begin with a server at work: an engine is registered, eight objects are stored."""

PLACES = {
    "/var/lib/kv": "{root}/kv",
    "/srv": "{root}/srv",
    "/dev/shm": "{root}/shm",
    "127.0.0.1:9109": "127.0.0.1:{port}",
}
"""What stands in the documents, and where it is in the test."""

SIZES = {"8GiB": "64MiB", "16GiB": "96MiB", "1GiB": "32MiB"}
"""What stands in the documents, and what the test takes; the first is a server's default."""

SHELL = {"lmcache-persist", "curl", "grep", "df", "du", "ls", "cp", "rm", "id"}
"""Programs that a shell runs, as they are written."""

ELSEWHERE = {
    "python3": "tests/integration/test_wheel.py installs the package into an environment",
    "/usr/local/lib/lmcache-persist/bin/pip": "the same",
    "ln": "root's",
    "systemd-sysusers": "root's; tests/unit/test_deploy.py reads the file",
    "usermod": "root's",
}
"""Programs that are not run, and why."""

FOREIGN_FLAGS = {
    "--kv-transfer-config",
    "--max-num-batched-tokens",
    "--group-add",
    "--ipc",
    "--format",
    "--shm-size",
    "--stop-timeout",
}
"""Flags of other programs that the documents name."""


class Reader:
    """Does what a page says.

    Args:
        root: a fresh folder.
        cli: socket of the resident command line.
    """

    def __init__(self, root: Path, cli: Path) -> None:
        self.root = root
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.servers: list[ServerProcess] = []
        self.engine: EmulatedEngine | None = None
        for name in ("shm", "srv", "bin"):
            (root / name).mkdir()
        write_program(root / "bin" / "lmcache-persist", cli)

    def here(self, text: str) -> str:
        """A command with the places of the test."""
        for place, there in PLACES.items():
            text = text.replace(place, there.format(root=self.root, port=self.port))
        return re.sub(r"\b\d+GiB\b", lambda size: SIZES[size[0]], text)

    def there(self, text: str) -> str:
        """An output with the places of the documents."""
        for place, there in PLACES.items():
            text = text.replace(there.format(root=self.root, port=self.port), place)
        sizes = {there: size for size, there in SIZES.items()}
        return re.sub(r"\b\d+MiB\b", lambda size: sizes.get(size[0], size[0]), text)

    def make(self, words: list[str]) -> ServerProcess:
        """A server for a ``serve`` command, not started."""
        _, flags = parse_verb(words)
        flags = {name: value for name, value in flags.items() if value not in (None, False)}
        more = [
            item
            for name, value in flags.items()
            if name not in ("data_dir", "pool_dir", "pool_size", "capacity")
            for item in ("--" + name.replace("_", "-"), str(value))
        ]
        return ServerProcess(
            Path(str(flags["data_dir"])),
            *more,
            pool_dir=self.root / "shm",
            pool_size=SIZES["1GiB"],
            capacity=str(flags.get("capacity", SIZES["8GiB"])),
        )

    def start(self, words: list[str] | None = None) -> ServerProcess:
        """Start a server, by default the one that the unit would start."""
        http = ["--http", f"127.0.0.1:{self.port}"]
        server = self.make(words or ["serve", "--data-dir", f"{self.root}/kv", *http])
        self.servers.append(server.start())
        return server

    def prepare(self) -> None:
        """A server at work: one engine, eight objects."""
        server = self.start()
        options = ClientOptions(request_timeout_s=5.0)
        self.engine = EmulatedEngine(server.url, [640], options=options).join()
        assert self.engine.store(self.engine.hashes(list(range(640 * 8)))) == 8
        self.engine.client.flush(20)

    def stop(self) -> None:
        """End the server that was started last, in good order."""
        assert self.servers.pop().terminate() == 0

    def close(self) -> None:
        """End everything."""
        if self.engine is not None:
            self.engine.client.close()
        for server in self.servers:
            server.kill()

    def serve(self, command: Command) -> tuple[int, str]:
        """Start the server of a command, or see it refused."""
        words = [self.here(word) for word in command.words[1:]]
        if command.error_code is not None:
            return self.make(words).refused()
        return 0, f"ready {self.start(words).url}\n"

    def shell(self, command: Command) -> tuple[int, str]:
        """Run a command in a shell: exit status, and what a terminal would show."""
        server = self.servers[-1].process if self.servers else None
        done = subprocess.run(
            ["bash", "-c", self.here(command.text)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            env={
                **os.environ,
                "PATH": f"{self.root}/bin:{os.environ['PATH']}",
                "SERVER": str(server.pid if server else ""),
            },
        )
        return done.returncode, done.stdout


def known_file(name: str) -> None:
    """A file of the checkout."""
    assert (REPOSITORY / name).exists(), name


def check_vllm(words: list[str]) -> None:
    """The connector's settings are valid."""
    config = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert config["kv_connector_module_path"] == "lmcache_persist.connector.vllm"
    assert config["kv_connector"] == "PersistConnector"
    read_extra_config(config["kv_connector_extra_config"])


def check_docker(words: list[str]) -> None:
    """Files are there; what runs inside is a command line of ours."""
    if words[1] == "build":
        known_file(words[words.index("-f") + 1])
    elif words[1] in ("run", "exec"):
        parse_verb(words[words.index("lmcache-persist") + 1 :])
    else:
        assert words[1] == "volume", words


def check_kubectl(words: list[str]) -> None:
    """The file is there; tests/unit/test_deploy.py reads it."""
    assert words[1:3] == ["apply", "-f"]
    known_file(words[3])
    assert list(yaml.safe_load_all((REPOSITORY / words[3]).read_text()))


def check_install(words: list[str]) -> None:
    """What is installed is in the checkout."""
    known_file(words[-2])


def check_pip(words: list[str]) -> None:
    """The extras exist; tests/integration/test_wheel.py installs."""
    assert words[1] == "install"
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = re.findall(r"\[([\w,-]+)\]", words[-1])
    for extra in extras[0].split(",") if extras else []:
        assert extra in project["optional-dependencies"]


def check_make(words: list[str]) -> None:
    """The targets exist."""
    makefile = (REPOSITORY / "Makefile").read_text()
    for target in (word for word in words[1:] if "=" not in word):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


CHECKED: dict[str, Callable[[list[str]], None]] = {
    "vllm": check_vllm,
    "docker": check_docker,
    "kubectl": check_kubectl,
    "install": check_install,
    "pip": check_pip,
    "make": check_make,
}
"""Programs of which the arguments are looked at, as nothing is there to run them."""


def stand_in(reader: Reader, words: list[str]) -> tuple[int, str] | None:
    """What systemd would do; None for another program."""
    if words == ["kill", "-TERM", "$SERVER"]:
        reader.stop()
    elif words == ["systemctl", "stop", "lmcache-persist"]:
        if reader.servers:
            reader.stop()
    elif words == ["systemctl", "start", "lmcache-persist"]:
        reader.start()
    elif words[:3] == ["journalctl", "-u", "lmcache-persist"]:
        return 0, reader.servers[-1].log()
    elif words[0] == "systemctl":
        assert words[1] in ("daemon-reload", "enable", "restart"), words
    else:
        return None
    return 0, ""


def follow(reader: Reader, command: Command) -> tuple[int, str]:
    """Do what a command says; exit status and output."""
    words = command.words
    program = words[0]
    if words[:2] == ["lmcache-persist", "serve"]:
        return reader.serve(command)
    if program in SHELL:
        return reader.shell(command)
    played = stand_in(reader, words)
    if played is not None:
        return played
    if program in CHECKED:
        CHECKED[program](words)
    elif program not in ELSEWHERE:
        pytest.fail(f"line {command.line}: {program} is not known to this test: {command.text}")
    return 0, ""


@pytest.fixture(scope="module")
def cli() -> Iterator[Path]:
    """The command line, ready for all pages."""
    folder = short_folder()
    with resident(folder / "cli") as path:
        yield path
    shutil.rmtree(folder)


@pytest.fixture
def reader(root: Path, cli: Path) -> Iterator[Reader]:
    """Somebody who does what a page says."""
    it = Reader(root, cli)
    yield it
    it.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda p: p.name)
def test_every_command_does_what_the_page_shows(page: Path, reader: Reader) -> None:
    """From top to bottom, exit status and output are those that a reader was told."""
    if page.name in PREPARED:
        reader.prepare()
    for command in commands(page):
        where = f"{page.name}:{command.line}: {command.text}"
        status, output = follow(reader, command)
        output = reader.there(output)
        expected = 0
        if command.error_code is not None:
            expected = exit_code_of(ERRORS_BY_CODE[command.error_code](""))
        assert status == expected, f"{where}\n{output}"
        if command.words[0] in SHELL | {"journalctl"}:
            assert command.matches(output), f"{where}\n{output}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_command_hides_where_it_is_not_run(page: Path) -> None:
    """Commands stand in ``console`` blocks, of which the test above runs each."""
    assert not hidden_commands(page)
    assert {language for _, language, _ in fences(page)} <= {"console", "yaml", "json", ""}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_verbs_and_flags_in_the_text_exist(page: Path) -> None:
    """What is said in passing is right, too."""
    program = typer.main.get_command(app)
    verbs = program.commands  # type: ignore[attr-defined]
    flags = {verb: flags_of(command) for verb, command in verbs.items()}
    flags["of the program"] = flags_of(program)
    for span in code_spans(page):
        named = re.findall(r"(?<![\w-])--[a-z][a-z-]*", span)
        words = span.split()
        if words[0] == "lmcache-persist" and len(words) > 1 and not words[1].startswith("-"):
            if words[1] != "VERB":
                assert set(named) <= flags[words[1]], span
        elif words[0].startswith("--"):
            assert set(named) <= set().union(*flags.values()) | FOREIGN_FLAGS, span


def flags_of(command: object) -> set[str]:
    """All spellings of a verb's flags."""
    found = {"--help"}
    for parameter in command.params:  # type: ignore[attr-defined]
        found.update(parameter.opts + parameter.secondary_opts)
    return found


def test_the_shell_has_what_the_pages_use() -> None:
    """A program that is missing here would be no fault of the page."""
    missing = [name for name in SHELL - {"lmcache-persist"} if shutil.which(name) is None]
    assert not missing, f"install {' '.join(missing)}"
