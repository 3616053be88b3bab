"""Weights that are not plain tensors on a real device: offloaded (more in test_offloaded.py), of a tensor subclass,
packed.

Such models decode by their own forward, and are never captured or cast. Also: the keys of stored measurements.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from ssd_generation import DraftingConfig, SelfSpeculativeConfig, SkipConfig, enable_self_speculative
from ssd_generation.forward.captured.conditions import why_not_captured
from ssd_generation.forward.copies.copied_layers import check_precision
from ssd_generation.forward.eager.row_by_row import ATTENTION, EVERYTHING, least_needed, row_by_row, run_row_by_row
from ssd_generation.forward.structure.linears import CannotRead, dense
from ssd_generation.forward.structure.sublayers import input_device
from ssd_generation.support.versions import CACHE
from ssd_generation.tuning.measuring import describe_model
from test_models import write_gguf
from tiny_models import prompt, tiny_model

# A warning about offloaded weights, which transformers 5.18 takes for weights on another device.
pytestmark = pytest.mark.filterwarnings("ignore:You are calling .generate")

FIXED = DraftingConfig(policy="fixed", max_draft_length=3)
SKIP = SkipConfig(attention=[1], mlp=[2])
REQUESTS: dict[str, Any] = {
    "auto": "auto",
    "lookup": SelfSpeculativeConfig(lookup=True),
    "skip": SelfSpeculativeConfig(SKIP, FIXED),
    "refined": SelfSpeculativeConfig(SKIP, lookup=True, adapt=True),
}


class Packed(torch.Tensor):
    """Weight of a tensor subclass like torchao's: it works in a linear layer, and in little else."""

    numbers: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, numbers: torch.Tensor, scale: torch.Tensor) -> Packed:
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scale.dtype, device=numbers.device)  # type: ignore[no-any-return,attr-defined]

    def __init__(self, numbers: torch.Tensor, scale: torch.Tensor) -> None:
        self.numbers, self.scale = numbers, scale

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            x, weight, *bias = args
            return nn.functional.linear(x, weight.numbers.to(x.dtype) * weight.scale, *bias)
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].numbers, args[0].scale)
        raise NotImplementedError(f"a packed weight has no {func}")


def packed(model: PreTrainedModel) -> PreTrainedModel:
    for module in model.modules():
        if type(module) is nn.Linear:
            scale = module.weight.detach().abs().amax(dim=1, keepdim=True) / 127
            numbers = (module.weight.detach() / scale).round().to(torch.int8)
            module.weight = nn.Parameter(Packed(numbers, scale), requires_grad=False)
    return model


def dynamic(model: PreTrainedModel) -> PreTrainedModel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao's deprecation warning
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)  # type: ignore[no-any-return]


def wide() -> PreTrainedModel:
    return tiny_model("llama", hidden_size=64, intermediate_size=128)


@pytest.fixture
def kinds(tmp_path: Path) -> dict[str, Callable[[], PreTrainedModel]]:
    return {
        "cpu offload": lambda: cpu_offload(wide(), execution_device="cpu"),
        "disk offload": lambda: disk_offload(wide(), str(tmp_path), execution_device="cpu"),
        "packed": lambda: packed(wide()),
    }


@pytest.mark.measures  # measuring costs inspects devices and kinds of weights
@pytest.mark.parametrize("request_name", REQUESTS)
@pytest.mark.parametrize("kind", ["cpu offload", "disk offload", "packed"])
def test_text_of_plain(kinds: dict[str, Callable[[], PreTrainedModel]], kind: str, request_name: str) -> None:
    model = enable_self_speculative(kinds[kind]())
    assert why_not_captured(model) is not None
    for rows in (1, 2):
        ids = prompt(6, rows).repeat(1, 2)
        plain = model.generate(ids, max_new_tokens=24, do_sample=False)
        drafted = model.generate(ids, max_new_tokens=24, do_sample=False, self_speculative=REQUESTS[request_name])
        assert torch.equal(plain, drafted)
        assert model.last_speculation.refusal is None
        if request_name == "skip":
            assert model.last_speculation.drafted_tokens > 0


def test_activations_that_are_quantised_by_the_pass() -> None:
    model = enable_self_speculative(dynamic(wide()))
    # One scale for all rows of a pass would mix tokens, so linear layers run row by row, each with its own scale.
    assert least_needed(model) == EVERYTHING
    plain = model.generate(prompt(), max_new_tokens=32, do_sample=False)
    requests = {**REQUESTS, "int8": SelfSpeculativeConfig(precision="int8", drafting=FIXED)}
    for name in ("skip", "refined", "auto", "lookup", "int8"):
        again = model.generate(prompt(), max_new_tokens=32, do_sample=False, self_speculative=requests[name])
        assert torch.equal(plain, again)
        assert model.last_speculation.refusal is None
    assert model.last_speculation.accepted_tokens > 0.5 * model.last_speculation.drafted_tokens > 0


def test_a_gguf_file_that_transformers_dequantised_is_copied(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf").eval()
    # The loader remains on the model; the weights are plain numbers.
    model.hf_quantizer = getattr(model, "hf_quantizer", None) or object()
    check_precision(model)
    enable_self_speculative(model)
    model.generation_config.eos_token_id = None
    ids = prompt()
    plain = model.generate(ids, max_new_tokens=16, do_sample=False)
    config = SelfSpeculativeConfig(precision="int8", drafting=FIXED)
    assert torch.equal(plain, model.generate(ids, max_new_tokens=16, do_sample=False, self_speculative=config))
    assert model.last_speculation.drafted_tokens > 0


class QuantLinear(nn.Module):
    """Linear layer like GPTQ's, whose weights are buffers of packed integers."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("qweight", torch.zeros(linear.weight.shape[0], 4, dtype=torch.int32))


def test_packed_buffers_are_quantised_weights() -> None:
    model = wide()
    check_precision(model)
    model.model.layers[0].mlp.up_proj = QuantLinear(model.model.layers[0].mlp.up_proj)
    check_precision(model)  # all other layers can be copied
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, QuantLinear(child))
    with pytest.raises(ValueError, match=r"they are in QuantLinear, not known.*Draft by skipping"):
        check_precision(model)


def test_copies_are_made_of_what_a_packed_layer_computes_with() -> None:
    model = packed(wide())
    weight = model.model.layers[0].mlp.up_proj.weight
    found, bias = dense(model.model.layers[0].mlp.up_proj, torch.float32)
    assert bias is None
    torch.testing.assert_close(found, weight.numbers * weight.scale, rtol=1e-6, atol=1e-6)
    enable_self_speculative(model)
    ids = prompt()
    plain = model.generate(ids, max_new_tokens=24, do_sample=False)
    for precision in ("int8", "int4"):
        config = SelfSpeculativeConfig(precision=precision, drafting=FIXED)
        assert torch.equal(plain, model.generate(ids, max_new_tokens=24, do_sample=False, self_speculative=config))
        assert model.last_speculation.accepted_tokens > 0.4 * model.last_speculation.drafted_tokens > 0


class Halved(nn.Linear):
    """Linear layer that rounds its input to 8-bit integers, with one scale per row or, if `mixes`, one for all rows."""

    mixes = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        top = x.abs().amax() if self.mixes else x.abs().amax(dim=-1, keepdim=True)
        scale = top.clamp(min=1e-9) / 127
        return nn.functional.linear((x / scale).round() * scale, self.weight)


class Alone(Halved):
    """Linear layer that gives a row the same bits whatever the other rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        return torch.stack([super(Alone, self).forward(row[None])[0] for row in flat]).view(*x.shape[:-1], -1)


class Wider(Alone):
    """Linear layer that rounds differently if there are several rows, as kernels do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        return output * (1 + 2**-22) if x.shape[-2] > 1 else output


class Cast(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x.bfloat16(), self.weight.bfloat16()).to(x.dtype)


def exchanged(kind: type[nn.Linear]) -> PreTrainedModel:
    model = wide()
    for module in model.modules():
        if type(module) is nn.Linear and module is not model.lm_head:
            module.__class__ = kind
    return model


@pytest.mark.parametrize(
    ("kind", "needed"),
    [
        (Halved, (ATTENTION, EVERYTHING)),  # depends on this machine's kernels
        (Cast, (ATTENTION, EVERYTHING)),
        (Alone, (ATTENTION,)),
        (Wider, (EVERYTHING,)),
        (type("Mixed", (Halved,), {"mixes": True, "__module__": __name__}), (EVERYTHING,)),
        (type("Own", (nn.Linear,), {"__module__": __name__}), (None,)),
    ],
)
def test_what_is_done_token_by_token(kind: type[nn.Linear], needed: tuple[str | None, ...]) -> None:
    model = exchanged(kind)
    assert least_needed(model) in needed
    enable_self_speculative(model)
    model.generation_config.eos_token_id = None
    config = SelfSpeculativeConfig(precision="int8", lookup=True, drafting=FIXED)
    for rows in (1, 2):
        inputs: dict[str, Any] = {"input_ids": prompt(8, rows), "attention_mask": torch.ones(rows, 8, dtype=torch.long)}
        inputs["attention_mask"][1:, :3] = 0
        for sampled in ({"do_sample": False}, {"do_sample": True, "top_k": 0}):
            texts = []
            for request in ({}, {"self_speculative": config}):
                torch.manual_seed(1)
                texts.append(model.generate(**inputs, max_new_tokens=60, pad_token_id=0, **sampled, **request))
            assert torch.equal(*texts)
            assert model.last_speculation.refusal is None
            assert model.last_speculation.accepted_tokens > 0


def test_attention_token_by_token_has_the_bits_of_single_tokens() -> None:
    model = wide()
    ids = prompt(20)

    def after(width: int) -> torch.Tensor:
        cache = DynamicCache(config=model.config)
        model(input_ids=ids[:, :4], **{CACHE: cache})
        parts = []
        for start in range(4, 20, width):
            with row_by_row(model, 1) if width > 1 else nullcontext():
                parts.append(model(input_ids=ids[:, start : start + width], **{CACHE: cache}).logits)
        return torch.cat(parts, dim=1)

    run_row_by_row(model, False, EVERYTHING)
    with torch.inference_mode():
        assert torch.equal(after(1), after(8))


def test_a_layer_that_is_not_linear_is_named() -> None:
    class Bent(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).abs()

    with pytest.raises(CannotRead, match="Bent is not linear"):
        dense(Bent(16, 16), torch.float32)
    model = exchanged(Bent)
    model.lm_head.__class__ = Bent
    with pytest.raises(ValueError, match=r"Low-bit copies cannot be made.*Bent is not linear.*Draft by skipping"):
        check_precision(model)


def test_measurements_hold_for_one_quantisation() -> None:
    one, other = packed(wide()), packed(wide())
    one.config.quantization_config = {"quant_method": "some", "activations": 8}
    other.config.quantization_config = {"quant_method": "some", "activations": None}
    assert key(one) != key(other)


def test_where_token_ids_go() -> None:
    model = wide()
    assert input_device(model) == torch.device("cpu")
    assert input_device(cpu_offload(model, execution_device="cpu")) == torch.device("cpu")
    assert input_device(wide().to("meta")) == torch.device("cpu")


# --- keys of stored measurements


def key(model: PreTrainedModel) -> str:
    return str(describe_model(model))


def test_measurements_are_told_apart(kinds: dict[str, Callable[[], PreTrainedModel]]) -> None:
    base = wide()
    assert key(base) == key(tiny_model("llama", seed=4, hidden_size=64, intermediate_size=128))
    others = {kind: make() for kind, make in kinds.items()}
    others["bfloat16"] = wide().to(torch.bfloat16)
    others["eager"] = tiny_model("llama", attn_implementation="eager", hidden_size=64, intermediate_size=128)
    others["dynamic"] = dynamic(wide())
    partly = wide()
    partly.model.layers[1].to(torch.float16)
    others["partly half"] = partly
    keys = {kind: key(model) for kind, model in others.items()} | {"plain": key(base)}
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        keys["threads"] = key(base)
    finally:
        torch.set_num_threads(threads)
    # Weights offloaded to the CPU or to the disk are loaded by the same kind of hook.
    assert len(set(keys.values())) >= len(keys) - 1
    assert "transformers" in describe_model(base) and "torch" in describe_model(base)["machine"]


def test_adapters_are_told_apart() -> None:
    peft = pytest.importorskip("peft")

    def with_adapter(name: str = "default") -> Any:
        config = peft.LoraConfig(target_modules=["q_proj"], r=2, task_type="CAUSAL_LM")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft's uses of deprecated names
            return peft.get_peft_model(wide(), config, adapter_name=name)

    model = with_adapter()
    used = key(model.get_base_model())
    assert used != key(wide())
    assert used == key(with_adapter().get_base_model())
    with model.disable_adapter():
        assert key(model.get_base_model()) not in (used, key(wide()))
    model.add_adapter("other", peft.LoraConfig(target_modules=["q_proj"], r=2, task_type="CAUSAL_LM"))
    model.set_adapter("other")
    assert key(model.get_base_model()) != used
