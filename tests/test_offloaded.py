"""Models whose weights accelerate loads for each pass: their drafts have all weights in memory."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.utils import OffloadedWeightsLoader
from packaging.version import Version
from transformers import PreTrainedModel

from ssd_generation import DraftingConfig, PrecisionConfig, SelfSpeculativeConfig, SkipConfig, enable_self_speculative
from ssd_generation.drafting.policy import make_policy
from ssd_generation.forward.captured.passes import skip_mode_of
from ssd_generation.forward.copies import resident
from ssd_generation.forward.copies.low_bit import CopiesPart, copy_bytes
from ssd_generation.forward.copies.resident import FOLDER, drafting_model, why_not_resident
from ssd_generation.forward.forward import Forward
from ssd_generation.forward.structure import offloaded
from ssd_generation.forward.structure.offloaded import is_offloaded, sources_of
from ssd_generation.forward.structure.sublayers import layout_of
from ssd_generation.support import memory
from ssd_generation.support.model_state import state_of
from ssd_generation.tuning.automatic import automatic_choice
from ssd_generation.tuning.costs import costs_of
from tiny_models import prompt, tiny_model

_OF_TODAY = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"),
    reason="with older transformers and accelerate a pass loads some weights twice, and they warn on their own",
)

pytestmark = pytest.mark.filterwarnings("ignore:You are calling .generate")

INT4 = SelfSpeculativeConfig(precision="int4", drafting=DraftingConfig(policy="fixed", max_draft_length=20))
NEW = 40


def wide(family: str = "llama", **changes: Any) -> PreTrainedModel:
    return tiny_model(family, hidden_size=64, intermediate_size=128, **changes)


def tied(family: str = "llama") -> PreTrainedModel:
    """Return a model whose drafts are often right, since its texts repeat themselves."""
    model = wide(family, tie_word_embeddings=True)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    return model


def on_disk(folder: Path, model: PreTrainedModel | None = None, **options: Any) -> PreTrainedModel:
    model = disk_offload(wide() if model is None else model, str(folder), execution_device="cpu", **options)
    return enable_self_speculative(model)


class Loads:
    """Count and names of the tensors read for offloaded weights."""

    def __init__(self) -> None:
        self.count = 0
        self.names: list[str] = []


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Loads:
    found = Loads()
    original = OffloadedWeightsLoader.__getitem__

    def load(loader: Any, key: str) -> Any:
        found.count += 1
        found.names.append(key)
        return original(loader, key)

    monkeypatch.setattr(OffloadedWeightsLoader, "__getitem__", load)
    return found


def texts(model: PreTrainedModel, request: Any = INT4, rows: int = 1, **options: Any) -> tuple[Any, Any]:
    ids = prompt(6, rows).repeat(1, 2)
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, **options}
    found = []
    for extra in ({}, {"self_speculative": request}):
        torch.manual_seed(3)
        found.append(model.generate(ids, **options, **extra))
    return found[0], found[1]


def draft_of(model: PreTrainedModel) -> Any:
    return state_of(model).get(CopiesPart).resident


# --- text


FAMILIES = ["llama", "qwen2", "gemma3", "gpt2", "mixtral", "qwen3_moe"]


@pytest.mark.parametrize("family", FAMILIES)
def test_text_of_plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    monkeypatch.setattr(offloaded, "SMALL", 500)  # no matrix is small
    model = on_disk(tmp_path, tiny_model(family) if family == "gpt2" else wide(family))
    for options in ({}, {"rows": 2}, {"do_sample": True, "temperature": 1.3}):
        plain, drafted = texts(model, **options)
        assert torch.equal(plain, drafted)
        assert model.last_speculation.refusal is None and model.last_speculation.drafted_tokens > 0
    assert draft_of(model) is not None


def offloaded_otherwise(kind: str, folder: Path) -> PreTrainedModel:
    if kind == "cpu":
        return cpu_offload(wide(), execution_device="cpu")
    if kind == "buffers":
        return disk_offload(wide(), str(folder), execution_device="cpu", offload_buffers=True)
    if kind == "tied":
        return disk_offload(wide(tie_word_embeddings=True), str(folder), execution_device="cpu")
    if kind == "bfloat16":
        return disk_offload(wide().to(torch.bfloat16), str(folder), execution_device="cpu")
    places: dict[str, Any] = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.norm"), "cpu")
    places |= {"lm_head": "disk"} | {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(4)}
    return dispatch_model(wide(), places, main_device="cpu", offload_dir=str(folder), force_hooks=True)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["cpu", "buffers", "tied", "bfloat16", "mixed"])
def test_ways_to_offload(tmp_path: Path, kind: str) -> None:
    model = enable_self_speculative(offloaded_otherwise(kind, tmp_path))
    plain, drafted = texts(model)
    assert torch.equal(plain, drafted)
    assert model.last_speculation.drafted_tokens > 0
    assert all(p.device.type == "cpu" for p in draft_of(model).model.parameters())
    assert (tmp_path / FOLDER).exists() is (kind != "cpu")  # weights in memory cannot be recognised by a later process


@pytest.mark.parametrize("family", ["llama", "qwen2"])  # qwen2 has biases
@pytest.mark.parametrize("skip", [SkipConfig(), SkipConfig(attention=[1], mlp=[2])])
def test_the_draft_is_that_of_the_model_in_memory(tmp_path: Path, skip: SkipConfig, family: str) -> None:
    config = SelfSpeculativeConfig(skip, precision="int4", drafting=INT4.drafting)
    in_memory, model = enable_self_speculative(tied(family)), on_disk(tmp_path, tied(family))
    drafted = []
    for one in (in_memory, model):
        texts(one, config)
        said = one.last_speculation
        drafted.append((said.drafted_tokens, said.accepted_tokens, said.target_passes))
    assert drafted[0] == drafted[1] and drafted[0][1] > NEW // 2
    copies = next(iter(state_of(draft_of(model).model).get(CopiesPart).low_bit_drafts.values()))
    (passes,) = copies.passes.values()
    assert passes.refusal is None and passes.program(1) is not None
    # By the modules' own code the draft is the same but for the rounding of the embedding.
    ids = prompt(6)
    logits = []
    for one in (in_memory, drafting_model(model, config)):
        with torch.inference_mode(), skip_mode_of(one, config)[0]:
            logits.append(one(ids, use_cache=False).logits)
    assert (logits[0] - logits[1]).norm() < 0.05 * logits[0].norm()


# --- reads of offloaded weights


@_OF_TODAY
def test_drafts_read_no_offloaded_weight(tmp_path: Path, loads: Loads, monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_disk(tmp_path)
    texts(model)
    streamed = len(sources_of(model))
    counts = []
    original = Forward.draft

    def draft(*args: Any, **kwargs: Any) -> Any:
        passes = original(*args, **kwargs)
        call, kind = type(passes).__call__, type(passes)

        class Counted(kind):  # type: ignore[misc,valid-type]
            def __call__(self, *args: Any) -> Any:
                before = loads.count
                result = call(self, *args)
                counts.append(loads.count - before)
                return result

        passes.__class__ = Counted
        return passes

    monkeypatch.setattr(Forward, "draft", draft)
    for rows in (1, 2):
        ids = prompt(6, rows).repeat(1, 2)
        before = loads.count
        model.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None, self_speculative=INT4)
        # One pass over the prompt, and one for each round.
        # A cost measured while the machine was busy is measured again, which reads weights, too.
        assert loads.count - before >= streamed * model.last_speculation.target_passes
    assert len(counts) > 40 and set(counts) == {0}


@pytest.mark.measures
def test_choosing_takes_no_pass(tmp_path: Path, loads: Loads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloaded, "SMALL", 100)
    monkeypatch.setenv("SSD_GENERATION_CACHE", str(tmp_path / "measured"))  # without other tests' measurements
    model = on_disk(tmp_path)
    passes: list[int] = []
    monkeypatch.setattr(type(model.model), "forward", noted(type(model.model).forward, model.model, passes))
    small = loads.count  # the norms, read when drafting was enabled
    assert small == sum(p.numel() <= 100 for p in model.parameters())
    model.generate(prompt(6), max_new_tokens=3, do_sample=False, self_speculative=INT4)
    assert len(passes) == model.last_speculation.target_passes
    before, made = loads.count, len(passes)
    config = SelfSpeculativeConfig(precision="int4")
    costs_of(model, config)
    automatic_choice(model, prompt(6))
    assert len(passes) == made
    assert loads.count - before < len(sources_of(model))


def noted(original: Any, module: Any, passes: list[int]) -> Any:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self is module:
            passes.append(1)
        return original(self, *args, **kwargs)

    return forward


@pytest.mark.measures
def test_the_price_of_a_streamed_pass_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = OffloadedWeightsLoader.__getitem__
    now = 0.0

    def slow(loader: Any, key: str) -> Any:
        nonlocal now
        now += 0.02
        return original(loader, key)

    def clock() -> float:
        nonlocal now
        now += 0.001
        return now

    # Reading a weight takes 20 ms; anything else between two readings of the clock takes 1 ms.
    monkeypatch.setattr(time, "perf_counter", clock)

    monkeypatch.setenv("SSD_GENERATION_CACHE", str(tmp_path / "measured"))  # without other tests' measurements
    model = on_disk(tmp_path)
    monkeypatch.setattr(OffloadedWeightsLoader, "__getitem__", slow)
    choice = automatic_choice(model, prompt(6), draft_memory=100.0)
    config = choice.config
    assert choice.precision == "int4" and not config.adapt and config.costs is not None
    assert config.costs.draft_step < 0.1 * config.costs.plain_step
    assert config.drafting.max_draft_length == 64
    # The costs alone, whatever the acceptance rate of this model's drafts is.
    policy = make_policy(config.drafting, config.costs)
    assert policy.draft_length(100) >= 16


# --- stored copies


def test_copies_are_read_by_the_next(tmp_path: Path) -> None:
    first = on_disk(tmp_path)
    plain, _ = texts(first)
    assert draft_of(first).made > 0 and draft_of(first).read == 0
    again = on_disk_again(tmp_path)
    assert torch.equal(plain, texts(again)[1])
    assert draft_of(again).made == 0 and draft_of(again).read == draft_of(first).made
    assert copy_bytes(again) == copy_bytes(first) > 0


def on_disk_again(folder: Path) -> PreTrainedModel:
    """Return the model with the weights offloaded to a folder, as another process would load it."""

    model = wide()
    assert OffloadedWeightsLoader(save_folder=str(folder)).index
    state = {name: {"dtype": "float32", "shape": list(p.shape)} for name, p in model.state_dict().items()}
    places: dict[str, Any] = {"main_device": "cpu", "offload_dir": str(folder), "offload_index": state}
    return enable_self_speculative(dispatch_model(model, {"": "disk"}, **places, force_hooks=True))


@pytest.mark.parametrize("damage", ["cut", "other", "nothing in it"])
def test_a_damaged_copy_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    first = on_disk(tmp_path)
    plain, _ = texts(first)
    files = sorted((tmp_path / FOLDER).glob("*.safetensors"))
    if damage == "other":
        files.sort(key=lambda path: path.stat().st_size)
        shutil.copy(files[-1], files[0])
    else:
        files[0].write_bytes(files[0].read_bytes()[:100] if damage == "cut" else b"")
    again = on_disk_again(tmp_path)
    assert torch.equal(plain, texts(again)[1])
    assert draft_of(again).made >= 1
    assert "making it again" in caplog.text
    assert torch.equal(plain, texts(third := on_disk_again(tmp_path))[1])
    assert draft_of(third).made == 0


def test_weights_that_changed_are_copied_again(tmp_path: Path) -> None:
    model = on_disk(tmp_path)
    texts(model)
    before = draft_of(model)
    name = "model.layers.1.mlp.up_proj.weight"
    path = tmp_path / f"{name}.dat"
    values = torch.from_file(str(path), shared=True, size=path.stat().st_size // 4)
    values.mul_(-1)
    del values
    os.utime(path, ns=(1, 1))
    plain, drafted = texts(model)
    assert torch.equal(plain, drafted)
    assert draft_of(model) is not before and draft_of(model).made == 1
    # No old copy is left.
    assert len(list((tmp_path / FOLDER).iterdir())) == draft_of(model).made + draft_of(model).read + 1


def test_a_map_whose_weights_are_exchanged() -> None:
    model = enable_self_speculative(cpu_offload(wide(), execution_device="cpu"))
    texts(model)
    before = draft_of(model)
    source = sources_of(model)["model.layers.1.mlp.up_proj.weight"]
    held, key = source._innermost()
    for change in ("another", "in place"):
        if change == "another":
            held[key] = -held[key]
        else:
            held[key].mul_(-1.5)
        plain, drafted = texts(model)
        assert torch.equal(plain, drafted)
        assert draft_of(model) is not before
        before = draft_of(model)
    texts(model)
    assert draft_of(model) is before


KILLED = """
import sys
sys.path.insert(0, {tests!r})
import torch
from pathlib import Path
from ssd_generation.forward.copies import resident
from test_offloaded import INT4, on_disk, prompt

def save(tensors, path, original=resident.save_file):
    original(tensors, path)
    if len(list(Path(path).parent.glob("[!.]*"))) == 3:
        data = Path(path).read_bytes()
        Path(path).write_bytes(data[: len(data) // 2])
        print("now", flush=True)
        import time
        time.sleep(60)

resident.save_file = save
model = on_disk(Path({folder!r}))
model.generate(prompt(6), max_new_tokens=3, do_sample=False, self_speculative=INT4)
"""


def test_killed_while_copies_are_written(tmp_path: Path) -> None:
    code = textwrap.dedent(KILLED).format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "now\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    left = list((tmp_path / FOLDER).iterdir())
    assert len(left) == 4 and sum(path.name.startswith(".ssd-") for path in left) == 1
    model = on_disk_again(tmp_path)
    plain, drafted = texts(model)
    assert torch.equal(plain, drafted)
    assert draft_of(model).read == 3 and draft_of(model).made > 0
    assert torch.equal(plain, texts(again := on_disk_again(tmp_path))[1])
    assert draft_of(again).made == 0


def test_what_a_killed_process_left_is_taken_away(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir()
    old, young = (folder / f".ssd-{digit * 32}.safetensors" for digit in "ab")
    old.write_bytes(b"half")
    young.write_bytes(b"half")
    os.utime(old, (1, 1))
    texts(on_disk(tmp_path))
    assert not old.exists() and young.exists()


# --- bad input


@_OF_TODAY
def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("a file where the folder should be")
    model = on_disk(tmp_path)
    with pytest.warns(UserWarning, match=r"could not be stored in .*they are in memory for this process") as given:
        plain, drafted = texts(model)
    assert len(given) == 1
    assert torch.equal(plain, drafted) and model.last_speculation.drafted_tokens > 0
    texts(model)  # without a warning


def test_a_folder_that_disappears(tmp_path: Path) -> None:
    folder = tmp_path / "offloaded"
    folder.mkdir()
    model = on_disk(folder)
    texts(model)
    folder.rename(tmp_path / "elsewhere")
    for request in (INT4, "auto", SelfSpeculativeConfig(lookup=True)):
        with pytest.raises(ValueError, match=r"offloaded to .*which is missing.*load the model again"):
            model.generate(prompt(6), max_new_tokens=4, self_speculative=request)
    (tmp_path / "elsewhere").rename(folder)
    plain, drafted = texts(model)
    assert torch.equal(plain, drafted)


def test_copies_that_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_disk(tmp_path)
    monkeypatch.setattr(resident, "available_bytes", lambda: 1000)
    with pytest.raises(
        ValueError, match=r"do not fit into memory: next to the largest layer.*0.00 GB of memory are free"
    ):
        texts(model)
    with pytest.warns(UserWarning, match="by prompt lookup alone: no low-bit copies fit"):
        plain, drafted = texts(model, "auto")
    assert torch.equal(plain, drafted) and draft_of(model) is None
    texts(model, "auto")  # without a warning
    with pytest.raises(ValueError, match=r"draft_memory=0\.01` allows no more"):
        model.generate(prompt(), self_speculative=INT4, draft_memory=0.01)
    monkeypatch.setattr(resident, "available_bytes", lambda: None)
    assert torch.equal(plain, texts(model)[1])


def test_a_patched_forward_has_no_draft(tmp_path: Path) -> None:
    model = wide()
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda x: 0 * x  # type: ignore[method-assign]
    disk_offload(model, str(tmp_path), execution_device="cpu")
    assert why_not_resident(model) == "the forward of LlamaMLP is patched"
    enable_self_speculative(model)
    with pytest.raises(ValueError, match=r"No low-bit copies can be made of the offloaded weights.*is patched"):
        texts(model)
    plain, drafted = texts(model, SelfSpeculativeConfig(lookup=True))
    assert torch.equal(plain, drafted)


def test_layers_are_found_without_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloaded, "SMALL", 100)
    in_memory = layout_of(wide("gemma2"))
    model = on_disk(tmp_path, wide("gemma2"))
    found = layout_of(model)
    assert is_offloaded(model) and len(found) == len(in_memory) and found.refusal is None
    own = {id(module) for module in model.modules()}
    for one, other in zip(found.layers, in_memory.layers, strict=True):
        assert one.can_be_bypassed == other.can_be_bypassed and one.output_length == other.output_length
        for sub, wanted in ((one.attention, other.attention), (one.mlp, other.mlp)):
            assert sub is not None and wanted is not None
            assert (sub.name, sub.output_length) == (wanted.name, wanted.output_length)
            assert len(sub.private_norms) == len(wanted.private_norms)
            assert {id(m) for m in (*sub.modules, *sub.private_norms)} <= own


def test_other_precisions_replace_the_copies(tmp_path: Path) -> None:
    model = on_disk(tmp_path)
    plain, _ = texts(model)
    whole = copy_bytes(model)
    partly = SelfSpeculativeConfig(precision=PrecisionConfig(mlp={1: "int8"}), drafting=INT4.drafting)
    assert torch.equal(plain, texts(model, partly)[1])
    # A weight without a low-bit copy is in memory unchanged.
    assert copy_bytes(model) > 2 * whole
    assert torch.equal(plain, texts(model)[1])
    assert copy_bytes(model) == whole and draft_of(model).made == 0


# --- memory


def test_available_memory(tmp_path: Path) -> None:
    assert memory.available_bytes() is None or memory.available_bytes() > 0  # type: ignore[operator]
    root = tmp_path / "cgroup"
    for version, folder in (("2", root / "a" / "b"), ("1", root / "memory" / "a" / "b")):
        folder.mkdir(parents=True)
        limit, used, line, prefix = {
            "2": ("memory.max", "memory.current", "0::/a/b", ""),
            "1": ("memory.limit_in_bytes", "memory.usage_in_bytes", "4:memory:/a/b", "total_"),
        }[version]
        (folder / limit).write_text("max\n")
        (folder / used).write_text("900\n")
        (folder.parent / limit).write_text("1000\n")
        (folder.parent / used).write_text("950\n")
        (folder.parent / "memory.stat").write_text(f"{prefix}inactive_file 100\n{prefix}active_file 20\nanon 5\n")
        own = tmp_path / f"own{version}"
        own.write_text(f"3:cpuset:/\n{line}\n")
        assert list(memory._of_the_groups(root, own)) == [170]
    assert list(memory._of_the_groups(root, tmp_path / "none")) == []
