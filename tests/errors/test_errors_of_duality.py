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
    (TypeError, "dual: h must be a measure; got int.", lambda: dual(3, inside)),
    (TypeError, "dual: mean must be a tensor; got list.", lambda: dual(square, [0.5, 0.5])),
    (TypeError, "dual: mean must be float32 or float64; got torch.int64.", lambda: dual(square, inside.long())),
    (
        TypeError,
        "dual: tensors must share one dtype; got mean torch.float32, measure torch.float64.",
        lambda: dual(square, inside.float()),
    ),
    (
        ValueError,
        "dual: tensors must be on one device; got mean on meta, measure on cpu.",
        lambda: dual(square, inside.to("meta")),
    ),
    (
        ValueError,
        "dual: mean must end in d=2, the dimension of the measure; got shape (3,).",
        lambda: dual(square, three),
    ),
    (
        ValueError,
        "dual: mean must begin with the 1 batch dimensions (2,) of the measure; got shape (3,).",
        lambda: dual(batch, torch.ones(3)),
    ),
    (
        ValueError,
        "dual: mean must begin with the batch (2,) of the measure, or with 1 in its place; got shape (5, 3).",
        lambda: dual(batch, torch.ones(5, 3)),
    ),
    (
        ValueError,
        "dual: mean must be finite; got 2 of 2 entries that are NaN or infinite.",
        lambda: dual(square, inside * nan),
    ),
    (
        RuntimeError,
        f"{unfinished} 1 of 1 rows unfinished after 1 steps.",
        lambda: dual(square, inside, max_iterations=1),
    ),
    (RuntimeError, f"{unfinished} 1 of 2 rows unfinished after 1 steps.", lambda: dual(square, both, max_iterations=1)),
    # mean_to_natural
    (ValueError, f"{hull} 1 of 1 rows outside.", lambda: mean_to_natural(square, outside)),
    (ValueError, f"{hull} 1 of 2 rows outside.", lambda: mean_to_natural(square, both)),
    # bregman
    (TypeError, "bregman: a must be a tensor; got list.", lambda: bregman(square.log_normalizer, [0.0], inside)),
    (
        ValueError,
        "bregman: a and b must have one shape; got shapes (2, 2) and (2,).",
        lambda: bregman(square.log_normalizer, both, inside),
    ),
    # moment_project
    (
        ValueError,
        "Gaussian.expect: samples must be given for a measure that is not carried by finitely many points;"
        " got samples=None.",
        lambda: moment_project(batch, batch, torch.ones(2, 3), statistic=lambda y: y),
    ),
    (ValueError, f"{hull} 1 of 1 rows outside.", lambda: moment_project(square, Empirical(3 * both), inside)),
    # maximum_entropy
    (TypeError, "maximum_entropy: h must be a measure; got int.", lambda: maximum_entropy(3, inside)),
    (TypeError, "maximum_entropy: mean must be a tensor; got list.", lambda: maximum_entropy(square, [0.5, 0.5])),
    (
        ValueError,
        "maximum_entropy: mean must be [*b, d=2], one for each measure; got shape (2, 2).",
        lambda: maximum_entropy(square, both),
    ),
    (ValueError, f"{hull} 1 of 1 rows outside.", lambda: maximum_entropy(square, outside)),
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
