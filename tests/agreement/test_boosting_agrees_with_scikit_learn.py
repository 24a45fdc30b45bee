"""AdaBoost descends G: its weights of learners and of examples are those of scikit-learn.   [theory 6.4, E18]

scikit-learn's estimator_weights_ are log(right/wrong), twice the step (1/2) log(right/wrong) along the learner.
"""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from sklearn.datasets import make_classification
from sklearn.ensemble import AdaBoostClassifier
from sklearn.tree import DecisionTreeClassifier

from gradlogz.measures import boost, margin_measure
from support.measure_registry import Source
from support.scales import close

ROUNDS = 12


class RecordingStump(DecisionTreeClassifier):
    """A stump that writes down the example weights it is trained with."""

    seen = []  # noqa: RUF012  shared by the clones that AdaBoost makes

    def fit(self, X, y, sample_weight=None):
        self.seen.append(np.array(sample_weight))
        return super().fit(X, y, sample_weight=sample_weight)


@pytest.fixture(scope="module")
def adaboost():
    """A fitted AdaBoost: labels, the answers of its stumps, the weights of its examples, and itself."""
    X, y = make_classification(120, 5, n_informative=3, flip_y=0.1, random_state=0)
    y = 2 * y - 1
    RecordingStump.seen.clear()
    model = AdaBoostClassifier(RecordingStump(max_depth=1), n_estimators=ROUNDS, random_state=0).fit(X, y)
    answers = np.stack([stump.predict(X) for stump in model.estimators_], -1)
    assert len(model.estimators_) == ROUNDS
    labels, answers = (torch.tensor(t, dtype=torch.float64) for t in (y, answers))
    return labels, answers, np.stack(RecordingStump.seen), model, X


def rounds(labels, answers):
    """The measures before each round and after the last, and the weight of each learner."""
    measures, weights = [margin_measure(labels, answers)], []
    for learner in range(answers.shape[-1]):
        _, weight, h = boost(measures[-1], learner)
        measures.append(h)
        weights.append(weight)
    return measures, torch.stack(weights)


def test_the_weights_of_the_learners_are_half_of_its_estimator_weights(adaboost):
    labels, answers, _, model, _ = adaboost
    _, weights = rounds(labels, answers)
    # 1e-10: scikit-learn multiplies weights round by round, and its errors of 1e-16 are divided by 1 - |edge|.
    close(2 * weights, torch.from_numpy(model.estimator_weights_), tolerance=1e-10)


def test_the_weights_of_the_examples_are_its_sample_weights_in_every_round(adaboost):
    labels, answers, seen, _, _ = adaboost
    measures, _ = rounds(labels, answers)
    zero = torch.zeros(ROUNDS, dtype=torch.float64)
    for h, expected in zip(measures[:-1], seen, strict=True):
        close(h.probabilities(zero), torch.from_numpy(expected / expected.sum()))


def test_z_is_the_exponential_loss_after_every_round(adaboost):
    labels, answers, _, model, X = adaboost
    measures, _ = rounds(labels, answers)
    zero = torch.zeros(ROUNDS, dtype=torch.float64)
    totals = np.cumsum(model.estimator_weights_)
    for h, decision, total in zip(measures[1:], model.staged_decision_function(X), totals, strict=True):
        # decision_function is 2 sum_t w_t f_t / sum_t w_t with w_t = twice our weight.
        loss = np.exp(-labels.numpy() * decision * total / 4).sum()
        assert float(h.log_normalizer(zero).exp()) == pytest.approx(loss, rel=1e-10)


def test_z_of_lambda_is_the_exponential_loss_of_the_combined_model():
    s = Source(0)
    labels, answers, scores, weights = (
        s.normal(2, 9).sign(),
        s.normal(2, 9, 4).sign(),
        s.normal(2, 9),
        s.normal(2, 3, 4),
    )
    loss = (-labels[:, None] * (scores[:, None] + weights @ answers.mT)).exp().sum(-1)
    close(margin_measure(labels, answers, scores).log_normalizer(weights), loss.log(), 10.0)


def test_the_chosen_learner_and_its_weight_minimise_the_loss_along_one_coordinate():
    s = Source(1)
    labels, answers, scores = s.normal(20).sign(), s.normal(20, 6).sign(), s.normal(20)
    margins, w = (-labels[:, None] * answers).numpy(), np.exp(-(labels * scores).numpy())
    found = [minimize_scalar(lambda a, j=j: float(w @ np.exp(a * margins[:, j])), tol=1e-12) for j in range(6)]
    best = int(np.argmin([f.fun for f in found]))
    learner, weight, h = boost(margin_measure(labels, answers, scores))
    assert int(learner) == best
    assert float(weight) == pytest.approx(found[best].x, abs=1e-7)  # a minimiser is known to half the digits
    mass = float(h.log_normalizer(torch.zeros(6, dtype=torch.float64)).exp())
    assert mass == pytest.approx(found[best].fun, rel=1e-12)


def test_batches_of_data_sets_are_boosted_by_their_own_best_learners():
    s = Source(2)
    labels, answers = s.normal(4, 15).sign(), s.normal(4, 15, 5).sign()
    together = boost(margin_measure(labels, answers))
    for i in range(4):
        alone = boost(margin_measure(labels[i], answers[i]))
        assert together.learner[i] == alone.learner
        close(together.weight[i], alone.weight)
        close(together.h.log_weights[i], alone.h.log_weights)


def test_a_learner_without_errors_gets_an_infinite_weight_and_leaves_no_mass():
    for seed in range(20):
        s = Source(seed)
        labels, answers = s.normal(11).sign(), s.normal(11, 3).sign()
        for sign in (1, -1):
            answers[:, 1] = sign * labels
            learner, weight, h = boost(margin_measure(labels, answers, s.normal(11)))
            assert int(learner) == 1
            assert float(weight) == sign * torch.inf
            assert float(h.log_normalizer(torch.zeros(3, dtype=torch.float64))) == -torch.inf


def test_examples_of_weight_zero_do_not_count():
    s = Source(3)
    labels, answers, scores = s.normal(8).sign(), s.normal(8, 3).sign(), s.normal(8)
    answers[:, 1] = labels
    answers[0, 1] = -labels[0]  # its only error, on an example that has no weight
    scores[0] = labels[0] * torch.inf
    learner, weight, h = boost(margin_measure(labels, answers, scores))
    assert int(learner) == 1
    assert float(weight) == torch.inf
    assert float(h.log_normalizer(torch.zeros(3, dtype=torch.float64))) == -torch.inf
