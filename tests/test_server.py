"""`ssd serve` and `transformers serve`: clients that stream, share the server and hang up, and its shutdown."""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from lab.served import served, transformers_serve
from ssd_generation import DraftingConfig, SelfSpeculativeConfig, SkipConfig, SpeculationStatistics
from ssd_generation.cli.serve import _in_url, _way
from ssd_generation.serving import requests as served_requests
from ssd_generation.serving.requests import log_line
from ssd_generation.serving.server import Drafting, free_port
from test_cli import TEMPLATE_OF, Run
from test_cli import folder as folder  # the fixture
from test_cli import ssd as ssd  # the fixture

CONFIG = SelfSpeculativeConfig(SkipConfig(attention=[1], mlp=[2]), DraftingConfig(policy="fixed", max_draft_length=3))
QUESTIONS = ["the rain", "a river", "the sea", "the fields", "what falls"]
SERVING = Path(__file__).resolve().parents[1] / "docs" / "serving.md"
PATIENCE = 120.0  # seconds to wait for the start

integrations = pytest.mark.integrations


# --- without a server -----------------------------------------------------------------------------


def test_a_line_of_the_log() -> None:
    statistics = SpeculationStatistics(drafted_by_depth=[8], accepted_by_depth=[6], round_accepted=[[1] * 6 + [0] * 2])
    line = log_line(14, 0.5, statistics)
    assert line.startswith("14 tokens in 0.50 s (28.0 tokens/s), acceptance rate 75% of 8 drafted tokens")
    assert log_line(1, 0.5, None) == "1 token in 0.50 s (2.0 tokens/s), decoded without drafts"
    refused = SpeculationStatistics(refusal="beams are searched\x1b[2J")
    assert log_line(4, 1.0, refused).endswith("nothing drafted: beams are searched\\x1b[2J")
    assert log_line(4, 1.0, statistics, served_requests.ServerEnds()).endswith("(4.0 tokens/s), cancelled")
    assert log_line(0, 1.0, None, ValueError("no such\nthing")).endswith("failed: no such\\nthing")


def test_the_way_of_drafting_in_words() -> None:
    assert "leaving out attention 1 and MLP 2" in _way(Drafting(CONFIG, 10, 0, None))
    assert _way(Drafting(SelfSpeculativeConfig(), 10, 0, "its cache is odd")) == "Nothing is drafted: its cache is odd."
    assert [_in_url(host) for host in ("localhost", "::1")] == ["localhost", "[::1]"]


def test_a_port_that_is_taken_is_refused_before_the_model_is_loaded(ssd: Callable[..., Run], folder: str) -> None:
    if importlib.util.find_spec("uvicorn") is None:
        pytest.skip("needs the extra `serve`")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        run = ssd("serve", folder, "--host", "127.0.0.1", "--port", str(taken.getsockname()[1]))
    assert run.status == 2 and "no server can listen there" in run.err and run.err.count("\n") == 1


def test_addresses() -> None:
    assert free_port("127.0.0.1", 0) > 0
    with pytest.raises(ValueError, match="no server can listen there"):
        free_port("no host \u202e", 8000)


def test_a_missing_package_is_named_with_its_extra(
    ssd: Callable[..., Run], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "fastapi" else object())
    run = ssd("serve", folder)
    assert run.status == 2 and "needs fastapi, which is not installed" in run.err
    assert 'pip install "ssd_generation[serve]"' in run.err


def test_a_request_is_logged_and_ends_with_the_server(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(served_requests.LOG, "log", lambda level, line: lines.append(line))
    monkeypatch.setattr(served_requests, "_ENDING", threading.Event())
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = AutoTokenizer.from_pretrained(folder)("the rain the rain", return_tensors="pt").input_ids
    config = GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    plain = model.generate(ids, generation_config=config)

    def serve(**arguments: Any) -> Any:
        given = {"input_ids": ids, "generation_config": config, **arguments}
        return served_requests.serve_request(model, CONFIG.to_dict(), (), given)

    assert torch.equal(serve(), plain)
    assert lines[-1].startswith("12 tokens in ") and "drafted tokens" in lines[-1]
    assert torch.equal(serve(self_speculative=False), plain)
    assert lines[-1].endswith("decoded without drafts")
    beams = model.generate(ids, generation_config=config, num_beams=2, self_speculative=False)
    with pytest.warns(UserWarning, match="without drafts"):
        assert torch.equal(serve(num_beams=2), beams)
    assert lines[-1].startswith("12 tokens in ") and "nothing drafted: " in lines[-1]
    served_requests.end_requests()
    assert torch.equal(serve(), ids)  # not streamed: the text so far
    assert lines[-1].startswith("0 tokens in ") and lines[-1].endswith("cancelled")
    tokens: list[Any] = []
    stream = SimpleNamespace(put=tokens.append, end=lambda: None)
    with pytest.raises(served_requests.ServerEnds):
        serve(streamer=stream)
    assert tokens == []


def test_a_request_ends_in_the_middle_with_the_server(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ending, lines = threading.Event(), []
    monkeypatch.setattr(served_requests.LOG, "log", lambda level, line: lines.append(line))
    monkeypatch.setattr(served_requests, "_ENDING", ending)
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = AutoTokenizer.from_pretrained(folder)("the rain the rain", return_tensors="pt").input_ids
    config = GenerationConfig(max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0)
    plain = model.generate(ids, generation_config=config)
    put = served_requests._Stream.put

    def ends_after_a_while(self: Any, value: Any) -> None:
        put(self, value)
        if self.new_tokens >= 7:
            ending.set()

    monkeypatch.setattr(served_requests._Stream, "put", ends_after_a_while)
    given = {"input_ids": ids, "generation_config": config}
    text = served_requests.serve_request(model, CONFIG.to_dict(), (), given)
    assert ids.shape[1] + 7 <= text.shape[1] < plain.shape[1]
    assert torch.equal(text, plain[:, : text.shape[1]]) and lines[-1].endswith("cancelled")


# --- with a server --------------------------------------------------------------------------------


class Server:
    """`ssd serve` in a separate process."""

    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
        command = [sys.executable, "-m", "ssd_generation", "serve", *arguments, "--port", "0"]
        self.process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=_heed_interrupts,
        )
        self.lines: list[str] = []
        self._new: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.line = self.wait_for("Serving ")
        found = re.search(r"at (http://\S+/v1)\.", self.line)
        assert found is not None
        self.url = found[1]

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            self._new.put(line)

    def wait_for(self, text: str) -> str:
        ends = time.monotonic() + PATIENCE
        while time.monotonic() < ends:
            try:
                line = self._new.get(timeout=1)
            except queue.Empty:
                assert self.process.poll() is None, "\n".join(self.lines)
                continue
            if text in line:
                return line
        raise AssertionError("\n".join(self.lines))

    def logged(self, at_least: int = 0) -> list[str]:
        """Return the lines of requests; those that are awaited come shortly after the answers."""
        ends = time.monotonic() + 20
        while True:
            found = [line for line in self.lines if "tokens/s)" in line]
            if len(found) >= at_least or time.monotonic() > ends:
                return found
            time.sleep(0.05)

    def end(self, how: int = signal.SIGINT) -> int:
        self.process.send_signal(how)
        return self.process.wait(timeout=30)


def _heed_interrupts() -> None:
    """Restore Ctrl-C in a child: tests run in the background of a script ignore it, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("temporary")


@pytest.fixture(scope="module")
def server(folder: str, place: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    for package in ("uvicorn", "fastapi", "openai"):
        pytest.importorskip(package)
    config = tmp_path_factory.mktemp("config")
    CONFIG.save_pretrained(config)
    environment = {"TMPDIR": str(place), "HF_MODULES_CACHE": str(tmp_path_factory.mktemp("modules"))}
    found = Server([folder, "--config", str(config)], environment)
    yield found
    if found.process.poll() is None:
        found.end(signal.SIGKILL)


def client(server: Server) -> Any:
    import openai

    return openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)


def asked(question: str, **options: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": question}], "max_tokens": 24, **options}


def streamed(server: Server, question: str, **options: Any) -> str:
    chunks = client(server).chat.completions.create(**asked(question, stream=True, **options))
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


@pytest.fixture(scope="module")
def answers(folder: str) -> dict[str, str]:
    """Return plain `generate`'s answers, decoded as a whole."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    found = {}
    for question in QUESTIONS:
        inputs = tokenizer(TEMPLATE_OF.format(question), return_tensors="pt", add_special_tokens=False)
        ids = model.generate(**inputs, max_new_tokens=24, do_sample=False)
        found[question] = str(tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    return found


@integrations
def test_the_first_line_says_what_is_served(server: Server, place: Path) -> None:
    assert "Serving tiny at http://localhost:" in server.line
    assert "Drafted by leaving out attention 1 and MLP 2." in server.line and "Ctrl-C ends it." in server.line
    assert [model.id for model in client(server).models.list()] == ["tiny"]
    assert len(list(place.iterdir())) == 1


@integrations
def test_an_answer_in_one_piece(server: Server, answers: dict[str, str]) -> None:
    before = len(server.logged())
    done = client(server).chat.completions.create(**asked("a river"))
    assert done.choices[0].message.content == answers["a river"]
    assert done.usage.completion_tokens <= 24
    server.wait_for("POST /v1/chat/completions")
    (line,) = server.logged(before + 1)[before:]
    assert re.search(r"\d+ tokens in .* tokens/s\), acceptance rate \d+% of \d+ drafted tokens", line)
    completion = client(server).completions.create(model="tiny", prompt="the rain", max_tokens=8)
    assert completion.usage.completion_tokens <= 8


@integrations
@pytest.mark.skipif(not SERVING.exists(), reason="a source distribution has no docs")
def test_the_client_of_the_docs(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    found = re.search(r"^```py\n(from openai.*?)^```$", SERVING.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert found is not None
    code = found[1].replace("http://localhost:8000/v1", server.url).replace("SmolLM2-135M-Instruct", "tiny")
    exec(compile(code, SERVING.name, "exec"), {})
    assert capsys.readouterr().out != ""


@integrations
def test_two_clients_stream_and_one_hangs_up(server: Server, answers: dict[str, str]) -> None:
    """Two clients send twenty requests, while a third disconnects after the first words of a long answer."""
    before = len(server.logged())
    failures: list[Any] = []

    def ask(questions: list[str]) -> None:
        for question in questions:
            text = streamed(server, question)
            # The tiny model's incomplete characters are streamed in another form than decoded as a whole.
            if text.replace("\ufffd", "") != answers[question].replace("\ufffd", ""):
                failures.append((question, text, answers[question]))

    def hang_up() -> None:
        chunks = client(server).chat.completions.create(
            **{**asked("the sea", stream=True), "max_tokens": 4000, "extra_body": {}}
        )
        for number, _ in enumerate(chunks):
            if number == 2:
                chunks.close()
                return

    clients = [threading.Thread(target=ask, args=(QUESTIONS * 2,)) for _ in range(2)]
    clients.insert(1, threading.Thread(target=hang_up))
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join(timeout=PATIENCE)
    assert failures == [] and not any(thread.is_alive() for thread in clients)
    lines = server.logged(before + 21)[before:]
    assert len(lines) == 21 and sum("cancelled" in line for line in lines) <= 1
    assert sum("drafted tokens" in line for line in lines) >= 20


@integrations
def test_sampling_and_requests_that_are_wrong(server: Server) -> None:
    assert isinstance(streamed(server, "the rain", temperature=0.8, seed=1), str)
    request = urllib.request.Request(
        f"{server.url}/chat/completions",
        json.dumps({**asked("x"), "model": "another"}).encode(),
        {"Content-Type": "application/json"},
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request)
    assert refused.value.code == 400


@integrations
def test_no_other_model_is_loaded_for_a_client(server: Server, folder: str) -> None:
    request = urllib.request.Request(
        server.url.replace("/v1", "/load_model"),
        json.dumps({"model": folder}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        assert "This server is for tiny alone." in answer.read().decode()
    assert [model.id for model in client(server).models.list()] == ["tiny"]


@integrations
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_it_ends_while_it_answers(
    folder: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, how: int
) -> None:
    for package in ("uvicorn", "fastapi", "openai"):
        pytest.importorskip(package)
    place = tmp_path_factory.mktemp("temporary")
    environment = {"TMPDIR": str(place), "HF_MODULES_CACHE": str(tmp_path / "modules")}
    CONFIG.save_pretrained(tmp_path)
    server = Server([folder, "--config", str(tmp_path)], environment)
    threads = [
        threading.Thread(target=_ask_and_be_left, args=(server, options), daemon=True)
        for options in ({"stream": True}, {"stream": False})
    ]
    for thread in threads:
        thread.start()
    time.sleep(1)
    started = time.monotonic()
    assert server.end(how) == 0, "\n".join(server.lines)
    assert time.monotonic() - started < 15
    assert list(place.iterdir()) == []
    assert not any("Traceback" in line for line in server.lines), "\n".join(server.lines)


def _ask_and_be_left(server: Server, options: dict[str, Any]) -> None:
    try:
        answer = client(server).chat.completions.create(**{**asked("the sea", **options), "max_tokens": 100_000})
        list(answer)
    except Exception:
        pass


COUNTED = """

_generate = generate


def generate(*inputs, model, **arguments):
    output = _generate(*inputs, model=model, **arguments)
    with open({file!r}, "a") as file:
        print(model.last_speculation.drafted_tokens, file=file)
    return output
"""


@integrations
def test_transformers_serve_drafts_from_an_exported_folder(
    ssd: Callable[..., Run], folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: dict[str, str]
) -> None:
    for package in ("uvicorn", "fastapi", "openai"):
        pytest.importorskip(package)
    CONFIG.save_pretrained(tmp_path / "config")
    out, counts = tmp_path / "out", tmp_path / "counts"
    assert ssd("export", folder, str(out), "--config", str(tmp_path / "config")).status == 0
    with open(out / "custom_generate" / "generate.py", "a") as file:
        file.write(COUNTED.format(file=str(counts)))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    # In a process of its own: what other programs' tests leave is not in it.
    with served(transformers_serve(str(out), runs_code=True), "float32") as server:
        address: Any = SimpleNamespace(url=server.url)
        done = client(address).chat.completions.create(**{**asked("a river"), "model": str(out)})
    assert done.choices[0].message.content == answers["a river"]
    assert int(counts.read_text()) > 0
