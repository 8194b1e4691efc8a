"""Runs one vLLM engine and obeys JSON lines on stdin; see :mod:`lmcache_persist.demo.engine`.

Answers go to the file descriptor named on the command line, since vLLM writes to stdout.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, TextIO


class Engine:
    """The engine behind the pipe: one method per verb, plain JSON in and out."""

    VERBS: tuple[str, ...] = ("generate", "drain", "reset_prefix_cache", "counters")

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM

        self._llm = LLM(**options)

    def generate(
        self, prompts: list[list[int]], max_tokens: int, **request: Any
    ) -> list[dict[str, Any]]:
        """Greedy tokens, their logprobs, cached tokens and time to first token per prompt."""
        from vllm import SamplingParams

        salt = request.pop("cache_salt", None)
        sampling = {"temperature": 0.0, "logprobs": 1, **request}
        params = SamplingParams(
            max_tokens=max_tokens, detokenize=False, ignore_eos=True, **sampling
        )
        inputs = [
            {"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {})
            for prompt in prompts
        ]
        outputs = self._llm.generate(inputs, params, use_tqdm=False)
        self.drain()
        return [self._describe(output) for output in outputs]

    @staticmethod
    def _describe(output: Any) -> dict[str, Any]:
        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        return {
            "tokens": tokens,
            "logprobs": [
                step[token].logprob
                for token, step in zip(tokens, completion.logprobs or [], strict=False)
            ],
            "cached_tokens": output.num_cached_tokens,
            "finish_reason": completion.finish_reason,
            "first_token_s": getattr(output.metrics, "first_token_latency", None),
        }

    def drain(self) -> None:
        """Step an in-process engine until nothing is left to report; else a no-op."""
        core = self._core()
        while core is not None and core.scheduler.has_requests():
            core.step_fn()

    def reset_prefix_cache(self) -> bool:
        """Empty vLLM's own prefix cache."""
        return bool(self._llm.reset_prefix_cache())

    def counters(self) -> dict[str, Any]:
        """The scheduler side's counters of an in-process engine."""
        core = self._core()
        connector = None if core is None else core.scheduler.connector
        return {} if connector is None else dict(connector.counters)

    def _core(self) -> Any:
        client = self._llm.llm_engine.engine_core
        return getattr(client, "engine_core", None)


def main(kind: type[Engine] = Engine) -> None:
    """Start the engine that the first line describes, then answer a line with a line.

    Args:
        kind: of engine; its ``VERBS`` may be called.
    """
    answers: TextIO = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    engine = kind(json.loads(sys.stdin.readline()))
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        command = json.loads(line)
        verb = command.pop("verb")
        if verb not in kind.VERBS:
            raise ValueError(f"verb {verb!r} is unknown, expected one of {kind.VERBS}")
        answers.write(json.dumps({"result": getattr(engine, verb)(**command)}) + "\n")


if __name__ == "__main__":
    main()
