"""An engine for tests: driven step by step, and broken where a test wants it broken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lmcache_persist.demo import engine_child

TOP = 5
"""Most likely tokens that are told of each step of a driven request."""


class TestEngine(engine_child.Engine):
    """An in-process engine that is looked into."""

    __test__ = False
    VERBS = (
        *engine_child.Engine.VERBS,
        "blank_loads",
        "break_loads",
        "break_loads_of_rank",
        "drive",
        "groups_of_kind",
        "held",
        "make_stage_buffers",
        "metrics",
        "reset_all",
        "stale_loads",
    )

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self._preemptions = 0
        core = self._core()
        if core is not None:
            self._count_preemptions(core.scheduler)

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

    @staticmethod
    def _describe(output: Any) -> dict[str, Any]:
        """The demo's, and the logprobs of each step's most likely tokens."""
        steps = output.outputs[0].logprobs or []
        top = [{str(token): one.logprob for token, one in step.items()} for step in steps]
        return {**engine_child.Engine._describe(output), "top": top}

    def _count_preemptions(self, scheduler: Any) -> None:
        preempt = scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._preemptions += 1
            return preempt(*args, **kwargs)

        scheduler._preempt_request = counted

    def reset_all(self, running: bool = False) -> bool:
        """What belongs to a weight update: vLLM's own cache and the connector's are reset.

        Args:
            running: also preempt what runs, to be computed again.
        """
        return bool(self._llm.reset_prefix_cache(running, reset_connector=True))

    def drive(
        self,
        requests: list[dict[str, Any]],
        reset_at: int | None = None,
        reset_running: bool = False,
        abort_preempted: int = 0,
    ) -> dict[str, Any]:
        """Add and abort requests at given steps, and step until all are over.

        Args:
            requests: each has ``id``, ``prompt``, ``max_tokens``; ``start``, the step before
                which it is added; it may have ``abort``, the one before which it is aborted.
            reset_at: the step before which :meth:`reset_all` is called, None for never.
            reset_running: its argument.
            abort_preempted: so many are aborted when they are found preempted.

        Returns:
            ``results`` by id of what was not aborted; ``aborted_in``, the scheduler's states
            that requests were aborted in; ``preemptions``; ``steps``; ``reset``, what it said.
        """
        engine, core, reset = self._llm.llm_engine, self._core(), None
        before, results, aborted_in, step = self._preemptions, {}, set(), 0
        last = max(max(one["start"], one.get("abort") or 0) for one in requests)
        while step <= last or engine.has_unfinished_requests():
            if step == reset_at:
                reset = self.reset_all(reset_running)
            for one in requests:
                state = core.scheduler.requests.get(one["id"])
                status = "finished" if state is None else state.status.name
                preempted = status == "PREEMPTED" and abort_preempted > 0
                if one.get("abort") == step or preempted:
                    abort_preempted -= preempted
                    aborted_in.add(status)
                    engine.abort_request([one["id"]])
                if one["start"] == step:
                    self._add(one)
            for output in engine.step():
                if output.finished:
                    results[output.request_id] = self._describe(output)
            step += 1
        self.drain()
        return {
            "results": results,
            "aborted_in": sorted(aborted_in),
            "preemptions": self._preemptions - before,
            "steps": step,
            "reset": reset,
        }

    def _add(self, one: dict[str, Any]) -> None:
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input

        params = SamplingParams(
            temperature=0.0,
            logprobs=TOP,
            max_tokens=one["max_tokens"],
            detokenize=False,
            ignore_eos=True,
        )
        self._llm.llm_engine.add_request(one["id"], tokens_input(one["prompt"]), params)

    def held(self) -> dict[str, int]:
        """What requests hold between calls: all 0 but for a leak."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        pool = self._core().scheduler.kv_cache_manager.block_pool
        scheduler = self._core().scheduler.connector._scheduler
        worker = get_kv_transfer_group()._worker
        return {
            # The null block is never free.
            "blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
            "tracked": len(scheduler._tracked),
            "loading": len(scheduler._loading) + len(scheduler._new_loads),
            "reserving": len(worker._asked),
            "reports": len(worker._loads) + len(worker._finished) + len(worker._failed),
        }

    def metrics(self) -> dict[str, float]:
        """What vLLM's Prometheus registry has of this connector, by name and reason."""
        return {
            " ".join(filter(None, (one.name, one.labels.get("reason")))): one.value
            for one in self._llm.get_metrics()
            if one.name.startswith("vllm:persist_") and hasattr(one, "value")
        }

    def make_stage_buffers(self) -> None:
        """Do for pipeline stages what vLLM 0.32 leaves out on a CPU: nothing could be received."""
        self._llm.collective_rpc(_make_stage_buffers)

    def break_loads(self, broken: bool) -> None:
        """Have an in-process worker lose sight of every pool, or find them again."""
        _break_loads(None, 0, broken)

    def break_loads_of_rank(self, rank: int, broken: bool) -> None:
        """As :meth:`break_loads`, for one of several worker processes."""
        self._llm.collective_rpc(_break_loads, args=(rank, broken))

    def blank_loads(self, groups: list[int]) -> None:
        """Have an in-process worker load zeros into these groups, as a defect would."""
        _falsify_loads(groups, _scatter_zeros)

    def stale_loads(self, groups: list[int]) -> None:
        """Have these groups always get what the next load to come brings, as a mix-up would."""
        _falsify_loads(groups, _scatter_the_first)

    def groups_of_kind(self, kind: str) -> list[int]:
        """Indexes of an in-process worker's groups of a kind."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        groups = get_kv_transfer_group()._worker._groups
        return [index for index, group in enumerate(groups) if group.kind == kind]


def _make_stage_buffers(worker: Any) -> None:
    runner = worker.model_runner
    runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
        batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
    )


def _break_loads(_: object, rank: int, broken: bool) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector = get_kv_transfer_group()
    if connector._worker._rank != rank:
        return
    if broken:
        connector._client.pool = lambda boot_id: None
    else:
        vars(connector._client).pop("pool", None)


_Scatter = Callable[..., int]


def _falsify_loads(groups: list[int], falsify: Callable[[_Scatter], _Scatter]) -> None:
    """Replace the scattering of these groups; the others load what they should."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    for index, pages in enumerate(get_kv_transfer_group()._worker._pages):
        if pages is None:
            continue
        vars(pages).pop("scatter", None)
        if index in groups:
            pages.scatter = falsify(pages.scatter)


def _scatter_zeros(scatter: _Scatter) -> _Scatter:
    def blank(blocks: Sequence[int], slot: memoryview, **options: Any) -> int:
        return scatter(blocks, memoryview(bytearray(slot.nbytes)), **options)

    return blank


def _scatter_the_first(scatter: _Scatter) -> _Scatter:
    first: list[bytes] = []

    def stale(blocks: Sequence[int], slot: memoryview, **options: Any) -> int:
        first.append(bytes(slot))
        return scatter(blocks, memoryview(bytearray(first[0])), **options)

    return stale


if __name__ == "__main__":
    engine_child.main(TestEngine)
