"""Where a config came from."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import date, datetime, timezone
from typing import TYPE_CHECKING

from ..support.hub import identity_of
from ..support.messages import shown
from ..support.parameters import Parameters
from .values import FREE_TEXT, NAME, NUM_LAYERS, VERSIONS

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Provenance(Parameters, title="'provenance'", omits_defaults=True):
    """Where a config came from: on which model, with what, and when. All of it is optional.

    Strings have at most 300 characters, `source` at most 10,000.

    Args:
        model_id: Hub id of the model, or the name of its folder.
        model_type: its architecture, such as "llama", as in the config of its text model.
        num_layers: its number of decoder layers, 1 to 10,000.
        revision: commit of its weights on the Hub.
        dtype: of its weights, such as "bfloat16".
        attention_implementation: such as "sdpa".
        device: such as "cpu" or "cuda (NVIDIA H200)".
        versions: library to version, of at most 50.
        date: day in UTC, YYYY-MM-DD.
        source: free text, such as a citation.

    Raises:
        TypeError, ValueError: a number out of range, a string or `versions` too long, or a date that is none.
    """

    model_id: str | None = field(default=None, metadata=NAME.metadata)
    model_type: str | None = field(default=None, metadata=NAME.metadata)
    num_layers: int | None = field(default=None, metadata=NUM_LAYERS.metadata)
    revision: str | None = field(default=None, metadata=NAME.metadata)
    dtype: str | None = field(default=None, metadata=NAME.metadata)
    attention_implementation: str | None = field(default=None, metadata=NAME.metadata)
    device: str | None = field(default=None, metadata=NAME.metadata)
    versions: Mapping[str, str] | None = field(default=None, metadata=VERSIONS.metadata)
    date: str | None = field(default=None, metadata=NAME.metadata)
    source: str | None = field(default=None, metadata=FREE_TEXT.metadata)

    def _check_together(self) -> None:
        try:
            is_day = self.date is None or date.fromisoformat(self.date).isoformat() == self.date
        except ValueError:
            is_day = False
        if not is_day:
            told = f"date must be a day written YYYY-MM-DD, such as '2025-01-31', but got {shown(self.date)}."
            raise ValueError(told)

    @classmethod
    def from_model(cls, model: PreTrainedModel) -> Provenance:
        """Describe a loaded target model and the libraries it runs on.

        A model loaded from a local folder is named by that folder alone (from the Hub's cache: by its Hub id), so that
        a shared config tells nothing of the machine's directories.
        """
        import torch
        import transformers

        libraries, config = (torch, transformers, sys.modules["ssd_generation"]), model.config
        text_config = config.get_text_config(decoder=True)
        model_id, revision = identity_of(getattr(config, "_name_or_path", None) or "")
        device = torch.device(model.device)
        return cls(
            model_id=model_id,
            model_type=text_config.model_type,
            num_layers=text_config.num_hidden_layers,
            revision=getattr(config, "_commit_hash", None) or revision,
            dtype=str(model.dtype).removeprefix("torch."),
            attention_implementation=getattr(text_config, "_attn_implementation", None),
            device=f"cuda ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else device.type,
            versions={"python": platform.python_version(), **{m.__name__: str(m.__version__) for m in libraries}},
            date=datetime.now(timezone.utc).date().isoformat(),
        )

    def validate_for(self, num_layers: int, model_type: str | None = None) -> None:
        """Raise ValueError where the config was made for a model of another type (if given) or number of layers."""
        named = f" ({shown(self.model_id)[1:-1]})" if self.model_id else ""
        advice = "Use a config that was made for this model."
        if model_type is not None and self.model_type not in (None, model_type):
            raise ValueError(
                f"This config was made for a model of type {shown(self.model_type)}{named}, but the model is of type "
                f"{shown(model_type)}. {advice}"
            )
        if self.num_layers not in (None, num_layers):
            told = f"This config was made for a model with {self.num_layers} layers{named}"
            raise ValueError(f"{told}, but the model has {num_layers}. {advice}")

    def __repr__(self) -> str:
        known = ((f.name, getattr(self, f.name)) for f in fields(self))
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in known if v is not None)})"
