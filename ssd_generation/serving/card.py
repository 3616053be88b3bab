"""Model cards of exported folders: how to use one, and what was measured."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

from ..config import Costs, SelfSpeculativeConfig
from ..support.display import for_markdown
from ..support.messages import clipped
from ..tuning.speedup import theoretical_speedup

__all__ = ["TAG", "CardError", "write_card"]

TAG = "custom_generate"
"""Tag under which the Hub lists repositories with their own `generate`."""

_BEGIN, _END = "<!-- ssd_generation -->", "<!-- end of ssd_generation -->"
_MOST_PASSES = 8  # verification passes in a card's table


class CardError(ValueError):
    """Model card whose metadata cannot be read, so that no tag can be added to it."""


def write_card(path: Path, name: str, default: SelfSpeculativeConfig | Literal["auto"], only: bool) -> None:
    """Write a model card, or add the tag and a section to the existing one.

    Args:
        path: path of the README.md.
        name: name of the model.
        default: the folder's drafting config.
        only: whether the folder has no model, only `custom_generate/`.

    Raises:
        CardError: the existing card has malformed metadata; it is left unchanged.
    """
    from huggingface_hub import metadata_save

    section = f"{_BEGIN}\n{_section(name, default, only)}{_END}\n"
    try:
        metadata = _metadata(path)
    except Exception as error:  # the YAML parser raises its own error types
        raise CardError(clipped(" ".join(str(error).split()))) from error
    tags = metadata.get("tags") or []
    tags = [tags] if isinstance(tags, str) else list(tags)
    metadata = {"library_name": "transformers", **metadata, "tags": [*tags, *([] if TAG in tags else [TAG])]}
    text = (
        path.read_text(encoding="utf-8") if path.exists() else f"# Self-speculative decoding of {for_markdown(name)}\n"
    )
    text = re.sub(f"{_BEGIN}.*?{_END}", "", text, flags=re.DOTALL)  # the section of an earlier export
    path.write_text(f"{text.rstrip()}\n\n{section}", encoding="utf-8", newline="\n")
    metadata_save(path, metadata)


def _metadata(path: Path) -> dict[str, Any]:
    from huggingface_hub import metadata_load

    return (metadata_load(path) or {}) if path.exists() else {}


def _section(name: str, default: SelfSpeculativeConfig | Literal["auto"], only: bool) -> str:
    """Return the section: usage, drafting config and measured figures."""
    if only:
        use = (
            f'model = AutoModelForCausalLM.from_pretrained("MODEL")  # {_comment(name)}\n'
            'model.generate(**inputs, custom_generate="FOLDER", trust_remote_code=True)'
        )
    else:
        use = (
            'model = AutoModelForCausalLM.from_pretrained("FOLDER", trust_remote_code=True)\n'
            "model.generate(**inputs)  # pipelines and `transformers serve FOLDER --trust-remote-code` draft as well"
        )
    parts = [
        "## Drafting with the model itself\n",
        "With the package `ssd_generation` installed, the model drafts a few "
        "tokens cheaply and verifies them in one pass: the same greedy text, the same distribution of samples. No "
        "second model, no training.\n",
        f"```python\n# pip install ssd_generation; FOLDER: this folder, or its Hub id\n{use}\n```\n",
        "`self_speculative=False` in a call decodes plainly; `assistant_model=` and `prompt_lookup_num_tokens=` draft "
        "in transformers' own ways instead.\n",
    ]
    if not isinstance(default, SelfSpeculativeConfig):
        parts.append(
            "It picks the fastest way to draft on this machine, or none: the first call measures that, in seconds.\n"
        )
    else:
        parts += [_figures(default), f"The config:\n\n```json\n{default.to_json_string()}```\n"]
    return "\n".join(part for part in parts if part)


def _comment(name: str) -> str:
    return json.dumps(name)[1:-1]


def _figures(config: SelfSpeculativeConfig) -> str:
    """Return the table of measured figures; an empty string if there are none."""
    rows = [*_conditions(config), *(_costs(config.costs) if config.costs is not None else [])]
    acceptance = config.drafting.acceptance
    if acceptance:
        rows.append(("acceptance by depth", ", ".join(f"{share:.2f}" for share in acceptance)))
    if acceptance and config.costs is not None:
        speedup, length = theoretical_speedup(acceptance, config.costs, config.drafting.max_draft_length)
        rows.append(("speed-up predicted from these figures", f"{speedup:.2f}, with drafts of {length} tokens"))
    if not rows:
        return ""
    table = "".join(f"| {name} | {for_markdown(value)} |\n" for name, value in rows)
    heading = "Where the config comes from, and what was measured there (another machine gives other figures):"
    return f"{heading}\n\n| | |\n|---|---|\n{table}"


def _conditions(config: SelfSpeculativeConfig) -> list[tuple[str, str]]:
    """Return table rows for the model, the machine and the versions."""
    found, costs = config.provenance, config.costs
    rows: list[tuple[str, str | None]] = []
    if found is not None:
        model = found.model_id if found.revision is None else f"{found.model_id} at {found.revision}"
        versions = ", ".join(f"{library} {number}" for library, number in (found.versions or {}).items())
        rows += [
            ("model", model if found.model_id is not None else None),
            ("weights", found.dtype),
            ("device", found.device if costs is None or costs.measured_on is None else None),
            ("versions", versions),
            ("date", found.date),
            ("source", found.source),
        ]
    if costs is not None:
        rows.append(("machine", costs.measured_on))
    return [(name, value) for name, value in rows if value]


def _costs(costs: Costs) -> list[tuple[str, str]]:
    passes = costs.verify[:: max(1, -(-len(costs.verify) // _MOST_PASSES))]
    return [
        ("plain step", f"{costs.plain_step * 1e3:.3g} ms"),
        ("draft step", f"{costs.draft_step * 1e3:.3g} ms"),
        ("verification pass", ", ".join(f"{tokens} tokens {seconds * 1e3:.3g} ms" for tokens, seconds in passes)),
    ]
