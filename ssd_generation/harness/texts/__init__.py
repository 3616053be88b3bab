"""Prompts, and checks of a method's texts: first differences, and the distribution of sampled tokens."""

from .differences import Difference, find_difference, first_difference
from .prompt_files import read_prompts
from .prompt_types import Prompt, Question, questions_of
from .prompts import BUILT_IN, HubRows, built_in_prompts, digest, encode_prompt, hub_rows, load_prompts
from .sampling_check import SamplingCheck, check_sampling, z_figure

__all__ = [
    "BUILT_IN",
    "Difference",
    "HubRows",
    "Prompt",
    "Question",
    "SamplingCheck",
    "built_in_prompts",
    "check_sampling",
]
__all__ += ["digest", "encode_prompt", "find_difference", "first_difference", "hub_rows", "load_prompts"]
__all__ += ["questions_of", "read_prompts", "z_figure"]
