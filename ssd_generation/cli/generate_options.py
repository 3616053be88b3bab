"""Option groups of `ssd generate`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from .options import MAX_SEED, ConfigOptions, JsonOption

__all__ = ["AnswerOptions", "DecodingOptions", "DraftLengthOptions", "DraftOptions", "ShowOptions"]


@dataclass(frozen=True)
class DraftOptions(ConfigOptions):
    """Draft: a config or its parts; by default the fastest way to draft on this machine, or none."""

    config: Annotated[
        str | None,
        typer.Option(
            metavar="CONFIG",
            help="A JSON file, a folder that holds one, a Hub id, or a preset (`ssd presets`). Default: the one stored "
            "with the model; else `auto`: the fastest way to draft here.",
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
            "Default: 0.3 for auto (0.35 of 16-bit weights), else no limit.",
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
    """Number of tokens that a round drafts."""

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
class AnswerOptions:
    """Decoding of an answer, drafted or not."""

    panel: ClassVar[str] = "How to decode"

    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "--new-tokens", min=1, metavar="N", help="The longest answer, in tokens.")
    ] = 128
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
    seed: Annotated[
        int | None, typer.Option(min=0, max=MAX_SEED, help="Seed of the sampling. The same seed, the same text.")
    ] = None
    exact: Annotated[
        bool,
        typer.Option(
            "--exact",
            help="Make the target's logits independent of the draft, bitwise, whatever that costs. "
            "Default: where it is nearly free.",
        ),
    ] = False
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="A system message before the prompt.")] = None

    def check_sampling(self) -> None:
        """Raise `ValueError` for a sampling option under greedy decoding."""
        for option, value in (("--top-k", self.top_k), ("--top-p", self.top_p), ("--seed", self.seed)):
            if value is not None and not self.temperature:
                raise ValueError(f"{option} {value} needs --temperature above 0: greedy decoding does not sample.")


@dataclass(frozen=True)
class DecodingOptions(AnswerOptions):
    """Decoding options where the prompt need not be a chat."""

    no_chat_template: Annotated[
        bool, typer.Option("--no-chat-template", help="Continue the prompt as it is, not as a chat.")
    ] = False


@dataclass(frozen=True)
class ShowOptions:
    """Output in addition to the answer."""

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
