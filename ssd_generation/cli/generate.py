"""`ssd generate`: an answer, how it compares with plain decoding, and where its tokens came from.

The options are here; `generate_run` does what they ask for, `generate_view` shows it.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from .option_groups import with_option_groups
from .options import AUTO, ConfigOptions, JsonOption, ModelOptions

if TYPE_CHECKING:
    from .generate_run import Request

DEFAULT_PROMPT = "Explain in three numbered steps how rain forms, then say in one sentence why it matters for farming."

HELP = """Generate an answer by self-speculative decoding.

The model drafts a few tokens cheaply, then checks them all in one pass of the whole model. Greedy text is the same as \
without; sampled text follows the same distribution. Unless options say how to draft, that is found out by measuring: \
a few seconds, once per model and machine.

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


@dataclass(frozen=True)
class DraftOptions(ConfigOptions):
    """What drafts: a config or its parts; by default whatever pays."""

    config: Annotated[
        str | None,
        typer.Option(
            metavar="CONFIG",
            help="A JSON file, a folder that holds one, a Hub id, or a preset (`ssd presets`). Default: the one stored "
            "with the model; else `auto`: whatever pays here.",
        ),
    ] = None
    precision: Annotated[
        str | None,
        typer.Option(metavar="int8|int4", help="Draft from copies of the weights in 8 or 4 bits (on the CPU)."),
    ] = None
    lookup: Annotated[
        bool | None,
        typer.Option(
            "--lookup/--no-lookup",
            help="Draft by prompt lookup: find the last words earlier in the text and copy what followed them.",
            show_default=False,
        ),
    ] = None
    draft_memory: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            metavar="SHARE",
            help="The most memory that low-bit copies may take, as a share of the weights' bytes; 0: no copies. "
            "Default: 0.3 for auto, else no limit.",
        ),
    ] = None
    adapt: Annotated[
        bool | None,
        typer.Option(
            "--adapt/--no-adapt",
            help="Keep improving the draft while it is used, in at most 2 % of the time. Default: as the config says; "
            "auto does.",
            show_default=False,
        ),
    ] = None


@dataclass(frozen=True)
class DraftLengthOptions:
    """How many tokens a round drafts."""

    panel: ClassVar[str] = "How far to draft"

    policy: Annotated[
        str | None,
        typer.Option(
            metavar="cost|confidence|fixed|none",
            help="cost: as many tokens as pay by measured costs; confidence: stop where the draft is unsure; fixed: "
            "always --draft-length; none: draft nothing. Default: the config's, which is cost unless it says "
            "otherwise.",
        ),
    ] = None
    draft_length: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Tokens to draft per round: exactly (fixed) or at most (cost, confidence). Default: the config's.",
        ),
    ] = None


@dataclass(frozen=True)
class DecodingOptions:
    """How the answer is decoded, drafted or not."""

    panel: ClassVar[str] = "How to decode"

    max_new_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="The longest answer, in tokens.")] = 128
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            metavar="T",
            help="Sample at this temperature. 0 or none: greedy, always the likeliest token.",
        ),
    ] = None
    top_k: Annotated[int | None, typer.Option(min=1, metavar="K", help="Sample from the K likeliest tokens only.")] = (
        None
    )
    top_p: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            metavar="P",
            help="Sample from the likeliest tokens whose probabilities add up to P.",
        ),
    ] = None
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the sampling. The same seed, the same text.")] = None
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="A system message before the prompt.")] = None
    no_chat_template: Annotated[
        bool, typer.Option("--no-chat-template", help="Continue the prompt as it is, not as a chat.")
    ] = False


@dataclass(frozen=True)
class ShowOptions:
    """What is shown beside the answer."""

    panel: ClassVar[str] = "What to show"

    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Decode plainly, with the draft alone and self-speculatively: text, speed and memory in a table.",
        ),
    ] = False
    repeats: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="With --compare: how often each of these is timed. Default: 3."),
    ] = None
    show_draft: Annotated[
        bool,
        typer.Option(
            "--show-draft", help="Mark the tokens: drafted by the model, looked up, or decided by the target itself."
        ),
    ] = False
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write these marks as a web page.", dir_okay=False)
    ] = None
    as_json: JsonOption = False


@with_option_groups
def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT", help="What to ask; `-` reads it from stdin. Default: an example.", show_default=False
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
    # What can be refused is refused before anything slow begins.
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
    """What the options ask for.

    Raises:
        ValueError, TypeError, FileNotFoundError: they contradict one another, or name what is not there.
    """
    from .configs import requested_config, with_drafting
    from .generate_run import Request
    from .loading import read_prompt

    if show.repeats is not None and not show.compare:
        raise ValueError(f"--repeats {show.repeats} needs --compare.")
    for option, value in (("--top-k", decoding.top_k), ("--top-p", decoding.top_p), ("--seed", decoding.seed)):
        if value is not None and not decoding.temperature:
            raise ValueError(f"{option} {value} needs --temperature above 0: greedy decoding does not sample.")
    if show.html is not None and not Path(os.path.expanduser(show.html)).absolute().parent.is_dir():
        raise FileNotFoundError(f"--html: there is no folder {str(show.html.parent)!r}. Make it first.")
    text = read_prompt(prompt, DEFAULT_PROMPT)
    is_auto = draft.config == AUTO
    named = dataclasses.replace(draft, config=None) if is_auto else draft
    config = requested_config(named, draft.precision, draft.lookup)
    if is_auto and config is not None:
        raise ValueError(
            "--config auto finds out what to draft with, but --precision, --lookup, --skip-attention and --skip-mlp "
            "say it. Leave one or the other out."
        )
    with_drafting(config, length.policy, length.draft_length)  # raises where no such drafting is possible
    return Request(
        prompt=text,
        is_example=prompt is None,
        config=config,
        seed=secrets.randbelow(2**31) if decoding.seed is None else decoding.seed,
        model=model,
        draft=draft,
        length=length,
        decoding=decoding,
        show=show,
    )
