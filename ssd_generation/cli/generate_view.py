"""Output of `ssd generate`: the answer as it arrives, its figures, and the origins of its tokens."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.rule import Rule

from ..support.display import visible
from .compare_view import comparison_view, drafts_from
from .console import err, out, print_json, styled
from .options import DEMO
from .word_wrap import WordWrap

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, TextStreamer

    from ..decoding.statistics import SpeculationStatistics
    from .generate_run import Answer, Request


def begin(request: Request, tokenizer: PreTrainedTokenizerBase) -> TextStreamer | None:
    """Print the prompt if it is the built-in example, and show the answer from here on; with `--json`, do neither.

    Returns:
        The streamer for `generate`; `None` with `--json`.
    """
    if request.show.as_json:
        return None
    if request.is_example:
        err().print(styled(("Prompt:", "dim"), f" {request.prompt}\n"))
    return answer_streamer(tokenizer)


def answer_streamer(tokenizer: PreTrainedTokenizerBase) -> TextStreamer:
    """Return a streamer that prints the answer as it arrives, without the prompt."""
    from transformers import TextStreamer

    words = WordWrap(lambda text, style: print(text, end=""))

    def write(text: str, stream_end: bool = False) -> None:
        if sys.stdout.isatty():
            words.add(visible(text, keep="\n\t"))
        else:  # a file or a pipe receives the model's text unchanged
            sys.stdout.write(text)
        if stream_end:
            sys.stdout.write("\n")
        sys.stdout.flush()

    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    streamer.on_finalized_text = write
    return streamer


def print_answer(answer: Answer) -> None:
    """Print what follows the text of an answer, or all of it as one JSON document; write the file of `--html`."""
    request, show = answer.request, answer.request.show
    if show.html is not None:
        title = f"{short_name(request.model.model)}: where each token came from"
        answer.origins.save_html(show.html, title=title, prompt=request.prompt)
    if show.as_json:
        print_json(answer.to_dict())
        return
    if answer.comparison is not None:
        out().print()
        out().print(comparison_view(answer))
    else:
        err().print(_summary(answer), style="dim")
    if show.show_draft:
        out().print()
        out().print(Rule("Where each token came from", align="left", style="dim"))
        out().print(answer.origins)
    if show.html is not None:
        err().print(f"Written to {show.html}", style="dim", soft_wrap=True)


def _summary(answer: Answer) -> str:
    from ..generation.plain import MEASURED_MEANWHILE

    parts = figures(len(answer.token_ids), answer.seconds, answer.speculation)
    drafts = drafts_from(answer.draft)
    if answer.speculation.refusal == MEASURED_MEANWHILE:
        drafts = (
            "Nothing was drafted: this first answer was decoded plainly, and the machine measured between its tokens."
            f"\nLater answers: {drafts[0].lower()}{drafts[1:]}"
        )
    return "\n" + ", ".join(parts) + f".\n{drafts}"


def figures(tokens: int, seconds: float, speculation: SpeculationStatistics | None) -> list[str]:
    """Describe the length, time and acceptance of an answer in words.

    Args:
        tokens: number of tokens of the answer.
        seconds: time of the call.
        speculation: statistics of the call; `None` where there are none.
    """
    parts = [f"{tokens} {'token' if tokens == 1 else 'tokens'} in {seconds:.1f} s ({tokens / seconds:.1f} per second)"]
    if speculation is None:
        return parts
    if speculation.acceptance_rate is not None:
        parts.append(f"{speculation.acceptance_rate:.0%} of the drafted tokens accepted")
    if speculation.tokens_per_round is not None:
        parts.append(f"{speculation.tokens_per_round:.2f} tokens per round")
    return parts


def short_name(model: str) -> str:
    """Return a model's name without its folder."""
    return "SmolLM2-135M-Instruct" if model == DEMO else Path(model).name
