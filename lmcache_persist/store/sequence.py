"""Sequence numbers of commits, and how far all of them are settled."""

from __future__ import annotations


class CommitSequence:
    """Numbers commits and knows up to which one everything is durable or dropped.

    A commit covers several chunks; it is settled when each is. ``durable_seq`` is the
    largest number up to which all are.

    Threads: one (the server's loop).
    """

    def __init__(self) -> None:
        self.last = 0
        self._open: dict[int, int] = {}
        self._held: int | None = None

    def begin(self) -> int:
        """The number of a new commit, with nothing open."""
        self.last += 1
        return self.last

    def add(self, seq: int) -> None:
        """One more chunk of commit ``seq``, the last one begun, is not settled yet.

        Raises:
            ValueError: a later commit was begun: ``durable_seq`` may have passed ``seq``.
        """
        if seq != self.last:
            raise ValueError(f"commit {seq} is closed, the last one is {self.last}")
        self._open[seq] = self._open.get(seq, 0) + 1

    def settle(self, seq: int) -> None:
        """One chunk of commit ``seq`` is durable, or was dropped."""
        left = self._open[seq] - 1
        if left:
            self._open[seq] = left
        else:
            del self._open[seq]

    def hold(self) -> None:
        """Let ``durable_seq`` stand still until :meth:`go_on`, whatever is settled."""
        self._held = self.durable_seq

    def go_on(self) -> None:
        """The inverse of :meth:`hold`."""
        self._held = None

    @property
    def durable_seq(self) -> int:
        """All commits up to this one are settled."""
        if self._held is not None:
            return self._held
        # Numbers are opened in rising order and dicts keep it: the first is the smallest.
        return next(iter(self._open)) - 1 if self._open else self.last
