"""Z(eta) = L{h}(-eta), with the two-sided transform L{h}(s) = ∫ exp(-<s, x>) h(dx).   [shim22, Eq. 2; theory E2]

The paper prints Z = L{h} and loses the sign.
"""

import pytest
import torch
from hypothesis import given

import gradlogz as gz
from support.densities import LAWS, law
from support.measure_registry import inside, seeds
from support.scales import close


def log_laplace(x, log_mass, s):
    return (log_mass - x @ s).logsumexp(-1)


@pytest.mark.parametrize("name", LAWS)
@given(seed=seeds)
def test_the_normalizer_is_the_laplace_transform_at_minus_eta(name, seed):
    at = law(name, seed)
    h, x, log_mass, eta = at
    close(h.log_normalizer(eta), log_laplace(x, log_mass, -eta), at.scale(0))


@pytest.mark.parametrize("name", [name for name in LAWS if name not in ("sphere", "circle")])
def test_with_the_printed_sign_it_is_not(name):
    h, x, log_mass, eta = law(name)
    eta = inside(h, torch.full_like(eta, -1.0))
    assert abs(float(h.log_normalizer(eta) - log_laplace(x, log_mass, eta))) > 0.05


def test_only_measures_symmetric_about_the_origin_do_not_care_about_the_sign():
    for name in ("sphere", "circle"):
        h, x, log_mass, eta = law(name)
        close(h.log_normalizer(eta), log_laplace(x, log_mass, eta))


def test_the_transform_of_a_gamma_converges_to_the_right_of_minus_its_rate():
    h = gz.Gamma(torch.tensor([2.0]), torch.tensor([3.0]))
    s = torch.tensor([[-3.1], [-3.0], [-2.9], [1e6]])
    assert h.in_domain(-s).tolist() == [False, False, True, True]
