"""Table of a comparison, and page and plot of several comparisons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna

from ssd_generation.search.plots import plot_progress
from ssd_generation.search.storage import storage_to_read
from ssd_generation.search.study import explain_unreadable, tried_in
from ssd_generation.search.trials import Found
from ssd_generation.support.display import for_markdown, for_plot
from ssd_generation.support.files import replacing, write_whole
from ssd_generation.support.reading import RESULT, read_json

from ..tables import as_markdown

__all__ = ["plot_methods", "put_together", "table"]


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the methods as a Markdown table; if the paper's search is among them, also the passes to equal it."""
    paper = next((name for name in ("paper", "paper-judged") if name in rows), None)
    head = ["method", "drafts", "passes", *([f"until as good as {paper}"] if paper else []), "promised"]
    head += ["on texts held back", "measured", "draft step", "acceptance"]
    lines = []
    for name, row in rows.items():
        measured = "–"
        if "measured" in row:
            measured = f"{row['measured']:.2f} ({row['measured_from']:.2f}–{row['measured_to']:.2f})"
        promised = f"{row['speedup']:.2f} at {row['draft_length']}"
        passes = [str(row["passes"])]
        if paper is not None:
            until = row["passes_to_reach"].get(paper)
            passes.append("never" if until is None else str(until))
        cells = [f"{name} ({row['what']})", str(row["trials"]), *passes, promised, f"{row['held_out_speedup']:.2f}"]
        lines.append([*cells, measured, f"{row['draft_cost']:.2f}", f"{row['acceptance']:.3f}"])
    return "\n".join(as_markdown(head, lines)) + "\n"


def plot_methods(founds: Mapping[str, Mapping[str, Found]], path: Path) -> None:
    """Plot the progress of several search methods as `plot_progress` does, in a panel for each model.

    Args:
        founds: results by model and method.
        path: path of the file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Plots need matplotlib: pip install 'ssd_generation[plots]'") from error
    several = len(founds) > 1
    figure = Figure(figsize=(2 + 4.6 * len(founds), 5.6 if several else 4), layout="constrained")
    names = list(dict.fromkeys(name for found in founds.values() for name in found))
    for place, (model, found) in enumerate(founds.items()):
        ax = figure.add_subplot(1, len(founds), place + 1)
        plot_progress(found, ax=ax, names=names)
        ax.set_title(for_plot(model), fontsize=12)
        if several:  # below, where it covers no line
            ax.legend(fontsize=10, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncol=2, frameon=False)
        if place > 0:
            ax.set_ylabel("")
    figure.savefig(path, dpi=130, format="png")


def put_together(folders: Sequence[Path], output: Path) -> str:
    """Put runs for several models on one page (methods.md), and in one plot (methods.png).

    Args:
        folders: folders that earlier runs have written.
        output: folder of the page and the plot.

    Returns:
        The page.

    Raises:
        ImportError: matplotlib is not installed; the page is written all the same.
        ValueError: a folder holds no finished run, or one that cannot be read.
    """
    pages, founds = [], {}
    for folder in folders:
        file = folder / "methods.json"
        try:
            data = read_json(file, RESULT)
            storage = storage_to_read(str(folder / "studies.db"))
        except FileNotFoundError as error:
            raise ValueError(
                f"{str(folder)!r} holds no finished comparison of methods: {file.name} or studies.db is missing there."
            ) from error
        with explain_unreadable(f"The comparison of methods in {str(folder)!r}"):
            names = {name: optuna.load_study(study_name=name, storage=storage) for name in data["methods"]}
            texts = data["texts"]
            pages.append(
                f"## {for_markdown(data['model'])}\n\n{for_markdown(data['measured_on'])}; chosen on "
                f"{texts['chosen_on']} texts of {texts['new_tokens']} tokens, {texts['held_back']} held back\n\n"
                f"{table(data['methods'])}"
            )
            founds[data["model"]] = {name: tried_in(study) for name, study in names.items()}
    page = "# Ways of searching\n\n" + "\n".join(pages)
    write_whole(output / "methods.md", page)
    with replacing(output / "methods.png") as path:
        plot_methods(founds, path)
    return page
