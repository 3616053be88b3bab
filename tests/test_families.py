"""The families of transformers as tiny models: lossless ones stay lossless, and the table shows the findings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

from lab.families import __main__ as command
from lab.families import children, models, trial
from lab.families.models import Kind, build, known_families, tiny_config
from lab.families.page import page
from lab.families.sizes import LAYERS
from lab.families.trial import COLUMNS, PICTURES, Row, how_captured, try_family
from ssd_generation import enable_self_speculative
from ssd_generation.native.codegen.compiler import why_not

# Found lossless with transformers 5.23. A family leaves this list only when it leaves transformers.
_LOSSLESS = """
afmoe apertus arcee aria_text axk1 axk2 bart beam bert bert-generation big_bird bigbird_pegasus biogpt bitnet
blenderbot blenderbot-small bloom camembert codegen cohere cohere2 cohere2_moe cohere_compass_text ctrl cwm
data2vec-text dbrx deepseek_v2 deepseek_v3 deepseek_v32 diffllama dots1 dots3_note_text electra emu3 ernie ernie4_5
ernie4_5_moe exaone4 exaone_moe falcon flex_olmo flint fuyu gemma gemma2 gemma3 gemma3_text gemma3n_text gemma4
gemma4_text gemma4_unified gemma4_unified_text git glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa got_ocr2 gpt-sw3 gpt2
gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gpt_oss gptj granite granite_swa granitemoe granitemoe_swa
granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax internlm3 iquestcoder jais2
jetmoe kolibri1 laguna llama llama4 llama4_text longcat_flash marian mbart megatron-bert mellum mimo_v2_flash minicpm3
minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral mllama modernbert-decoder moss_transcribe_diarize
mpt mvp nanochat nemotron olmo olmo2 olmo3 olmoe opt pegasus persimmon phi phi3 phi4_multimodal phimoe plbart qwen2
qwen2_moe qwen3 qwen3_moe rembert roberta roberta-prelayernorm roc_bert roformer seed_oss smollm3 solar_open stablelm
starcoder2 trocr vaultgemma whisper xglm xlm-roberta xlm-roberta-xl xmod youtu
"""
# Families with recurrent states.
_HYBRIDS = """
bailing_hybrid bamba falcon_h1 falcon_mamba granitemoehybrid inkling2_text inkling_text jamba kimi_linear lfm2 lfm2_moe
lfm3 mamba mamba2 minimax nemotron_h olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp
qwen4_exp_text recurrent_gemma zamba zamba2 zaya
"""
# Image-text models, with a picture in the prompt; those whose pixel shape is unknown, with text alone.
_WITH_A_PICTURE = """
aria aya_vision cohere2_vision cohere_compass cosmos3_edge cosmos3_omni deepseek_vl deepseek_vl_hybrid
ernie4_5_vl_moe exaone4_5 fuyu gemma3 gemma4 git glm46v glm4v glm4v_moe glm_ocr glmga got_ocr2 granite_docling
hunyuan_vl hyperclovax_vision_v2 idefics2 idefics3 internvl janus kimi_k25 lfm2_vl lighton_ocr llama4 llava
llava_next llava_next_video llava_onevision minimax_m3_vl mistral3 mistral_large4 ovis2 paddleocr_vl paligemma
pp_chart2table qianfan_ocr qwen2_5_omni_thinker qwen2_5_vl qwen2_vl qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe
shieldgemma2 smolvlm step3p7 video_llama_3 video_llava vipllava mllama
"""
_WITH_TEXT_ALONE = """
chameleon deepseek_ocr2 gemma4_unified kosmos-2.5 mistral4 molmo2 muse_glimmer
"""
_HYBRIDS_WITH_A_PICTURE = """
glm5_next lfm3_vl minicpm_ocr minicpmv4_6 minicpmv4_7 nemotron_h_omni qwen3_5 qwen3_5_moe qwen4_exp
"""
LOSSLESS = _LOSSLESS.split()
HYBRIDS = _HYBRIDS.split()
WITH_A_PICTURE = _WITH_A_PICTURE.split()
WITH_TEXT_ALONE = _WITH_TEXT_ALONE.split()
HYBRIDS_WITH_A_PICTURE = _HYBRIDS_WITH_A_PICTURE.split()
TABLE_MADE_WITH = Version("5.23")
OLDER = Version(transformers.__version__) < TABLE_MADE_WITH


@pytest.mark.parametrize("family", [*LOSSLESS, *HYBRIDS])
def test_lookup_gives_plain_text(family: str) -> None:
    if family not in known_families():
        pytest.skip("this transformers does not know it")
    if family in HYBRIDS and OLDER:
        pytest.skip("this transformers keeps states otherwise")
    row = try_family(family, ["lookup"])
    if row.untried is not None and OLDER:
        pytest.skip(f"this transformers has another config of it ({row.untried})")
    assert row.untried is None
    assert row.cells == {"lookup": "yes"}
    assert row.drafted["lookup"] > 0


@pytest.mark.parametrize("family", [*WITH_A_PICTURE, *WITH_TEXT_ALONE, *HYBRIDS_WITH_A_PICTURE])
def test_lookup_gives_plain_text_of_image_text_models(family: str) -> None:
    if family not in known_families("image-text"):
        pytest.skip("this transformers does not know it")
    if family in HYBRIDS_WITH_A_PICTURE and OLDER:
        pytest.skip("this transformers keeps states otherwise")
    row = try_family(family, ["lookup"], "image-text")
    if family == "llama4" and row.untried is not None and "image_outputs" in row.untried:
        pytest.skip("transformers 5.24 cannot run it itself")
    if (row.untried is not None or row.picture not in PICTURES) and OLDER:
        pytest.skip(f"this transformers has another config of it ({row.untried or row.picture})")
    assert row.untried is None
    assert row.cells == {"lookup": "yes"}
    assert row.drafted["lookup"] > 0
    assert (row.picture in PICTURES) == (family not in WITH_TEXT_ALONE)


def test_the_list_does_not_shrink() -> None:
    assert len(set(LOSSLESS)) == len(LOSSLESS) >= 143
    assert len(set(HYBRIDS)) == len(HYBRIDS) >= 28
    assert len(set(WITH_A_PICTURE)) == len(WITH_A_PICTURE) >= 56
    assert len(set(HYBRIDS_WITH_A_PICTURE)) == len(HYBRIDS_WITH_A_PICTURE) >= 9
    # Families in both lists of transformers are counted once.
    assert len({*LOSSLESS, *WITH_A_PICTURE, *WITH_TEXT_ALONE}) >= 190
    assert len({*LOSSLESS, *HYBRIDS, *WITH_A_PICTURE, *WITH_TEXT_ALONE, *HYBRIDS_WITH_A_PICTURE}) >= 225


@pytest.mark.parametrize("family", HYBRIDS)
def test_hybrids_draft_for_themselves(family: str) -> None:
    if family not in known_families() or OLDER:
        pytest.skip("this transformers does not know it, or keeps states otherwise")
    row = try_family(family, ["low bits", "skipping", "batch"])
    assert row.cells == {"low bits": "yes", "skipping": "yes", "batch": "yes"}


def test_low_bits_draft_where_a_layer_was_never_filled() -> None:
    # Without an image, mllama omits its cross-attention layers once it finds their cache empty.
    assert try_family("mllama", ["low bits"]).cells == {"low bits": "yes"}


# --- The builder ----------------------------------------------------------------------------------


def test_models_are_tiny_and_the_same_every_time() -> None:
    first, second = build("qwen2"), build("qwen2")
    assert sum(parameter.numel() for parameter in first.parameters()) < 100_000
    assert len(first.model.layers) == LAYERS
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


def test_few_layers_have_each_kind() -> None:
    assert set(tiny_config("gemma3_text").layer_types) == {"sliding_attention", "full_attention"}
    assert tiny_config("gemma3").text_config.hidden_size == 32


def test_what_is_not_small_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "MOST_PARAMETERS", 1000)
    row = try_family("llama")
    assert row.untried is not None and "not small" in row.untried and row.cells == {}


# --- The report -----------------------------------------------------------------------------------


def test_a_refusal_is_told_by_its_reason() -> None:
    row = try_family("rwkv", ["lookup"])
    assert "recurrent" in row.cells["lookup"] and not row.cells["lookup"].startswith("crashed")


def test_another_text_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(model: Any) -> Any:
        model.lm_head.weight.data.neg_()
        return enable_self_speculative(model)

    monkeypatch.setattr(trial, "enable_self_speculative", spoil)
    assert try_family("llama", ["lookup"]).cells == {"lookup": "WRONG"}


def test_any_other_error_is_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model: Any) -> Any:
        # A ValueError, but not one raised by the library.
        raise ValueError("no such thing")

    monkeypatch.setattr(trial, "enable_self_speculative", fail)
    assert try_family("llama", ["lookup"]).cells == {"lookup": "crashed: ValueError: no such thing"}


def rows() -> list[Row]:
    refused = "LlamaForCausalLM is a recurrent (stateful) model: it cannot."
    return [
        Row("wrong", "WrongForCausalLM", {**dict.fromkeys(COLUMNS, "yes"), "batch": "WRONG"}),
        Row("llama", "LlamaForCausalLM", dict.fromkeys(COLUMNS, refused)),
        Row("another", "AnotherForCausalLM", dict.fromkeys(COLUMNS, refused.replace("Llama", "Another"))),
        Row("broken", "BrokenForCausalLM", {**dict.fromkeys(COLUMNS, "yes"), "lookup": "crashed: KeyError: 'a|b'"}),
        Row("fine", "FineForCausalLM", dict.fromkeys(COLUMNS, "yes"), captured="yes"),
        Row("alone", "AloneForCausalLM", dict.fromkeys(COLUMNS, "yes"), captured="one text"),
        Row("slow", "SlowForCausalLM", dict.fromkeys(COLUMNS, "yes"), captured="its attention is odd."),
        Row("huge", "HugeForCausalLM", untried="no tiny model can be built: 9 parameters. Install more."),
    ]


def test_the_page_counts_and_shows_everything() -> None:
    text = page(rows())
    assert "| WRONG | 0 | 0 | 0 | 0 | 1 | 0 |" in text
    assert "| crashed | 0 | 1 | 0 | 0 | 0 | 0 |" in text
    assert "| no (refused) | 2 | 2 | 2 | 2 | 2 | 2 |" in text
    assert "| yes | 5 | 4 | 5 | 5 | 4 | 5 |" in text
    assert "Tried: 7. Not tried" in text
    assert "another text (`WRONG`): 1; with a crash: 1." in text
    assert "| wrong | WrongForCausalLM | yes | yes | yes | yes | **WRONG** | yes |  |" in text
    assert "| broken | BrokenForCausalLM | yes | crashed (2) | yes | yes | yes | yes |  |" in text
    assert "Captured passes: 2 families, of batches too: 1." in text
    assert "| fine | FineForCausalLM | yes | yes | yes | yes | yes | yes | yes |" in text
    assert "| yes | yes | one text |" in text and "| yes | yes | no (3) |" in text
    assert "3. Not captured: its attention is odd. Families: slow." in text
    # One note for both, without a class name; characters that end a table cell are escaped.
    assert "1. The model is a recurrent (stateful) model: it cannot. Families: another, llama." in text
    assert "KeyError: 'a\\|b'. Families: broken." in text
    assert "- huge (HugeForCausalLM): no tiny model can be built: 9 parameters.\n" in text
    assert text.index("| another |") < text.index("| broken |") < text.index("| fine |")


@pytest.mark.parametrize(
    ("family", "how"),
    # gemma3n's passes have constants of the rewrites, which have no shape in the graph.
    [
        ("llama", "yes"),
        ("gemma3_text", "yes"),
        ("gemma3n_text", "yes"),
        ("gpt_oss", "yes"),
        ("bloom", "code of its own"),
        ("minimax", "cache of its own"),
    ],
)
def test_which_passes_are_captured(family: str, how: str) -> None:
    if why_not() is not None:
        pytest.skip("no code can be made")
    model = enable_self_speculative(build(family))
    assert how in how_captured(model)


def test_a_wrong_text_ends_the_command_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("HF_HUB_OFFLINE", "SSD_GENERATION_CACHE", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")  # restored afterwards
    monkeypatch.setattr(command, "try_families", lambda names: iter(rows()))
    with pytest.raises(SystemExit, match="1"):
        command.main(["--only", "llama", "-o", str(tmp_path / "models.md")])
    assert "**WRONG**" in (tmp_path / "models.md").read_text(encoding="utf-8")
    assert "batch: WRONG" in capsys.readouterr().err
    monkeypatch.setattr(command, "try_families", lambda names: iter(rows()[1:]))
    command.main(["--json"])
    assert [row["family"] for row in json.loads(capsys.readouterr().out)][:2] == ["alone", "another"]
    with pytest.raises(SystemExit, match="2"):
        command.main(["--only", "llama", "no-such-model"])
    assert "no model type no-such-model" in capsys.readouterr().err


def test_an_interrupted_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("HF_HUB_OFFLINE", "SSD_GENERATION_CACHE", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")  # restored afterwards
    names = ["gpt2", "llama", "opt"]
    asked: list[str] = []

    def interrupted(waiting: list[tuple[str, Kind]]) -> Iterator[Row]:
        for family, kind in waiting:
            if len(asked) == 2:
                raise KeyboardInterrupt
            asked.append(family)
            yield Row(family, "Class", dict.fromkeys(COLUMNS, "yes"), kind=kind, drafted={"lookup": 3})

    monkeypatch.setattr(command, "try_families", interrupted)
    asking = ["--only", *names, "--json", "--rows", str(tmp_path / "rows")]
    with pytest.raises(KeyboardInterrupt):
        command.main(asking)
    asked = ["the first two are not asked for again"]
    command.main(asking)
    assert asked[1:] == ["opt"]
    out, _ = capsys.readouterr()
    assert [row["family"] for row in json.loads(out)] == names
    assert all(row["drafted"] == {"lookup": 3} for row in json.loads(out))
    with pytest.raises(SystemExit, match="2"):
        command.main(["--only", "llama", "--rows", str(tmp_path / "rows")])  # rows of another run
    assert "with --rows, or repeat the arguments" in capsys.readouterr().err


def test_a_child_that_dies_or_hangs_costs_its_family_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    child = children.Child()
    try:
        child.give("llama")
        child.process.kill()
        child.process.join()
        row = child.outcome()
        assert row is not None and set(row.cells.values()) == {"crashed: its process ended with exit code -9"}
        monkeypatch.setattr(children, "SECONDS", 0.0)
        child.give("llama")
        row = child.outcome()
        assert row is not None and set(row.cells.values()) == {"crashed: no end within 0 s"}
    finally:
        child.stop()


def test_families_are_tried_in_children() -> None:
    (row,) = children.try_families([("llama", "causal")])
    assert row.untried is None and row.cells == dict.fromkeys(COLUMNS, "yes")
