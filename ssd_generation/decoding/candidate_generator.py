"""The model's own draft as a candidate generator, for transformers' assisted decoding loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.candidate_generator import CandidateGenerator

from ..cache.buffered_layers import add_buffers
from ..config import SelfSpeculativeConfig
from ..drafting.drafter import Draft
from ..drafting.policy import DraftPolicy
from ..drafting.self_drafter import self_drafter
from ..forward.forward import Context, Forward
from ..forward.pass_plan import EAGER
from ..forward.structure.positions import most_positions
from ..support.tensors import argmax
from ..support.versions import cache_argument

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["SelfSpeculativeCandidateGenerator"]


class SelfSpeculativeCandidateGenerator(CandidateGenerator):
    """Candidate generator in which the target model drafts: in skip mode, from low-bit copies, or by prompt lookup.

    It implements transformers' candidate-generator interface, and works in transformers' own assisted decoding loop,
    unmodified. The target fills its cache with the prompt alone; from then on each round drafts some tokens in skip
    mode. The draft reads the target's keys and values in place, never writes to them, and discards its own at the end
    of the round.

    `generate(..., self_speculative=config)` runs its own loop and does not use this class. transformers has no argument
    for a candidate generator; to run its loop with this one, subclass the model:

    ```python
    class WithGenerator(type(model)):
        def _get_candidate_generator(self, generation_config, logits_processor, **kwargs):
            config = SelfSpeculativeConfig(skip, DraftingConfig(policy="fixed", max_draft_length=4))
            return SelfSpeculativeCandidateGenerator(self, config, generation_config, logits_processor)


    model.__class__ = WithGenerator
    model.generate(**inputs, assistant_model=model)  # any model: it only selects assisted decoding
    ```

    Args:
        model: the target model.
        config: configuration of the draft and its length.
        generation_config: the prepared generation config of the call (`do_sample`, `max_length`, end-of-sequence
            tokens).
        logits_processor: the processors of the call, applied to the draft's logits exactly as to the target's.
        policy: draft-length policy; by default a new one made from `config.drafting` and `config.costs`. Pass one to
            continue from its state.

    Raises:
        ValueError: the config does not fit the model, low-bit copies cannot be made of it, or the policy needs costs
            and the config has none (`generate` measures them).
    """

    requires_model_outputs = True

    def __init__(
        self,
        model: PreTrainedModel,
        config: SelfSpeculativeConfig,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList | None = None,
        policy: DraftPolicy | None = None,
    ) -> None:
        self.model = model
        self._samples = bool(generation_config.do_sample)
        self.drafter = self_drafter(
            Forward(model, plan=EAGER), config, generation_config, policy, keeps_scores=self._samples
        )
        self.logits_processor = logits_processor if logits_processor is not None else LogitsProcessorList()
        self.max_length = int(generation_config.max_length)
        if (most := most_positions(model)) is not None:
            self.max_length = min(self.max_length, most + 1)
        self._last_draft: Draft | None = None

    @property
    def policy(self) -> DraftPolicy:
        """Draft-length policy."""
        return self.drafter.policy

    @property
    def draft_passes(self) -> int:
        """Number of passes of the model in skip mode so far."""
        return self.drafter.draft_passes

    @property
    def model_kwargs_overrides(self) -> dict[str, Any]:
        """Extra arguments for the target's passes: none."""
        return {}

    def get_candidates(
        self,
        input_ids: torch.LongTensor,
        model_kwargs: dict[str, Any] | None = None,
        model_outputs: Any = None,
        is_first_iteration: bool = False,
        n_last_matches: int = 0,
        **kwargs: Any,
    ) -> tuple[torch.LongTensor, torch.Tensor | None]:
        """Draft a continuation of `input_ids`.

        Args:
            input_ids (`torch.LongTensor` of shape `(1, sequence_length)`): the text so far; the cache holds all but its
                last token.
            model_kwargs: the target's keyword arguments, including its cache.
            model_outputs: outputs of the target's last pass; not used.
            is_first_iteration: whether the target has not read the prompt yet. Nothing is drafted then.
            n_last_matches: drafted tokens accepted in the last round; not used, `update_candidate_strategy` gets it
                too.

        Returns:
            `torch.LongTensor` of shape `(1, sequence_length + k)`, and the scores that the k tokens were drawn from, of
            shape `(1, k, vocab_size)`; `None` for the scores under greedy decoding or where nothing was drafted.
        """
        self._last_draft = None
        cache = (model_kwargs or {}).get(cache_argument(self.model))
        limit = self.max_length - input_ids.shape[1] - 1
        if is_first_iteration or cache is None or limit < 1:
            return input_ids, None
        add_buffers(cache)
        model_kwargs = model_kwargs or {}
        positions = model_kwargs.get("position_ids")
        context = Context(
            cache,
            length=input_ids.shape[1] - 1,
            mask=model_kwargs.get("attention_mask"),
            positions=None if positions is None else positions[..., -1:],
            arguments=model_kwargs,
        )
        draft = self.drafter.propose(_Text(input_ids, context, self.logits_processor, self._samples), [limit])
        self._last_draft = draft
        if draft.tokens.shape[1] == 0:
            return input_ids, None
        scores = draft.distributions(self._vocabulary).to(input_ids.device) if self._samples else None
        return torch.cat((input_ids, draft.tokens.to(input_ids.device)), dim=1), scores  # type: ignore[return-value]

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        """Update the draft-length policy with the outcome of the last round.

        Args:
            input_ids (`torch.LongTensor` of shape `(1, sequence_length)`): the text so far.
            scores: the target's scores; not used.
            num_matches: number of drafted tokens accepted.
        """
        if self._last_draft is not None:
            self.drafter.learn(self._last_draft, [int(num_matches)], rows=[0])

    @property
    def _vocabulary(self) -> int:
        known = getattr(self.model.get_output_embeddings(), "out_features", None)
        return int(known if known is not None else self.model.config.get_text_config(decoder=True).vocab_size)


class _Text:
    """Single text of transformers' loop, as a drafter sees it (`Texts`)."""

    batch, lockstep = 1, False

    def __init__(
        self, input_ids: torch.Tensor, context: Context, processors: LogitsProcessorList, samples: bool
    ) -> None:
        self.input_ids, self.context, self._processors, self._samples = input_ids, context, processors, samples
        self.pending, self.lengths = input_ids[:, -1:], [input_ids.shape[1]]
        self.has_processors = len(processors) > 0
        self.are_greedy = not (self.has_processors or samples)

    def text(self, row: int, start: int = 0) -> list[int]:
        return self.input_ids[row, start:].tolist()

    def draw(self, drafted: torch.Tensor, logits: torch.Tensor) -> None:
        """Draw nothing: transformers' loop needs the scores."""

    def process(self, drafted: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        ids = torch.cat((self.input_ids, drafted), dim=1)
        return self._processors(ids, logits)  # type: ignore[no-any-return]

    def choose(self, scores: torch.Tensor, ahead: int) -> torch.Tensor:
        if self._samples:  # transformers' rule of acceptance: sample from the draft, independently of the target
            return torch.multinomial(scores.softmax(dim=-1), num_samples=1).squeeze(1)
        return argmax(scores)
