"""`ssd chat`: each answer is that of plain `generate` over the whole conversation, however much of it is read again."""

from __future__ import annotations

import io
import json
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ssd_generation import DraftingConfig, SelfSpeculativeConfig, SkipConfig, enable_self_speculative
from ssd_generation.chat.conversation import Conversation, Turn
from ssd_generation.chat.kept_cache import KeptCache
from ssd_generation.chat.streamer import PieceStreamer
from ssd_generation.cli import chat_run, chat_view
from ssd_generation.cli.console import Screen
from ssd_generation.decoding.ends import StopRequest
from ssd_generation.support.token_lists import shared_prefix
from test_cli import SKIP, TEMPLATE, Run, tiny_tokenizer
from test_cli import folder as folder  # the fixture
from test_cli import ssd as ssd  # the fixture
from tiny_models import WINDOW, tiny_model

QUESTIONS = ["the rain", "a river runs", "what falls?"]
CONFIG = SelfSpeculativeConfig(
    SkipConfig(attention=[1], mlp=[2]), DraftingConfig(policy="fixed", max_draft_length=3), lookup=True
)
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
SAMPLED: dict[str, Any] = {"max_new_tokens": 12, "do_sample": True, "temperature": 1.3, "top_k": 20}

# Only the first two characters of an earlier answer, as in templates that leave out its reasoning.
FORGETFUL = TEMPLATE.replace("m['content'] +", "(m['content'][:2] if m['role'] == 'assistant' else m['content']) +")


def talker(
    family: str = "llama", arguments: dict[str, Any] = GREEDY, template: str = TEMPLATE, **options: Any
) -> Conversation:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    config = options.pop("config", CONFIG)
    model = options.pop("model", None) or tiny_model(family, vocab_size=len(tokenizer))
    return Conversation(enable_self_speculative(model), tokenizer, config, arguments, **options)


def ask(
    conversation: Conversation, question: str, write: Callable[[str, str], None] = lambda text, origin: None
) -> Turn | None:
    stop = StopRequest()
    return conversation.ask(question, PieceStreamer(conversation.tokenizer, write), stop)


def plain_answer(conversation: Conversation, number: int, arguments: dict[str, Any], seed: int = 0) -> list[int]:
    """Return plain `generate`'s answer in that turn, with the whole conversation read again."""
    model, tokenizer = conversation._model, conversation.tokenizer
    first = len(conversation.messages) - 2 * len(conversation.turns)
    messages = conversation.messages[: first + 2 * number + 1]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    torch.manual_seed(seed + number)
    ids = model.generate(**inputs, **arguments)
    found: list[int] = ids[0, inputs["input_ids"].shape[1] :].tolist()
    return found


def check_turns(conversation: Conversation, arguments: dict[str, Any], seed: int = 0) -> list[Turn]:
    for question in QUESTIONS:
        assert ask(conversation, question) is not None
    for number, turn in enumerate(conversation.turns):
        assert turn.token_ids == plain_answer(conversation, number, arguments, seed)
    assert [turn.question for turn in conversation.turns] == QUESTIONS
    return conversation.turns


# --- the text -------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("system", [None, "be brief"])
def test_turns_share_a_cache_and_say_what_plain_says(arguments: dict[str, Any], system: str | None) -> None:
    first, *later = check_turns(talker(arguments=arguments, system=system, seed=7), arguments, seed=7)
    assert first.cached_tokens == 0
    # At least the tokens before the answer; the answer may be tokenised differently when its text is read again.
    assert all(turn.cached_tokens >= first.prompt_tokens - 1 for turn in later), later
    assert all(turn.statistics is not None and turn.statistics.drafted_tokens for turn in later)


@pytest.mark.parametrize("template", [FORGETFUL, TEMPLATE.replace("m['content']", "m['content'] | trim")])
def test_a_template_that_rewrites_earlier_turns(template: str) -> None:
    turns = check_turns(talker(template=template), GREEDY)
    if template is FORGETFUL:
        # Up to the answer that the template now renders differently.
        assert 0 < turns[1].cached_tokens <= turns[0].prompt_tokens + 2


@pytest.mark.parametrize("family", ["gpt2", "mistral", "gemma2", "llama4", "gpt_oss"])
def test_other_layers(family: str) -> None:
    check_turns(talker(family), GREEDY)


def test_recurrent_states_are_read_anew() -> None:
    if not hasattr(tf, "Lfm2Config"):
        pytest.skip("this transformers has no such model")
    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    config = tf.Lfm2Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, layer_types=["conv", "full_attention"] * 2, pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    model = tf.Lfm2ForCausalLM(config).eval()
    turns = check_turns(talker(model=model, config=SelfSpeculativeConfig(lookup=True)), GREEDY)
    assert [turn.cached_tokens for turn in turns] == [0, 0, 0]


def test_a_rotary_embedding_that_changes_is_read_anew() -> None:
    tokenizer = tiny_tokenizer()
    parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    model = tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=96, rope_parameters=parameters)
    arguments = {**GREEDY, "max_new_tokens": 5}
    turns = check_turns(talker(model=model, arguments=arguments), arguments)
    assert [turn.cached_tokens for turn in turns] == [0, 0, 0]


# --- the cache ------------------------------------------------------------------------------------


def cache_of(length: int, window: int | None = None) -> DynamicCache:
    cache = DynamicCache()
    cache.layer_class_to_replicate = None
    cache.layers = [DynamicLayer(), DynamicLayer() if window is None else DynamicSlidingWindowLayer(window)]
    for layer in cache.layers:
        layer.update(torch.arange(length * 2.0).reshape(1, 1, length, 2), torch.zeros(1, 1, length, 2))
    return cache


@pytest.fixture
def kept() -> KeptCache:
    return KeptCache(tiny_model())


def test_a_cache_is_cut_to_what_both_texts_begin_with(kept: KeptCache) -> None:
    kept.keep(cache_of(6), [1, 2, 3, 4, 5, 6, 7])
    cache, held = kept.take([1, 2, 3, 9, 5, 6])
    assert held == 3 and [layer.get_seq_length() for layer in cache.layers] == [3, 3]
    assert cache.layers[0].keys.flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert kept.take([1, 2, 3, 9, 5, 6]) == (None, 0), "a call has it now"


def test_the_last_token_is_read_in_any_case(kept: KeptCache) -> None:
    kept.keep(cache_of(6), [1, 2, 3, 4, 5, 6, 7])
    assert kept.take([1, 2, 3, 4])[1] == 3
    kept.keep(cache_of(6), [1, 2, 3, 4, 5, 6, 7])
    assert kept.take([2, 2]) == (None, 0)


def test_a_full_window_is_not_cut(kept: KeptCache) -> None:
    ids = list(range(20))
    for length, window, surplus, is_of_use in ((6, 8, 2, True), (12, 8, 0, True), (12, 8, 1, False)):
        kept.keep(cache_of(length, window), ids)
        text = [*ids[: length - surplus], 99, 98]
        assert (kept.take(text)[1] == length - surplus) is is_of_use


def test_what_cannot_be_continued_is_dropped(kept: KeptCache) -> None:
    class Own(DynamicCache):  # type: ignore[misc]
        pass

    class OwnLayer(DynamicLayer):  # type: ignore[misc]
        pass

    strange = cache_of(4)
    strange.layers[0] = OwnLayer()
    uneven = cache_of(4)
    uneven.layers[0].crop(-1)
    for cache in (None, Own(), DynamicCache(), strange, uneven, cache_of(9)):
        kept.keep(cache, [1, 2, 3, 4, 5])
        assert kept.take([1, 2, 3, 4, 5, 6]) == (None, 0)


def test_shared_prefix() -> None:
    assert shared_prefix([], [1]) == 0 == shared_prefix([2], [1])
    assert shared_prefix([1, 2], [1, 2, 3]) == 2 == shared_prefix([1, 2, 3], [1, 2])


# --- stopping -------------------------------------------------------------------------------------


def test_a_stopped_answer_stays_as_far_as_it_came() -> None:
    conversation = talker(arguments={**GREEDY, "max_new_tokens": 60})
    ask(conversation, QUESTIONS[0])
    stop, said = StopRequest(), []

    def write(text: str, origin: str) -> None:
        said.append(text)
        if len(said) == 5:
            stop.ask()

    turn = conversation.ask(QUESTIONS[1], PieceStreamer(conversation.tokenizer, write), stop)
    assert turn is not None and turn.ended_by == "stop" and turn.answer == "".join(said)
    whole = plain_answer(conversation, 1, {**GREEDY, "max_new_tokens": 60})
    assert 0 < len(turn.token_ids) < len(whole) and whole[: len(turn.token_ids)] == turn.token_ids
    after = ask(conversation, QUESTIONS[2])
    assert after is not None and after.cached_tokens > turn.prompt_tokens
    assert after.token_ids == plain_answer(conversation, 2, {**GREEDY, "max_new_tokens": 60})


@pytest.mark.parametrize("drafts", [True, False])
def test_an_answer_is_cut_off_in_the_middle_of_a_pass(drafts: bool) -> None:
    config = CONFIG if drafts else SelfSpeculativeConfig(drafting=DraftingConfig(policy="none"))
    conversation = talker(config=config)
    ask(conversation, QUESTIONS[0])
    said: list[str] = []

    def write(text: str, origin: str) -> None:
        said.append(text)
        if len(said) == 4:
            raise KeyboardInterrupt

    turn = ask(conversation, QUESTIONS[1], write)
    assert turn is not None and turn.ended_by == "stop" and turn.statistics is None
    after = ask(conversation, QUESTIONS[2])
    assert after is not None and after.cached_tokens == 0
    assert after.token_ids == plain_answer(conversation, 2, GREEDY)


def test_a_turn_without_a_token_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = talker()

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(conversation._model), "generate", interrupted)
        assert ask(conversation, QUESTIONS[0]) is None
    assert conversation.messages == []
    check_turns(conversation, GREEDY)


def test_a_conversation_ends_where_the_model_does() -> None:
    model = tiny_model("llama", vocab_size=len(tiny_tokenizer()), max_position_embeddings=40)
    conversation = talker(model=model, arguments={**GREEDY, "max_new_tokens": 100})
    first = ask(conversation, "the rain")
    assert first is not None and first.ended_by == "length"
    assert first.prompt_tokens + len(first.token_ids) == 40
    with pytest.raises(ValueError, match=r"context is 40\. /reset starts over"):
        ask(conversation, "and then?")
    assert conversation.turns == [first]
    conversation.reset()
    assert ask(conversation, "the rain").token_ids == first.token_ids  # type: ignore[union-attr]


# --- pieces ---------------------------------------------------------------------------------------


def test_pieces_add_up_and_know_where_they_came_from() -> None:
    conversation = talker()
    pieces: list[tuple[str, str]] = []
    turn = ask(conversation, QUESTIONS[0], lambda text, origin: pieces.append((text, origin)))
    assert turn is not None and turn.statistics is not None
    assert "".join(text for text, _ in pieces) == turn.answer
    told = {"drafted": "drafted and accepted", "looked up": "looked up and accepted"}
    sources = {told.get(source, "decided by the target") for source in turn.statistics.token_sources[0]}
    assert {origin for _, origin in pieces} <= sources


def test_colours_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(file=io.StringIO(), force_terminal=True, color_system="standard", width=60)
    monkeypatch.setattr(chat_view, "out", lambda: screen)
    for shows, expected in ((True, "\x1b[32mrain\n\x1b[0m"), (False, "rain\n")):
        view = chat_view.ChatView(is_interactive=True, shows_origins=shows, is_silent=False)
        view.write("rain\n", "drafted and accepted")
        view.write("\x1b[2J", "decided by the target")
        shown = screen.file.getvalue()  # type: ignore[attr-defined]
        assert shown.replace("\x1b[32mrain\x1b[0m\n", expected).startswith(expected)
        assert "\\x1b[2J" in shown and "\x1b[2J" not in shown
        screen.file = io.StringIO()


# --- the command ----------------------------------------------------------------------------------


def said_by(folder: str, questions: Sequence[str]) -> list[str]:
    conversation = talker(model=AutoModelForCausalLM.from_pretrained(folder))
    for question in questions:
        ask(conversation, question)
    return [turn.answer for turn in check_turns_of(conversation)]


def check_turns_of(conversation: Conversation) -> list[Turn]:
    for number, turn in enumerate(conversation.turns):
        assert turn.token_ids == plain_answer(conversation, number, GREEDY)
    return conversation.turns


SHORT = ["--max-new-tokens", "12"]


def test_a_pipe_gets_the_answers_alone(ssd: Callable[..., Run], folder: str) -> None:
    run = ssd("chat", folder, *SKIP, *SHORT, stdin="the rain\n\na river runs\n")
    assert run.status == 0, run.err
    assert run.out == "".join(f"{answer}\n" for answer in said_by(folder, QUESTIONS[:2]))
    assert "\x1b" not in run.out + run.err and ">" not in run.err
    assert run.err.count("12 tokens in") == 2 and "prompt tokens from the cache" in " ".join(run.err.split())


def test_json_is_the_conversation(ssd: Callable[..., Run], folder: str, tmp_path: Path) -> None:
    file = tmp_path / "it all.json"
    lines = f"the rain\n/reset\nthe rain\na river runs\n/save {file}\n/exit\nnobody reads this\n"
    run = ssd("chat", folder, *SKIP, *SHORT, "--json", "--system", "be brief", stdin=lines)
    document = run.json
    assert document == json.loads(file.read_text(encoding="utf-8"))
    assert [message["role"] for message in document["messages"]] == ["system", *["user", "assistant"] * 2]
    assert [answer["tokens"] for answer in document["answers"]] == [12, 12]
    assert document["answers"][1]["cached_tokens"] > 0 == document["answers"][0]["cached_tokens"]
    assert document["decoding"] == GREEDY and document["config"]["skip"] == {"attention": [1], "mlp": [2]}


def test_sampled_by_a_seed(ssd: Callable[..., Run], folder: str) -> None:
    common = ["chat", folder, *SKIP, *SHORT, "--json", "--temperature", "1.5"]
    first, again, other = (
        ssd(*common, "--seed", seed, stdin="the rain\nthe rain\n").json["messages"] for seed in ("1", "1", "2")
    )
    assert first == again != other


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("/save", "/save needs the name of a file"),
        ("/save {}/none/it.json", "there is no folder"),
        ("/safe it.json", "There is no command '/safe'"),
    ],
)
def test_commands_that_cannot_be_obeyed(
    ssd: Callable[..., Run], folder: str, tmp_path: Path, line: str, complaint: str
) -> None:
    run = ssd("chat", folder, *SKIP, *SHORT, stdin=line.format(tmp_path) + "\n")
    assert run.status == 2 and complaint in run.err and run.out == ""


def test_a_model_without_a_template(ssd: Callable[..., Run], folder: str, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "base")
    common = ["chat", str(tmp_path / "base"), *SKIP, *SHORT]
    run = ssd(*common, stdin="the rain\n")
    assert run.status == 2 and "has no chat template" in run.err and "--chat-template FILE" in run.err
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    run = ssd(*common, "--chat-template", str(template), stdin="the rain\n")
    assert run.out == said_by(folder, QUESTIONS[:1])[0] + "\n"


def test_a_template_that_refuses(ssd: Callable[..., Run], folder: str, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% if messages | length > 1 %}{{ raise_exception('one turn only') }}{% endif %}" + TEMPLATE)
    run = ssd("chat", folder, *SKIP, *SHORT, "--chat-template", str(template), stdin="the rain\nand then?\n")
    assert run.status == 2 and run.out.count("\n") >= 1 and "one turn only" in run.err


# --- interactive input ----------------------------------------------------------------------------


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that makes standard input yield lines, or raise errors in their place."""

    def types(*lines: str | type[BaseException]) -> None:
        waiting: Iterator[str | type[BaseException]] = iter([*lines, EOFError])

        def read(prompt: str = "") -> str:
            line = next(waiting)
            if not isinstance(line, str):
                raise line
            return line

        monkeypatch.setattr("builtins.input", read)
        monkeypatch.setattr(chat_run, "_somebody_types", lambda: True)

    return types


def test_a_typed_conversation(ssd: Callable[..., Run], folder: str, typed: Callable[..., None]) -> None:
    typed("the rain", "/nonsense", "/save", "/help", "", "a river\\", " runs", "/reset", "the rain", EOFError)
    run = ssd("chat", folder, *SKIP, *SHORT)
    assert run.status == 0
    rain = said_by(folder, ["the rain"])[0]
    assert run.out == "".join(f"{text}\n" for text in (*said_by(folder, ["the rain", "a river\n runs"]), rain))
    for said in ("/help lists the commands", "no command '/nonsense'", "/save needs", "/save FILE", "starts over"):
        assert said in " ".join(run.err.split())


def test_ctrl_c_at_the_prompt(ssd: Callable[..., Run], folder: str, typed: Callable[..., None]) -> None:
    typed(KeyboardInterrupt, "the rain", KeyboardInterrupt, KeyboardInterrupt, "not read")
    run = ssd("chat", folder, *SKIP, *SHORT)
    assert run.status == 130 and run.err.count("Ctrl-C once more") == 2
    assert run.out == said_by(folder, ["the rain"])[0] + "\n"


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_stops_an_answer(
    ssd: Callable[..., Run], folder: str, typed: Callable[..., None], monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    real, count = chat_view.ChatView.write, [0]

    def write(self: chat_view.ChatView, text: str, origin: str) -> None:
        real(self, text, origin)
        count[0] += 1
        if count[0] == 4:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(chat_view.ChatView, "write", write)
    typed("the rain", "/exit")
    run = ssd("chat", folder, *SKIP, "--max-new-tokens", "40")
    assert run.status == 0 and "stopped" in run.err
    assert len(run.out) > 0 and said_by_at_length(folder).startswith(run.out.rstrip("\n"))
    assert signal.getsignal(signal.SIGINT) is before


def said_by_at_length(folder: str) -> str:
    conversation = talker(model=AutoModelForCausalLM.from_pretrained(folder), arguments=GREEDY | {"max_new_tokens": 40})
    turn = ask(conversation, "the rain")
    assert turn is not None and len(turn.token_ids) > WINDOW
    return turn.answer


def test_ctrl_c_in_a_pipe_ends_it(ssd: Callable[..., Run], folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(self: chat_view.ChatView, text: str, origin: str) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(chat_view.ChatView, "write", write)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in background jobs
    try:
        assert ssd("chat", folder, *SKIP, *SHORT, stdin="the rain\na river runs\n").status == 130
    finally:
        signal.signal(signal.SIGINT, before)
