"""`ssd chat`: a conversation of several turns over one KV cache.

`chat_options` defines the options, `chat_run` reads the turns and answers them, `chat_view` shows the answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .chat_options import ChatAnswerOptions, ChatShowOptions
from .generate_options import DraftLengthOptions, DraftOptions
from .option_groups import with_option_groups
from .options import ModelArgumentOptions

if TYPE_CHECKING:
    from .chat_run import ChatRequest

HELP = """Chat with a model that drafts for itself.

The turns share one KV cache: only the new tokens of each turn are processed. In a terminal the answer is \
coloured by where its tokens came from, and a line after it says how fast it was. From a pipe each line is a turn, \
and only the answers go to stdout.

[bold]Examples[/bold]

  ssd chat
  ssd chat Qwen/Qwen3-8B --system "Be brief." --temperature 0.7
  printf 'Name a river.\\nWhere does it end?\\n' | ssd chat demo

[bold]In the conversation[/bold]

  /reset           start over
  /save FILE       write the conversation as JSON
  /help, /exit     Ctrl-D exits too; Ctrl-C stops an answer
"""


@with_option_groups
def chat(
    model: ModelArgumentOptions,
    draft: DraftOptions,
    length: DraftLengthOptions,
    decoding: ChatAnswerOptions,
    show: ChatShowOptions,
) -> None:
    """Hold a conversation, turn by turn."""
    # Invalid options are rejected before anything slow begins.
    request = parse(model, draft, length, decoding, show)

    from .chat_run import run
    from .console import at_work, print_json

    with at_work(show.as_json):
        document = run(request)
    if show.as_json:
        print_json(document)


def parse(
    model: ModelArgumentOptions,
    draft: DraftOptions,
    length: DraftLengthOptions,
    decoding: ChatAnswerOptions,
    show: ChatShowOptions,
) -> ChatRequest:
    """Build the request from the options.

    Raises:
        ValueError, TypeError, FileNotFoundError: the options contradict one another, or name something missing.
    """
    from ..support.reading import DATA, read_text
    from .chat_run import ChatRequest
    from .configs import requested_draft
    from .generate_run import some_seed

    decoding.check_sampling()
    return ChatRequest(
        config=requested_draft(draft, length),
        seed=some_seed(decoding.seed),
        model=model,
        draft=draft,
        length=length,
        decoding=decoding,
        show=show,
        template=None if decoding.chat_template is None else read_text(decoding.chat_template, DATA),
        threads=model.threads,
    )
