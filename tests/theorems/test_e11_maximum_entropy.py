"""max { -KL(p‖h) : E_p x = u } = min_eta G(eta) - <eta, u>, attained by the member of the family.   [theory E11, 3.5]

The paper calls this the dual problem of attention. It is dual to the function G, but attention ascends G itself, while
the dual problem descends G(eta) - <eta, u>.
"""

import torch
from hypothesis import given

import gradlogz as gz
from support.attention_strategies import attentions
from support.scales import close, scale_of


def kl(p, log_h):
    return (torch.xlogy(p, p) - p * log_h).sum(-1)


@given(attentions(min_keys=5, max_dim=2, scales=(1.0,)))
def test_among_laws_with_one_mean_the_member_is_closest_to_h(attention):
    keys, _, s = attention
    log_h, law = s.normal(len(keys)), s.log_simplex(len(keys)).exp()
    found = gz.maximum_entropy(gz.Empirical(keys, log_h), law @ keys)
    member = (log_h + keys @ found.eta).softmax(-1)
    close(member @ keys, law @ keys, 1 + keys.abs().max(), tolerance=1e-8)
    close(found.relative_entropy, kl(member, log_h), 1 + log_h.abs().max(), tolerance=1e-8)
    # Directions that keep the total mass and the mean: the competitors of the member.
    constraints = torch.cat((torch.ones(1, len(keys), dtype=keys.dtype), keys.mT))
    free = torch.linalg.svd(constraints).Vh[keys.shape[-1] + 1 :]
    for direction in torch.cat((free, -free)):
        reach = (member / direction.abs()).min() / 2
        assert float(kl(member + reach * direction, log_h)) > float(found.relative_entropy)
    assert float(kl(law, log_h)) >= float(found.relative_entropy) - 1e-9


@given(attentions(min_keys=3, max_dim=2, scales=(1.0,)))
def test_the_value_is_that_of_the_dual_problem(attention):
    keys, _, s = attention
    h, u = gz.Empirical(keys), s.log_simplex(len(keys)).exp() @ keys
    found = gz.maximum_entropy(h, u)
    lowest = (keys @ found.eta).logsumexp(-1) - found.eta @ u
    close(-found.relative_entropy, lowest, scale_of(h, found.eta, 0), tolerance=1e-8)
    for step in s.normal(4, len(u)):
        eta = found.eta + step
        assert float((keys @ eta).logsumexp(-1) - eta @ u) >= float(lowest) - 1e-9


def test_the_law_with_the_mean_of_h_is_h_itself():
    s = torch.tensor([[0.0], [1.0], [5.0]], dtype=torch.float64)
    found = gz.maximum_entropy(gz.Empirical(s), s.mean(0))
    close(found.eta, torch.zeros(1).double(), tolerance=1e-8)


def test_a_step_of_attention_leaves_the_optimum_of_the_dual_problem():
    keys = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]], dtype=torch.float64)
    h, u = gz.Empirical(keys), keys.mean(0)
    eta = gz.maximum_entropy(h, u).eta
    stepped = eta + h.mean(eta)
    assert float(h.log_normalizer(stepped)) > float(h.log_normalizer(eta)) + 1.0  # up G ...
    objective = [float(h.log_normalizer(e) - e @ u) for e in (eta, stepped)]
    assert objective[1] > objective[0] + 0.1  # ... and away from the minimum of G(eta) - <eta, u>
