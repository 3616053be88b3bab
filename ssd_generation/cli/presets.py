"""`ssd presets`: the configs that come with the package."""

from __future__ import annotations

from .layer_lists import describe_layers
from .options import JsonOption

HELP = "List the configs that come with the package, for [bold]--config[/bold]."


def presets(as_json: JsonOption = False) -> None:
    """List the configs that come with the package."""
    from ..config import PRESETS
    from .console import out, print_json

    if as_json:
        print_json({name: config.to_dict() for name, config in PRESETS.items()})
        return
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("preset", no_wrap=True, style="bold")
    table.add_column("layers", justify="right", no_wrap=True)
    table.add_column("the draft leaves out")
    sources: dict[str, list[str]] = {}
    for name, config in PRESETS.items():
        layers = config.provenance.num_layers if config.provenance is not None else None
        table.add_row(
            name,
            "–" if layers is None else str(layers),
            f"attention {describe_layers(config.skip.attention) or 'none'}\n"
            f"MLP {describe_layers(config.skip.mlp) or 'none'}",
        )
        if config.provenance is not None and config.provenance.source is not None:
            sources.setdefault(config.provenance.source, []).append(name)
    out().print(table)
    for source, names in sources.items():
        out().print(f"{', '.join(names)}: {source}", style="dim")
