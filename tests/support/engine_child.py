"""An engine for tests: the demo's, with loads that can be made to fail, or to go wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lmcache_persist.demo import engine_child


class FallibleEngine(engine_child.Engine):
    """Also breaks what a test wants broken."""

    VERBS = (*engine_child.Engine.VERBS, "break_loads", "blank_loads", "groups_of_kind")

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        lora: list[Any] | None = None,
        **request: Any,
    ) -> list[dict[str, Any]]:
        """The demo's, for an adapter where ``lora`` is its (name, number, path)."""
        if lora is None:
            return super().generate(prompts, max_tokens, **request)
        from vllm.lora.request import LoRARequest

        plain = self._llm.generate
        self._llm.generate = partial(plain, lora_request=LoRARequest(*lora))
        try:
            return super().generate(prompts, max_tokens, **request)
        finally:
            self._llm.generate = plain

    def break_loads(self, broken: bool) -> None:
        """Have an in-process worker lose sight of every pool, or find them again."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        client = get_kv_transfer_group()._client
        if broken:
            client.pool = lambda boot_id: None
        else:
            del client.pool

    def blank_loads(self, groups: list[int]) -> None:
        """Have an in-process worker load zeros into these groups, as a defect would."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        for index, pages in enumerate(get_kv_transfer_group()._worker._pages):
            if pages is None:
                continue
            vars(pages).pop("scatter", None)
            if index in groups:
                pages.scatter = _scatter_zeros(pages.scatter)

    def groups_of_kind(self, kind: str) -> list[int]:
        """Indexes of an in-process worker's groups of a kind."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        groups = get_kv_transfer_group()._worker._groups
        return [index for index, group in enumerate(groups) if group.kind == kind]


def _scatter_zeros(scatter: Callable[..., int]) -> Callable[..., int]:
    def blank(blocks: Sequence[int], slot: memoryview, **options: Any) -> int:
        return scatter(blocks, memoryview(bytearray(slot.nbytes)), **options)

    return blank


if __name__ == "__main__":
    engine_child.main(FallibleEngine)
