"""Terminals for what people see: streams that say they are one, and real ones of a size."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import struct
import sys
import termios
import time
from collections.abc import Callable, Sequence

_SEQUENCES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal(io.TextIOWrapper):
    """A stream that is a terminal, of the size that ``COLUMNS`` and ``LINES`` say."""

    def __init__(self, encoding: str = "utf-8") -> None:
        super().__init__(io.BytesIO(), encoding=encoding, newline="")

    def isatty(self) -> bool:
        """It is one."""
        return True

    def fileno(self) -> int:
        """There is none."""
        raise OSError("no descriptor")

    def text(self) -> str:
        """All that was written."""
        self.flush()
        buffer = self.buffer
        assert isinstance(buffer, io.BytesIO)
        return buffer.getvalue().decode(self.encoding)


def without_sequences(text: str) -> str:
    """What is seen of it."""
    return _SEQUENCES.sub("", text)


class Window:
    """A program at a terminal of its own.

    Args:
        command: program and arguments.
        columns: of the terminal.
        lines: of it.
    """

    def __init__(self, command: Sequence[str], columns: int, lines: int) -> None:
        self.drawn = ""
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
            for name in ("COLUMNS", "LINES", "NO_COLOR"):
                os.environ.pop(name, None)
            os.environ["TERM"] = "xterm"
            os.execv(sys.executable, list(command))

    def resize(self, columns: int, lines: int) -> None:
        """As a person pulls at its corner."""
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def type(self, text: str) -> None:
        """Press keys."""
        os.write(self._fd, text.encode())

    def read_until(self, done: Callable[[str], bool], timeout_s: float = 60.0) -> str:
        """What was drawn so far, once it is enough, or the program's end."""
        deadline = time.monotonic() + timeout_s
        data = b""
        begin = self.drawn
        while time.monotonic() < deadline:
            if select.select([self._fd], [], [], 0.1)[0]:
                try:
                    data += os.read(self._fd, 65536)
                except OSError:
                    break  # it has ended
                self.drawn = begin + data.decode(errors="replace")
                if done(self.drawn):
                    break
        return self.drawn

    def wait(self) -> int:
        """Its exit code."""
        self.read_until(lambda _: False)
        _, status = os.waitpid(self._pid, 0)
        os.close(self._fd)
        return os.waitstatus_to_exitcode(status)
