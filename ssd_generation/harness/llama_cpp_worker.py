"""The worker process in which llama.cpp runs, run as a program by `llama_cpp.py`: one model, one request at a time.

It imports nothing of the package, so that its memory is llama.cpp's. It reads one JSON object per line from stdin and
answers each with one on stdout, until stdin ends.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import sys
import urllib.parse
from collections.abc import Mapping
from typing import Any


class Worker:
    """Answers requests; each method named `do_…` answers one kind."""

    def __init__(self) -> None:
        self.server: Any = None

    def do_load(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Load the model `file`, with room for `context` tokens, to run on so many `threads`."""
        import xllamacpp

        parameters = xllamacpp.CommonParams()
        parameters.model.path = message["file"]
        parameters.n_ctx = message["context"]
        parameters.fit_params = False  # the context as it is, however much memory there is
        parameters.n_parallel = 1
        parameters.n_gpu_layers = 0
        parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = message["threads"]
        # Nothing is kept of a prompt for the next one.
        parameters.cache_prompt = False
        parameters.cache_ram_mib = parameters.n_ctx_checkpoints = 0
        parameters.verbosity = 0
        self.server = xllamacpp.Server(parameters)
        return {}

    def do_call(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Go on greedily with the tokens `input_ids` by `new_tokens` tokens."""
        request = {
            "prompt": message["input_ids"],
            "n_predict": message["new_tokens"],
            # Greedy, and nothing else of what a file's metadata may ask for.
            "temperature": 0,
            "top_k": 1,
            "samplers": ["top_k"],
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
        }
        # The binding's own calls answer as OpenAI's interface does, without the tokens.
        address = urllib.parse.urlsplit(self.server.listening_address)
        with contextlib.closing(http.client.HTTPConnection(address.hostname or "", address.port)) as connection:
            connection.request("POST", "/completion", json.dumps(request), {"Content-Type": "application/json"})
            answer = json.loads(connection.getresponse().read())
        if "error" in answer:
            raise ValueError(answer["error"]["message"])
        return {"token_ids": answer["tokens"], "prompt_seconds": answer["timings"]["prompt_ms"] / 1000}

    def do_memory(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The most memory that this process has had."""
        return {"peak_bytes": _peak_resident_bytes()}


def _peak_resident_bytes() -> int:
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="utf-8") as file:
        # Linux counts into `ru_maxrss` what the process that started this one held then.
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _serve() -> None:
    # What libraries print must not come between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    worker = Worker()
    for line in sys.stdin:
        message = json.loads(line)
        try:
            answer = getattr(worker, f"do_{message['do']}")(message)
        except Exception as error:  # for the other side to judge
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    # The folder of this file comes first on the path; its modules are the package's, not top-level ones.
    sys.path[:] = [p for p in sys.path if os.path.abspath(p or ".") != os.path.dirname(os.path.abspath(__file__))]
    _serve()
    # The server's threads would be waited for.
    os._exit(0)
