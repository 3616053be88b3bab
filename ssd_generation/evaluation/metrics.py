"""Metrics with the interface of Hugging Face `evaluate`, without the Hub; intervals and paired comparisons."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["ROUGE_TYPES", "Interval", "bootstrap", "load_rouge", "paired_difference", "pass_at_k"]

ROUGE_TYPES = ("rouge1", "rouge2", "rougeL")


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Return the unbiased estimate, from n samples, of the probability that at least one of k samples is correct.

    `1 − C(n − c, k) / C(n, k)` (Chen et al., Evaluating Large Language Models Trained on Code, arXiv 2107.03374,
    equation 1).

    Args:
        samples: n, number of samples drawn for the problem, ≥ k.
        correct: c, number of those that passed, 0 … n.
        k: number of attempts, ≥ 1.

    Raises:
        ValueError: a number out of range.
    """
    if not (1 <= k <= samples and 0 <= correct <= samples):
        raise ValueError(
            f"pass@k needs 1 ≤ k ≤ samples and 0 ≤ correct ≤ samples, but got k={k}, samples={samples}, "
            f"correct={correct}."
        )
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


@dataclass(frozen=True)
class Interval:
    """Mean with its confidence interval.

    Attributes:
        mean: mean of the sample.
        low: lower end of the interval.
        high: upper end.
    """

    mean: float
    low: float
    high: float


def bootstrap(values: Sequence[float], confidence: float = 0.95, resamples: int = 2000, seed: int = 0) -> Interval:
    """Return the mean, with the percentile interval of its bootstrap (Efron, The Annals of Statistics 7, 1979).

    Args:
        values: the sample, at least one value.
        confidence: confidence level of the interval, between 0 and 1.
        resamples: number of resamples drawn with replacement, ≥ 1.
        seed: seed of the resampling: the same values have the same interval.

    Raises:
        ValueError: no values, or a number out of range.
    """
    if not values:
        raise ValueError("There is nothing to take the mean of: no values were given.")
    if not (0.0 < confidence < 1.0 and resamples >= 1):
        raise ValueError(
            f"A bootstrap needs a confidence between 0 and 1 and at least one resample, but got "
            f"confidence={confidence} and resamples={resamples}."
        )
    generator = np.random.default_rng(seed)
    given, count = np.asarray(values, dtype=np.float64), len(values)
    means: list[float] = sorted(float(given[generator.integers(count, size=count)].mean()) for _ in range(resamples))
    tail = (1.0 - confidence) / 2.0
    mean = math.fsum(values) / count
    low = means[min(int(tail * resamples), resamples - 1)]
    high = means[max(math.ceil((1.0 - tail) * resamples) - 1, 0)]
    return Interval(mean, min(low, mean), max(high, mean))


def paired_difference(
    first: Sequence[float], second: Sequence[float], confidence: float = 0.95, resamples: int = 2000, seed: int = 0
) -> Interval:
    """Return the mean of `first − second`, sample by sample, with the interval of its bootstrap.

    On the same samples, the difference of two methods is far less uncertain than their own intervals suggest.

    Args:
        first: values of one method.
        second: values of the other, in the same order.
        confidence: confidence level of the interval.
        resamples: see `bootstrap`.
        seed: see `bootstrap`.

    Raises:
        ValueError: the sequences differ in length, or are empty.
    """
    if len(first) != len(second):
        raise ValueError(
            f"A paired comparison needs the same samples of both methods, but got {len(first)} and {len(second)}."
        )
    return bootstrap([a - b for a, b in zip(first, second, strict=True)], confidence, resamples, seed)


class _Tokenizer:
    """Adapter of a function to the tokenizer interface of `rouge_score`."""

    def __init__(self, tokenize: Callable[[str], list[str]]) -> None:
        self.tokenize = tokenize


def load_rouge() -> Any:
    """Return ROUGE as an `evaluate.Metric` over `rouge_score`, with the arguments of `evaluate.load("rouge")`.

    `compute(predictions=…, references=…, rouge_types=…, use_stemmer=…, tokenizer=…, use_aggregator=…)` returns
    F-measures: with `use_aggregator=False` a list for each type, one value per sample, like the Hub's; else their
    mean. (The Hub's aggregate is the median of a bootstrap without a seed: near the mean, but different in every run.)
    References may be lists of texts; the best one counts.
    """
    import datasets
    import evaluate
    from rouge_score import rouge_scorer

    class Rouge(evaluate.Metric):
        def _info(self) -> Any:
            text = datasets.Value("string")
            return evaluate.MetricInfo(
                description="ROUGE: overlap of n-grams and longest common subsequences with a reference summary.",
                citation="Lin: ROUGE: A Package for Automatic Evaluation of Summaries. ACL workshop, 2004.",
                inputs_description="predictions and references: texts, or several references each.",
                features=[
                    datasets.Features({"predictions": text, "references": datasets.Sequence(text)}),
                    datasets.Features({"predictions": text, "references": text}),
                ],
            )

        def _compute(
            self,
            predictions: Sequence[str],
            references: Sequence[str | Sequence[str]],
            rouge_types: Sequence[str] | None = None,
            use_aggregator: bool = True,
            use_stemmer: bool = False,
            tokenizer: Callable[[str], list[str]] | None = None,
        ) -> dict[str, Any]:
            types = list(rouge_types or (*ROUGE_TYPES, "rougeLsum"))
            own = None if tokenizer is None else _Tokenizer(tokenizer)
            scorer = rouge_scorer.RougeScorer(types, use_stemmer=use_stemmer, tokenizer=own)
            rows: dict[str, list[float]] = {name: [] for name in types}
            for prediction, reference in zip(predictions, references, strict=True):
                several = not isinstance(reference, str)
                scores = (scorer.score_multi if several else scorer.score)(reference, prediction)
                for name in types:
                    rows[name].append(float(scores[name].fmeasure))
            return {name: statistics.fmean(row) for name, row in rows.items()} if use_aggregator else rows

    return Rouge()
