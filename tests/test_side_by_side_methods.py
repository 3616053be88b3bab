"""Names of methods, and each method's arguments of `generate`."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from ssd_generation import DraftingConfig, LookupConfig, SelfSpeculativeConfig, SkipConfig, enable_self_speculative
from ssd_generation.forward.structure.sublayers import locate_sublayers
from ssd_generation.harness.methods import (
    METHODS,
    check_methods,
    default_methods,
    make_methods,
    portable,
    random_half,
)
from ssd_generation.harness.peer_methods import PeerModel
from tiny_models import LAYERS, tiny_model

CONFIG = SelfSpeculativeConfig(
    SkipConfig([1], [2]), DraftingConfig(policy="fixed", max_draft_length=3), precision="int8", lookup=True
)


@pytest.fixture(scope="module")
def model() -> Any:
    return enable_self_speculative(tiny_model())


def request_of(name: str, model: Any, config: SelfSpeculativeConfig | None = None) -> dict[str, Any]:
    (method,) = make_methods([name], model, config)
    return dict(method.request)


def test_requests(model: Any) -> None:
    assert request_of("plain", model) == {}
    assert request_of("prompt-lookup-10", model) == {"prompt_lookup_num_tokens": 10}
    assert request_of("early-exit-2", model) == {"assistant_early_exit": 2}
    assert request_of("assistant", model) == {"assistant_model": True}
    assert request_of("auto", model) == {"self_speculative": "auto"}
    assert request_of("config", model, CONFIG)["self_speculative"] is CONFIG
    (peer,) = make_methods(["llama.cpp-x"], model, peers={"llama.cpp-x": PeerModel("llama.cpp", "below/x.gguf")})
    assert peer.request == {"peer": PeerModel("llama.cpp", "below/x.gguf")} and not peer.is_own and peer.config is None


def test_mode_configs(model: Any) -> None:
    def config_of(name: str) -> SelfSpeculativeConfig:
        (method,) = make_methods([name], model, CONFIG)
        assert method.is_own and method.config is not None
        return method.config

    assert config_of("lookup") == SelfSpeculativeConfig(lookup=LookupConfig())
    assert config_of("int4") == SelfSpeculativeConfig(precision="int4")
    assert config_of("plain-loop").drafting.policy == "none"
    skip, paper = config_of("skip"), config_of("paper")
    assert skip.skip == paper.skip == CONFIG.skip
    assert (skip.precision, skip.lookup, skip.drafting.policy) == (None, None, "cost")
    assert (paper.precision, paper.lookup) == (None, None)
    assert (paper.drafting.policy, paper.drafting.max_draft_length) == ("confidence", 12)


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2", "falcon", "gemma3"])
def test_random_half_can_be_skipped(family: str) -> None:
    layout = locate_sublayers(tiny_model(family))
    halves = [random_half(layout, seed) for seed in range(30)]
    assert halves[0] == random_half(layout, 0)
    assert len(set(halves)) > 20
    for half in halves:
        assert len(half) == LAYERS
        layout.stubs(half)  # raises if these cannot be skipped


def test_defaults_are_what_there_is_something_for() -> None:
    assert default_methods(None, has_assistant=False)[0] == "plain"
    assert not {"config", "paper", "assistant"} & set(default_methods(None, False))
    assert {"config", "paper", "assistant"} <= set(default_methods(CONFIG, True))
    # Nothing is skipped, so by the paper's method the target model itself would be the draft.
    in_low_bits = SelfSpeculativeConfig(precision="int8")
    assert "config" in default_methods(in_low_bits, True) and "paper" not in default_methods(in_low_bits, True)
    for config in (None, in_low_bits, CONFIG):
        names = default_methods(config, True)
        assert check_methods(names, config, True) == names


def test_plain_comes_first_and_is_always_there() -> None:
    assert check_methods(["auto"], None, False) == ("plain", "auto")
    assert check_methods(["auto", "plain"], None, False) == ("plain", "auto")
    files = {"llama.cpp-a.b": PeerModel("llama.cpp", "a.b.gguf")}
    assert check_methods(["llama.cpp-a.b"], None, False, files) == ("plain", "llama.cpp-a.b")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["fast"], "no method 'fast'. Choose from plain, auto"),
        (["prompt-lookup-N"], "no method 'prompt-lookup-N'"),
        (["prompt-lookup"], "needs a number of at least 1, such as prompt-lookup-3, but got 'prompt-lookup'"),
        (["early-exit-0"], "such as early-exit-3, but got 'early-exit-0'"),
        (["llama.cpp-x"], r"'llama.cpp-x' needs a GGUF file .* --gguf …/x\.gguf"),
        (["openvino-x"], r"'openvino-x' needs a folder in OpenVINO's format, .* --openvino …/x\."),
        (["openvino-prefix-cache-x"], r"-x' needs a folder .* --openvino …/x\."),
        (["skip"], "'skip' needs a config"),
        (["paper"], "'paper' needs a config"),
        (["assistant"], "needs an assistant model"),
        (["auto", "auto"], "'auto' was named more than once"),
        (["plain"], "nothing to compare"),
        ([], "nothing to compare"),
    ],
)
def test_bad_names(names: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_methods(names, None, has_assistant=False)


@pytest.mark.parametrize("name", ["skip", "paper"])
def test_methods_that_skip_need_something_to_skip(name: str, model: Any) -> None:
    config = SelfSpeculativeConfig(precision="int8", lookup=True)
    with pytest.raises(ValueError, match=f"'{name}' drafts by a skip set alone, but this config skips nothing"):
        check_methods([name], config, False)
    with pytest.raises(ValueError, match="skips nothing"):
        make_methods([name], model, config)


def test_every_name_is_made(model: Any) -> None:
    names = [re.sub("-N(AME)?$", "-2", name) for name in METHODS]
    files = {
        "llama.cpp-2": PeerModel("llama.cpp", "2.gguf"),
        "openvino-2": PeerModel("openvino", "2"),
        "openvino-prefix-cache-2": PeerModel("openvino", "2", prefix_cache=True),
    }
    assert check_methods(names, CONFIG, True, files) == tuple(names)
    assert [method.name for method in make_methods(names, model, CONFIG, peers=files)] == names


def test_portable_requests_name_only_what_differs_from_the_default() -> None:
    config = SelfSpeculativeConfig(SkipConfig([1]), DraftingConfig(policy="confidence", threshold=0.5))
    request = json.loads(json.dumps(portable({"self_speculative": config})))
    assert request["self_speculative"]["drafting"] == {
        "policy": "confidence",
        "max_draft_length": 12,
        "threshold": 0.5,
    }
    assert SelfSpeculativeConfig.from_dict(request["self_speculative"]) == config
    assert portable({"assistant_model": True}) == {"assistant_model": True}
