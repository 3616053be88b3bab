"""`ssd generate`: an answer, how it compares with plain decoding, and where its tokens came from.

`generate_options` defines the options, `generate_run` carries them out, `generate_view` shows the result.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .generate_options import DecodingOptions, DraftLengthOptions, DraftOptions, ShowOptions
from .option_groups import with_option_groups
from .options import ModelOptions

if TYPE_CHECKING:
    from .generate_run import Request

DEFAULT_PROMPT = "Explain in three numbered steps how rain forms, then say in one sentence why it matters for farming."

HELP = """Generate an answer by self-speculative decoding.

The model drafts a few tokens cheaply, then verifies them all in one pass of the target model. Greedy text is the same \
as without; sampled text follows the same distribution. Unless options say how to draft, that is chosen by \
measuring: a few seconds, once per model and machine.

[bold]Examples[/bold]

  ssd generate --compare
  ssd generate "Name five rivers of Europe." --show-draft
  ssd generate --compare --draft-memory 0
  ssd generate --compare --precision int8 --lookup
  ssd generate -m Qwen/Qwen3-8B --skip-attention 10-14,18 --compare
  ssd generate -m meta-llama/Llama-2-13b-hf --config llama-2-13b "Once upon"
  cat letter.txt | ssd generate - --temperature 0.7 --seed 1 --json

`ssd inspect MODEL` lists the layers that a draft can leave out.
"""


@with_option_groups
def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT",
            help="What to ask; `-`, a pipe or a file reads it from stdin. Default: an example.",
            show_default=False,
        ),
    ] = None,
    *,
    model: ModelOptions,
    draft: DraftOptions,
    length: DraftLengthOptions,
    decoding: DecodingOptions,
    show: ShowOptions,
) -> None:
    """Answer a prompt, compare with plain decoding, show the draft."""
    # Invalid options are rejected before anything slow begins.
    request = parse(prompt, model, draft, length, decoding, show)

    from .console import at_work
    from .generate_run import run
    from .generate_view import begin, print_answer

    with at_work(show.as_json):
        answer = run(request, begin)
    print_answer(answer)


def parse(
    prompt: str | None,
    model: ModelOptions,
    draft: DraftOptions,
    length: DraftLengthOptions,
    decoding: DecodingOptions,
    show: ShowOptions,
) -> Request:
    """Build the request from the options.

    Raises:
        ValueError, TypeError, FileNotFoundError: the options contradict one another, or name something missing.
    """
    from .configs import requested_draft
    from .generate_run import Request, some_seed
    from .resolve_options import read_prompt

    if show.repeats is not None and not show.compare:
        raise ValueError(f"--repeats {show.repeats} needs --compare.")
    decoding.check_sampling()
    if show.html is not None and not Path(os.path.expanduser(show.html)).absolute().parent.is_dir():
        raise FileNotFoundError(f"--html: there is no folder {str(show.html.parent)!r}. Make it first.")
    text = read_prompt(prompt)
    return Request(
        prompt=DEFAULT_PROMPT if text is None else text,
        is_example=text is None,
        config=requested_draft(draft, length),
        seed=some_seed(decoding.seed),
        model=model,
        draft=draft,
        length=length,
        decoding=decoding,
        show=show,
    )
