"""Bad input raises an error that names it, the permitted values and the remedy; it never gives a wrong text."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from packaging.version import Version
from transformers import DynamicCache, PreTrainedModel, StaticCache

from ssd_generation import Provenance, SelfSpeculativeConfig, SkipConfig, enable_self_speculative
from ssd_generation.support import versions
from ssd_generation.support.versions import CACHE
from tiny_models import VOCAB, prompt, tiny_model

SKIP = SkipConfig(attention=[1], mlp=[2])


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return enable_self_speculative(tiny_model())


def generate(model: Any, request: Any = SKIP, **kwargs: Any) -> Any:
    options = {"max_new_tokens": 6, "do_sample": False, **kwargs}
    return model.generate(options.pop("inputs", prompt(9)), **options, self_speculative=request)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_beams": 3}, r"beam search \(`num_beams=3`\)"),
        ({"use_cache": False}, "use_cache=True"),
        ({"cache_implementation": "offloaded_static"}, "cache_implementation='offloaded_static'"),
        ({"cache_implementation": "offloaded"}, "cache_implementation='offloaded'"),
        ({"cache_implementation": "quantized"}, "cache_implementation='quantized'"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3"),
        ({"assistant_early_exit": 2}, "assistant_early_exit=2"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "generation mode|penalty_alpha|contrastive"),
        ({"synced_gpus": True}, "synced_gpus"),
    ],
)
def test_what_cannot_be_combined(model: PreTrainedModel, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(model, **kwargs)
    assert model.generate(prompt(9), max_new_tokens=2).shape == (1, 11), "the model still works"


def test_a_transformers_that_was_never_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "_RELEASE", Version("5.25.0"))
    with pytest.warns(
        UserWarning, match=r"not been tested with transformers 5\.\d+\.\d+.*'transformers>=5\.18,<5\.25'"
    ):
        model = enable_self_speculative(tiny_model(seed=4))
    assert generate(model).shape[0] == 1


def test_an_assistant_as_well(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="`self_speculative` and `assistant_model` were both given"):
        generate(model, assistant_model=tiny_model(seed=3))
    with pytest.raises(ValueError, match="custom_generate"):
        generate(model, custom_generate=lambda *args, **kwargs: None)


def test_caches_that_cannot_be_rolled_back(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="StaticLayer"):
        generate(model, **{CACHE: StaticCache(config=model.config, max_cache_len=32)})
    offloaded = DynamicCache(config=model.config)
    offloaded.offloading = True
    with pytest.raises(ValueError, match="offloaded cache"):
        generate(model, **{CACHE: offloaded})

    class Quantized(tf.cache_utils.QuantizedLayer):  # type: ignore[misc]
        def _quantize(self, tensor: Any, axis: int) -> Any: ...

        def _dequantize(self, tensor: Any) -> Any: ...

    quantized = DynamicCache(config=model.config)
    quantized.layers[2] = Quantized()
    with pytest.raises(ValueError, match="Layer 2 of the cache is a Quantized"):
        generate(model, **{CACHE: quantized})


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        (SkipConfig(attention=[4]), ValueError, "4"),
        (SkipConfig(mlp=[99]), ValueError, "99"),
        (SkipConfig(attention=[0, 1, 2, 3]), ValueError, "(?i)every|all"),
        (
            SelfSpeculativeConfig(SKIP, provenance=Provenance(model_type="gpt2")),
            ValueError,
            "gpt2",
        ),
        (SelfSpeculativeConfig(SKIP, provenance=Provenance(num_layers=40)), ValueError, "40"),
        ({"attention": [1], "mpl": [2]}, ValueError, "mpl"),
        ({"attention": [-1]}, ValueError, "-1"),
        ({"attention": [1, 1]}, ValueError, "1"),
        ({"attention": ["one"]}, (TypeError, ValueError), "one"),
        ({"drafting": {"max_draft_length": 0}}, ValueError, "0"),
        ("missing.json", FileNotFoundError, "missing.json"),
        (3.5, TypeError, "3.5"),
        ([1, 2], TypeError, "list"),
    ],
)
def test_requests(model: PreTrainedModel, request_: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        generate(model, request_)


def test_true_without_a_default(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match=r"enable_self_speculative\(model, default=config\)"):
        generate(model, True)


@pytest.mark.parametrize(
    "stored",
    ["secrets.json", Path("secrets.json"), "user/repo", "llama-2-13b", "AUTO", False, 3, ["x" * 10**6]],
    ids=lambda stored: str(stored)[:20],
)
def test_a_default_that_is_no_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secrets.json").write_text('{"password": "1234"}')
    model: Any = enable_self_speculative(tiny_model())
    model.generation_config.self_speculative = stored
    with pytest.raises(
        TypeError, match=r"self_speculative` must be the config itself.*to_dict.*\(model, default="
    ) as caught:
        generate(model, True)
    assert "password" not in str(caught.value) and len(str(caught.value)) < 400
    for good in (SKIP, SKIP.to_dict(), SelfSpeculativeConfig(SKIP)):
        model.generation_config.self_speculative = good
        assert generate(model, True).shape[0] == 1


@pytest.mark.parametrize("name", ["n" * 300, "~nosuchuser/x", "round/x", "pipe", "folder", "a\0b", "n/" * 3000])
def test_paths_that_lead_nowhere(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("folder").mkdir()
    os.mkfifo("folder/self_speculative_config.json")
    Path("round").symlink_to("round")
    for request in (name, Path(name)):
        with pytest.raises((ValueError, FileNotFoundError)) as caught:
            generate(model, request)
        assert type(caught.value) in (ValueError, FileNotFoundError) and len(str(caught.value)) < 600


class Huge:
    def __repr__(self) -> str:
        return "x" * 10**6


class Failing:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize("request_", [Huge(), Failing(), type("y" * 10**5, (), {})()], ids=["huge", "failing", "long"])
def test_requests_of_any_class(model: PreTrainedModel, request_: Any) -> None:
    with pytest.raises(TypeError, match="must be a SelfSpeculativeConfig") as caught:
        generate(model, request_)
    assert len(str(caught.value)) < 400


def test_a_file_that_is_not_json(model: PreTrainedModel, tmp_path: Path) -> None:
    file = tmp_path / "skip.json"
    file.write_text('{"attention": [1,')
    with pytest.raises(ValueError, match=r"skip\.json"):
        generate(model, file)


def test_a_default_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match="12"):
        enable_self_speculative(tiny_model(), default=SkipConfig(attention=[12]))


def test_a_model_that_was_not_enabled() -> None:
    # transformers' own error, which cannot be replaced without touching transformers; at least it names the argument.
    with pytest.raises(ValueError, match="self_speculative"):
        generate(tiny_model())


def test_no_new_tokens_and_empty_prompts_are_as_in_transformers(model: PreTrainedModel) -> None:
    for kwargs in ({"max_new_tokens": 0}, {"inputs": torch.empty((1, 0), dtype=torch.long)}):
        outcomes: list[Any] = []
        for request in (None, SKIP):
            try:
                outcomes.append(generate(model, request, **kwargs).tolist())
            except Exception as error:
                outcomes.append((type(error), str(error)))
        assert outcomes[0] == outcomes[1]


def test_models_that_cannot_draft_for_themselves() -> None:
    t5 = tf.T5ForConditionalGeneration(
        tf.T5Config(vocab_size=VOCAB, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    )
    with pytest.raises(ValueError, match="encoder-decoder"):
        enable_self_speculative(t5)
    rwkv = tf.RwkvForCausalLM(tf.RwkvConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2))
    with pytest.raises(ValueError, match="recurrent"):
        enable_self_speculative(rwkv)
    with pytest.raises(TypeError, match="Linear"):
        enable_self_speculative(torch.nn.Linear(2, 2))
    bert = tf.BertModel(
        tf.BertConfig(
            vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
        )
    )
    with pytest.raises(ValueError, match="AutoModelForCausalLM"):
        enable_self_speculative(bert)
    warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")  # torch's own, on its first compile
    with pytest.raises(TypeError, match=r"model\.compile\(\)"):
        compiled: Any = torch.compile(tiny_model())
        enable_self_speculative(compiled)


def test_a_hybrid_model_keeps_an_attention_with_keys() -> None:
    config = tf.Qwen3NextConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=16,
    )  # fmt: skip
    model = tf.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=r"leaves out all 1 attention sub-layers.*Keep at least one"):
        generate(enable_self_speculative(model), SkipConfig(attention=[0, 3]))
