"""llama.cpp as a peer: its process and the process's end, the rows of a run, and refusals.

Most tests replace xllamacpp by a module whose server follows instructions in the given GGUF file.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from peer_processes import IDS, TOKENS, gguf_file, put_in_place, rows_of, run
from peer_processes import children as children
from peer_processes import own_cache as own_cache
from ssd_generation.benchmark.run_benchmark import BenchmarkSettings
from ssd_generation.cli.benchmark_view import _name_lines
from ssd_generation.harness.peer_methods import PeerModel
from ssd_generation.harness.peers import LlamaCpp, describe_model, gguf_models
from ssd_generation.harness.results import markdown
from ssd_generation.harness.run import Caller, Child, TimedCall
from test_benchmark_cli import folder as folder
from test_benchmark_cli import prompts as prompts
from test_benchmark_cli import ssd as ssd
from test_cli import Run
from tiny_models import prompt as random_ids
from tiny_models import tiny_model

NAME = "llama.cpp-tiny"
FAKE = '''
    """In the place of xllamacpp: what follows the four letters of a GGUF file says what happens."""
    import http.server, json, os, threading
    from types import SimpleNamespace

    print("what libraries print")

    def once(path):
        """Whether this is the first time."""
        try:
            open(path, "x").close()
        except FileExistsError:
            return False
        return True

    class CommonParams(SimpleNamespace):
        def __init__(self):
            super().__init__(model=SimpleNamespace(), cpuparams=SimpleNamespace(), cpuparams_batch=SimpleNamespace())

    class Server:
        def __init__(self, params):
            told = json.loads(open(params.model.path, "rb").read()[4:] or b"{}")
            if "refuses" in told:
                raise RuntimeError(told["refuses"])
            assert params.n_gpu_layers == 0 and params.n_parallel == 1 and not params.cache_prompt
            threads = params.cpuparams.n_threads

            class Handler(http.server.BaseHTTPRequestHandler):
                def log_message(self, *args):
                    pass

                def do_POST(self):
                    asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                    assert self.path == "/completion" and asked["return_tokens"] and asked["ignore_eos"]
                    if "dies" in told and once(told["dies"]):
                        os.write(2, b"out of luck\\n")
                        os._exit(3)
                    if told.get("error"):
                        answer = {"error": {"message": told["error"]}}
                    else:
                        count = told.get("gives", asked["n_predict"])
                        tokens = [3 + (sum(asked["prompt"]) + n) % 5 for n in range(count)]
                        answer = {"tokens": tokens, "timings": {"prompt_ms": 0.001 * threads}}
                    body = json.dumps(answer).encode()
                    self.send_response(200)
                    self.end_headers()
                    self.wfile.write(body)

            server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
            self.listening_address = f"http://127.0.0.1:{server.server_port}"
            threading.Thread(target=server.serve_forever).start()
'''


@pytest.fixture
def fake(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_place(tmp_path_factory.mktemp("packages"), monkeypatch, {"xllamacpp": FAKE}, "xllamacpp", "1.2.3")


def model_of(*args: Any, **told: Any) -> PeerModel:
    """Make a model from a file of instructions for `FAKE`."""
    return PeerModel("llama.cpp", gguf_file(*args, **told))


@pytest.fixture
def peer() -> Iterator[LlamaCpp]:
    with contextlib.closing(LlamaCpp(context=64)) as made:
        yield made


# --- the process ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("fake")
def test_a_call(peer: LlamaCpp, tmp_path: Path, children: list[Child]) -> None:
    model = model_of(tmp_path)
    call = peer.call(model, IDS, 4)
    assert call.token_ids == TOKENS and call.speculation is None and call.assisted is None
    assert call.prompt_seconds == pytest.approx(1e-6 * torch.get_num_threads()) and call.seconds > call.prompt_seconds
    # Each file has one process, which is reused.
    peer.call(model, IDS, 2)
    assert len(children) == 1
    peer.call(model_of(tmp_path, "other.gguf"), IDS, 2)
    assert len(children) == 2
    peer.close()
    assert all(child._process.poll() is not None for child in children)


@pytest.mark.usefixtures("fake")
def test_memory_is_the_file_and_what_is_beyond(peer: LlamaCpp, tmp_path: Path) -> None:
    model = model_of(tmp_path)
    memory = peer.memory(model)
    assert memory["persistent_bytes"] == os.path.getsize(model.path)
    # A Python process that has not loaded PyTorch.
    assert 1e6 < memory["peak_bytes"] < 1e8


@pytest.mark.usefixtures("fake")
def test_a_prompt_without_room_is_refused_before_anything_is_started(
    peer: LlamaCpp, tmp_path: Path, children: list[Child]
) -> None:
    with pytest.raises(ValueError, match="has 3 tokens, which leaves no room for 62 new ones in the 64"):
        peer.call(model_of(tmp_path), IDS, 62)
    assert children == []


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"refuses": "no such model"}, r"cannot load '.*tiny\.gguf': RuntimeError: no such model"),
        ({"error": "invalid tokens"}, r"cannot call '.*tiny\.gguf': ValueError: invalid tokens"),
        ({"gives": 3}, "asked for 4 tokens, but gave 3"),
    ],
)
def test_what_llama_cpp_cannot_do(peer: LlamaCpp, tmp_path: Path, told: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        peer.call(model_of(tmp_path, **told), IDS, 4)


@pytest.mark.usefixtures("fake")
def test_a_process_that_has_died_is_started_again(peer: LlamaCpp, tmp_path: Path, children: list[Child]) -> None:
    model = model_of(tmp_path, dies=str(tmp_path / "died"))
    with pytest.raises(RuntimeError, match=r"'llama.cpp, tiny.gguf' ended with exit status 3\..*; .*out of luck$"):
        peer.call(model, IDS, 4)
    assert len(children) == 1
    assert peer.call(model, IDS, 4).token_ids == TOKENS
    assert len(children) == 2


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fake")
def test_methods_of_files(tmp_path: Path) -> None:
    one, two = gguf_file(tmp_path, "b.q4_0.gguf"), gguf_file(tmp_path, "a.gguf")
    assert gguf_models([one, two]) == {
        "llama.cpp-b.q4_0": PeerModel("llama.cpp", one),
        "llama.cpp-a": PeerModel("llama.cpp", two),
    }
    assert gguf_models([]) == {}
    LlamaCpp.check_installed()
    assert LlamaCpp().versions() == {"xllamacpp": "1.2.3"}
    described = describe_model(one)
    assert described["path"] == one and described["bytes"] == 6 and len(described["sha256"]) == 64
    assert describe_model(gguf_file(tmp_path, "b.q4_0.gguf", gives=3))["sha256"] != described["sha256"]


def test_without_xllamacpp_nothing_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    with pytest.raises(ImportError, match=r"\(extra `llama-cpp`\), which is not installed: pip install xllamacpp"):
        LlamaCpp.check_installed()


# --- a run ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fake")
def test_a_run(tmp_path: Path, children: list[Child]) -> None:
    peers = {NAME: model_of(tmp_path)}
    summary = run(tmp_path / "r", peers, memory=True)
    entry = summary["methods"][NAME]
    assert summary["complete"] and entry["calls"] == 3 and entry["errors"] == [] and len(children) == 1
    assert entry["drafting"] is None and entry["assisted"] is None and entry["engine_efficiency"] is None
    assert entry["decode_ratio"]["geometric_mean"] > 0
    assert entry["memory"]["persistent_bytes"] == os.path.getsize(peers[NAME].path)
    # Where its texts diverge from plain decoding's, the model gives the logit margin.
    assert len(entry["text"]["differences"]) + entry["text"]["identical"] == 3
    assert all(parted["logit_margin"] is not None for parted in entry["text"]["differences"])
    for row in rows_of(tmp_path / "r", NAME):
        assert len(row["token_ids"]) == 4 and row["costs"] is None and row["speculation"] is None
    page = markdown(summary, "Benchmark")
    assert "xllamacpp 1.2.3" in page and "llama.cpp runs in a process of its own" in page
    assert not any(line.startswith(f"| {NAME}") for line in page.partition("Where the time goes")[2].splitlines())
    (session,) = json.loads((tmp_path / "r" / "environment.json").read_text())["sessions"]
    assert session["versions"]["xllamacpp"] == "1.2.3"
    # All rows exist: the process is not started again.
    assert run(tmp_path / "r", peers, memory=True)["methods"][NAME] == entry and len(children) == 1


@pytest.mark.usefixtures("fake")
def test_a_death_costs_one_row_and_a_later_session_makes_it_good(tmp_path: Path, children: list[Child]) -> None:
    peers = {NAME: model_of(tmp_path, dies=str(tmp_path / "died"))}
    summary = run(tmp_path / "r", peers, warm_up=0)
    (error,) = summary["methods"][NAME]["errors"]
    assert error.startswith("RuntimeError: The worker 'llama.cpp, tiny.gguf' ended") and "\n" not in error
    assert summary["methods"][NAME]["calls"] == 2 and summary["complete"] and len(children) == 2
    assert run(tmp_path / "r", peers, warm_up=0)["methods"][NAME]["calls"] == 3 and len(children) == 3


@pytest.mark.usefixtures("fake")
def test_a_file_that_cannot_be_loaded_is_reported_and_the_run_goes_on(tmp_path: Path, children: list[Child]) -> None:
    summary = run(tmp_path / "r", {NAME: model_of(tmp_path, refuses="unknown architecture")}, memory=True)
    assert summary["methods"]["plain-loop"]["calls"] == 3 and summary["complete"]
    (error,) = summary["methods"][NAME]["errors"]
    assert "unknown architecture" in error and len(children) == 1
    assert "cannot run here: RuntimeError: llama.cpp cannot load" in markdown(summary, "Benchmark").replace("\\", "")


@pytest.mark.usefixtures("fake")
def test_an_interruption_ends_the_process(
    tmp_path: Path, children: list[Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Caller.call

    def call(self: Caller, method: str, *args: Any) -> TimedCall:
        if method == "plain" and children:
            raise KeyboardInterrupt
        return real(self, method, *args)

    monkeypatch.setattr(Caller, "call", call)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "r", {NAME: model_of(tmp_path)})
    (child,) = children
    assert child._process.poll() is not None


def test_its_sampling_is_not_compared() -> None:
    with pytest.raises(ValueError, match=r"'llama.cpp-tiny' decodes greedily only"):
        BenchmarkSettings(methods=("plain", NAME), do_sample=True)


# --- the command ----------------------------------------------------------------------------------


def test_command(ssd: Callable[..., Run], fake: None, folder: str, prompts: str, tmp_path: Path) -> None:
    name = "a-model-with-a-long-name-q4_0"
    file = gguf_file(tmp_path, f"{name}.gguf")
    common = ["-m", folder, "--device", "cpu", "--prompts", prompts, "--methods", f"plain-loop,llama.cpp-{name}"]
    common += ["--new-tokens", "8", "--no-memory", "--gguf", file]
    run = ssd(*common, "-o", "r")
    assert run.status == 0, run.err
    assert all(len(line) <= 80 for line in run.out.splitlines()) and "…" not in run.out
    # In both tables, with the rest of the name on the next line, and where its texts diverge.
    assert sum(line.startswith("llama.cpp-a-model-") for line in run.out.splitlines()) == 3
    assert f"llama.cpp-{name} differs from plain decoding in" in " ".join(run.out.split())
    assert "xllamacpp 1.2.3" in " ".join(run.out.split())
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert summary["methods"][f"llama.cpp-{name}"]["calls"] == 3
    assert json.loads((tmp_path / "r" / "config.json").read_text())["gguf"] == [describe_model(file)]
    # A run is resumed with the same file only.
    gguf_file(tmp_path, f"{name}.gguf", gives=8)
    run = ssd(*common, "-o", "r")
    assert run.status == 2 and "holds a run with other arguments (gguf: " in run.err


def test_files_are_among_the_defaults(
    ssd: Callable[..., Run], fake: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ssd_generation.cli import benchmark

    asked: list[Any] = []

    def run(request: Any, *_: Any) -> None:
        asked.append(request)
        raise ValueError("enough")

    monkeypatch.setattr(benchmark, "_run", run)
    files = [gguf_file(tmp_path, "b.gguf"), gguf_file(tmp_path, "a.gguf")]
    ssd("--device", "cpu", "--gguf", files[0], "--gguf", files[1])
    (request,) = asked
    assert request.settings.methods[-3:] == ("prompt-lookup-10", "llama.cpp-b", "llama.cpp-a")
    assert [model.path for model in request.peers.values()] == files


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gguf", "nowhere.gguf"], "There is no GGUF file 'nowhere.gguf'"),
        (["--gguf", "text.gguf"], "'text.gguf' is not a GGUF file: it starts with b'some'"),
        (["--gguf", "tiny.gguf", "--gguf", "below/tiny.gguf"], "would both be the method 'llama.cpp-tiny'"),
        (["--methods", "llama.cpp-tiny"], "'llama.cpp-tiny' needs a GGUF file of that name. Name it"),
        (["--methods", "llama.cpp-NAME"], "'llama.cpp-NAME' needs a GGUF file of that name"),
        (["--methods", "llama.cpp-x", "--gguf", "tiny.gguf"], "of that name; those of --gguf here: llama.cpp-tiny."),
        (["--methods", "auto", "--gguf", "tiny.gguf"], "'llama.cpp-tiny' of --gguf is not among --methods"),
        (["--gguf", "tiny.gguf", "--paired", "."], "--gguf and --paired"),
        (["--gguf", "tiny.gguf", "--do-sample"], "'llama.cpp-tiny' decodes greedily only"),
        (["--gguf", "tiny.gguf", "--device", "cuda"], "llama.cpp runs on the CPU here, but the model on 'cuda'"),
    ],
)
def test_mistakes_are_told_before_anything_is_loaded(
    ssd: Callable[..., Run], fake: None, arguments: list[str], message: str, tmp_path: Path
) -> None:
    gguf_file(tmp_path)
    (tmp_path / "below").mkdir()
    gguf_file(tmp_path / "below")
    (tmp_path / "text.gguf").write_text("some text")
    device = [] if "--device" in arguments else ["--device", "cpu"]
    run = ssd("-m", "./nowhere", *device, *arguments, "-o", "r")
    assert run.status == 2 and run.out == "" and run.err.startswith("error: ")
    assert message in run.err
    assert not (tmp_path / "r").exists()


def test_a_missing_package_is_told_before_anything_is_loaded(
    ssd: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    run = ssd("-m", "./nowhere", "--device", "cpu", "--gguf", gguf_file(tmp_path), "-o", "r")
    assert run.status != 0 and run.out == "" and "pip install xllamacpp" in run.err


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("prompt-lookup-10", ["prompt-lookup-10"]),
        ("llama.cpp-smollm2-135m-q4_0", ["llama.cpp-smollm2-", "135m-q4_0"]),
        ("llama.cpp-" + 30 * "x", ["llama.cpp-", 17 * "x", 13 * "x"]),
        ("a[bold]", ["a[bold]"]),
    ],
)
def test_long_names_take_several_lines(name: str, lines: list[str]) -> None:
    assert _name_lines(name) == lines


# --- the real library -----------------------------------------------------------------------------


def test_llama_cpp_itself(peer: LlamaCpp, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    gguf = pytest.importorskip("gguf")
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *(f"t{n}" for n in range(61))]
    model = tiny_model(vocab_size=len(vocabulary), hidden_size=32, intermediate_size=64)
    file = str(tmp_path / "tiny.gguf")
    write_gguf(gguf, model, vocabulary, file)
    (model_of_file,) = gguf_models([file]).values()
    assert peer.versions() == {"xllamacpp": importlib.metadata.version("xllamacpp")}
    ids = random_ids(12, vocab=len(vocabulary))
    plain = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)[0, 12:].tolist()
    call = peer.call(model_of_file, ids, 12)
    assert call.token_ids == plain and 0 < call.prompt_seconds < call.seconds
    # No state of one prompt remains for the next one.
    assert peer.call(model_of_file, ids, 12).token_ids == plain
    with pytest.raises(RuntimeError, match="invalid tokens"):
        peer.call(model_of_file, torch.tensor([[1, 10**6]]), 4)


def write_gguf(gguf: Any, model: Any, vocabulary: list[str], file: str, half: bool = False) -> None:
    """Write the weights; for OpenVINO, all but vectors in float16 (`half`), and a vocabulary of GPT-2's kind."""
    config = model.config
    writer = gguf.GGUFWriter(file, "llama")
    kind = gguf.LlamaFileType.MOSTLY_F16 if half else gguf.LlamaFileType.ALL_F32
    writer.add_file_type(kind)  # OpenVINO requires it
    writer.add_context_length(512)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(len(vocabulary))
    writer.add_tokenizer_model("gpt2" if half else "llama")
    if half:
        writer.add_tokenizer_pre("smollm")
        writer.add_token_merges([" ".join(token) for token in vocabulary if len(token) == 2])
    writer.add_token_list(vocabulary)
    writer.add_token_scores([0.0] * len(vocabulary))
    kinds = gguf.TokenType
    special = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, *[kinds.NORMAL if half else kinds.BYTE] * 256]
    writer.add_token_types(special + [kinds.NORMAL] * (len(vocabulary) - len(special)))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if part in name:  # GGUF files hold the two halves of a head's rotary dimensions interleaved
                weight = weight.view(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
        weight = weight.half() if half and weight.dim() > 1 else weight
        writer.add_tensor(names.get_name(name, (".weight",)), weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
