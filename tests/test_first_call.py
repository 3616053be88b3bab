"""The first streamed `"auto"` call for a model here: its text is plain, and what drafts need is prepared meanwhile."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM
from transformers.generation.streamers import BaseStreamer

from lab import first_calls
from ssd_generation import enable_self_speculative
from ssd_generation.generation import first_call
from ssd_generation.generation.first_call import FirstCallPart
from ssd_generation.generation.plain import MEASURED_MEANWHILE, NOT_MEASURED
from ssd_generation.support.model_state import state_of
from ssd_generation.tuning import automatic
from tiny_models import prompt, tiny_model

NEW = 12


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Start every test without measurements."""
    monkeypatch.setenv("SSD_GENERATION_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def made(kind: str = "llama", **changes: Any) -> Any:
    return enable_self_speculative(
        tiny_model(kind, **{"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, **changes})
    )


class Seen(BaseStreamer):
    """Records what a streamer gets."""

    def __init__(self) -> None:
        self.got: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.got.append(value.tolist())

    def end(self) -> None:
        self.got.append("end")


def stream(model: Any, streamer: BaseStreamer | None = None, **options: Any) -> tuple[Any, list[Any]]:
    seen = Seen() if streamer is None else streamer
    settings = {"input_ids": prompt(9), "max_new_tokens": NEW, "do_sample": False, **options}
    output = model.generate(**settings, streamer=seen)
    return output, getattr(seen, "got", [])


@pytest.mark.parametrize("sampling", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_first_text_is_plain_and_the_second_drafts(dtype: torch.dtype, sampling: bool) -> None:
    model = made().to(dtype)
    options = {"do_sample": sampling}
    torch.manual_seed(3)
    plain, given = stream(model, **options)
    torch.manual_seed(3)
    first, first_given = stream(model, self_speculative="auto", **options)
    after = torch.rand(1)
    assert torch.equal(first, plain) and first_given == given
    assert model.last_speculation.refusal == MEASURED_MEANWHILE and model.last_speculation.generated_tokens == NEW
    torch.manual_seed(3)
    stream(model, **options)
    assert torch.equal(torch.rand(1), after)  # the random numbers after the call, too
    torch.manual_seed(3)
    second, _ = stream(model, self_speculative="auto", **options)
    assert model.last_speculation.refusal is None and model.last_speculation.drafted_tokens > 0
    if dtype is torch.float32:
        assert torch.equal(second, plain)
    # Another process finds it stored.
    again = made().to(dtype)
    stream(again, self_speculative="auto", **options)
    assert again.last_speculation.refusal is None


def test_calls_without_a_streamer_measure_beforehand() -> None:
    model = made()
    model.generate(prompt(9), max_new_tokens=NEW, do_sample=False, self_speculative="auto")
    assert model.last_speculation.refusal is None and model.last_speculation.drafted_tokens > 0
    stream(model, self_speculative="auto")
    assert model.last_speculation.refusal is None


@pytest.mark.parametrize("streams", [False, True])
def test_calls_for_few_tokens_do_not_wait_for_measurements(streams: bool) -> None:
    model = made()
    options = {"do_sample": False, "streamer": Seen() if streams else None}
    plain = model.generate(prompt(9), max_new_tokens=8, **options)

    def refusal(new_tokens: int, **more: Any) -> str | None:
        text = model.generate(prompt(9), max_new_tokens=new_tokens, self_speculative="auto", **options, **more)
        assert torch.equal(text, plain[:, : 9 + new_tokens])
        return model.last_speculation.refusal  # type: ignore[no-any-return]

    for number in range(16):
        assert refusal(3 + number % 6) == NOT_MEASURED
        assert not automatic.is_chosen(model)
    assert refusal(5) != NOT_MEASURED and automatic.is_chosen(model)  # they have cost as much as measuring does
    assert refusal(5) is None


def test_a_longer_call_measures_for_those_for_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made()
    few = {"max_new_tokens": 5, "do_sample": False, "self_speculative": "auto"}
    model.generate(prompt(9), **few)
    assert model.last_speculation.refusal == NOT_MEASURED
    model.generate(prompt(9), **{**few, "max_new_tokens": 9})
    model.generate(prompt(9), **few)
    assert model.last_speculation.refusal is None
    # So do calls that ask for more than a text, and those whose number of tokens is not known.
    for change in ({"draft_memory": 0.5}, {"max_new_tokens": None, "max_length": 14}):
        again = made(vocab_size=99)
        monkeypatch.setattr(first_call, "is_chosen", lambda *_: False)
        again.generate(prompt(9), **{**few, **change})
        assert again.last_speculation.refusal is None


def test_calls_that_draft_always_and_memory_of_their_own() -> None:
    model = enable_self_speculative(made(), default="auto", always=True)
    stream(model, draft_memory=0)
    assert model.last_speculation.refusal == MEASURED_MEANWHILE
    for _ in range(2):
        stream(model)  # the same process measures what it lacks beforehand
        assert model.last_speculation.refusal is None
    again = made()
    stream(again, self_speculative="auto", draft_memory=0.5)  # which has not been chosen for
    assert again.last_speculation.refusal == MEASURED_MEANWHILE
    with pytest.raises(ValueError, match="draft_memory"):
        stream(model, self_speculative="auto", draft_memory=-1)


def test_a_model_that_cannot_draft_says_so_afterwards() -> None:
    model = made(attention_dropout=0.5).train()  # no two passes agree
    stream(model, self_speculative="auto")
    with pytest.warns(UserWarning, match="dropout"):
        stream(model, self_speculative="auto")
    assert "dropout" in model.last_speculation.refusal


def test_parts_take_turns_with_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    done: list[tuple[float, int]] = []

    class Slow(Seen):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            now[0] += 1.0

    slow = Slow()

    def parts(self: Any) -> Any:
        for _ in range(6):
            now[0] += 2.5
            done.append((now[0], len(slow.got)))
            yield

    monkeypatch.setattr("ssd_generation.generation.first_call.time.perf_counter", lambda: now[0])
    monkeypatch.setattr(first_call.FirstCall, "_in_parts", parts)
    model = made()
    stream(model, slow, self_speculative="auto")
    # A part follows the first token (the prompt is put first), and another one when decoding has taken twice as long.
    assert [tokens for _, tokens in done] == [2, 6, 11, 14, 14, 14]
    assert slow.got[-1] == "end" and len(slow.got) == NEW + 2


def test_a_part_that_fails_leaves_the_text_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made()
    plain, given = stream(model)

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("of the test")

    with monkeypatch.context() as patch:
        patch.setattr(first_call, "plan_passes", fails)
        first, got = stream(model, self_speculative="auto")
    assert torch.equal(first, plain) and got == given
    assert model.last_speculation.refusal == MEASURED_MEANWHILE
    assert not automatic.is_chosen(model)
    stream(model, self_speculative="auto")
    assert model.last_speculation.refusal is None and automatic.is_chosen(model)


def test_a_broken_off_text_leaves_the_rest_to_the_next_call() -> None:
    class Stops(Seen):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.got) == 3:
                raise KeyboardInterrupt

    model = made()
    with pytest.raises(KeyboardInterrupt):
        stream(model, Stops(), self_speculative="auto")
    assert not automatic.is_chosen(model)
    stream(model, self_speculative="auto")
    stream(model, self_speculative="auto")
    assert model.last_speculation.refusal is None


def test_one_thread_prepares() -> None:
    model = made()
    plain, _ = stream(model)
    holds, leaves = threading.Event(), threading.Event()

    def hold() -> None:
        with state_of(model).get(FirstCallPart).lock:
            holds.set()
            leaves.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    holds.wait()
    try:
        text, _ = stream(model, self_speculative="auto")
        assert torch.equal(text, plain) and not automatic.is_chosen(model)
    finally:
        leaves.set()
        thread.join()


def test_batches_measure_beforehand() -> None:
    model = made()
    stream(model, input_ids=prompt(9).repeat(2, 1), self_speculative="auto")
    assert model.last_speculation.refusal is None


def test_models_with_states_measure_beforehand() -> None:
    config = MambaConfig(vocab_size=128, hidden_size=32, state_size=8, num_hidden_layers=2, pad_token_id=0)
    model = enable_self_speculative(MambaForCausalLM(config).eval())
    stream(model, self_speculative="auto")
    assert model.last_speculation.refusal != MEASURED_MEANWHILE


def test_parts_leave_random_numbers_and_modules_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("qwen2")
    model.model.rope_deltas = torch.tensor([[7]])  # as a call with pictures leaves it for the next steps

    def parts(self: Any) -> Any:
        while True:
            torch.rand(3)
            self._request.model.model.rope_deltas = torch.tensor([[9]])
            yield
            if len(seen.got) > NEW:
                return

    monkeypatch.setattr(first_call.FirstCall, "_in_parts", parts)
    seen = Seen()
    torch.manual_seed(3)
    plain, _ = stream(model, do_sample=True)
    torch.manual_seed(3)
    text, _ = stream(model, seen, do_sample=True, self_speculative="auto")
    assert torch.equal(text, plain) and torch.equal(model.model.rope_deltas, torch.tensor([[7]]))


def test_the_laboratory_times_these_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    def tokenizer(text: str, **_: Any) -> dict[str, torch.Tensor]:
        return {"input_ids": prompt(9)}

    monkeypatch.setattr(first_calls, "load_model", lambda name, dtype: (tiny_model("llama"), tokenizer))
    plain, *rows = first_calls.measure_process("tiny", "float32", NEW, 2, streams=True)
    assert plain["call"] == "plain" and [row["call"] for row in rows] == ["auto, 1", "auto, 2"]
    assert all(row["first"] < row["last"] <= row["returns"] and row["same"] for row in (plain, *rows))
    # What the first call measured after its text is no part of the text's time.
    assert rows[0]["returns"] - rows[0]["last"] > rows[1]["returns"] - rows[1]["last"]
