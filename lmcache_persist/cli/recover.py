"""``recover``: a lost manifest made anew from the store's stamp."""

from __future__ import annotations

from lmcache_persist.cli.confirm import confirmation
from lmcache_persist.cli.exit_codes import ExitCode
from lmcache_persist.cli.live import absolute, without_server
from lmcache_persist.cli.options import DataDir, Json, Yes
from lmcache_persist.cli.output import ending, plain, say, write, write_json


@ending
def recover(
    data_dir: DataDir,
    yes: Yes = False,
    json_output: Json = False,
) -> int:
    """Make a manifest anew that is absent, unreadable or unbound, while no server runs.

    The store's stamp holds the whole binding. A manifest that cannot be read is moved
    aside, which it asks about; one that is good and says something else is refused.
    Nothing stored is lost.

    Example: lmcache-persist recover /var/lib/kv
    """
    from lmcache_persist.server.recover import recover as carry_out

    with without_server("recover"):
        done = carry_out(
            absolute(data_dir),
            confirmation("recover", yes=yes),
            say=lambda text: say(plain(text)),
        )
    if json_output:
        write_json({"done": done})
    else:
        for line in done:
            write(plain(line))
    return ExitCode.OK
