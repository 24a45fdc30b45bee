"""Functions of duality.py say what is wrong with a mean, and when the search has failed."""

import torch

from gradlogz import Empirical, Gaussian, bregman, dual
from gradlogz.measures import maximum_entropy, mean_to_natural, moment_project
from support.error_form import each_of, refused

square = Empirical(torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]).double())
batch = Gaussian.diagonal(torch.zeros(2, 3), torch.ones(2, 3))
inside, outside = torch.tensor([0.9, 0.2]).double(), torch.tensor([1.5, 0.5]).double()
both, three, nan = torch.stack((inside, outside)), torch.ones(3).double(), torch.nan
unfinished = "dual: the gap must fall below 1e-12; got"
hull = "mean_to_natural: mean must lie inside the hull of the support; got"

ERRORS = [
    # dual
    (TypeError, "dual: h", "a measure", lambda: dual(3, inside)),
    (TypeError, "dual: mean", "a tensor", lambda: dual(square, [0.5, 0.5])),
    (TypeError, "dual: mean", "float32", lambda: dual(square, inside.long())),
    (
        TypeError,
        "dual: None",
        "share",
        lambda: dual(square, inside.float()),
    ),
    (
        ValueError,
        "dual: None",
        "device",
        lambda: dual(square, inside.to("meta")),
    ),
    (
        ValueError,
        "dual: mean",
        "dimension",
        lambda: dual(square, three),
    ),
    (
        ValueError,
        "dual: mean",
        "dimensions",
        lambda: dual(batch, torch.ones(3)),
    ),
    (
        ValueError,
        "dual: mean",
        "measure",
        lambda: dual(batch, torch.ones(5, 3)),
    ),
    (
        ValueError,
        "dual: mean",
        "finite",
        lambda: dual(square, inside * nan),
    ),
    (
        RuntimeError,
        "dual: max_iterations",
        "gap",
        lambda: dual(square, inside, max_iterations=1),
    ),
    (RuntimeError, "dual: max_iterations", "gap", lambda: dual(square, both, max_iterations=1)),
    # mean_to_natural
    (ValueError, "mean_to_natural: mean", "support", lambda: mean_to_natural(square, outside)),
    (ValueError, "mean_to_natural: mean", "support", lambda: mean_to_natural(square, both)),
    # bregman
    (TypeError, "bregman: a", "a tensor", lambda: bregman(square.log_normalizer, [0.0], inside)),
    (
        ValueError,
        "bregman: a",
        "one shape",
        lambda: bregman(square.log_normalizer, both, inside),
    ),
    # moment_project
    (
        ValueError,
        "Gaussian.expect: samples",
        "finitely",
        lambda: moment_project(batch, batch, torch.ones(2, 3), statistic=lambda y: y),
    ),
    (ValueError, "mean_to_natural: mean", "support", lambda: moment_project(square, Empirical(3 * both), inside)),
    # maximum_entropy
    (TypeError, "maximum_entropy: h", "a measure", lambda: maximum_entropy(3, inside)),
    (TypeError, "maximum_entropy: mean", "a tensor", lambda: maximum_entropy(square, [0.5, 0.5])),
    (
        ValueError,
        "maximum_entropy: mean",
        "measure",
        lambda: maximum_entropy(square, both),
    ),
    (ValueError, "mean_to_natural: mean", "support", lambda: maximum_entropy(square, outside)),
]


@each_of(ERRORS)
def test_it_is_refused_in_one_sentence(refusal):
    refused(refusal)


def test_without_throwing_an_unfinished_search_returns_what_it_has():
    result = dual(square, both, max_iterations=1, throw=False)
    assert result.converged.tolist() == [False, True]  # the second was shown to lie outside
    assert result.steps == 1
    assert result.value[1] == torch.inf
    assert float(result.gap[0]) > 0
    assert bool(result.eta.isfinite().all())


def test_a_mean_outside_is_an_answer_of_the_dual_and_an_error_of_the_link():
    result = dual(square, outside)
    assert bool(result.converged)
    assert float(result.separating @ outside) > float((square.points @ result.separating).max())
