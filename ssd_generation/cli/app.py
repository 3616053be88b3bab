"""Typer app with all sub-commands."""

from __future__ import annotations

from typing import Annotated

import typer

from . import benchmark, chat, evaluate, export, generate, inspect, presets, profile, search, serve

# Typer joins the lines of the first paragraph only; the other paragraphs keep their line breaks.
HELP = """Self-speculative decoding: a language model drafts for itself.

It drafts a few tokens cheaply (from low-bit copies of its own weights, with sub-layers left out, or copied from the \
text), then verifies them all in one pass. No second model, no training, the same text.

[bold]Start here[/bold]

  ssd generate --compare                      compared with plain decoding: text, speed, memory
  ssd generate "Why is the sky blue?"         just the answer
  ssd generate --show-draft                   where each token came from
  ssd chat                                    a conversation, coloured by where tokens came from
  ssd inspect demo                            what a draft can leave out
  ssd search demo                             the best draft on this machine
  ssd profile demo                            what drafting costs, part by part
  ssd benchmark --limit-per-category 1        compared with its peers, on many kinds of prompts
  ssd evaluate summarisation --limit 8        are the answers as good?
  ssd serve demo                              a server that drafts (transformers' own)
  ssd export demo smollm2-drafting            a folder that drafts in any program
"""

app = typer.Typer(
    name="ssd",
    add_completion=False,
    invoke_without_command=True,
    rich_markup_mode="rich",
    # Errors are printed in one line (see `main`); a traceback, where there is one, is Python's own.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(help=HELP)
def ssd(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Print the version, or the help where no sub-command is named."""
    if version:
        from importlib.metadata import version as version_of

        print(f"ssd_generation {version_of('ssd_generation')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        context.get_help()  # prints it
        raise typer.Exit


app.command(help=generate.HELP)(generate.generate)
app.command(help=chat.HELP)(chat.chat)
app.command(help=benchmark.HELP)(benchmark.benchmark)
app.command(help=evaluate.HELP)(evaluate.evaluate)
app.command(help=evaluate.REPORT_HELP)(evaluate.report)
app.command(help=search.HELP)(search.search)
app.command(help=profile.HELP)(profile.profile)
app.command(help=inspect.HELP)(inspect.inspect)
app.command(help=export.HELP)(export.export)
app.command(help=serve.HELP)(serve.serve)
app.command(help=presets.HELP)(presets.presets)
