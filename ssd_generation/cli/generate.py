"""`ssd generate`: an answer, how it compares with plain decoding, and where its tokens came from."""

from __future__ import annotations

import contextlib
import secrets
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import DEMO, ConfigNameOption, ConfigOption, JsonOption, SkipAttentionOption, SkipMlpOption

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase, TextStreamer

    from ..comparison import Comparison

DEFAULT_PROMPT = "Explain in three numbered steps how rain forms, then say in one sentence why it matters for farming."

HELP = """Generate an answer by self-speculative decoding.

The model drafts a few tokens with some of its sub-layers left out, then checks them all in one pass of the whole \
model. Greedy text is the same as without; sampled text follows the same distribution.

[bold]Examples[/bold]

  ssd generate --compare
  ssd generate "Name five rivers of Europe." --show-draft
  ssd generate -m Qwen/Qwen3-8B --skip-attention 10-14,18 --compare
  ssd generate -m meta-llama/Llama-2-13b-hf --config llama-2-13b "Once upon"
  cat letter.txt | ssd generate - --temperature 0.7 --seed 1 --json

`ssd inspect MODEL` shows which layers there are to leave out.
"""

_MODEL = "Model"
_DRAFTING = "How to draft"
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
    dtype: Annotated[
        str,
        typer.Option(help="auto (as stored), float32, bfloat16, float16.", rich_help_panel=_MODEL),
    ] = "auto",
    device: Annotated[
        str | None,
        typer.Option(help="cpu, cuda, cuda:1, … Default: cuda if there is one.", rich_help_panel=_MODEL),
    ] = None,
    device_map: Annotated[
        str | None,
        typer.Option(
            help="Spread the model over devices: auto, balanced, … (needs accelerate).", rich_help_panel=_MODEL
        ),
    ] = None,
    config: ConfigOption = None,
    config_name: ConfigNameOption = None,
    skip_attention: SkipAttentionOption = None,
    skip_mlp: SkipMlpOption = None,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="fixed|confidence",
            help="fixed: always so many tokens per round; confidence: stop where it is unsure. Default: the config's.",
            rich_help_panel=_DRAFTING,
        ),
    ] = None,
    draft_length: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Tokens to draft per round: exactly (fixed) or at most (confidence). Default: the config's.",
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
            help="Decode plainly, with the draft alone and self-speculatively; print a table.",
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
            help="Mark which tokens were drafted and accepted, and which the target decided.",
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
    from .console import err, out, print_json, progress, quiet_libraries
    from .options import default_config, encode, load, read_prompt, requested_config, with_drafting

    # What can be refused is refused before anything slow begins.
    if repeats is not None and not compare:
        raise ValueError(f"--repeats {repeats} needs --compare.")
    sampling = bool(temperature)
    for option, value in (("--top-k", top_k), ("--top-p", top_p), ("--seed", seed)):
        if value is not None and not sampling:
            raise ValueError(f"{option} {value} needs --temperature above 0: greedy decoding does not sample.")
    if html is not None and not html.expanduser().absolute().parent.is_dir():
        raise FileNotFoundError(f"--html: there is no folder {str(html.parent)!r}. Make it first.")
    question = read_prompt(prompt, DEFAULT_PROMPT)
    stored = requested_config(config, config_name, skip_attention, skip_mlp)
    if seed is None:
        seed = secrets.randbelow(2**31)

    # In a --json run nothing but the document may reach stdout.
    elsewhere = contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()
    with quiet_libraries(), elsewhere:
        import torch

        from ..comparison import compare as compare_methods
        from ..comparison import describe_environment
        from ..generation import enable_self_speculative
        from ..rendering import TokenOrigins
        from ..sublayers import locate_sublayers

        target, tokenizer = load(model, dtype, device, device_map)
        target = enable_self_speculative(target)
        found = stored or default_config(model, target.generation_config)
        if found is None:
            raise ValueError(
                f"Nothing says what the draft of {model} should leave out. Name a config with --config, or layers with "
                f"--skip-attention and --skip-mlp; `ssd inspect {model}` shows which there are."
            )
        chosen = with_drafting(found, policy, draft_length)
        layout = locate_sublayers(target)
        chosen.validate_for(num_layers=len(layout), model_type=target.config.get_text_config(decoder=True).model_type)
        layout.stubs(chosen.skip)  # raises where a sub-layer cannot be skipped

        inputs = {k: v.to(target.device) for k, v in encode(tokenizer, question, system, not no_chat_template).items()}
        length = inputs["input_ids"].shape[1]
        arguments: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": sampling}
        if sampling:
            arguments |= {"temperature": temperature, "top_k": top_k, "top_p": top_p}
            arguments = {key: value for key, value in arguments.items() if value is not None}

        if prompt is None and not as_json:
            err().print(f"[dim]Prompt:[/dim] {question}\n")
        streamer = None if as_json else _streamer(tokenizer)
        if sampling:
            torch.manual_seed(seed)
        with progress("Generating") if as_json else contextlib.nullcontext():
            started = time.perf_counter()
            output: torch.Tensor = target.generate(**inputs, **arguments, self_speculative=chosen, streamer=streamer)
            new = output[0, length:].tolist()
            seconds = time.perf_counter() - started
        speculation: Any = target.last_speculation
        origins = TokenOrigins.from_ids(tokenizer, new, speculation.token_origins[0])

        comparison: Comparison | None = None
        if compare:
            repeats = repeats or 3
            with progress("Comparing", total=3 + 3 * repeats) as advance:
                comparison = compare_methods(
                    target, inputs, chosen, repeats=repeats, seed=seed, advance=advance, **arguments
                )
        if html is not None:
            origins.save_html(html, title=f"{_short_name(model)}: where each token came from", prompt=question)
        environment = describe_environment(target)

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
        out().print(comparison_view(comparison, chosen, environment, tokenizer, prompt_tokens=length))
    else:
        err().print(_summary(len(new), seconds, speculation), style="dim")
    if show_draft:
        from rich.rule import Rule

        out().print()
        out().print(Rule("Where each token came from", align="left", style="dim"))
        out().print(origins)
    if html is not None:
        err().print(f"Written to {html}", style="dim", soft_wrap=True)


def _streamer(tokenizer: PreTrainedTokenizerBase) -> TextStreamer:
    """Prints the answer as it comes, without the prompt."""
    from transformers import TextStreamer

    from ..rendering import visible

    def write(text: str, stream_end: bool = False) -> None:
        sys.stdout.write(visible(text) if sys.stdout.isatty() else text)
        if stream_end:
            sys.stdout.write("\n")
        sys.stdout.flush()

    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    streamer.on_finalized_text = write
    return streamer


def _summary(tokens: int, seconds: float, speculation: Any) -> str:
    parts = [f"{tokens} tokens in {seconds:.1f} s ({tokens / seconds:.1f} per second)"]
    if speculation.acceptance_rate is not None:
        parts.append(f"{speculation.acceptance_rate:.0%} of the drafted tokens accepted")
    if speculation.tokens_per_round is not None:
        parts.append(f"{speculation.tokens_per_round:.2f} tokens per round")
    return "\n" + ", ".join(parts) + "."


def _short_name(model: str) -> str:
    return "SmolLM2-135M-Instruct" if model == DEMO else Path(model).name
