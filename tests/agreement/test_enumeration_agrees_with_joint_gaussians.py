"""The exact filter is conditioning of one joint Gaussian for each history of modes.   [theory 7]"""

import math
from dataclasses import replace

import pytest
import torch

from gradlogz import Prior, Series
from gradlogz.filters import enumerate_modes
from support.switching_oracles import F64, beginning, by_definition, chain, observed, same, system


@pytest.mark.parametrize(("k", "s", "o", "steps"), [(1, 2, 1, 5), (2, 1, 1, 6), (3, 2, 2, 4), (2, 3, 2, 5)])
@pytest.mark.parametrize("offsets", [True, False])
def test_all_that_is_reported(k, s, o, steps, offsets):
    model, start = system(k, s, o, offsets=offsets), beginning(k, s)
    y = observed(model, steps)
    found = enumerate_modes(model, y, start)
    same(found.filtered, by_definition(model, y, start), 10.0)
    assert found.histories.shape == (k ** (steps + 1), steps + 1)
    assert (found.log_pruned == -torch.inf).all()


def test_with_gaps():
    model, start = system(2, 2, 3), beginning(2)
    y = observed(model, 5)
    y[1] = torch.nan
    y[2, 0] = y[3, 1:] = torch.nan
    same(enumerate_modes(model, y, start).filtered, by_definition(model, y, start), 10.0)


def test_with_inputs_and_models_that_change():
    steps = 5
    model = system(2, 2, 1, lead=(steps,), transition=torch.stack([chain(2) for _ in range(steps)]))
    driven = type(model)(
        **{name: getattr(model, name) for name in ("transition", "F", "Q", "H", "R", "b", "d")},
        B=torch.randn(2, 2, 3, dtype=F64),
        D=torch.randn(steps, 2, 1, 3, dtype=F64),
    )
    y, u, start = observed(model, steps), torch.randn(steps, 3, dtype=F64), beginning(2)
    same(enumerate_modes(driven, Series(y, inputs=u), start).filtered, by_definition(driven, y, start, u), 10.0)


def test_with_transitions_that_never_happen():
    T = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.2, 0.8], [0.9, 0.0, 0.1]], dtype=F64)
    model, start = system(3, transition=T), beginning(3)
    y = observed(model, 4)
    same(enumerate_modes(model, y, start).filtered, by_definition(model, y, start), 10.0)


def test_none_is_uniform():
    model, start = system(3), beginning(3)
    y = observed(model, 2)
    uniform = torch.full((3,), -math.log(3), dtype=F64)
    found = enumerate_modes(model, y, Prior(start.mean, start.covariance))
    same(found.filtered, enumerate_modes(model, y, replace(start, log_mode_probability=uniform)).filtered)


def test_pruning_says_what_it_threw_away():
    model, start = system(2), beginning(2)
    y = observed(model, 7)
    whole, none = enumerate_modes(model, y, start), enumerate_modes(model, y, start, max_histories=2**8)
    same(none.filtered, whole.filtered)
    some, fewer = enumerate_modes(model, y, start, max_histories=8), enumerate_modes(model, y, start, max_histories=2)
    assert some.histories.shape == (8, 8)
    thrown, more = some.log_pruned.exp(), fewer.log_pruned.exp()
    assert bool((thrown[:2] == 0).all())
    assert bool((thrown[2:] > 0).all())
    at = (whole.histories.unsqueeze(-3) == some.histories.unsqueeze(-2)).all(-1).int().argmax(-1)
    assert torch.equal(whole.histories[at], some.histories)
    # What is thrown away is the only difference: histories that are kept keep their joint probabilities.
    joint = some.log_probability + some.filtered.log_likelihood - whole.filtered.log_likelihood
    joint = joint.exp() * (1 - thrown).prod()
    torch.testing.assert_close(joint, whole.log_probability[at].exp(), rtol=0, atol=1e-12)
    assert float(thrown.sum()) < float(more.sum())
