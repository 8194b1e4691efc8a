"""``flush``: wait until everything committed is durable."""

from __future__ import annotations

import time

from lmcache_persist.cli.connection import connected, seconds
from lmcache_persist.cli.exit_codes import ExitCode
from lmcache_persist.cli.live import endpoint_of
from lmcache_persist.cli.options import Json, ServedDir, Server, VerbTimeout
from lmcache_persist.cli.output import ending, write, write_json


@ending
def flush(
    data_dir: ServedDir = None,
    server: Server = None,
    timeout: VerbTimeout = "60",
    json_output: Json = False,
) -> int:
    """Return when everything that was committed before is on disk.

    Exit code 4 if that is not so in time: then nothing is known.

    Example: lmcache-persist flush /var/lib/kv

    Example: lmcache-persist flush --server ipc:///var/lib/kv/server.sock
    """
    limit = seconds(timeout)
    deadline = time.monotonic() + limit
    url, root = endpoint_of(data_dir, server)
    with connected(url, limit, "flush", root=root) as client:
        durable_seq = client.flush(max(0.0, deadline - time.monotonic()))
    if json_output:
        write_json({"durable_seq": durable_seq})
    else:
        write(f"durable up to sequence number {durable_seq}")
    return ExitCode.OK
