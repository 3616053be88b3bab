"""`ssd export`: folders from which transformers drafts in any program that loads them, and possible failures."""

from __future__ import annotations

import copy
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, T5Config, T5ForConditionalGeneration, pipeline

from ssd_generation import (
    Costs,
    DraftingConfig,
    Provenance,
    SelfSpeculativeConfig,
    SkipConfig,
    disable_self_speculative,
    enable_self_speculative,
    is_self_speculative,
)
from ssd_generation.serving.source import find_model, require_no_code, stored_default
from ssd_generation.support import hub
from test_cli import Run
from test_cli import folder as folder  # the fixture
from test_cli import ssd as ssd  # the fixture
from tiny_models import LAYERS, prompt

CONFIG = SelfSpeculativeConfig(SkipConfig(attention=[1], mlp=[2]), DraftingConfig(policy="fixed", max_draft_length=3))
OTHER = SelfSpeculativeConfig(lookup=True, drafting=DraftingConfig(policy="fixed", max_draft_length=2))
GREEDY: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
IDS = prompt(9).repeat(1, 2)


@pytest.fixture(autouse=True)
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep the code that comes with a model out of the user's cache."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        del sys.modules[name]


@pytest.fixture
def config(tmp_path: Path) -> str:
    CONFIG.save_pretrained(tmp_path / "config")
    return str(tmp_path / "config")


def loaded(folder: str | Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def metadata_of(folder: str) -> dict[str, Any]:
    return huggingface_hub.metadata_load(f"{folder}/README.md") or {}


def drafted(model: Any) -> int:
    return 0 if model.last_speculation is None else model.last_speculation.drafted_tokens


# --- drafting -------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [[], ["--link"]], ids=["copy", "link"])
def test_an_exported_folder_drafts(ssd: Callable[..., Run], folder: str, config: str, options: list[str]) -> None:
    run = ssd("export", folder, "out", "--config", config, *options)
    assert run.status == 0 and "Written to" in run.out
    assert ("links" in run.err) is bool(options)
    assert (Path("out") / "model.safetensors").is_symlink() is bool(options)
    assert not (Path("out") / "README.md").is_symlink()
    plain = loaded(folder).generate(IDS, **GREEDY)
    model = loaded("out", trust_remote_code=True)
    assert not is_self_speculative(model)
    for call in ({"input_ids": IDS}, {"inputs": IDS}):
        assert torch.equal(model.generate(**call, **GREEDY), plain)
        assert drafted(model) > 0
        model.last_speculation = None
    assert torch.equal(loaded("out", trust_remote_code=True).generate(IDS, **GREEDY), plain)  # positional argument
    assert SelfSpeculativeConfig.from_dict(model.generation_config.self_speculative).skip == CONFIG.skip
    assert stored_default(Path("out")) == CONFIG


def test_without_trust_it_is_the_model_as_before(ssd: Callable[..., Run], folder: str) -> None:
    assert ssd("export", folder, "out").status == 0
    model = loaded("out")
    assert torch.equal(model.generate(IDS, **GREEDY), loaded(folder).generate(IDS, **GREEDY))
    assert not is_self_speculative(model)


def test_what_a_call_asks_for_wins_before_it_drafts(ssd: Callable[..., Run], folder: str, config: str) -> None:
    ssd("export", folder, "out", "--config", config)
    plain = loaded(folder).generate(IDS, **GREEDY)
    asked: list[dict[str, Any]] = [
        {"self_speculative": False},
        {"prompt_lookup_num_tokens": 3},
        {"assistant_model": loaded(folder)},
    ]
    for arguments in asked:
        model = loaded("out", trust_remote_code=True)  # the first call enables it
        assert torch.equal(model.generate(IDS, **GREEDY, **arguments), plain), arguments
        assert drafted(model) == 0, arguments
        assert torch.equal(model.generate(IDS, **GREEDY), plain)
        assert drafted(model) > 0
    model = loaded("out", trust_remote_code=True)
    assert torch.equal(model.generate(IDS, **GREEDY, self_speculative=OTHER), plain)
    assert model.last_speculation.self_drafted_tokens == 0 < model.last_speculation.looked_up_tokens


def test_pipelines_of_it(ssd: Callable[..., Run], folder: str, config: str) -> None:
    ssd("export", folder, "out", "--config", config)
    chat = [{"role": "user", "content": "the river"}]
    short = {"max_new_tokens": 12, "do_sample": False}
    expected = pipeline("text-generation", folder)(chat, **short)
    pipe = pipeline("text-generation", "out", trust_remote_code=True)
    assert pipe(chat, **short) == expected
    assert drafted(pipe.model) > 0


def test_only_the_repository_drafts(ssd: Callable[..., Run], folder: str, config: str) -> None:
    assert ssd("export", folder, "out", "--config", config, "--only").status == 0
    files = {path.relative_to("out").as_posix() for path in Path("out").rglob("*") if path.is_file()}
    code = {"custom_generate/generate.py", "custom_generate/requirements.txt"}
    assert files == {*code, "README.md", "self_speculative_config.json"}
    named: dict[str, Any] = {"custom_generate": str(Path("out").resolve()), "trust_remote_code": True}
    model = loaded(folder)
    plain = model.generate(IDS, **GREEDY)
    for _ in range(2):  # the second time, the model is already enabled
        assert torch.equal(model.generate(IDS, **GREEDY, **named), plain)
        assert drafted(model) > 0
        model.last_speculation = None
    assert torch.equal(model.generate(IDS, **GREEDY), plain)
    assert drafted(model) == 0  # the argument applied to those calls only
    assert not hasattr(model.generation_config, "self_speculative_always")
    model.generate(IDS, **GREEDY, **named, prompt_lookup_num_tokens=3)
    assert drafted(model) == 0


def test_the_model_is_like_any_enabled_one(ssd: Callable[..., Run], folder: str, config: str) -> None:
    ssd("export", folder, "out", "--config", config)
    model = loaded("out", trust_remote_code=True)
    plain = loaded(folder).generate(IDS, **GREEDY)
    other = copy.deepcopy(model)  # before its first call
    assert torch.equal(other.generate(IDS, **GREEDY), plain) and drafted(other) > 0
    assert not is_self_speculative(model)
    model.generate(IDS, **GREEDY)
    disable_self_speculative(model)
    assert torch.equal(model.generate(IDS, **GREEDY), plain) and not is_self_speculative(model)
    other.save_pretrained("again")
    again = enable_self_speculative(loaded("again"))
    assert torch.equal(again.generate(IDS, **GREEDY), plain) and drafted(again) > 0


def test_a_wrapper_around_generate_stays(ssd: Callable[..., Run], folder: str, config: str) -> None:
    ssd("export", folder, "out", "--config", config)
    model = loaded("out", trust_remote_code=True)
    inner, calls = model.generate, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return inner(*args, **kwargs)

    model.generate = counted
    plain = loaded(folder).generate(IDS, **GREEDY)
    for _ in range(2):
        assert torch.equal(model.generate(IDS, **GREEDY), plain)
        assert drafted(model) > 0
        model.last_speculation = None
    assert len(calls) == 2 and model.generate is counted


# --- contents of the folder -----------------------------------------------------------------------


def test_the_default_is_what_is_stored_with_the_model(ssd: Callable[..., Run], folder: str) -> None:
    ssd("export", folder, "auto")
    assert 'DEFAULT = "auto"' in (Path("auto") / "custom_generate" / "generate.py").read_text()
    enable_self_speculative(loaded(folder), default=CONFIG).save_pretrained("stored")
    AutoTokenizer.from_pretrained(folder).save_pretrained("stored")
    ssd("export", "stored", "out")
    ssd("export", "out", "again")
    assert stored_default(Path("out")) == stored_default(Path("again")) == CONFIG
    ssd("export", "out", "other", "--config", "auto")
    assert 'DEFAULT = "auto"' in (Path("other") / "custom_generate" / "generate.py").read_text()


def test_requirements_are_met_by_this_version(ssd: Callable[..., Run], folder: str) -> None:
    from transformers.dynamic_module_utils import check_python_requirements

    ssd("export", folder, "out", "--only")
    check_python_requirements("out", requirements_file="custom_generate/requirements.txt")


def test_the_figures_are_on_the_card(ssd: Callable[..., Run], folder: str) -> None:
    drafting = DraftingConfig(acceptance=[0.9, 0.8])
    costs = Costs(0.02, 0.004, [(2, 0.021), (8, 0.03)], measured_on="cpu (someone's, 2 threads), float32")
    about = Provenance(
        model_id="someone/model", model_type="llama", num_layers=LAYERS, dtype="float32", date="2025-01-31"
    )
    SelfSpeculativeConfig(CONFIG.skip, drafting, costs=costs, provenance=about).save_pretrained("measured")
    ssd("export", folder, "out", "--config", "measured", "--only")
    text = (Path("out") / "README.md").read_text(encoding="utf-8")
    assert metadata_of("out")["tags"] == ["custom_generate"]
    for figure in ("someone/model", "2025-01-31", "cpu (someone's, 2 threads)", "20 ms", "4 ms", "8 tokens 30 ms"):
        assert figure in text
    assert "0.90, 0.80" in text and "speed-up predicted from these figures" in text


def test_a_models_own_card_stays_a_card(ssd: Callable[..., Run], folder: str) -> None:
    shutil.copytree(folder, "mine")
    card = Path("mine") / "README.md"
    card.write_text("---\nlicense: mit\ntags:\n- rivers\n---\n# Mine\n\nAbout it.\n", encoding="utf-8")
    ssd("export", "mine", "out")
    ssd("export", "out", "again")
    for place in ("out", "again"):
        text = (Path(place) / "README.md").read_text(encoding="utf-8")
        metadata = metadata_of(place)
        assert metadata["license"] == "mit" and metadata["tags"] == ["rivers", "custom_generate"]
        assert "About it." in text and text.count("## Drafting with the model itself") == 1
    assert "custom_generate" not in card.read_text(encoding="utf-8")
    card.write_text("---\ntags: [\n---\n# Mine\n", encoding="utf-8")
    run = ssd("export", "mine", "third")
    assert run.status == 0 and "metadata cannot be read" in run.err
    assert (Path("third") / "README.md").read_text(encoding="utf-8") == card.read_text(encoding="utf-8")


def test_files_of_git_and_of_caches_are_left_out(ssd: Callable[..., Run], folder: str) -> None:
    shutil.copytree(folder, "mine")
    for name in (".git/config", ".cache/huggingface/x", "sub/more.txt"):
        (Path("mine") / name).parent.mkdir(parents=True)
        (Path("mine") / name).write_text("x")
    ssd("export", "mine", "out")
    assert {".git", ".cache"} & set(os.listdir("out")) == set() and (Path("out") / "sub" / "more.txt").is_file()


# --- from the Hub ---------------------------------------------------------------------------------


def test_a_hub_id_is_downloaded(ssd: Callable[..., Run], folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, bool]] = []
    gives = folder

    def download(repo_id: str, ignore_patterns: list[str]) -> str:
        asked.append((repo_id, "*.bin" in ignore_patterns))
        return gives

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert find_model("someone/tiny").name == "someone/tiny"
    assert asked == [("someone/tiny", True)]
    assert ssd("export", "someone/tiny", "out", "--link").status == 0
    shutil.copytree(folder, "pickled")
    (Path("pickled") / "model.safetensors").rename("pickled/pytorch_model.bin")
    gives = "pickled"
    asked.clear()
    find_model("someone/old")
    assert asked == [("someone/old", True), ("someone/old", False)]


def test_a_hub_that_gives_nothing_is_refused(ssd: Callable[..., Run]) -> None:
    run = ssd("export", "someone/nothing", "out")  # the tests are offline
    assert run.status == 2 and "the Hub did not provide it" in run.err and not os.path.exists("out")


# --- refusals -------------------------------------------------------------------------------------


def test_outputs_that_cannot_be_are_refused(ssd: Callable[..., Run], folder: str) -> None:
    Path("file").write_text("x")
    Path("full").mkdir()
    (Path("full") / "notes.txt").write_text("mine")
    for output, message in (
        ("file", "is a file"),
        ("file/out", "cannot be written"),
        ("full", "not empty"),
        (folder, "own folder"),
        (f"{folder}/out", "own folder"),
    ):
        run = ssd("export", folder, output)
        assert run.status == 2 and message in run.err, output
    assert os.listdir("full") == ["notes.txt"]
    run = ssd("export", folder, "full", "--force")
    assert run.status == 0 and (Path("full") / "notes.txt").read_text() == "mine"
    assert ssd("export", folder, "full", "--force", "--link").status == 0
    assert (Path("full") / "model.safetensors").is_symlink()
    assert ssd("export", folder, "full", "--force").status == 0
    assert not (Path("full") / "model.safetensors").is_symlink()


def test_models_that_cannot_be_are_refused(ssd: Callable[..., Run], folder: str, config: str) -> None:
    Path("empty").mkdir()
    Path("model.gguf").write_text("x")
    Path("adapter").mkdir()
    (Path("adapter") / "adapter_config.json").write_text("{}")
    shutil.copytree(folder, "custom")
    (Path("custom") / "custom_generate").mkdir()
    (Path("custom") / "custom_generate" / "generate.py").write_text("def generate(model, **kwargs): ...\n")
    T5ForConditionalGeneration(
        T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    ).save_pretrained("t5")
    for model, message in (
        ("./nowhere", "no folder"),
        ("empty", "no config.json"),
        ("model.gguf", "is a file"),
        ("adapter", "adapter"),
        ("custom", "a generate of its own"),
        ("t5", "encoder-decoder"),
    ):
        run = ssd("export", model, "out")
        assert run.status == 2 and message in run.err and run.err.count("\n") == 1, model
        assert not os.path.exists("out")
    assert ssd("export", "custom", "out", "--only").status == 0


def test_configs_that_do_not_fit_are_refused(ssd: Callable[..., Run], folder: str) -> None:
    SelfSpeculativeConfig(SkipConfig(attention=[LAYERS + 3])).save_pretrained("deep")
    for config, message in (
        ("deep", "layers"),
        ("./nowhere.json", "no file or folder"),
        ("llama-2-70b", "llama-2-70b"),
    ):
        run = ssd("export", folder, "out", "--config", config)
        assert run.status == 2 and run.err.startswith("error:"), run.err
        assert message in run.err.lower() or config == "llama-2-70b"
        assert not os.path.exists("out")
    run = ssd("export", folder, "out", "--only", "--link")
    assert run.status == 2 and "--link" in run.err


def test_nothing_is_left_of_an_export_that_fails(
    ssd: Callable[..., Run], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[Any] = []

    def fails(source: Any, target: Any) -> None:
        if copied:
            raise OSError(28, "No space left on device", str(target))
        copied.append(target)
        Path(target).touch()

    monkeypatch.setattr(shutil, "copyfile", fails)
    before = set(os.listdir("."))
    run = ssd("export", folder, "out")
    assert run.status == 2 and "No space left" in run.err
    assert copied and set(os.listdir(".")) == before


def test_file_systems_without_links_are_refused(
    ssd: Callable[..., Run], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*args: Any, **kwargs: Any) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "symlink_to", no_links)
    run = ssd("export", folder, "hard", "--link")
    assert run.status == 0 and (Path("hard") / "model.safetensors").stat().st_nlink > 1
    monkeypatch.setattr(Path, "hardlink_to", no_links)
    run = ssd("export", folder, "out", "--link")
    assert run.status == 2 and "without --link" in run.err and not os.path.exists("out")


def test_names_that_come_from_outside_are_data(ssd: Callable[..., Run], folder: str) -> None:
    run = ssd("export", folder, "a\x1b[2Jb[/red]")
    assert run.status == 0 and "\x1b[2J" not in run.out and "[/red]" in run.out


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "processor_config.json"])
@pytest.mark.parametrize("more", [{}, {"padding": "0" * 2**21}], ids=["small", "large"])
def test_code_that_comes_with_a_model_is_named(folder: str, name: str, more: dict[str, str]) -> None:
    shutil.copytree(folder, "mine")
    path = Path("mine") / name
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**known, **more}))
    require_no_code(find_model("mine"))
    path.write_text(json.dumps({**known, **more, "auto_map": {"AutoTokenizer": "mine.Tokenizer"}}))
    with pytest.raises(ValueError, match="--trust-remote-code"):
        require_no_code(find_model("mine"))


def test_a_snapshot_of_the_hubs_cache_is_named_by_its_id(folder: str) -> None:
    snapshot = Path("hub") / "models--someone--tiny" / "snapshots" / "0123"
    shutil.copytree(folder, snapshot)
    assert find_model(str(snapshot)).name == "someone/tiny"
    assert hub.identity_of(str(snapshot))[0] == "someone/tiny"
