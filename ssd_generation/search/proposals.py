"""Drafts worth trying before a sampler has anything to go by, worked out from those that were tried.

All of it is a function of the trials in the study, so that any worker comes to the same proposals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from .space import HEAD, KEEP, SKIP, Space
from .trials import SPEEDUP, Tried, Worth

if TYPE_CHECKING:
    from .profile import CostProfile

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
    worth: Worth = SPEEDUP,
) -> list[Proposal]:
    """What to try next, each with the name of its origin; nothing where the strategy is at its end.

    Args:
        strategy: "warm" (see `warm_start`) or "forward" (see `forward_selection`).
        space: the space.
        profile: costs.
        tried: what was tried.
        context: tokens before a drafted one.
        layerwise: skip sets found by hidden states (`layerwise.layerwise_skips`), by size.
        worth: what the search is after.
    """
    if strategy == "forward":
        return forward_selection(space, tried)
    return warm_start(space, profile, tried, context, layerwise, worth=worth)


def _letters(choices: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(choices.values())


def _missing(proposals: Sequence[Proposal], by_key: Mapping[tuple[str, ...], Tried]) -> list[Proposal]:
    return [proposal for proposal in proposals if _letters(proposal[1]) not in by_key]


def _by_key(space: Space, tried: Sequence[Tried]) -> dict[tuple[str, ...], Tried]:
    return {_letters({name: t.choices[name] for name in space.choices}): t for t in tried}


def uniform_drafts(space: Space) -> list[dict[str, str]]:
    """Each precision everywhere, and int4 with the LM head in int8."""
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
    worth: Worth = SPEEDUP,
) -> list[Proposal]:
    """Stage by stage, what is worth trying before a sampler has its say.

    Uniform precisions; each sub-layer on its own left out of the best of them; the sets that these losses promise, and
    sets found by hidden states; small changes to the best, while they help.

    Sets: the log-acceptance that a sub-layer costs is taken to add up, and so is the time it saves, as profiled. Then
    the best set of a attention and m MLP sub-layers has those with the least losses of each kind, which solves the
    knapsack of KnapSpec (ICML 2026) for every capacity at once where the sub-layers of a kind cost the same.

    In a model with more sub-layers than `most_singles`, some are tried on their own, and the others are taken to be
    like their neighbours.
    """
    by_key = _by_key(space, tried)
    uniform = uniform_drafts(space)
    if waiting := _missing([("uniform", choices) for choices in uniform], by_key):
        return waiting
    base = space.uniform(KEEP)
    reference: Tried | None = None
    for choices in uniform:
        t = by_key[_letters(choices)]
        if not t.pruned and t.speedup > (reference.speedup if reference else 1.0):
            base, reference = choices, t
    singles = {name: {**base, name: SKIP} for name in _spread(space.skippable, most_singles)}
    singles = {name: choices for name, choices in singles.items() if space.is_possible(choices)}
    if waiting := _missing([("single", choices) for choices in singles.values()], by_key):
        return waiting
    at_first = 0.0 if reference is None else -_log_acceptance(reference)
    measured = {
        name: max(0.0, -_log_acceptance(by_key[_letters(choices)]) - at_first) for name, choices in singles.items()
    }
    losses = {name: measured[_nearest(name, measured)] for name in space.skippable}
    sets = [("set", choices) for choices in _sets(space, profile, base, at_first, losses, context, worth)]
    sets += [
        ("layerwise", choices) for choices in _by_hidden_states(base, layerwise) if choices not in (c for _, c in sets)
    ]
    if waiting := _missing(sets, by_key):
        return waiting
    return _missing([("move", c) for c in _moves(space, profile, tried, losses, context, worth)], by_key)


def _spread(names: Sequence[str], most: int) -> list[str]:
    """At most so many of the names, spread over the model, those of each kind alike."""
    stride = -(-len(names) // max(most, 1))
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(name.partition(".")[0], []).append(name)
    return [name for group in kinds.values() for name in group[::stride]]


def _nearest(name: str, known: Mapping[str, float]) -> str:
    """The sub-layer of the same kind that is nearest to one, of those known (of any kind, if there is none)."""
    kind, _, layer = name.partition(".")
    same = [other for other in known if other.startswith(f"{kind}.")] or list(known)
    return min(same, key=lambda other: (abs(int(other.partition(".")[2]) - int(layer)), other))


def _log_acceptance(t: Tried) -> float:
    """Log of accepted / drafted tokens, one of each added."""
    return math.log((sum(t.acceptance.accepted) + 1) / (sum(t.acceptance.tried) + 2))


def _sets(
    space: Space,
    profile: CostProfile,
    base: Mapping[str, str],
    at_first: float,
    losses: Mapping[str, float],
    context: int,
    worth: Worth,
) -> list[dict[str, str]]:
    """The sets that promise most, best first, no two of them next to one another."""
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
            promised.append((worth.of(math.exp(-loss - at_first), costs), a, m))
    promised.sort(key=lambda p: (-p[0], p[1], p[2]))
    taken: list[tuple[int, int]] = []
    for _, a, m in promised:
        # What adds up on paper loses more in truth the more is left out: sizes on either side are worth a look, too.
        if (a, m) != (0, 0) and all(abs(a - x) + abs(m - y) > 1 for x, y in taken):
            taken.append((a, m))
        if len(taken) == (_MOST_SETS // 2 if worth.budget is None else _MOST_SETS):
            break
    if taken and worth.budget is None:  # a budget says what sizes there are
        a, m = taken[0]
        taken += [(round(a * f), round(m * f)) for f in (0.25, 0.5, 0.75, 1.25, 1.5, 2.0)]
    sets = []
    for a, m in dict.fromkeys(taken):
        choices = _with_skipped(base, (*ordered["attention"][:a], *ordered["mlp"][:m]))
        if (a, m) != (0, 0) and space.is_possible(choices) and choices not in sets:
            sets.append(choices)
    return sets


def _by_hidden_states(base: Mapping[str, str], layerwise: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Some sizes of these sets, on top of the base."""
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
    worth: Worth,
) -> list[dict[str, str]]:
    """The best draft with one sub-layer more or fewer, those that promise most first.

    Under a budget also with one in place of another: the best draft is as dear as it may be, so that what is taken
    back has to be paid for.
    """
    whole = [t for t in tried if not t.pruned]
    if not whole:
        return []
    best = max(whole, key=lambda t: (worth.found(t), -t.number))
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
    if worth.budget is not None:
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
        promised.append((worth.of(math.exp(min(0.0, guess)), costs), key, other))
    promised.sort(key=lambda p: (-p[0], p[1]))
    return [other for _, _, other in promised[:_MOST_MOVES]]


def forward_selection(space: Space, tried: Sequence[Tried]) -> list[Proposal]:
    """Greedy: to the best set so far, each sub-layer in turn; the best of these is the next set.

    It ends when half of all sub-layers are left out.
    """
    by_key = _by_key(space, tried)
    chosen = space.uniform(KEEP)
    for _ in range(len(space.skippable) // 2):
        candidates = [
            {**chosen, name: SKIP}
            for name in space.skippable
            if chosen[name] != SKIP and space.is_possible({**chosen, name: SKIP})
        ]
        waiting = [("forward", choices) for choices in candidates if _letters(choices) not in by_key]
        if waiting or not candidates:
            return waiting
        # A draft that was given up early has a speed-up from the texts that it was judged on, which will do.
        chosen = max(candidates, key=lambda c: by_key[_letters(c)].speedup)
    return []
