"""The drafter of a call, with what the model's draft-length policies and refinements have learnt in earlier calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..drafting.drafter import CheckedDrafter, Drafter
from ..drafting.ngram_store import NGramStore, StorePart
from ..drafting.policy import CostAwarePolicy, DraftPolicy, make_policy
from ..drafting.self_drafter import SelfDrafter, self_drafter
from ..forward.forward import Forward
from ..forward.structure.offloaded import is_offloaded
from ..forward.structure.sublayers import input_device
from ..support.display import visible
from ..support.model_state import state_of
from ..support.warn import warn_user
from .costs import costs_of, rows_measured
from .learnt import LearntPart
from .measuring import describe_machine
from .moving_weights import follow_weights
from .pending_copies import pending_copies
from .refinement import WINDOW, Refinement

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

    from ..config import SelfSpeculativeConfig
    from ..decoding.batch_rows import Rows

__all__ = ["BetweenRounds", "call_drafter", "policy_of", "refinement_of", "store_of"]


def call_drafter(
    forward: Forward, draft_by: SelfSpeculativeConfig | Drafter, generation_config: GenerationConfig, batch: int
) -> tuple[Drafter, BetweenRounds | None]:
    """Build the drafter of a call and, if its config says `adapt`, its online refinement.

    Args:
        forward: the model's passes.
        draft_by: config to draft with, or a drafter of the user's own.
        generation_config: the prepared generation config of the call.
        batch: number of rows, B.
    """
    model = forward.model
    if isinstance(draft_by, Drafter):
        return CheckedDrafter(draft_by, int(model.get_input_embeddings().weight.shape[0])), None
    config = draft_by
    # Each judging pass would read all offloaded weights, while the draft reads none.
    adapts = config.adapt and not (config.precision and is_offloaded(model))
    refinement = refinement_of(model, config) if adapts else None
    if refinement is not None:
        config = refinement.config
    follow_weights(model, config, generation_config.max_new_tokens)
    policy = policy_of(model, config, batch)
    pending = pending_copies(model, config, generation_config.max_new_tokens)
    drafter = self_drafter(
        forward,
        config,
        generation_config,
        policy,
        batch,
        store=store_of(model, config),
        prepare=None if pending is None else pending.make_some,
    )
    return drafter, None if refinement is None else BetweenRounds(model, refinement, drafter, batch)


def store_of(model: PreTrainedModel, config: SelfSpeculativeConfig | None) -> NGramStore | None:
    """Return the store of earlier calls' texts that a config drafts from; `None` where it uses none.

    Args:
        model: the target model.
        config: the config to draft with.
    """
    if config is None or config.lookup is None or not config.lookup.store:
        return None
    return state_of(model).get(StorePart).store


def policy_of(model: PreTrainedModel, config: SelfSpeculativeConfig, batch: int) -> DraftPolicy:
    """Return the draft-length policy of a model and config, with its learnt state where that is carried over.

    Args:
        model: the target model.
        config: the config to draft with; its costs are measured where it has none and its policy needs them.
        batch: number of rows, B.

    Warns:
        The costs in the config were measured elsewhere.
    """
    policies, key, rows = state_of(model).get(LearntPart).policies, _key(config, batch), rows_measured(batch)
    if key not in policies or config.drafting.carry_state is False:
        costs = config.costs
        if config.drafting.policy == "cost":
            if costs is not None and costs.measured_on is not None and costs.measured_on != describe_machine(model):
                warn_user(
                    f"The costs in this config were measured on another machine, dtype or version "
                    f"({visible(costs.measured_on)}) than this one ({describe_machine(model)}): the draft length may "
                    "not be the best here. Leave `costs` out to have them measured, or store those of "
                    "`ssd_generation.tuning.measure_costs(model, config)`."
                )
            elif costs is None or (rows > 1 and costs.measured_on is not None):
                costs = costs_of(model, config, rows=rows)  # those measured before are for a single row
        policies[key] = make_policy(
            config.drafting,
            costs,
            self_drafts=config.drafts_itself,
            lookup=config.lookup is not None,
            use_confidence=input_device(model).type == "cpu",
        )
    found: DraftPolicy = policies[key]
    return found


def _key(config: SelfSpeculativeConfig, batch: int) -> Any:
    """Return the key of a policy: the config and, for a batch, roughly how many rows share its passes."""
    return config if batch == 1 else (config, rows_measured(batch))


def refinement_of(model: PreTrainedModel, config: SelfSpeculativeConfig) -> Refinement:
    """Return the refinement of a config's draft, with what it has learnt so far; measure costs where it is new.

    Args:
        model: the target model.
        config: the config that the user requested.
    """
    refinements: dict[SelfSpeculativeConfig, Refinement] = state_of(model).get(LearntPart).refinements
    if config not in refinements or config.drafting.carry_state is False:
        costs = config.costs if config.costs is not None else costs_of(model, config)
        refinements[config] = Refinement(model, config, costs)
    return refinements[config]


class BetweenRounds:
    """Judge of drafts between the rounds of a call, which replaces the draft where another one is better.

    Args:
        model: the target model.
        refinement: refinement of the draft.
        drafter: drafter of the call, whose draft may be replaced.
        batch: number of rows, B.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        refinement: Refinement,
        drafter: SelfDrafter,
        batch: int,
    ) -> None:
        self.refinement = refinement
        self._model, self._batch, self._drafter = model, batch, drafter
        self._judged = 0  # tokens of the text

    def __call__(self, draft_passes: int, verified: int, rows: Rows) -> None:
        """Judge a draft if one is due; arguments as in `DecodingLoop.after_round`."""
        refinement = self.refinement
        refinement.earn(draft_passes, verified)
        length = rows.lengths[0]
        since = length - max(self._judged, rows.prompt_length)
        if not (self._drafter.is_prepared and refinement.is_due(since)):
            return
        self._judged = length
        text = rows.verified_text(min(since, WINDOW))
        before = refinement.config
        if text is None or not refinement.learn(self._model, text):
            return
        policies, key = state_of(self._model).get(LearntPart).policies, _key(before, self._batch)
        policy = policy_of(self._model, refinement.config, self._batch)
        old = policies[key] if before == refinement.base else policies.pop(key)
        if isinstance(policy, CostAwarePolicy) and isinstance(old, CostAwarePolicy):
            policy.take_over(old)  # nothing is known of the new draft
        self._drafter.draft_by(refinement.config, policy)
