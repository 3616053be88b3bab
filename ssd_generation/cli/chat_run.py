"""What `ssd chat` does: load, choose a draft, then read, answer and obey, turn by turn."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .chat_view import ChatView
from .console import print_error, progress
from .generate_run import AnswerRequest, Draft, choose_draft, draft_of

if TYPE_CHECKING:
    from ..chat.conversation import Conversation
    from .chat_options import ChatShowOptions

__all__ = ["ChatRequest", "run"]

_FIRST = 8
"""New tokens of the call that prepares the others."""


@dataclass(frozen=True, kw_only=True)
class ChatRequest(AnswerRequest):
    """What was asked for, checked as far as that goes without the model.

    Attributes:
        show: the options' group.
        template: a chat template in the place of the tokenizer's; `None`: that one.
        threads: CPU threads; `None`: torch's.
    """

    show: ChatShowOptions
    template: str | None
    threads: int | None


def run(request: ChatRequest) -> dict[str, Any]:
    """Talk until the user leaves.

    Returns:
        The conversation, as `/save` writes it.
    """
    from ..chat.conversation import Conversation, check_template
    from ..generation import enable_self_speculative
    from .generate import DEFAULT_PROMPT
    from .loading import encode, load, set_threads

    set_threads(request.threads)
    target, tokenizer = load(request.model)
    if request.template is not None:
        tokenizer.chat_template = request.template
    check_template(tokenizer)
    target = enable_self_speculative(target)
    # Measured before the first turn, on any text: nobody waits for it while a question is open.
    example = encode(tokenizer, DEFAULT_PROMPT, request.decoding.system, True)["input_ids"].to(target.device)
    config, choice = choose_draft(request, target, example)
    conversation = Conversation(
        target, tokenizer, config, request.generate_arguments, request.decoding.system, request.seed
    )
    is_interactive = _somebody_types() and not request.show.as_json
    view = ChatView(is_interactive, request.show.show_draft, request.show.as_json)
    if is_interactive:
        with progress("Preparing"):
            # What a first call makes and checks, no answer has to wait for.
            target.generate(example, max_new_tokens=_FIRST, do_sample=False, self_speculative=config)
    dialogue = Dialogue(request, conversation, view, is_interactive)
    dialogue.run(draft_of(target, config, choice))
    return dialogue.document()


def _somebody_types() -> bool:
    return sys.stdin.isatty()


class Dialogue:
    """Read what the user says, and do it.

    Args:
        request: what was asked for.
        conversation: with the model.
        view: shows it.
        is_interactive: somebody types: an error or a Ctrl-C does not end the dialogue.
    """

    def __init__(self, request: ChatRequest, conversation: Conversation, view: ChatView, is_interactive: bool) -> None:
        self._request, self._conversation, self._view = request, conversation, view
        self._is_interactive = is_interactive
        self._commands: dict[str, Callable[[str], None]] = {
            "/reset": self._reset,
            "/save": self._save,
            "/help": lambda rest: view.help(),
        }

    def run(self, draft: Draft) -> None:
        """Go on until the user leaves.

        Args:
            draft: what the model drafts with.

        Raises:
            KeyboardInterrupt: Ctrl-C twice where the user was to say something; in a pipe once, anywhere.
        """
        self._view.begin(self._request.model.model, draft)
        has_interrupted = False
        while True:
            try:
                said = self._view.read()
                has_interrupted = False
                if said is None or said.strip() == "/exit":
                    return
                if said.strip():
                    self._obey(said)
            except KeyboardInterrupt:
                if has_interrupted or not self._is_interactive:
                    raise
                has_interrupted = True
                self._view.say("\nCtrl-C once more, /exit or Ctrl-D leaves.")

    def _obey(self, said: str) -> None:
        """Run a command or answer; where somebody types, a mistake is shown and the dialogue goes on."""
        try:
            if said.startswith("/"):
                self._command(said)
            else:
                self._answer(said)
        except Exception as error:
            if not self._is_interactive or not print_error(error):
                raise

    def _command(self, line: str) -> None:
        name, _, rest = line.strip().partition(" ")
        if name not in self._commands:
            raise ValueError(f"There is no command {name!r}. /help lists them; a space before it says it to the model.")
        self._commands[name](rest.strip())

    def _answer(self, question: str) -> None:
        from ..decoding.ends import StopRequest

        stop = StopRequest()
        if not self._is_interactive:
            turn = self._ask(question, stop)
            if turn is None or turn.statistics is None:
                raise KeyboardInterrupt
        else:
            from .interrupts import stops_at_interrupt

            with stops_at_interrupt(stop):
                turn = self._ask(question, stop)
        self._view.end(turn)

    def _ask(self, question: str, stop: Any) -> Any:
        from ..chat.streamer import PieceStreamer

        streamer = PieceStreamer(self._conversation.tokenizer, self._view.write)
        return self._conversation.ask(question, streamer, stop)

    def _reset(self, rest: str) -> None:
        self._conversation.reset()
        self._view.say("The conversation begins anew.")

    def _save(self, rest: str) -> None:
        from ..support.files import write_whole

        if not rest:
            raise ValueError("/save needs the name of a file: /save conversation.json")
        path = Path(os.path.expanduser(rest))
        if not path.absolute().parent.is_dir():
            raise FileNotFoundError(f"/save: there is no folder {str(path.parent)!r}. Make it first.")
        write_whole(path, json.dumps(self.document(), indent=2, ensure_ascii=False) + "\n")
        self._view.say(f"Written to {path}")

    def document(self) -> dict[str, Any]:
        """The conversation and how it was decoded, as plain JSON types."""
        request, conversation = self._request, self._conversation
        return {
            "model": request.model.model,
            "messages": conversation.messages,
            "answers": [turn.to_dict() for turn in conversation.turns],
            "decoding": request.generate_arguments | ({"seed": request.seed} if request.is_sampling else {}),
            "config": conversation.config.to_dict(),
        }
