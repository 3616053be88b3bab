"""`ssd export`: a folder from which transformers drafts, in any program that loads it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from .options import AUTO

if TYPE_CHECKING:
    from ..config import SelfSpeculativeConfig
    from ..serving import Export

HELP = """Write a folder from which transformers drafts.

OUTPUT holds the model's files and a `custom_generate/`. Programs that load it with `trust_remote_code=True` draft \
without another line of code: `from_pretrained(…).generate`, `pipeline`, `transformers serve`. They need this package \
installed.

[bold]Examples[/bold]

  ssd export Qwen/Qwen2.5-0.5B-Instruct qwen-drafting
  ssd export ./my-model ./my-model-drafting --config ./search-my-model
  ssd export ./my-model ./my-model-drafting --link
  ssd export ./my-model ./generate-only --only
"""

ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="A Hub id, a folder, or `demo`.", show_default=False)
]
ConfigOption = Annotated[
    str | None,
    typer.Option(
        metavar="CONFIG",
        help="What to draft with: auto, a JSON file, a folder that holds one, a Hub id, or a preset (`ssd presets`). "
        "Default: what is stored with the model, else auto.",
    ),
]


def export(
    model: ModelArgument,
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="The folder to write.", show_default=False)],
    config: ConfigOption = None,
    only: Annotated[
        bool, typer.Option("--only", help="Write `custom_generate/` and its model card alone, without the model.")
    ] = False,
    link: Annotated[bool, typer.Option("--link", help="Link to the model's files instead of copying them.")] = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="Write into a folder that is not empty; files of the same names are replaced."),
    ] = False,
) -> None:
    """Write a folder from which transformers drafts."""
    if only and link:
        raise ValueError("--only leaves the model out, so that there is nothing to --link. Leave one of them out.")
    from ..serving import export_model, find_model
    from ..serving.source import check_fits
    from .console import at_work, progress

    with at_work(as_json=False):
        source = find_model(model)
        default = default_of(config, source.folder)
        check_fits(source.folder, default)
        with progress(f"Exporting {source.name}") as advance:
            written = export_model(
                source, output.expanduser(), default, only=only, link=link, force=force, advance=advance
            )
    _report(written, only=only, link=link)


def default_of(config: str | None, folder: Path) -> SelfSpeculativeConfig | Literal["auto"]:
    """Return the config that `--config` names, or the one stored with the model.

    Raises:
        ValueError, TypeError, FileNotFoundError: the config cannot be read.
    """
    from ..config import SelfSpeculativeConfig
    from ..serving import stored_default

    if config is None:
        return stored_default(folder)
    return AUTO if config == AUTO else SelfSpeculativeConfig.from_pretrained(config)  # type: ignore[return-value]


def _report(written: Export, *, only: bool, link: bool) -> None:
    from ..support.display import byte_size
    from .console import err, out, styled

    files = "1 file" if written.files == 1 else f"{written.files} files"
    linked = ", the rest linked" if link else ""
    out().print(f"Written to {written.folder} ({files}, {byte_size(written.bytes)}{linked}).", soft_wrap=True)
    if only:
        use = f'model.generate(…, custom_generate="{written.folder}", trust_remote_code=True)'
    else:
        use = f'AutoModelForCausalLM.from_pretrained("{written.folder}", trust_remote_code=True).generate(…)'
    out().print(styled("It drafts in: ", (use, "bold")), soft_wrap=True)
    if link:
        err().print(
            "Its files are links: saving a model into this folder (save_pretrained) writes through them, into the "
            "original.",
            style="yellow",
        )
    if written.card_problem is not None:
        err().print(
            "The model card's metadata cannot be read, so it was left as it is, without the tag custom_generate: "
            f"{written.card_problem}.",
            style="yellow",
        )
