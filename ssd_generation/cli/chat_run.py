"""Control flow of `ssd chat`: load, choose a draft, then read and answer turns or run commands."""

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
"""New tokens of the warm-up call."""


@dataclass(frozen=True, kw_only=True)
class ChatRequest(AnswerRequest):
    """Parsed request, checked as far as possible without the model.

    Attributes:
        show: display options.
        template: chat template that replaces the tokenizer's; `None`: the tokenizer's.
        threads: number of CPU threads; `None`: torch's.
    """

    show: ChatShowOptions
    template: str | None
    threads: int | None


def run(request: ChatRequest) -> dict[str, Any]:
    """Run the conversation until the user leaves.

    Returns:
        The conversation as the document that `/save` writes.
    """
    from ..chat.conversation import Conversation, check_template
    from ..generation import enable_self_speculative
    from .generate import DEFAULT_PROMPT
    from .resolve_options import encode, load, set_threads

    set_threads(request.threads)
    target, tokenizer = load(request.model)
    if request.template is not None:
        tokenizer.chat_template = request.template
    check_template(tokenizer)
    target = enable_self_speculative(target)
    # Costs are measured before the first turn, on an example, so that no question waits for them.
    example = encode(tokenizer, DEFAULT_PROMPT, request.decoding.system, True)["input_ids"].to(target.device)
    config, choice = choose_draft(request, target, example)
    conversation = Conversation(
        target, tokenizer, config, request.generate_arguments, request.decoding.system, request.seed
    )
    is_interactive = _somebody_types() and not request.show.as_json
    view = ChatView(is_interactive, request.show.show_draft, request.show.as_json)
    if is_interactive:
        with progress("Preparing"):
            # A first call sets up and checks what later calls reuse; no answer should wait for that.
            target.generate(example, max_new_tokens=_FIRST, do_sample=False, self_speculative=config)
    dialogue = Dialogue(request, conversation, view, is_interactive)
    dialogue.run(draft_of(target, config, choice))
    return dialogue.document()


def _somebody_types() -> bool:
    return sys.stdin.isatty()


class Dialogue:
    """Loop that reads the user's lines and answers them or runs their commands.

    Args:
        request: request of the command.
        conversation: conversation with the model.
        view: display of the conversation.
        is_interactive: whether a user types: then an error or a Ctrl-C does not end the dialogue.
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
        """Read and answer until the user leaves.

        Args:
            draft: draft that the model uses.

        Raises:
            KeyboardInterrupt: Ctrl-C twice at the prompt; in a pipe once, anywhere.
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
                self._view.say("\nCtrl-C once more, /exit or Ctrl-D exits.")

    def _obey(self, said: str) -> None:
        """Run a command or answer; in an interactive dialogue, print a user's error and continue."""
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
            raise ValueError(
                f"There is no command {name!r}. /help lists them; a space before it sends it to the model."
            )
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
        self._view.say("The conversation starts over.")

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
        """Return the conversation and its decoding arguments as plain JSON types."""
        request, conversation = self._request, self._conversation
        return {
            "model": request.model.model,
            "messages": conversation.messages,
            "answers": [turn.to_dict() for turn in conversation.turns],
            "decoding": request.generate_arguments | ({"seed": request.seed} if request.is_sampling else {}),
            "config": conversation.config.to_dict(),
        }
