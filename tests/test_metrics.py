"""Metrics, intervals and paired comparisons."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rouge_score import rouge_scorer

from ssd_generation.evaluation.metrics import (
    ROUGE_TYPES,
    bootstrap,
    load_rouge,
    paired_difference,
    pass_at_k,
)

SAID = ["the cat sat on the mat", "a dog barked", "nothing of the kind"]
WANTED = ["the cat is on the mat", "a dog barked at night", "something else entirely"]


@given(st.integers(1, 12), st.data())
def test_pass_at_k_is_the_share_of_draws_with_a_correct_one(samples: int, data: st.DataObject) -> None:
    correct = data.draw(st.integers(0, samples))
    k = data.draw(st.integers(1, samples))
    # 1 − Π (1 − k / i) over i = n − c + 1 … n: the product form of the paper's appendix.
    product = math.prod(1.0 - k / i for i in range(samples - correct + 1, samples + 1))
    expected = 1.0 if samples - correct < k else 1.0 - product
    assert pass_at_k(samples, correct, k) == pytest.approx(expected)
    assert pass_at_k(samples, correct, 1) == pytest.approx(correct / samples)


@pytest.mark.parametrize(("samples", "correct", "k"), [(3, 1, 4), (3, 4, 1), (3, -1, 1), (3, 1, 0)])
def test_pass_at_k_of_nonsense(samples: int, correct: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"but got k={k}, samples={samples}, correct={correct}"):
        pass_at_k(samples, correct, k)


def test_the_metric_answers_as_evaluate_metrics_do() -> None:
    rouge = load_rouge()
    types = (*ROUGE_TYPES, "rougeLsum")  # the defaults of the Hub's metric
    scorer = rouge_scorer.RougeScorer(list(types))
    each = [scorer.score(wanted, said) for wanted, said in zip(WANTED, SAID, strict=True)]
    rows = rouge.compute(predictions=SAID, references=WANTED, use_aggregator=False)
    assert rows == {name: [row[name].fmeasure for row in each] for name in types}
    means = rouge.compute(predictions=SAID, references=WANTED)
    assert means == {name: pytest.approx(statistics.fmean(values)) for name, values in rows.items()}
    # "the cat ... on the mat": 5 of 6 words on either side.
    assert rows["rouge1"][0] == pytest.approx(5 / 6) and rows["rougeL"][0] == pytest.approx(5 / 6)
    several = rouge.compute(predictions=SAID[:1], references=[[WANTED[1], WANTED[0]]], rouge_types=["rouge1"])
    assert several == {"rouge1": pytest.approx(5 / 6)}
    stemmed = rouge.compute(predictions=["dogs barking"], references=["dog barks"], use_stemmer=True)
    assert stemmed["rouge1"] == pytest.approx(1.0)
    letters = rouge.compute(predictions=["cat"], references=["act"], rouge_types=["rouge1"], tokenizer=list)
    assert letters == {"rouge1": pytest.approx(1.0)}


def test_intervals_cover_what_they_say() -> None:
    generator = random.Random(0)
    covered = 0
    for trial in range(200):
        values = [generator.gauss(3.0, 1.0) for _ in range(40)]
        found = bootstrap(values, resamples=400, seed=trial)
        assert found.low <= found.mean <= found.high and found.mean == pytest.approx(statistics.fmean(values))
        covered += found.low <= 3.0 <= found.high
    assert 178 <= covered <= 199
    assert bootstrap([2.0]) == bootstrap([2.0, 2.0, 2.0]), "nothing is left to chance"
    assert bootstrap([1.0, 5.0, 2.0]) == bootstrap([1.0, 5.0, 2.0]), "the same seed"
    wide, narrow = (bootstrap([0.0, 1.0] * n) for n in (5, 200))
    assert narrow.high - narrow.low < 0.3 * (wide.high - wide.low)


def test_a_paired_comparison_sees_more_than_two_intervals() -> None:
    generator = random.Random(1)
    first = [generator.random() for _ in range(60)]
    second = [value - 0.02 + 0.01 * generator.random() for value in first]
    difference = paired_difference(first, second)
    assert difference.low > 0
    assert bootstrap(first).low < bootstrap(second).high, "their own intervals overlap"
    assert paired_difference(first, first) == paired_difference([0.0], [0.0])


def test_what_cannot_be_computed() -> None:
    with pytest.raises(ValueError, match="nothing to take the mean of"):
        bootstrap([])
    with pytest.raises(ValueError, match=r"confidence=1\.0"):
        bootstrap([1.0], confidence=1.0)
    with pytest.raises(ValueError, match="but got 2 and 1"):
        paired_difference([1.0, 2.0], [1.0])
