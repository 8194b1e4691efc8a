"""An engine for tests: the demo's, with loads that can be made to fail."""

from __future__ import annotations

from lmcache_persist.demo import engine_child


class FallibleEngine(engine_child.Engine):
    """Also breaks what a test wants broken."""

    VERBS = (*engine_child.Engine.VERBS, "break_loads")

    def break_loads(self, broken: bool) -> None:
        """Have an in-process worker lose sight of every pool, or find them again."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        client = get_kv_transfer_group()._client
        if broken:
            client.pool = lambda boot_id: None
        else:
            del client.pool


if __name__ == "__main__":
    engine_child.main(FallibleEngine)
