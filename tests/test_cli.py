"""The command line: stdout, stderr and the exit status."""

from __future__ import annotations

import io
import json
import os
import re
import runpy
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from packaging import version
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, DogeConfig, DogeForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

import ssd_generation
from ssd_generation import Costs, SelfSpeculativeConfig, SkipConfig, enable_self_speculative
from ssd_generation.cli import configs as cli_configs
from ssd_generation.cli import console, main, resolve_options
from ssd_generation.cli.layer_lists import describe_layers, parse_layers
from ssd_generation.forward.structure.sublayers import locate_sublayers
from tiny_models import CONFIGS, LAYERS, WINDOW, tiny_model

TEXT = ["the rain falls on the fields", "a river runs to the sea", "what falls as rain runs as a river"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
SKIP = ["--skip-attention", "1", "--skip-mlp", "2"]
SHORT = ["--max-new-tokens", "12"]


def tiny_tokenizer() -> Any:
    """Train a byte-level BPE on three sentences: random tokens are often parts of characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|pad|>", "<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|pad|>", bos_token="<|start|>", eos_token="<|end|>"
    )
    fast.chat_template = TEMPLATE
    return fast


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Save a tiny model and its tokenizer with `save_pretrained`."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = tiny_tokenizer()
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@dataclass
class Run:
    status: int | str | None
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.status == 0, self.err
        return json.loads(self.out)


@pytest.fixture
def ssd(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    for name in ("SSD_DEBUG", "NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    # No message about waiting, even on a busy machine.
    monkeypatch.setattr("ssd_generation.cli.console._PATIENCE", 3600.0)

    def run(*arguments: str, stdin: str = "") -> Run:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as left:
            main(arguments)
        captured = capfd.readouterr()
        return Run(left.value.code, captured.out, captured.err)

    return run


def answer(folder: str, prompt: str, template: bool = True, **kwargs: Any) -> str:
    """Return plain `generate`'s answer."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    text = TEMPLATE_OF.format(prompt) if template else prompt
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    ids = model.generate(**inputs, **{"max_new_tokens": 12, "do_sample": False, **kwargs})
    return str(tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


TEMPLATE_OF = "<|start|>user\n{}<|end|><|start|>assistant\n"


# --- generate -------------------------------------------------------------------------------------


def test_the_answer_alone_is_on_stdout(ssd: Callable[..., Run], folder: str) -> None:
    run = ssd("generate", "the river", "--model", folder, *SKIP, *SHORT)
    assert run.status == 0
    assert run.out == answer(folder, "the river") + "\n"
    assert "12 tokens in" in run.err and "tokens per round" in run.err
    assert "\x1b" not in run.out + run.err


def test_json_is_one_document(ssd: Callable[..., Run], folder: str) -> None:
    run = ssd("generate", "the river", "-m", folder, *SKIP, *SHORT, "--json")
    document = run.json
    assert document["text"] == answer(folder, "the river")
    assert document["prompt"] == "the river"
    assert len(document["token_ids"]) == sum(piece["tokens"] for piece in document["token_origins"]) == 12
    assert document["config"]["skip"] == {"attention": [1], "mlp": [2]}
    assert document["speculation"]["generated_tokens"] == 12
    assert document["environment"]["dtype"] == "float32"
    assert "comparison" not in document
    assert run.err == ""


def test_what_others_print_does_not_spoil_the_document(
    ssd: Callable[..., Run], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = resolve_options.encode

    def chatty(*args: Any) -> Any:
        print("a word from a library")
        return real(*args)

    monkeypatch.setattr(resolve_options, "encode", chatty)
    run = ssd("generate", "rain", "-m", folder, *SKIP, *SHORT, "--json")
    assert run.json["text"] and run.err == "a word from a library\n"


def test_prompt_from_stdin(ssd: Callable[..., Run], folder: str) -> None:
    document = ssd("generate", "-", "-m", folder, *SKIP, *SHORT, "--json", stdin="rain\n\nfalls\n").json
    assert document["prompt"] == "rain\n\nfalls"


@pytest.mark.parametrize(("content", "prompt"), [(b"rain\n", "rain"), (b" \n", None)], ids=["text", "empty"])
def test_a_prompt_may_be_redirected(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes, prompt: str | None
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(content)
    with file.open(encoding="utf-8") as redirected:
        monkeypatch.setattr(sys, "stdin", redirected)
        assert resolve_options.read_prompt(None) == prompt
    ends = os.pipe()
    with os.fdopen(ends[1], "wb") as pipe:
        pipe.write(content)
    with os.fdopen(ends[0], encoding="utf-8") as piped:
        monkeypatch.setattr(sys, "stdin", piped)
        assert resolve_options.read_prompt(None) == prompt
    with open(os.devnull, encoding="utf-8") as nothing:  # a device, which may be a terminal or never end
        monkeypatch.setattr(sys, "stdin", nothing)
        assert resolve_options.read_prompt(None) is None


def test_a_pipe_that_stays_silent_is_mentioned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_PATIENCE", 0.0)
    # Not capfd, which would lose a line that another thread prints while this one reads what has been printed.
    monkeypatch.setattr(sys, "stderr", said := io.StringIO())
    ends = os.pipe()
    with os.fdopen(ends[0], encoding="utf-8") as piped, os.fdopen(ends[1], "wb") as pipe:
        monkeypatch.setattr(sys, "stdin", piped)
        found: list[str | None] = []
        reader = threading.Thread(target=lambda: found.append(resolve_options.read_prompt(None)))
        reader.start()
        for _ in range(1000):
            if "Reading the prompt from stdin" in said.getvalue():
                break
            time.sleep(0.01)
        assert "Reading the prompt from stdin" in said.getvalue() and reader.is_alive()
        pipe.write(b"rain")
        pipe.close()
        reader.join(60)
    assert found == ["rain"]


def test_a_redirected_prompt_is_utf8(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_bytes("café".encode("latin-1"))
    with (tmp_path / "prompt.txt").open(encoding="utf-8") as redirected:
        monkeypatch.setattr(sys, "stdin", redirected)
        with pytest.raises(ValueError, match=r"not UTF-8: .* at byte 3"):
            resolve_options.read_prompt(None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there(ssd: Callable[..., Run], folder: str) -> None:
    run = ssd("generate", "x", "-m", folder, *SKIP, "--device", "cuda")
    assert run.status == 2 and run.err.count("\n") == 1
    assert re.fullmatch(r"error: --device cuda: .*[^.]\. Write cpu, cuda, cuda:1, mps, …\n", run.err)


def test_without_a_prompt_there_is_an_example(ssd: Callable[..., Run], folder: str) -> None:
    run = ssd("generate", "-m", folder, *SKIP, *SHORT)
    assert run.status == 0
    assert "Prompt: Explain" in run.err and "Prompt" not in run.out


def test_chat_template_and_system_message(ssd: Callable[..., Run], folder: str) -> None:
    common = ["generate", "rain", "-m", folder, *SKIP, *SHORT, "--json"]
    chat, raw, system = (
        ssd(*common).json,
        ssd(*common, "--no-chat-template").json,
        ssd(*common, "--system", "be brief").json,
    )
    assert raw["text"] == answer(folder, "rain", template=False)
    assert raw["prompt_tokens"] < chat["prompt_tokens"] < system["prompt_tokens"]


def test_drafting_options(ssd: Callable[..., Run], folder: str) -> None:
    document = ssd(
        "generate", "x", "-m", folder, *SKIP, *SHORT, "--json", "--policy", "fixed", "--draft-length", "3"
    ).json
    assert document["config"]["drafting"]["policy"] == "fixed"
    assert document["config"]["drafting"]["max_draft_length"] == 3
    assert document["config"]["skip"] == {"attention": [1], "mlp": [2]}


def test_sampling_is_repeatable(ssd: Callable[..., Run], folder: str) -> None:
    sampled = ["generate", "rain", "-m", folder, *SKIP, *SHORT, "--json", "--temperature", "1.5", "--top-p", "0.9"]
    first, again, other = (ssd(*sampled, "--seed", seed).json for seed in ("1", "1", "2"))
    assert first["token_ids"] == again["token_ids"] != other["token_ids"]
    assert first["decoding"] == {"max_new_tokens": 12, "do_sample": True, "temperature": 1.5, "top_p": 0.9, "seed": 1}
    unseeded = ssd(*sampled).json
    assert ssd(*sampled, "--seed", str(unseeded["decoding"]["seed"])).json["token_ids"] == unseeded["token_ids"]


def test_temperature_zero_is_greedy(ssd: Callable[..., Run], folder: str) -> None:
    document = ssd("generate", "rain", "-m", folder, *SKIP, *SHORT, "--json", "--temperature", "0").json
    assert document["decoding"]["do_sample"] is False
    assert document["text"] == answer(folder, "rain")


# --- choice of the config -------------------------------------------------------------------------


def test_config_from_a_file_of_several(ssd: Callable[..., Run], folder: str, tmp_path: Path) -> None:
    file = tmp_path / "skips.json"
    file.write_text(json.dumps({"a": {"attention": [0], "mlp": []}, "b": {"attn": [3], "mlp": [1]}}))
    common = ["generate", "rain", "-m", folder, *SHORT, "--json", "--config", str(file)]
    assert ssd(*common, "--config-name", "b").json["config"]["skip"] == {"attention": [3], "mlp": [1]}
    assert "Choose one" in ssd(*common).err


def test_config_stored_with_the_model(ssd: Callable[..., Run], folder: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    enable_self_speculative(model, default=SkipConfig(attention=[2]))
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    assert ssd("generate", "x", "-m", str(tmp_path), *SHORT, "--json").json["config"]["skip"]["attention"] == [2]
    assert ssd("inspect", str(tmp_path), "--json").json["skip"]["attention"] == [2]


def test_inspect_shows_the_demo_models_skip_set(
    ssd: Callable[..., Run], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = cli_configs.default_config("demo", None)
    assert config is not None and len(config.skip) > 0
    monkeypatch.setattr("ssd_generation.models.fetch_demo", lambda: Path(folder))
    small = SelfSpeculativeConfig(skip=SkipConfig(attention=[3]))
    monkeypatch.setattr(cli_configs, "default_config", lambda name, stored: small if name == "demo" else None)
    assert ssd("inspect", "--json").json["skip"]["attention"] == [3]


def test_without_a_config_what_pays_is_found_out(
    ssd: Callable[..., Run], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("models", "models.loading"):
        monkeypatch.setattr(f"ssd_generation.{module}.fetch_demo", lambda: Path(folder))
    for model in ([], ["-m", folder]):  # with the demo model too
        run = ssd("generate", "the rain", *model, *SHORT, "--json")
        document = run.json
        assert run.err == ""
        assert document["text"] == answer(folder, "the rain")
        assert document["auto"]["lookup"] is True and document["auto"]["draft_memory"] == 0.3
        assert document["auto"]["expected_speedup"].keys() | document["auto"]["ruled_out"].keys() >= {"int8", "int4"}
        assert document["config"]["skip"] == {"attention": [], "mlp": []}
        assert document["config"]["lookup"] and document["config"]["costs"]


def test_draft_memory_is_a_budget(ssd: Callable[..., Run], folder: str) -> None:
    common = ["generate", "rain", "-m", folder, *SHORT, "--json"]
    none, all_of_it = (ssd(*common, "--draft-memory", share).json for share in ("0", "1"))
    assert none["auto"]["precision"] is None and "precision" not in none["config"]
    assert "draft_memory=0" in none["auto"]["ruled_out"]["int8"] and none["memory"]["copy_bytes"] == 0
    # Drafting is cheap by the costs that the tests use.
    assert all_of_it["auto"]["precision"] is not None and all_of_it["config"]["precision"]
    assert 0 < all_of_it["memory"]["copy_share"] <= 1
    assert all_of_it["auto"]["expected_speedup"][all_of_it["auto"]["precision"]] > 1
    assert none["text"] == all_of_it["text"] == answer(folder, "rain")
    run = ssd(*common, "--precision", "int8", "--draft-memory", "0.01")
    assert run.status == 2 and "of the weights' bytes" in run.err and run.err.count("\n") == 1


def test_precision_and_lookup(ssd: Callable[..., Run], folder: str, tmp_path: Path) -> None:
    common = ["generate", "rain", "-m", folder, *SHORT, "--json"]
    bits = ssd(*common, "--precision", "int8").json
    assert bits["config"]["precision"]["default"] == "int8" and "lookup" not in bits["config"] and bits["auto"] is None
    assert bits["memory"]["copy_bytes"] > 0
    lookup = ssd(*common, "--lookup").json
    assert "precision" not in lookup["config"] and lookup["config"]["lookup"]["max_tokens"] == 12
    both = ssd(*common, *SKIP, "--precision", "int8", "--lookup").json
    assert both["config"]["skip"] == {"attention": [1], "mlp": [2]}
    assert both["config"]["precision"] == bits["config"]["precision"]
    assert both["config"]["lookup"] == lookup["config"]["lookup"]
    assert {bits["text"], lookup["text"], both["text"]} == {answer(folder, "rain")}
    # The options add to a config, and override it.
    file = tmp_path / "mine.json"
    file.write_text(SelfSpeculativeConfig(SkipConfig(attention=[1]), lookup={"max_ngram": 2}).to_json_string())
    mine = [*common, "--config", str(file)]
    assert ssd(*mine, "--lookup").json["config"]["lookup"]["max_ngram"] == 2
    assert "lookup" not in ssd(*mine, "--no-lookup").json["config"]
    assert ssd(*mine, "--precision", "int8").json["config"]["precision"]["default"] == "int8"


def test_auto_without_lookup(ssd: Callable[..., Run], folder: str) -> None:
    common = ["generate", "rain", "-m", folder, *SHORT, "--json", "--no-lookup"]
    bits = ssd(*common, "--draft-memory", "1").json["config"]
    assert bits["precision"] and "lookup" not in bits and bits["drafting"]["policy"] == "cost"
    nothing = ssd(*common, "--draft-memory", "0").json
    assert nothing["config"]["drafting"]["policy"] == "none" and nothing["speculation"]["drafted_tokens"] == 0


def test_drafts_that_improve(ssd: Callable[..., Run], folder: str) -> None:
    common = ["generate", "rain", "-m", folder, *SHORT, "--json"]
    skipping = ssd(*common, *SKIP, "--adapt").json
    assert skipping["config"]["adapt"] is True and skipping["text"] == answer(folder, "rain")
    assert skipping["speculation"]["refinement"]["reason"] is None
    assert "adapt" not in ssd(*common, *SKIP).json["config"]
    assert ssd(*common, "--draft-memory", "0").json["config"]["adapt"] is True, "auto"
    still = ssd(*common, "--draft-memory", "0", "--no-adapt").json
    assert "adapt" not in still["config"] and "refinement" not in still["speculation"]
    assert "adapt" not in ssd(*common, "--policy", "none").json["config"], "nothing is drafted"


def test_auto_can_be_asked_for(ssd: Callable[..., Run], folder: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    common = ["generate", "x", "-m", str(tmp_path), *SHORT, "--json"]
    enable_self_speculative(model, default=SkipConfig(attention=[2]))
    model.save_pretrained(tmp_path)
    assert ssd(*common).json["auto"] is None
    assert ssd(*common, "--config", "auto", "--policy", "fixed").json["auto"] is not None
    enable_self_speculative(model, default="auto")
    model.save_pretrained(tmp_path)
    assert ssd(*common).json["auto"] is not None
    assert ssd("inspect", str(tmp_path), "--json").json["skip"]["attention"] == []


def test_costs_from_elsewhere_are_told(ssd: Callable[..., Run], folder: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    costs = Costs(plain_step=1.0, draft_step=0.5, verify=[(1, 1.0), (4, 1.2)], measured_on="some other machine")
    file.write_text(SelfSpeculativeConfig(SkipConfig(attention=[1]), costs=costs).to_json_string())
    run = ssd("generate", "x", "-m", folder, *SHORT, "--config", str(file))
    assert run.status == 0 and "measured elsewhere (some other machine)" in " ".join(run.err.split())


# --- --compare ------------------------------------------------------------------------------------


def test_compare_prints_a_table(ssd: Callable[..., Run], folder: str) -> None:
    run = ssd("generate", "rain", "-m", folder, *SKIP, *SHORT, "--compare", "--repeats", "1")
    assert run.status == 0
    text = answer(folder, "rain")
    assert run.out.startswith(text + "\n")
    rows = {line.split("  ")[0]: line for line in run.out.splitlines()}
    assert rows["plain"].split()[1] == "12"
    assert rows["self-speculative"].rstrip().endswith("yes")
    assert "differs at token" in rows["draft alone"] and "margin" in run.out
    assert rows["self-speculative"].split()[4].endswith("/0")  # self-drafted / looked up
    flat = " ".join(run.out.split())
    assert "leaves out 2 of 8 sub-layers: attention 1 and MLP 2" in flat
    assert "Draft length by cost. Measured here beforehand: a draft step costs 0.10 of a plain one" in flat
    assert "as many tokens per round as pay, up to 12" in flat
    assert "Extra memory (computed)" in flat and "float32" in flat and torch.__version__ in flat


def test_the_table_fits_into_80_columns(ssd: Callable[..., Run], folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    run = ssd("generate", "rain", "-m", folder, *SKIP, *SHORT, "--compare", "--repeats", "2")
    head = next(line for line in run.out.splitlines() if line.startswith("method"))
    assert (
        head.rstrip().endswith("to plain") and "looked up" in head and max(map(len, run.out.splitlines()[-20:])) <= 80
    )


def test_compare_tells_what_auto_chose_and_its_memory(ssd: Callable[..., Run], folder: str) -> None:
    compared = ["generate", "rain", "-m", folder, *SHORT, "--compare", "--repeats", "1"]
    run = ssd(*compared, "--draft-memory", "1")
    assert run.status == 0
    flat = " ".join(run.out.split())
    assert re.search(r"`auto` chose copies in int\S+ (\(head too\) )?and prompt lookup\.", flat)
    assert "a draft step costs 0.10 of a plain one, verifying 16 tokens 1.10" in flat
    assert re.search(r"Expected of the copies alone: \d+\.\d\d times plain speed", flat)
    assert re.search(r"Low-bit copies: \S+ kB, \d+\.\d% of the weights' \S+ kB\. Other extra memory \(computed\)", flat)
    assert "draft alone" in run.out
    free = ssd(*compared, "--draft-memory", "0")
    flat = " ".join(free.out.split())
    assert "`auto` chose prompt lookup alone." in flat and "not allowed (draft_memory 0)" in flat
    assert "Low-bit copies:" not in flat and "draft alone" not in free.out


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("cost", "It drafts as many tokens per round as pay, up to 3."),
        ("confidence", "It drafts up to 3 tokens per round, fewer where it is unsure."),
        ("fixed", "It drafts 3 tokens per round."),
        ("none", "Nothing is drafted: every step is a plain one."),
    ],
)
def test_compare_tells_how_far_it_drafts(ssd: Callable[..., Run], folder: str, policy: str, said: str) -> None:
    run = ssd(
        *["generate", "rain", "-m", folder, *SKIP, *SHORT, "--compare", "--repeats", "1"],
        *["--policy", policy, "--draft-length", "3"],
    )
    assert run.status == 0 and said in " ".join(run.out.split())
    assert ("draft alone" in run.out) == (policy != "none")


def test_compare_as_json(ssd: Callable[..., Run], folder: str) -> None:
    run = ssd("generate", "rain", "-m", folder, *SKIP, *SHORT, "--compare", "--repeats", "2", "--json")
    methods = run.json["comparison"]["methods"]
    assert list(methods) == ["plain", "draft alone", "self-speculative"]
    assert methods["self-speculative"]["identical_to_plain"] is True
    assert methods["self-speculative"]["token_ids"] == methods["plain"]["token_ids"] == run.json["token_ids"]
    assert methods["draft alone"]["first_difference"]["logit_margin"] > 0
    assert len(methods["plain"]["seconds"]) == 2
    own = methods["self-speculative"]
    assert own["looked_up_tokens"] == 0 and own["looked_up_acceptance"] is None
    assert own["self_drafted_tokens"] > 0 and own["self_drafted_acceptance"] == own["acceptance_rate"]
    assert run.json["comparison"]["copy_bytes"] == 0 and run.json["comparison"]["costs"]["draft_step"] == 0.1


def test_compare_says_that_small_models_gain_nothing(
    ssd: Callable[..., Run], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ssd_generation.harness.results import MethodResult

    monkeypatch.setattr(MethodResult, "ratio", property(lambda self: 0.8))
    run = ssd("generate", "rain", "-m", folder, *SKIP, *SHORT, "--compare", "--repeats", "1")
    assert "layer skipping alone gains them little or nothing" in " ".join(run.out.split())
    run = ssd("generate", "rain", "-m", folder, *SHORT, "--compare", "--repeats", "1")
    assert "`auto` drafts only where the costs that it measured say" in " ".join(run.out.split())


def test_compare_judges_sampled_texts_by_their_draws(ssd: Callable[..., Run], folder: str) -> None:
    arguments = ("generate", "x", "-m", folder, *SKIP, *SHORT, "--compare", "--repeats", "1", "--temperature", "1")
    run = ssd(*arguments)
    assert run.status == 0
    shown = " ".join(run.out.split())
    assert "to plain; z" in shown and "in standard deviations" in shown
    assert re.search(r"self-speculative .* yes; [+-]\d", run.out)
    methods = json.loads(ssd(*arguments, "--json").out)["comparison"]["methods"]
    for name, method in methods.items():
        assert method["draws"]["tokens"] == sum(method["new_tokens"])
        if name != "draft alone":  # it draws from another distribution
            assert method["draws"]["impossible"] == 0 and abs(method["draws"]["z"]) < 4


def test_compare_shows_both_texts_where_they_differ(
    ssd: Callable[..., Run], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ssd_generation.harness.run import Caller, TimedCall

    real = Caller.call

    def wrong(self: Caller, method: str, *args: Any) -> TimedCall:
        call = real(self, method, *args)
        if method == "self-speculative":
            call.token_ids[3] = (call.token_ids[3] + 1) % 300
        return call

    monkeypatch.setattr(Caller, "call", wrong)
    run = ssd("generate", "rain", "-m", folder, *SKIP, *SHORT, "--compare", "--repeats", "1")
    flat = " ".join(run.out.split())
    assert "Plain decoding gives:" in flat and "The text differs from plain decoding at token 4." in flat


# --- --show-draft and --html ----------------------------------------------------------------------


def test_show_draft(ssd: Callable[..., Run], folder: str) -> None:
    run = ssd("generate", "rain", "-m", folder, *SKIP, *SHORT, "--show-draft")
    assert run.status == 0
    answered, view = run.out.split("Where each token came from")
    assert answered.strip() == answer(folder, "rain").strip()
    assert "⟦" in view and "drafted and accepted · ⟦decided by the target⟧" in view
    assert "12 tokens: " in view


def test_looked_up_tokens_are_marked(ssd: Callable[..., Run], folder: str) -> None:
    # A text that repeats itself, as far as that of a random model does.
    run = ssd("generate", "rain " * 8, "-m", folder, "--lookup", "--max-new-tokens", "60", "--show-draft", "--json")
    document = run.json
    marked = sum(piece["tokens"] for piece in document["token_origins"] if piece["looked_up"])
    assert marked > 0 and document["speculation"]["accepted_looked_up_tokens"] >= marked
    view = ssd("generate", "rain " * 8, "-m", folder, "--lookup", "--max-new-tokens", "60", "--show-draft")
    assert "‹looked up and accepted›" in view.out and "Drafted by prompt lookup." in view.err


def test_html_file(ssd: Callable[..., Run], folder: str, tmp_path: Path) -> None:
    file = tmp_path / "answer.html"
    run = ssd("generate", "<rain>", "-m", folder, *SKIP, *SHORT, "--html", str(file))
    assert run.status == 0 and "Written to" in run.err and "Where each" not in run.out
    html = file.read_text(encoding="utf-8")
    assert "&lt;rain&gt;" in html and html.count('title="token') >= 3
    assert os.listdir(tmp_path) == ["answer.html"]


# --- inspect and presets --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family", ["llama", "gpt2", "opt", "bloom", "mixtral", "gpt_oss", "deepseek_v3", "gemma2", "falcon"]
)
def test_inspect_needs_no_weights(ssd: Callable[..., Run], family: str, tmp_path: Path) -> None:
    if family == "opt" and version.parse(transformers.__version__) < version.parse("5.23"):
        pytest.skip("this transformers' opt cannot run on fake tensors; `ssd inspect` loads its weights instead")
    model = tiny_model(family)
    CONFIGS[family]().save_pretrained(tmp_path)  # nothing but config.json
    document = ssd("inspect", str(tmp_path), "--skip-attention", "1", "--skip-mlp", "2,3", "--json").json
    assert document["copies"]["offloaded"] >= document["copies"]["int4"] >= 0
    layout = locate_sublayers(model)
    assert [layer["attention"]["parameters"] for layer in document["layers"]] == [
        layer.attention.num_parameters() for layer in layout.layers if layer.attention
    ]
    assert [layer["mlp"]["parameters"] for layer in document["layers"]] == [
        layer.mlp.num_parameters() for layer in layout.layers if layer.mlp
    ]
    assert document["skipped_parameters"] == layout.skipped_parameters(SkipConfig(attention=[1], mlp=[2, 3]))
    assert [layer["layer"] for layer in document["layers"] if layer["attention"]["skipped"]] == [1]
    assert [layer["layer"] for layer in document["layers"] if layer["mlp"]["skipped"]] == [2, 3]
    totals = document["parameters"]
    assert totals.pop("all") == sum(totals.values())
    assert (document["skipped_sublayers"], document["sublayers"]) == (3, 2 * LAYERS)


def test_inspect_names_sliding_windows(ssd: Callable[..., Run], tmp_path: Path) -> None:
    for family, windows in (("mistral", [WINDOW] * 4), ("gemma3", [WINDOW, None, WINDOW, None])):
        CONFIGS[family]().save_pretrained(tmp_path)
        layers = ssd("inspect", str(tmp_path), "--json").json["layers"]
        assert [layer["attention"]["window"] for layer in layers] == windows
    assert f"self_attn, sliding {WINDOW}" in ssd("inspect", str(tmp_path)).out


def test_inspect_prints_a_table(ssd: Callable[..., Run], folder: str) -> None:
    run = ssd("inspect", folder, *SKIP)
    rows = [line.split() for line in run.out.splitlines() if line.strip()[:1].isdigit()]
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    assert run.out.count("left out") == 2
    assert "leaves out 2 of 8 sub-layers: attention 1 and MLP 2" in " ".join(run.out.split())
    bare = ssd("inspect", folder)
    assert bare.status == 0 and "left out" not in bare.out and "--skip-attention" in bare.out
    # Neighbouring layers that are alike share a line.
    assert [line.split()[0] for line in bare.out.splitlines() if line.strip()[:1].isdigit()] == ["0–3"]
    two = ssd("inspect", folder, "--skip-mlp", "2,3").out
    assert [line.split()[0] for line in two.splitlines() if line.strip()[:1].isdigit()] == ["0–1", "2–3"]


def test_inspect_loads_the_model_where_it_must(
    ssd: Callable[..., Run], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ssd_generation.forward.structure.sublayers as sublayers

    real, tried = sublayers._trace, []

    def fails_without_weights(model: Any, layers: Any) -> Any:
        tried.append(type(next(model.parameters())).__name__)
        if len(tried) == 1:
            raise RuntimeError("no fake version of this operator")
        return real(model, layers)

    monkeypatch.setattr(sublayers, "_trace", fails_without_weights)
    assert ssd("inspect", folder, "--json").json["parameters"]["all"] > 0
    assert tried == ["FakeTensor", "Parameter"]


def test_presets(ssd: Callable[..., Run]) -> None:
    run = ssd("presets")
    assert run.status == 0 and all(name in run.out for name in ssd_generation.config.PRESETS)
    assert ssd("presets", "--json").json["llama-2-13b"]["skip"]["attention"][0] == 3


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "x", "-m", "{}", "--skip-attention", "9"], "0 to 3"),
        (["generate", "x", "-m", "{}", "--skip-attention", "0-3"], "all 4 attention"),
        (["generate", "x", "-m", "{}", "--skip-mlp", "1,1"], "more than once"),
        (["generate", "x", "-m", "{}", "--skip-mlp", "a"], "--skip-mlp: 'a' is not a layer"),
        (["generate", "x", "-m", "{}", "--skip-mlp", "3-1"], "runs backwards. Write 1-3"),
        (["generate", "x", "-m", "{}", "--config", "llama-2-13b"], "made for a model"),
        (["generate", "x", "-m", "{}", "--config", "./nowhere.json"], "no file or folder './nowhere.json'"),
        (["generate", "x", "-m", "{}", "--config", "a.json", "--skip-mlp", "1"], "Leave one of them out"),
        (["generate", "x", "-m", "{}", "--config-name", "a"], "needs --config"),
        (["generate", "x", "-m", "{}", *SKIP, "--policy", "lucky"], "Unknown draft-length policy 'lucky'"),
        (["generate", "x", "-m", "{}", "--policy", "lucky"], "Unknown draft-length policy 'lucky'"),
        (["generate", "x", "-m", "{}", "--precision", "int3"], "no precision 'int3'; use 'int8' or 'int4'"),
        (["generate", "x", "-m", "{}", "--draft-memory", "-1"], "--draft-memory"),
        (["generate", "x", "-m", "{}", "--draft-memory", "inf"], "draft_memory must be a share"),
        (["generate", "x", "-m", "{}", "--config", "auto", "--precision", "int8"], "Leave one or the other out"),
        (["generate", "x", "-m", "{}", "--config", "auto", "--config-name", "a"], "needs --config"),
        (["generate", "x", "-m", "{}", *SKIP, "--draft-length", "0"], "--draft-length"),
        (["generate", "x", "-m", "{}", *SKIP, "--max-new-tokens", "0"], "--max-new-tokens"),
        (["generate", "x", "-m", "{}", *SKIP, "--top-p", "0.5"], "--top-p 0.5 needs --temperature"),
        (["generate", "x", "-m", "{}", *SKIP, "--seed", "1"], "--seed 1 needs --temperature"),
        (
            ["generate", "x", "-m", "{}", *SKIP, "--temperature", "1", "--seed", str(10**30)],
            "less than or equal to 4294967295",
        ),
        (["generate", "x", "-m", "{}", *SKIP, "--repeats", "2"], "--repeats 2 needs --compare"),
        (["generate", "x", "-m", "{}", *SKIP, "--html", "nowhere/x.html"], "no folder 'nowhere'"),
        (["generate", "x", "-m", "{}", *SKIP, "--dtype", "float33"], "float33"),
        (["generate", "x", "-m", "{}", *SKIP, "--device", "gpu"], "--device gpu"),
        (["generate", "x", "-m", "{}", *SKIP, "--device", "cpu", "--device-map", "auto"], "Leave one of them out"),
        (["generate", "x", "-m", "{}", *SKIP, "--system", "y", "--no-chat-template"], "--system needs a chat template"),
        (["generate", " ", "-m", "{}", *SKIP], "The prompt is empty"),
        (["generate", "-", "-m", "{}", *SKIP], "The prompt from stdin is empty"),
        (["generate", "caf\udce9", "-m", "{}", *SKIP], "The prompt is not UTF-8"),
        (["generate", "x", "-m", "./nowhere", *SKIP], "./nowhere"),
        (["generate", "x", "--zebra"], "No such option: --zebra. See `ssd generate --help`."),
        (["inspect", "./nowhere.gguf"], "no GGUF file './nowhere.gguf'"),
        (["inspect", "./nowhere"], "Found no model './nowhere'"),
        (["inspect", "{}", "--skip-mlp", "7"], "0 to 3"),
        (["generat"], "Did you mean 'generate'?"),
    ],
)
def test_mistakes_are_told_in_one_line(
    ssd: Callable[..., Run], folder: str, arguments: list[str], message: str
) -> None:
    run = ssd(*(argument.format(folder) for argument in arguments))
    assert run.status == 2
    assert run.out == ""
    assert run.err.startswith("error: ") and run.err.count("\n") == 1
    assert message in run.err


def test_a_file_that_is_no_model(ssd: Callable[..., Run], tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.touch()
    for command in (["inspect", str(file)], ["generate", "x", *SKIP, "-m", str(file)]):
        run = ssd(*command)
        assert run.status == 2 and "not a" in run.err


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: transformers.RwkvConfig(hidden_size=16, num_hidden_layers=2, vocab_size=32), "recurrent"),
        (lambda: transformers.T5Config(), "t5 model, which is not a causal language model"),
    ],
)
def test_a_model_that_cannot_draft(
    ssd: Callable[..., Run], config: Callable[[], Any], message: str, tmp_path: Path
) -> None:
    config().save_pretrained(tmp_path)
    run = ssd("inspect", str(tmp_path))
    assert run.status == 2 and run.err.startswith("error: ") and message in run.err
    assert len(run.err) < 500


def test_a_template_that_refuses(ssd: Callable[..., Run], folder: str, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    tokenizer.save_pretrained(tmp_path)
    run = ssd("generate", "x", "-m", str(tmp_path), *SKIP, "--system", "y")
    assert run.status == 2 and "System role not supported" in run.err and "without --system" in run.err


def test_debugging_shows_the_traceback_of_a_mistake(
    ssd: Callable[..., Run], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSD_DEBUG", "1")
    run = ssd("generate", "x", "-m", folder, "--skip-attention", "9")
    assert run.status == 2 and "Traceback" in run.err and run.err.splitlines()[-1].startswith("error: ")


def test_ctrl_c_is_quiet(ssd: Callable[..., Run], folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(resolve_options, "encode", interrupted)
    run = ssd("generate", "x", "-m", folder, *SKIP)
    assert run.status == 130 and run.out + run.err == ""


def test_ctrl_c_before_a_sub_command_runs_is_quiet_too(
    ssd: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ssd_generation.cli.app.app", interrupted)
    run = ssd("presets")
    assert run.status == 130 and run.out + run.err == ""


def test_a_reader_that_goes_away_is_no_fault(ssd: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("ssd_generation.cli.app.app", broken)
    monkeypatch.setattr(os, "dup2", lambda *args: None)
    run = ssd("presets")
    assert run.status == 1 and run.err == ""


def test_faults_of_ours_keep_their_traceback(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise AttributeError("a bug")

    monkeypatch.setattr(resolve_options, "encode", broken)
    with pytest.raises(AttributeError, match="a bug"):
        main(["generate", "x", "-m", folder, *SKIP])


def test_memory_that_runs_out_is_told_in_one_line(
    ssd: Callable[..., Run], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(resolve_options, "encode", full)
    run = ssd("generate", "x", "-m", folder, *SKIP)
    assert run.status == 2 and run.err == "error: CUDA out of memory.\n"


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_missing_packages_are_named(ssd: Callable[..., Run], missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    run = ssd("--help")
    assert run.status == 2 and missing in run.err and 'pip install "ssd_generation[cli]"' in run.err


# --- the rest -------------------------------------------------------------------------------------


def test_help_teaches(ssd: Callable[..., Run]) -> None:
    assert "ssd generate --compare" in ssd("--help").out
    assert ssd().out.strip() == ssd("-h").out.strip()
    shown = ssd("generate", "--help").out
    assert "--skip-attention 10-14,18 --compare" in shown
    for option in (
        "--draft-memory",
        "--precision",
        "--no-lookup",
        "--no-adapt",
        "int8|int4",
        "cost|confidence|fixed|none",
    ):
        assert option in shown
    assert "ssd inspect demo" in ssd("inspect", "--help").out
    assert "--config" in ssd("presets", "--help").out
    # Square brackets would be markup for rich.
    assert "ID[:CONFIG][@SPLIT][#COLUMN]" in "".join(ssd("search", "--help").out.split())


def test_version(ssd: Callable[..., Run]) -> None:
    assert ssd("--version").out == f"ssd_generation {ssd_generation.__version__}\n"


def test_python_dash_m(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["python -m ssd_generation", "--version"])
    with pytest.raises(SystemExit) as left:
        runpy.run_module("ssd_generation", run_name="__main__")
    assert left.value.code == 0 and capfd.readouterr().out.startswith("ssd_generation ")


def test_the_command_line_itself_loads_nothing_heavy() -> None:
    # The package without its __init__, whose imports are not the command line's.
    package = Path(ssd_generation.__file__).parent
    source = f"""
        import sys, types
        package = types.ModuleType("ssd_generation")
        package.__path__ = [{str(package)!r}]
        sys.modules["ssd_generation"] = package
        from ssd_generation.cli import main
        try:
            main(["generate", "--help"])
        except SystemExit as left:
            assert left.code == 0
        print(sorted({{"torch", "transformers", "numpy", "ssd_generation.config"}} & set(sys.modules)))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(source)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_libraries_are_quiet_and_then_as_they_were() -> None:
    from ssd_generation.cli.console import quiet_libraries

    before = (
        transformers_logging.get_verbosity(),
        transformers_logging.is_progress_bar_enabled(),
        list(warnings.filters),
    )
    with quiet_libraries():
        warnings.warn("unheard", UserWarning, stacklevel=1)
        assert transformers_logging.get_verbosity() == transformers_logging.ERROR
    after = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled(), list(warnings.filters)
    assert after == before


def test_measuring_shows_the_librarys_bars_in_a_terminal_alone(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.console import Console

    from ssd_generation.cli import console

    with console.quiet_libraries(), console.measuring():
        assert not transformers_logging.is_progress_bar_enabled()
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr(console, "_PATIENCE", 0.0)
    with console.quiet_libraries(), console.measuring():
        for timer in threading.enumerate():
            if isinstance(timer, threading.Timer):
                timer.join(60)  # it has printed its line when it ends
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err == "Measuring what drafting costs here, once per model and machine.\n"
    monkeypatch.setattr(console, "err", lambda: Console(file=io.StringIO(), force_terminal=True))
    with console.quiet_libraries():
        with console.measuring():
            assert transformers_logging.is_progress_bar_enabled()
        assert not transformers_logging.is_progress_bar_enabled()


def test_progress_in_a_log_file_waits_two_seconds(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ssd_generation.cli import console

    now = iter([0.0, 1.0, 2.5, 2.5, 3.0, 5.0, 5.0])
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: next(now)))
    with console.progress("Counting", total=4) as step:
        for name in ("one", "two", "three", "four"):
            step(name)
    assert capfd.readouterr().err == "Counting 1/4: two\nCounting 3/4: four\n"


def test_progress_in_a_terminal_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    from ssd_generation.cli import console

    file = io.StringIO()
    monkeypatch.setattr(console, "err", lambda: Console(file=file, force_terminal=True, width=60))
    with console.progress("Counting", total=2) as step:
        step("one")
        step("two")
    assert "Counting: two" in file.getvalue() and "1/2" in file.getvalue() and "-1/2" not in file.getvalue()
    with console.progress("Waiting"):
        pass


@pytest.mark.parametrize(
    ("text", "layers", "shown"),
    [
        (None, [], ""),
        ("", [], ""),
        ("5", [5], "5"),
        ("5,7,10-12", [5, 7, 10, 11, 12], "5, 7, 10–12"),
        (" 1 2, 3 ,", [1, 2, 3], "1–3"),
        ("4-4, 6", [4, 6], "4, 6"),
        ("1,2,4,5", [1, 2, 4, 5], "1, 2, 4, 5"),
    ],
)
def test_layers(text: str | None, layers: list[int], shown: str) -> None:
    assert parse_layers("--skip", text) == layers
    assert describe_layers(layers) == shown


@pytest.mark.parametrize("text", ["a", "-1", "1.5", "1-", "1--2", "99999999999"])
def test_no_layers(text: str) -> None:
    with pytest.raises(ValueError, match="--skip: "):
        parse_layers("--skip", text)


def test_a_model_that_cannot_draft_answers_all_the_same(ssd: Callable[..., Run], tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    config = DogeConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        is_moe=True,
        num_experts=16,
        num_experts_per_tok=4,
    )
    folder = str(tmp_path / "doge")
    torch.manual_seed(0)
    model = DogeForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0.0, 0.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    told = "DogeForCausalLM is decoded without drafts, as transformers decodes it: its pass over several tokens"
    plain = ssd("generate", "the river", "-m", folder, *SHORT)
    assert plain.status == 0 and told in plain.err
    compared = ssd("generate", "the river", "-m", folder, *SHORT, "--compare", "--repeats", "1")
    assert compared.status == 0 and plain.out.strip() in compared.out
    assert ssd("generate", "the river", "-m", folder, *SHORT, "--precision", "int8").status == 0
    refused = ssd("search", folder, "--trials", "1", "-o", str(tmp_path / "found"))
    assert refused.status == 2 and "DogeForCausalLM cannot draft for itself" in refused.err
    assert len(refused.err.splitlines()) == 1
