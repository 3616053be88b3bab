"""Drafts to try before the sampler takes over, derived from the drafts tried so far.

Everything here is a function of the trials in the study, so that all workers make the same proposals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from .space import HEAD, KEEP, SKIP, Space
from .trials import SPEEDUP, Scoring, Tried

if TYPE_CHECKING:
    from .cost_profile import CostProfile

__all__ = ["forward_selection", "next_proposals", "uniform_drafts", "warm_start"]

Proposal = tuple[str, dict[str, str]]


_MOST_SINGLES = 80
_MOST_SETS = 12
_MOST_MOVES = 4


def next_proposals(
    strategy: str,
    space: Space,
    profile: CostProfile,
    tried: Sequence[Tried],
    context: int,
    layerwise: Sequence[Mapping[str, str]] = (),
    scoring: Scoring = SPEEDUP,
) -> list[Proposal]:
    """Return the drafts to try next, each with the name of its origin; none if the strategy has finished.

    Args:
        strategy: "warm" (see `warm_start`) or "forward" (see `forward_selection`).
        space: the space.
        profile: the costs.
        tried: drafts tried so far.
        context: prefix length of a drafted token.
        layerwise: skip sets found by hidden states (`layerwise.layerwise_skips`), in order of size.
        scoring: score that the search maximises.
    """
    if strategy == "forward":
        return forward_selection(space, tried)
    return warm_start(space, profile, tried, context, layerwise, scoring=scoring)


def _key(choices: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(choices.values())


def _missing(proposals: Sequence[Proposal], by_key: Mapping[tuple[str, ...], Tried]) -> list[Proposal]:
    return [proposal for proposal in proposals if _key(proposal[1]) not in by_key]


def _by_key(space: Space, tried: Sequence[Tried]) -> dict[tuple[str, ...], Tried]:
    return {_key({name: t.choices[name] for name in space.choices}): t for t in tried}


def uniform_drafts(space: Space) -> list[dict[str, str]]:
    """Return the drafts with one precision everywhere, and int4 with the LM head in int8."""
    drafts = [space.uniform(precision) for precision in space.precisions]
    if set(space.precisions) >= {"int4", "int8"}:
        drafts.append(space.uniform("int4", head="int8"))
    return drafts


def warm_start(
    space: Space,
    profile: CostProfile,
    tried: Sequence[Tried],
    context: int,
    layerwise: Sequence[Mapping[str, str]] = (),
    most_singles: int = _MOST_SINGLES,
    scoring: Scoring = SPEEDUP,
) -> list[Proposal]:
    """Return the drafts to try before the sampler takes over, in stages.

    The stages: uniform precisions; the best of these with one sub-layer skipped, for each sub-layer; the skip sets that
    are best if the losses of single sub-layers add up, and sets found by hidden states; small changes to the best
    draft, while they help.

    Losses are differences of the log acceptance rate. They are assumed to add up, and so is the time saved, as
    profiled. Then the best set of a attention and m MLP sub-layers has those with the smallest losses of each kind.
    This solves the knapsack problem of KnapSpec (ICML 2026) for every capacity at once where the sub-layers of a kind
    cost the same.

    In a model with more sub-layers than `most_singles`, only some are skipped singly, and the others are assumed to
    lose as much as the nearest of these.
    """
    by_key = _by_key(space, tried)
    uniform = uniform_drafts(space)
    if waiting := _missing([("uniform", choices) for choices in uniform], by_key):
        return waiting
    base = space.uniform(KEEP)
    reference: Tried | None = None
    for choices in uniform:
        t = by_key[_key(choices)]
        if not t.pruned and t.speedup > (reference.speedup if reference else 1.0):
            base, reference = choices, t
    singles = {name: {**base, name: SKIP} for name in _spread(space.skippable, most_singles)}
    singles = {name: choices for name, choices in singles.items() if space.is_possible(choices)}
    if waiting := _missing([("single", choices) for choices in singles.values()], by_key):
        return waiting
    at_first = 0.0 if reference is None else -_log_acceptance(reference)
    measured = {name: max(0.0, -_log_acceptance(by_key[_key(choices)]) - at_first) for name, choices in singles.items()}
    losses = {name: measured[_nearest(name, measured)] for name in space.skippable}
    sets = [("set", choices) for choices in _sets(space, profile, base, at_first, losses, context, scoring)]
    sets += [
        ("layerwise", choices) for choices in _by_hidden_states(base, layerwise) if choices not in (c for _, c in sets)
    ]
    if waiting := _missing(sets, by_key):
        return waiting
    return _missing([("move", c) for c in _moves(space, profile, tried, losses, context, scoring)], by_key)


def _spread(names: Sequence[str], most: int) -> list[str]:
    """Return about `most` of the names, spread evenly over the model, for each kind."""
    stride = -(-len(names) // max(most, 1))
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(name.partition(".")[0], []).append(name)
    return [name for group in kinds.values() for name in group[::stride]]


def _nearest(name: str, known: Mapping[str, float]) -> str:
    """Return the nearest known sub-layer of the same kind (of any kind, if there is none)."""
    kind, _, layer = name.partition(".")
    same = [other for other in known if other.startswith(f"{kind}.")] or list(known)
    return min(same, key=lambda other: (abs(int(other.partition(".")[2]) - int(layer)), other))


def _log_acceptance(t: Tried) -> float:
    """Return the log of the acceptance rate, with one accepted and one rejected token added."""
    return math.log((sum(t.acceptance.accepted) + 1) / (sum(t.acceptance.tried) + 2))


def _sets(
    space: Space,
    profile: CostProfile,
    base: Mapping[str, str],
    at_first: float,
    losses: Mapping[str, float],
    context: int,
    scoring: Scoring,
) -> list[dict[str, str]]:
    """Return the sets of best predicted score, best first, of distant sizes; without a budget also scaled sizes."""
    ordered = {
        kind: sorted((name for name in losses if name.startswith(kind)), key=lambda name: (losses[name], name))
        for kind in ("attention", "mlp")
    }
    promised: list[tuple[float, int, int]] = []
    for a in range(len(ordered["attention"]) + 1):
        for m in range(len(ordered["mlp"]) + 1):
            loss = sum(losses[name] for name in (*ordered["attention"][:a], *ordered["mlp"][:m]))
            choices = _with_skipped(base, (*ordered["attention"][:a], *ordered["mlp"][:m]))
            if loss + at_first > 2.5 or not space.is_possible(choices):
                break
            costs = profile.costs(space.config(choices), context)
            promised.append((scoring.score(math.exp(-loss - at_first), costs), a, m))
    promised.sort(key=lambda p: (-p[0], p[1], p[2]))
    sizes: list[tuple[int, int]] = []
    for _, a, m in promised:
        # In practice losses grow faster than their sum, so other sizes are tried too.
        if (a, m) != (0, 0) and all(abs(a - x) + abs(m - y) > 1 for x, y in sizes):
            sizes.append((a, m))
        if len(sizes) == (_MOST_SETS // 2 if scoring.budget is None else _MOST_SETS):
            break
    if sizes and scoring.budget is None:  # a budget already fixes the sizes
        a, m = sizes[0]
        sizes += [(round(a * f), round(m * f)) for f in (0.25, 0.5, 0.75, 1.25, 1.5, 2.0)]
    sets = []
    for a, m in dict.fromkeys(sizes):
        choices = _with_skipped(base, (*ordered["attention"][:a], *ordered["mlp"][:m]))
        if (a, m) != (0, 0) and space.is_possible(choices) and choices not in sets:
            sets.append(choices)
    return sets


def _by_hidden_states(base: Mapping[str, str], layerwise: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Return the base draft with each of some of these sets skipped."""
    wanted = (1, 2, 3, 4, 6, 8, 11, 15, 20)
    return [
        _with_skipped(base, [name for name, choice in layerwise[size - 1].items() if choice == SKIP])
        for size in wanted
        if size <= len(layerwise)
    ]


def _with_skipped(base: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    return {**base, **dict.fromkeys(names, SKIP)}


def _moves(
    space: Space,
    profile: CostProfile,
    tried: Sequence[Tried],
    losses: Mapping[str, float],
    context: int,
    scoring: Scoring,
) -> list[dict[str, str]]:
    """Return the best draft with one sub-layer more or fewer skipped, best predicted score first.

    Under a budget also with one skipped instead of another: the best draft uses all of the budget, so that restoring a
    sub-layer means skipping another one.
    """
    whole = [t for t in tried if not t.pruned]
    if not whole:
        return []
    best = max(whole, key=lambda t: (scoring.score_of(t), -t.number))
    choices = {name: best.choices[name] for name in space.choices}
    log_rate = _log_acceptance(best)
    changed: dict[str, dict[str, str]] = {}
    for name in (*losses, *((HEAD,) if HEAD in space.choices else ())):
        for choice in space.choices[name]:
            if choice == choices[name] or (SKIP not in (choice, choices[name]) and name != HEAD):
                continue
            if choice == KEEP and len(space.choices[name]) > 2 and name != HEAD:
                continue  # back to a copy, not to the weights as loaded
            changed[f"{name} {choice}"] = {name: choice}
    if scoring.budget is not None:
        back = {key: change for key, change in changed.items() if SKIP not in change.values()}
        out = {key: change for key, change in changed.items() if SKIP in change.values()}
        changed |= {f"{a}, {b}": {**back[a], **out[b]} for a in back for b in out}
    promised = []
    for key, change in changed.items():
        other = {**choices, **change}
        if not space.is_possible(other) or all(c == KEEP for c in other.values()):
            continue
        guess = log_rate
        for name, choice in change.items():
            loss = losses.get(name, 0.0)
            guess += -loss if choice == SKIP else loss if choices[name] == SKIP else 0.0
        costs = profile.costs(space.config(other), context)
        promised.append((scoring.score(math.exp(min(0.0, guess)), costs), key, other))
    promised.sort(key=lambda p: (-p[0], p[1]))
    return [other for _, _, other in promised[:_MOST_MOVES]]


def forward_selection(space: Space, tried: Sequence[Tried]) -> list[Proposal]:
    """Select greedily: return the best set so far with each other sub-layer skipped too; the best is the next set.

    The selection ends when half of the skippable sub-layers are skipped.
    """
    by_key = _by_key(space, tried)
    chosen = space.uniform(KEEP)
    for _ in range(len(space.skippable) // 2):
        candidates = [
            {**chosen, name: SKIP}
            for name in space.skippable
            if chosen[name] != SKIP and space.is_possible({**chosen, name: SKIP})
        ]
        waiting = [("forward", choices) for choices in candidates if _key(choices) not in by_key]
        if waiting or not candidates:
            return waiting
        # The speed-up of a pruned draft is estimated from the texts it was judged on, which is good enough.
        chosen = max(candidates, key=lambda c: by_key[_key(c)].speedup)
    return []
