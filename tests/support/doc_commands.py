"""Commands in documents: found in the text, run, compared with the output that is shown."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS = re.compile(
    r"\s*([$#] )?(lmcache-persist|vllm|docker|kubectl|make|pip|curl|systemctl|journalctl) ",
    re.ASCII,
)
"""How a line looks that is a command, wherever it stands."""


@dataclass(slots=True)
class Command:
    """One command of a document.

    Attributes:
        line: where it stands in its page.
        text: as it is typed, continuation lines included.
        shown: the lines of output below it; ``...`` stands for anything.
    """

    line: int
    text: str
    shown: list[str] = field(default_factory=list)

    @property
    def words(self) -> list[str]:
        """The command as the shell splits it."""
        return shlex.split(self.text)

    @property
    def error_code(self) -> str | None:
        """The code of the error that is shown, if one is."""
        found = re.search(r"^error: .*\[(\w+)\]$", "\n".join(self.shown), re.MULTILINE)
        return found[1] if found else None

    def matches(self, output: str) -> bool:
        """Whether an output is the one that is shown; true if none is."""
        if not self.shown:
            return True
        lines = [" ".join(line.split()) for line in output.splitlines()]
        return (
            re.fullmatch(_pattern(self.shown), "".join(f"{line}\n" for line in lines)) is not None
        )


def _pattern(shown: list[str]) -> str:
    parts = []
    for line in shown:
        if line.strip() == "...":
            parts.append(r"(?:.*\n)*")
        else:
            parts.append(re.escape(" ".join(line.split())).replace(r"\.\.\.", ".*") + r"\n")
    return "".join(parts)


def fences(page: Path) -> list[tuple[int, str, list[str]]]:
    """The fenced blocks of a page: first line, language, lines."""
    found: list[tuple[int, str, list[str]]] = []
    inside = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.startswith("```"):
            inside = not inside
            if inside:
                found.append((number + 1, line[3:].strip(), []))
        elif inside:
            found[-1][2].append(line)
    return found


def commands(page: Path) -> list[Command]:
    """The commands of a page's ``console`` blocks, in order."""
    found: list[Command] = []
    for first, language, lines in fences(page):
        if language == "console":
            prompt = lines[0][:2]
            if prompt not in ("$ ", "# "):
                raise ValueError(f"{page.name}:{first}: expected a prompt, $ or #")
            found.extend(_of_block(first, lines, prompt))
    return found


def _of_block(first: int, lines: list[str], prompt: str) -> list[Command]:
    found: list[Command] = []
    is_open = False
    for number, line in enumerate(lines, first):
        if is_open:
            found[-1].text += "\n" + line
        elif line.startswith(prompt):
            found.append(Command(number, line[2:]))
        else:
            found[-1].shown.append(line)
            continue
        is_open = _is_open(found[-1].text)
    return found


def _is_open(text: str) -> bool:
    """Whether a command goes on in the next line."""
    try:
        shlex.split(text)
    except ValueError:
        return True
    return text.endswith("\\")


def hidden_commands(page: Path) -> list[str]:
    """Commands outside of ``console`` blocks, where nobody would run them."""
    text = page.read_text()
    found = [
        f"{page.name}:{first}: {line}"
        for first, language, lines in fences(page)
        if language != "console"
        for line in lines
        if PROGRAMS.match(line)
    ]
    bare = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    found += [
        f"{page.name}: {line}"
        for line in bare.splitlines()
        if line.startswith("    ") and PROGRAMS.match(line)
    ]
    return found


def code_spans(page: Path) -> list[str]:
    """Everything in single backquotes, over line ends, outside of fences."""
    bare = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", bare)]
