"""Worker in whose process llama.cpp runs (see `run/child.py`): one model.

It imports nothing of the package, so that its memory is llama.cpp's.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import urllib.parse
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class Worker:
    """Handler of requests; each method named `do_…` answers one kind."""

    def __init__(self) -> None:
        self.server: Any = None
        self._caches = False

    def do_load(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Load the model `file`, with room for `context` tokens, to run on `threads` threads.

        With `prefix_cache`, what was read of a prompt is stored for the next one. `rows` is the number of texts that
        `do_batch` decodes together, 1 by default.
        """
        import xllamacpp

        parameters = xllamacpp.CommonParams()
        parameters.model.path = message["file"]
        parameters.n_ctx = message["context"]
        parameters.fit_params = False  # keep the given context, whatever memory is free
        parameters.n_parallel = message.get("rows", 1)
        parameters.n_gpu_layers = 0
        parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = message["threads"]
        self._caches = message["prefix_cache"]
        if not self._caches:
            parameters.cache_prompt = False
            parameters.cache_ram_mib = parameters.n_ctx_checkpoints = 0
        parameters.verbosity = 0
        self.server = xllamacpp.Server(parameters)
        return {}

    def do_call(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Continue the tokens `input_ids` greedily by `new_tokens` tokens."""
        request = {
            "prompt": message["input_ids"],
            "n_predict": message["new_tokens"],
            # Greedy, whatever sampling the file's metadata requests.
            "temperature": 0,
            "top_k": 1,
            "samplers": ["top_k"],
            "ignore_eos": True,
            "cache_prompt": self._caches,
            "return_tokens": True,
        }
        # The binding's own calls follow OpenAI's interface, whose answers lack the tokens.
        address = urllib.parse.urlsplit(self.server.listening_address)
        with contextlib.closing(http.client.HTTPConnection(address.hostname or "", address.port)) as connection:
            connection.request("POST", "/completion", json.dumps(request), {"Content-Type": "application/json"})
            answer = json.loads(connection.getresponse().read())
        if "error" in answer:
            raise ValueError(answer["error"]["message"])
        return {"token_ids": answer["tokens"], "prompt_seconds": answer["timings"]["prompt_ms"] / 1000}

    def do_batch(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Continue each of the token lists `rows` greedily by `new_tokens` tokens, all at the same time."""
        requests = [{"input_ids": row, "new_tokens": message["new_tokens"]} for row in message["rows"]]
        with ThreadPoolExecutor(len(requests)) as threads:
            return {"token_ids": [answer["token_ids"] for answer in threads.map(self.do_call, requests)]}
