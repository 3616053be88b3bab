"""Servers of OpenAI's interface in processes of their own, and requests to them."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence

from ssd_generation.serving.server import free_port

__all__ = ["Server", "served", "ssd_serve", "streamed", "transformers_serve"]

_PATIENCE = 300.0  # seconds until a server answers


class Server:
    """A running server.

    Args:
        url: its address.
        log: file with what it prints.
    """

    def __init__(self, url: str, log: str) -> None:
        self.url, self._log = url, log

    def log(self) -> str:
        """Return what it has printed."""
        with open(self._log, encoding="utf-8", errors="replace") as file:
            return file.read()

    def wait_for(self, text: str, seconds: float = 20.0) -> str:
        """Wait until it has printed a text, for some seconds at most; return what it has printed."""
        ends = time.monotonic() + seconds
        while text not in self.log() and time.monotonic() < ends:
            time.sleep(0.1)
        return self.log()


def ssd_serve(folder: str) -> list[str]:
    """Return the command that serves a folder by `ssd serve`."""
    return [sys.executable, "-m", "ssd_generation", "serve", folder]


def transformers_serve(folder: str, runs_code: bool) -> list[str]:
    """Return the command that serves a folder by `transformers serve`, running the code in it or not."""
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", folder]
    return [*command, "--trust-remote-code"] if runs_code else command


@contextlib.contextmanager
def served(command: Sequence[str], dtype: str = "auto") -> Iterator[Server]:
    """Run a server until the block ends.

    Args:
        command: the command without its options.
        dtype: data type of the weights.

    Raises:
        RuntimeError: it does not answer.
    """
    port = free_port("localhost", 0)
    options = ["--port", str(port), "--dtype", dtype, "--device", "cpu"]
    with tempfile.NamedTemporaryFile() as log:
        process = subprocess.Popen([*command, *options], stdout=log, stderr=subprocess.STDOUT)
        server = Server(f"http://localhost:{port}/v1", log.name)
        try:
            _wait_for(server, process)
            yield server
        finally:
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for(server: Server, process: subprocess.Popen[bytes]) -> None:
    ends = time.monotonic() + _PATIENCE
    while True:
        try:
            with urllib.request.urlopen(f"{server.url}/models", timeout=10):
                return
        except OSError as error:
            if process.poll() is not None or time.monotonic() > ends:
                said = server.log().strip().splitlines()[-1:] or ["nothing"]
                raise RuntimeError(f"the server does not answer; it said: {said[0]}") from error
            time.sleep(0.2)


def streamed(server: Server, name: str, question: str, new_tokens: int) -> str:
    """Have a server answer a question greedily, in a stream.

    Args:
        server: the server.
        name: name of its model.
        question: the question.
        new_tokens: most tokens of the answer.
    """
    messages = [{"role": "user", "content": question}]
    asked = {"model": name, "messages": messages, "max_tokens": new_tokens, "temperature": 0, "stream": True}
    request = urllib.request.Request(
        f"{server.url}/chat/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    pieces = []
    with urllib.request.urlopen(request, timeout=_PATIENCE) as stream:
        for line in stream:
            found = re.fullmatch(rb"data: (\{.*\})\s*", line)
            for choice in json.loads(found[1])["choices"] if found else ():
                pieces.append(choice["delta"].get("content") or "")
    return "".join(pieces)
