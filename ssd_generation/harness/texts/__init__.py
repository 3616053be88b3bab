"""Prompts, and what the texts of a method are checked for: first differences, and how tokens were drawn."""

from .differences import Difference, find_difference, first_difference
from .prompts import (
    BUILT_IN,
    HubRows,
    Prompt,
    built_in_prompts,
    digest,
    encode_prompt,
    hub_rows,
    load_prompts,
    read_prompts,
)
from .sampling_check import SamplingCheck, check_sampling, z_figure

__all__ = ["BUILT_IN", "Difference", "HubRows", "Prompt", "SamplingCheck", "built_in_prompts", "check_sampling"]
__all__ += ["digest", "encode_prompt", "find_difference", "first_difference", "hub_rows", "load_prompts"]
__all__ += ["read_prompts", "z_figure"]
