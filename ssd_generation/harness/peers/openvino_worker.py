"""Worker in whose process OpenVINO GenAI runs (see `run/child.py`): one model.

It imports nothing of the package, so that its memory is OpenVINO's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Worker:
    """Handler of requests; each method named `do_…` answers one kind."""

    def __init__(self) -> None:
        self.pipeline: Any = None

    def do_load(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Load the model `file`, to run in `precision` on `threads` threads, with or without `prefix_cache`."""
        import openvino_genai

        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = message["prefix_cache"]
        properties = {"INFERENCE_NUM_THREADS": message["threads"]}
        if message["precision"] is not None:
            # By default it computes in bfloat16 where the processor can, whatever the weights are.
            properties["INFERENCE_PRECISION_HINT"] = message["precision"]
        self.pipeline = openvino_genai.LLMPipeline(message["file"], "CPU", scheduler_config=scheduler, **properties)
        return {}

    def do_call(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Continue the tokens `input_ids` greedily by `new_tokens` tokens."""
        import numpy
        import openvino

        ids = openvino.Tensor(numpy.array([message["input_ids"]], dtype=numpy.int64))
        answer = self.pipeline.generate(ids, self._config(message["new_tokens"]))
        return {
            "token_ids": list(answer.tokens[0]),
            "prompt_seconds": answer.perf_metrics.get_ttft().mean / 1000,
        }

    def do_batch(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Continue each of the token lists `rows` greedily by `new_tokens` tokens, all at the same time."""
        import numpy
        import openvino
        import openvino_genai

        rows = message["rows"]
        ids = numpy.zeros((len(rows), max(map(len, rows))), dtype=numpy.int64)
        mask = numpy.zeros_like(ids)
        for row, tokens in enumerate(rows):
            ids[row, -len(tokens) :], mask[row, -len(tokens) :] = tokens, 1
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(mask))
        answer = self.pipeline.generate(inputs, self._config(message["new_tokens"]))
        return {"token_ids": [list(tokens) for tokens in answer.tokens]}

    @staticmethod
    def _config(new_tokens: int) -> Any:
        """Return a config for greedy texts, without the settings of the generation config in the model's folder."""
        import openvino_genai

        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = new_tokens
        config.do_sample = False
        config.ignore_eos = True
        return config
