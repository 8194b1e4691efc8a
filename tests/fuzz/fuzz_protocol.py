"""Coverage-guided fuzzing of everything that reads what a peer sent.

``python tests/fuzz/fuzz_protocol.py [libFuzzer flags] [corpus folders]``, see ``make fuzz``.
The codec itself is compiled and gives no coverage; the judging of what it read is Python
and does, so both are driven together. Whatever is not a ``PersistError`` is a finding.
"""

from __future__ import annotations

import random
import sys
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import atheris

with atheris.instrument_imports(include=["lmcache_persist"], enable_loader_override=False):
    from lmcache_persist import protocol
    from lmcache_persist.errors import PersistError, ProtocolError
    from support.judging import judge_reply, judge_request

from support.mutation import mutate


def one(data: bytes) -> None:
    """Read ``data`` as a request and as a reply; judge what came out."""
    with suppress(ProtocolError):
        message = protocol.decode_request(data)
        with suppress(PersistError):
            judge_request(message)
    with suppress(ProtocolError):
        reply = protocol.decode_reply(data)
        with suppress(PersistError):
            judge_reply(reply)


def mutator(data: bytes, max_size: int, seed: int) -> bytes:
    """Half of the time by structure, else as libFuzzer would."""
    draw = random.Random(seed)
    if draw.random() < 0.5:
        return mutate(data, draw)[:max_size]
    return bytes(atheris.Mutate(data, max_size))


def main() -> None:
    """Fuzz until the flags say stop."""
    atheris.Setup(sys.argv, one, custom_mutator=mutator)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
