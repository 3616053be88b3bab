"""OpenVINO GenAI as a peer: its processes, with and without a prefix cache, the rows of a run, and refusals.

Most tests replace openvino and openvino_genai by mock modules whose behaviour the given folder specifies. The code that
all peers share is tested with llama.cpp.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.convert_slow_tokenizer import bytes_to_unicode

from peer_processes import IDS, TOKENS, gguf_file, put_in_place, rows_of, run
from peer_processes import children as children
from peer_processes import own_cache as own_cache
from ssd_generation.harness.methods import check_methods
from ssd_generation.harness.peer_methods import PeerModel
from ssd_generation.harness.peers import OpenVino, describe_model, openvino_models
from ssd_generation.harness.results import markdown
from ssd_generation.harness.run import Child
from test_benchmark_cli import folder as folder
from test_benchmark_cli import prompts as prompts
from test_benchmark_cli import ssd as ssd
from test_cli import Run
from test_llama_cpp import write_gguf
from tiny_models import prompt as random_ids
from tiny_models import tiny_model

NAME, CACHED = "openvino-tiny", "openvino-prefix-cache-tiny"
FAKE_GENAI = '''
    """In the place of openvino_genai: a folder's .xml, or what follows the four letters of a GGUF file, says more."""
    import json, os
    from types import SimpleNamespace

    print("what libraries print")

    class SchedulerConfig(SimpleNamespace):
        pass

    class GenerationConfig(SimpleNamespace):
        pass

    class LLMPipeline:
        def __init__(self, path, device, scheduler_config, INFERENCE_NUM_THREADS, **properties):
            file = os.path.join(path, "openvino_model.xml") if os.path.isdir(path) else path
            self.told = json.loads(open(file, "rb").read().removeprefix(b"GGUF") or b"{}")
            if "refuses" in self.told:
                raise RuntimeError(self.told["refuses"])
            assert device == "CPU"
            self.precision = properties.get("INFERENCE_PRECISION_HINT", "")
            assert self.precision == self.told.get("precision", self.precision)
            self.threads = INFERENCE_NUM_THREADS
            self.known = set() if scheduler_config.enable_prefix_caching else None

        def generate(self, ids, config):
            assert ids.shape[0] == 1 and config.ignore_eos and not config.do_sample
            prompt = tuple(map(int, ids.data[0]))
            known = self.known is not None and prompt in self.known
            if self.known is not None:
                self.known.add(prompt)
            tokens = [3 + (sum(prompt) + n) % 5 for n in range(config.max_new_tokens)]
            ttft = SimpleNamespace(mean=0.0 if known else 0.001 * self.threads)
            return SimpleNamespace(tokens=[tokens], perf_metrics=SimpleNamespace(get_ttft=lambda: ttft))
'''
FAKE = """
    class Tensor:
        def __init__(self, data):
            self.data, self.shape = data, data.shape
"""


@pytest.fixture
def fake(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {"openvino": FAKE, "openvino_genai": FAKE_GENAI}
    put_in_place(tmp_path_factory.mktemp("packages"), monkeypatch, modules, "openvino-genai", "1.2.3")


@pytest.fixture
def peer() -> Iterator[OpenVino]:
    with contextlib.closing(OpenVino()) as made:
        yield made


def exported(folder: Path, name: str = "tiny", **told: Any) -> str:
    """Return a model folder that specifies the mock's behaviour (see `FAKE_GENAI`)."""
    made = folder / name
    made.mkdir()
    (made / "openvino_model.xml").write_text(json.dumps(told))
    (made / "openvino_model.bin").write_bytes(bytes(1000))
    return str(made)


# --- the processes --------------------------------------------------------------------------------


@pytest.mark.usefixtures("fake")
def test_a_call_and_one_that_finds_its_prompt_in_the_cache(
    peer: OpenVino, tmp_path: Path, children: list[Child]
) -> None:
    models = openvino_models([exported(tmp_path)])
    call = peer.call(models[NAME], IDS, 4)
    assert call.token_ids == TOKENS and call.speculation is None and call.assisted is None
    assert call.prompt_seconds == pytest.approx(1e-6 * torch.get_num_threads()) and call.seconds > call.prompt_seconds
    # Without a prefix cache the prompt is read in every call, repeated or not.
    assert peer.call(models[NAME], IDS, 4).prompt_seconds == call.prompt_seconds
    # With one, it is in the cache at every call, the first included.
    assert [peer.call(models[CACHED], ids, 4).prompt_seconds for ids in (IDS, IDS + 1, IDS)] == [0, 0, 0]
    # Each of the two has its own process.
    assert len(children) == 2


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(("dtype", "name"), [(torch.float32, "f32"), (torch.bfloat16, "bf16"), (None, "")])
def test_it_computes_in_the_dtype_of_the_model(dtype: torch.dtype | None, name: str, tmp_path: Path) -> None:
    with contextlib.closing(OpenVino(dtype)) as peer:
        peer.call(openvino_models([exported(tmp_path, precision=name)])[NAME], IDS, 4)


@pytest.mark.usefixtures("fake")
def test_memory_is_the_files_and_what_is_beyond(peer: OpenVino, tmp_path: Path) -> None:
    path = exported(tmp_path)
    memory = peer.memory(openvino_models([path])[NAME])
    assert memory["persistent_bytes"] == describe_model(path)["bytes"] == 1002 and memory["peak_bytes"] > 1e6


@pytest.mark.usefixtures("fake")
def test_what_it_cannot_load(peer: OpenVino, tmp_path: Path) -> None:
    (model, _) = openvino_models([exported(tmp_path, refuses="no such operation")]).values()
    with pytest.raises(RuntimeError, match=r"^OpenVINO GenAI cannot load '.*tiny': RuntimeError: no such operation"):
        peer.call(model, IDS, 4)


# --- folders and files ----------------------------------------------------------------------------


def test_methods_of_folders_and_files(tmp_path: Path) -> None:
    one, two = exported(tmp_path, "b.int4"), gguf_file(tmp_path, "a.gguf")
    assert openvino_models([one, two]) == {
        "openvino-b.int4": PeerModel("openvino", one),
        "openvino-prefix-cache-b.int4": PeerModel("openvino", one, prefix_cache=True),
        "openvino-a": PeerModel("openvino", two),
        "openvino-prefix-cache-a": PeerModel("openvino", two, prefix_cache=True),
    }
    described = describe_model(one)
    (Path(one) / "openvino_model.bin").write_bytes(bytes(999) + b"x")
    assert describe_model(one)["sha256"] != described["sha256"] and len(described["sha256"]) == 64


def test_one_of_the_two_methods_is_enough(tmp_path: Path) -> None:
    models = openvino_models([exported(tmp_path)])
    assert check_methods([CACHED], None, False, models) == ("plain", CACHED)
    assert check_methods([NAME], None, False, models) == ("plain", NAME)
    with pytest.raises(ValueError, match=f"The method '{NAME}' or '{CACHED}' of --openvino is not among --methods"):
        check_methods(["auto"], None, False, models)


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino_genai", None)
    with pytest.raises(ImportError, match=r"\(extra `openvino`\), which is not installed: pip install openvino-genai"):
        OpenVino.check_installed()


# --- a run ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fake")
def test_a_run(tmp_path: Path, children: list[Child]) -> None:
    models = openvino_models([exported(tmp_path)])
    summary = run(tmp_path / "r", models, memory=True)
    assert summary["complete"] and len(children) == 2
    for name in (NAME, CACHED):
        entry = summary["methods"][name]
        assert entry["calls"] == 3 and entry["errors"] == [] and entry["decode_ratio"]["geometric_mean"] > 0
        assert entry["drafting"] is None and entry["engine_efficiency"] is None
        assert len(entry["text"]["differences"]) + entry["text"]["identical"] == 3
        assert entry["memory"]["persistent_bytes"] == 1002
    assert all(row["prompt_seconds"] > 0 for row in rows_of(tmp_path / "r", NAME))
    assert all(row["prompt_seconds"] == 0 for row in rows_of(tmp_path / "r", CACHED))
    page = markdown(summary, "Benchmark").replace("\\", "")
    assert "openvino-genai 1.2.3" in page and "OpenVINO GenAI runs in a process of its own" in page
    assert f"{CACHED}: the prompt is in the prefix cache" in page and "llama.cpp" not in page
    without = markdown(run(tmp_path / "s", {NAME: models[NAME]}), "Benchmark")
    assert "OpenVINO GenAI runs in a process of its own" in without and "prefix cache" not in without


# --- the command ----------------------------------------------------------------------------------


def test_command(ssd: Callable[..., Run], fake: None, folder: str, prompts: str, tmp_path: Path) -> None:
    path = exported(tmp_path)
    common = ["-m", folder, "--device", "cpu", "--prompts", prompts, "--methods", f"{NAME},{CACHED}"]
    common += ["--new-tokens", "8", "--no-memory", "--openvino", path]
    done = ssd(*common, "-o", "r")
    assert done.status == 0, done.err
    assert all(len(line) <= 80 for line in done.out.splitlines()) and "…" not in done.out
    flat = " ".join(done.out.split())
    assert "openvino-genai 1.2.3" in flat and f"{CACHED}: the prompt is in the prefix cache" in flat
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert [summary["methods"][name]["calls"] for name in (NAME, CACHED)] == [3, 3]
    config = json.loads((tmp_path / "r" / "config.json").read_text())
    assert config["openvino"] == [describe_model(path)] and config["gguf"] is None
    # A run can only continue with the same files.
    (Path(path) / "openvino_model.bin").write_bytes(b"others")
    done = ssd(*common, "-o", "r")
    assert done.status == 2 and "holds a run with other arguments (openvino: " in done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--openvino", "nowhere"], "There is no 'nowhere'. Name a folder"),
        (["--openvino", "half"], "There is no openvino_model.bin in 'half'"),
        (["--openvino", "text"], "'text' is not a GGUF file: it starts with b'some'"),
        (["--openvino", "tiny", "--openvino", "below/tiny"], f"would both be the method '{NAME}'"),
        (["--methods", CACHED], f"'{CACHED}' needs a folder in OpenVINO's format, or a GGUF file, of that name. Name"),
        (["--methods", "openvino-x", "--openvino", "tiny"], f"those of --openvino here: {NAME}, {CACHED}."),
        (["--openvino", "tiny", "--paired", "."], "--openvino and --paired"),
        (["--openvino", "tiny", "--do-sample"], f"'{NAME}' decodes greedily only"),
        (["--openvino", "tiny", "--device", "cuda"], "OpenVINO GenAI runs on the CPU here, but the model on 'cuda'"),
    ],
)
def test_mistakes_are_told_before_anything_is_loaded(
    ssd: Callable[..., Run], fake: None, arguments: list[str], message: str, tmp_path: Path
) -> None:
    exported(tmp_path)
    (tmp_path / "below").mkdir()
    exported(tmp_path / "below")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "openvino_model.xml").touch()
    (tmp_path / "text").write_text("some text")
    device = [] if "--device" in arguments else ["--device", "cpu"]
    done = ssd("-m", "./nowhere", *device, *arguments, "-o", "r")
    assert done.status == 2 and done.out == "" and done.err.startswith("error: ")
    assert message in done.err
    assert not (tmp_path / "r").exists()


# --- the real one ---------------------------------------------------------------------------------


def test_openvino_itself(peer: OpenVino, tmp_path: Path) -> None:
    pytest.importorskip("openvino_genai")
    gguf = pytest.importorskip("gguf")
    bytes_ = list(bytes_to_unicode().values())
    vocabulary = ["<unk>", "<s>", "</s>", *bytes_, *(f"t{character}" for character in bytes_[:61])]
    # OpenVINO reads float16 and low-bit weights, but no float32.
    model = tiny_model(vocab_size=len(vocabulary), hidden_size=32, intermediate_size=64).half().float()
    file = str(tmp_path / "tiny.gguf")
    write_gguf(gguf, model, vocabulary, file, half=True)
    models = openvino_models([file])
    assert peer.versions() == {"openvino-genai": importlib.metadata.version("openvino-genai")}
    ids = random_ids(40, vocab=len(vocabulary))
    plain = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)[0, 40:].tolist()
    for name in (NAME, CACHED):
        call = peer.call(models[name], ids, 12)
        assert call.token_ids == plain and 0 < call.prompt_seconds < call.seconds
        assert peer.call(models[name], ids, 12).token_ids == plain
