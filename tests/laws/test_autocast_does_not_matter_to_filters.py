"""Filters give under autocast, bit by bit, what they give without it: a Gaussian in half precision has no digits."""

import pytest
import torch
from torch.utils._pytree import tree_flatten

from gradlogz import KalmanModel, Prior, SwitchingFilter, SwitchingModel
from gradlogz.filters import InverseWishartNormal, LinearGaussian
from support.filter_calls import CALLS, Place


@pytest.mark.parametrize("name", CALLS)
def test_results_under_autocast_are_those_without(name):
    run = CALLS[name]()
    place = Place(dtype=torch.float32)
    expected, form = tree_flatten(run(place))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, found_form = tree_flatten(run(place))
    assert found_form == form
    for a, e in zip(found, expected, strict=True):
        if isinstance(e, torch.Tensor):
            assert a.dtype == e.dtype
            torch.testing.assert_close(a, e, rtol=0, atol=0, equal_nan=True)
        else:
            assert a == e


def test_priors_of_families_are_those_without():
    eye, mean = torch.eye(2), torch.tensor([1.0 / 3, -0.7])
    gaussian = LinearGaussian(eye.expand(1, 2, 2) / 3, eye.expand(1, 2, 2))
    covariance = torch.tensor([[1.3, 0.2], [0.2, 0.7]])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        prior, wishart = gaussian.prior(mean, covariance), InverseWishartNormal(2).prior(torch.tensor(7.0), covariance)
        found = gaussian.parameters(prior)
    torch.testing.assert_close(prior, gaussian.prior(mean, covariance), rtol=0, atol=0)
    torch.testing.assert_close(wishart, InverseWishartNormal(2).prior(torch.tensor(7.0), covariance), rtol=0, atol=0)
    torch.testing.assert_close(found.mean, mean)


def test_what_a_filter_begins_with_is_as_precise_as_what_it_is_given():
    modes = [KalmanModel(*torch.tensor([[[1.0]], [[q]], [[1.0]], [[1.0]]])) for q in (0.1, 4.0)]
    model = SwitchingModel.of(modes, transition=torch.tensor([[0.9, 0.1], [0.1, 0.9]]))
    chosen, start = SwitchingFilter(model, "gpb", depth=1), Prior(torch.rand(2, 1), torch.eye(1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        state = chosen.init(start)
    assert all(torch.equal(a, b) for a, b in zip(state, chosen.init(start), strict=True))
