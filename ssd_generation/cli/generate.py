"""`ssd generate`: an answer, how it compares with plain decoding, and where its tokens came from."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..support.display import visible
from .options import (
    AUTO,
    DEMO,
    WHAT_TO_DRAFT_WITH,
    ConfigNameOption,
    DeviceMapOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    SkipAttentionOption,
    SkipMlpOption,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase, TextStreamer

    from ..config import SelfSpeculativeConfig
    from ..harness.comparison import Comparison
    from ..tuning.automatic import AutomaticChoice

DEFAULT_PROMPT = "Explain in three numbered steps how rain forms, then say in one sentence why it matters for farming."

HELP = """Generate an answer by self-speculative decoding.

The model drafts a few tokens cheaply, then checks them all in one pass of the whole model. Greedy text is the same as \
without; sampled text follows the same distribution. How it drafts is found out by measuring (seconds, once per model \
and machine), unless options say it.

[bold]Examples[/bold]

  ssd generate --compare
  ssd generate "Name five rivers of Europe." --show-draft
  ssd generate --compare --draft-memory 0
  ssd generate --compare --precision int8 --lookup
  ssd generate -m Qwen/Qwen3-8B --skip-attention 10-14,18 --compare
  ssd generate -m meta-llama/Llama-2-13b-hf --config llama-2-13b "Once upon"
  cat letter.txt | ssd generate - --temperature 0.7 --seed 1 --json

`ssd inspect MODEL` shows which layers there are to leave out.
"""

_MODEL = "Model"
_DRAFTING = "How far to draft"
_DECODING = "How to decode"
_SHOW = "What to show"


def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT", help="What to ask; `-` reads it from stdin. Default: an example.", show_default=False
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            metavar="MODEL",
            help="A Hub id, a folder, a .gguf file, or `demo`: SmolLM2-135M-Instruct, fetched once (93 MB) and kept.",
            rich_help_panel=_MODEL,
        ),
    ] = DEMO,
    dtype: DtypeOption = "auto",
    device: DeviceOption = None,
    device_map: DeviceMapOption = None,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="CONFIG",
            help="A JSON file, a folder that holds one, a Hub id, or a preset (`ssd presets`). Default: the one stored "
            "with the model; else `auto`: whatever pays here.",
            rich_help_panel=WHAT_TO_DRAFT_WITH,
        ),
    ] = None,
    config_name: ConfigNameOption = None,
    skip_attention: SkipAttentionOption = None,
    skip_mlp: SkipMlpOption = None,
    precision: Annotated[
        str | None,
        typer.Option(
            metavar="int8|int4",
            help="Draft from copies of the weights in 8 or 4 bits (on the CPU).",
            rich_help_panel=WHAT_TO_DRAFT_WITH,
        ),
    ] = None,
    lookup: Annotated[
        bool | None,
        typer.Option(
            "--lookup/--no-lookup",
            help="Draft by copying from the text what followed its last words before.",
            show_default=False,
            rich_help_panel=WHAT_TO_DRAFT_WITH,
        ),
    ] = None,
    draft_memory: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            metavar="SHARE",
            help="The most that copies in low bits may take, as a share of the weights' bytes; 0: no copies. Default: "
            "0.3 for auto, else no limit.",
            rich_help_panel=WHAT_TO_DRAFT_WITH,
        ),
    ] = None,
    adapt: Annotated[
        bool | None,
        typer.Option(
            "--adapt/--no-adapt",
            help="Go on improving the draft while it is used, in at most 2 % of the time. Default: the config's; auto "
            "does.",
            show_default=False,
            rich_help_panel=WHAT_TO_DRAFT_WITH,
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="cost|confidence|fixed|none",
            help="cost: as many tokens as pay by measured costs; confidence: stop where it is unsure; fixed: always so "
            "many; none: draft nothing. Default: the config's, which is cost unless it says otherwise.",
            rich_help_panel=_DRAFTING,
        ),
    ] = None,
    draft_length: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Tokens to draft per round: exactly (fixed) or at most (cost, confidence). Default: the config's.",
            rich_help_panel=_DRAFTING,
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="The longest answer.", rich_help_panel=_DECODING)
    ] = 128,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            metavar="T",
            help="Sample at this temperature. 0 or none: greedy, always the likeliest token.",
            rich_help_panel=_DECODING,
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(min=1, metavar="K", help="Sample from the K likeliest tokens.", rich_help_panel=_DECODING),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            metavar="P",
            help="Sample from the likeliest tokens that make up P.",
            rich_help_panel=_DECODING,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Of the sampling, to get the same text again.", rich_help_panel=_DECODING),
    ] = None,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="A system message before the prompt.", rich_help_panel=_DECODING)
    ] = None,
    no_chat_template: Annotated[
        bool,
        typer.Option(
            "--no-chat-template", help="Continue the prompt as it is, not as a chat.", rich_help_panel=_DECODING
        ),
    ] = False,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Decode plainly, with the draft alone and self-speculatively: text, speed and memory in a table.",
            rich_help_panel=_SHOW,
        ),
    ] = False,
    repeats: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="With --compare: how often each is timed. Default: 3.", rich_help_panel=_SHOW
        ),
    ] = None,
    show_draft: Annotated[
        bool,
        typer.Option(
            "--show-draft",
            help="Mark which tokens were drafted, which looked up, and which the target decided.",
            rich_help_panel=_SHOW,
        ),
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the same as a web page.", dir_okay=False, rich_help_panel=_SHOW),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Answer a prompt, compare with plain decoding, show the draft."""
    from .console import err, measuring, out, print_json, progress, quiet_libraries, styled
    from .options import encode, load, read_prompt, requested_config, stored_config, with_drafting, with_lookup

    # What can be refused is refused before anything slow begins.
    if repeats is not None and not compare:
        raise ValueError(f"--repeats {repeats} needs --compare.")
    sampling = bool(temperature)
    for option, value in (("--top-k", top_k), ("--top-p", top_p), ("--seed", seed)):
        if value is not None and not sampling:
            raise ValueError(f"{option} {value} needs --temperature above 0: greedy decoding does not sample.")
    if html is not None and not Path(os.path.expanduser(html)).absolute().parent.is_dir():
        raise FileNotFoundError(f"--html: there is no folder {str(html.parent)!r}. Make it first.")
    question = read_prompt(prompt, DEFAULT_PROMPT)
    is_auto = config == AUTO
    requested = requested_config(None if is_auto else config, config_name, skip_attention, skip_mlp, precision, lookup)
    if is_auto and requested is not None:
        raise ValueError(
            "--config auto finds out what to draft with, but --precision, --lookup, --skip-attention and --skip-mlp "
            "say it. Leave one or the other out."
        )
    with_drafting(requested, policy, draft_length)
    if seed is None:
        seed = secrets.randbelow(2**31)

    # In a --json run nothing but the document may reach stdout.
    elsewhere = contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()
    with quiet_libraries(), elsewhere:
        import torch

        from ..config import SelfSpeculativeConfig
        from ..forward.low_bit import copy_bytes
        from ..generation import enable_self_speculative, refinement_of, why_no_drafts
        from ..harness.comparison import compare as compare_methods
        from ..harness.comparison import describe_environment, methods_of
        from ..harness.token_origins import TokenOrigins
        from ..tuning.automatic import weight_bytes

        target, tokenizer = load(model, dtype, device, device_map)
        target = enable_self_speculative(target)
        refusal = why_no_drafts(target)
        if refusal is not None:
            name = type(target).__name__
            err().print(f"{name} is decoded without drafts, as transformers decodes it: {refusal}.", style="yellow")
            requested, policy, adapt = SelfSpeculativeConfig(), "none", False
        elif requested is None and not is_auto:
            requested = stored_config(target.generation_config)
            if requested is not None and lookup is False:
                requested = with_lookup(requested, False)
        inputs = {k: v.to(target.device) for k, v in encode(tokenizer, question, system, not no_chat_template).items()}
        length = inputs["input_ids"].shape[1]
        arguments: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": sampling}
        if sampling:
            arguments |= {"temperature": temperature, "top_k": top_k, "top_p": top_p}
            arguments = {key: value for key, value in arguments.items() if value is not None}

        choice: AutomaticChoice | None = None
        if requested is None:
            choice = _choose(target, inputs["input_ids"], draft_memory)
            chosen = choice.config if lookup is not False else _only_itself(choice.config)
        else:
            chosen = requested
        if adapt is not None:
            chosen = dataclasses.replace(chosen, adapt=adapt)
        chosen = _ready(target, with_drafting(chosen, policy, draft_length), draft_memory)
        if chosen.adapt and not sampling:
            with measuring():
                refinement_of(target, chosen)

        if prompt is None and not as_json:
            err().print(styled(("Prompt:", "dim"), f" {question}\n"))
        streamer = None if as_json else _streamer(tokenizer)
        if sampling:
            torch.manual_seed(seed)
        with progress("Generating") if as_json else contextlib.nullcontext():
            started = time.perf_counter()
            output: torch.Tensor = target.generate(**inputs, **arguments, self_speculative=chosen, streamer=streamer)
            new = output[0, length:].tolist()
            seconds = time.perf_counter() - started
        speculation: Any = target.last_speculation
        origins = TokenOrigins.from_ids(tokenizer, new, speculation.token_sources[0])

        comparison: Comparison | None = None
        if compare:
            repeats = repeats or 3
            with progress("Comparing", total=len(methods_of(chosen)) * (1 + repeats + sampling)) as advance:
                comparison = compare_methods(
                    target, inputs, chosen, repeats=repeats, seed=seed, advance=advance, **arguments
                )
        if html is not None:
            origins.save_html(html, title=f"{_short_name(model)}: where each token came from", prompt=question)
        environment = describe_environment(target)
        weights, copies = weight_bytes(target), copy_bytes(target) if chosen.precision else 0

    if as_json:
        document: dict[str, Any] = {
            "model": model,
            "prompt": question,
            "prompt_tokens": length,
            "text": tokenizer.decode(new, skip_special_tokens=True),
            "token_ids": new,
            "token_origins": origins.to_dicts(),
            "seconds": seconds,
            "tokens_per_second": len(new) / seconds,
            "decoding": arguments | ({"seed": seed} if sampling else {}),
            "config": chosen.to_dict(),
            "auto": None if choice is None else choice.to_dict(),
            "memory": {"weight_bytes": weights, "copy_bytes": copies, "copy_share": copies / max(weights, 1)},
            "speculation": speculation.to_dict(),
            "environment": environment,
        }
        if comparison is not None:
            document["comparison"] = comparison.to_dict()
        print_json(document)
        return

    if comparison is not None:
        from .compare_view import comparison_view

        out().print()
        out().print(comparison_view(comparison, chosen, choice, environment, tokenizer, prompt_tokens=length))
    else:
        from .compare_view import drafts_from

        err().print(_summary(len(new), seconds, speculation, drafts_from(chosen, copies, weights)), style="dim")
    if show_draft:
        from rich.rule import Rule

        out().print()
        out().print(Rule("Where each token came from", align="left", style="dim"))
        out().print(origins)
    if html is not None:
        err().print(f"Written to {html}", style="dim", soft_wrap=True)


def _choose(target: Any, prompt: torch.Tensor, draft_memory: float | None) -> AutomaticChoice:
    """What pays for this model on this machine."""
    from ..tuning.automatic import DRAFT_MEMORY, automatic_choice
    from .console import measuring

    with measuring():
        return automatic_choice(target, prompt, DRAFT_MEMORY if draft_memory is None else draft_memory)


def _only_itself(config: SelfSpeculativeConfig) -> SelfSpeculativeConfig:
    """What `auto` chose without prompt lookup; where nothing else pays, nothing is drafted."""
    drafting = config.drafting if config.precision else dataclasses.replace(config.drafting, policy="none")
    return dataclasses.replace(config, lookup=None, drafting=drafting, adapt=config.adapt and bool(config.precision))


def _ready(target: Any, config: SelfSpeculativeConfig, draft_memory: float | None) -> SelfSpeculativeConfig:
    """A config that fits the model, with the costs that its draft length goes by.

    Raises:
        ValueError: it does not fit, or takes more memory than it may.
    """
    from ..forward.low_bit import check_precision
    from ..forward.sublayers import locate_sublayers
    from ..tuning.automatic import check_budget
    from ..tuning.costs import costs_of, describe_machine
    from .console import err, measuring

    layout = locate_sublayers(target)
    config.validate_for(num_layers=len(layout), model_type=target.config.get_text_config(decoder=True).model_type)
    layout.stubs(config.skip)  # raises where a sub-layer cannot be skipped
    if config.precision:
        check_precision(target)
    if draft_memory is not None:
        check_budget(target, config, draft_memory)
    if config.drafting.policy != "cost":
        return config
    if config.costs is None:
        with measuring():
            return dataclasses.replace(config, costs=costs_of(target, config))
    made_on = config.costs.measured_on
    if made_on is not None and made_on != describe_machine(target):
        err().print(
            f"The costs in this config were measured elsewhere ({made_on}), so the draft length may not be the best "
            "here. Take `costs` out of it to have them measured.",
            style="yellow",
        )
    return config


def _streamer(tokenizer: PreTrainedTokenizerBase) -> TextStreamer:
    """Prints the answer as it comes, without the prompt."""
    from transformers import TextStreamer

    def write(text: str, stream_end: bool = False) -> None:
        # To a file or a pipe goes what the model says, as it is.
        sys.stdout.write(visible(text, keep="\n\t") if sys.stdout.isatty() else text)
        if stream_end:
            sys.stdout.write("\n")
        sys.stdout.flush()

    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    streamer.on_finalized_text = write
    return streamer


def _summary(tokens: int, seconds: float, speculation: Any, drafted_from: str) -> str:
    parts = [f"{tokens} tokens in {seconds:.1f} s ({tokens / seconds:.1f} per second)"]
    if speculation.acceptance_rate is not None:
        parts.append(f"{speculation.acceptance_rate:.0%} of the drafted tokens accepted")
    if speculation.tokens_per_round is not None:
        parts.append(f"{speculation.tokens_per_round:.2f} tokens per round")
    return "\n" + ", ".join(parts) + f".\n{drafted_from}"


def _short_name(model: str) -> str:
    return "SmolLM2-135M-Instruct" if model == DEMO else Path(model).name
