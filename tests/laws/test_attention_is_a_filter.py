"""Attention, its dropped covariance and its slot probabilities, by enumeration of slots and by the IMM filter."""

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from gradlogz import AttentionFilter, Empirical, Gaussian, Prior, SwitchingModel, imm
from gradlogz.filters import Slots, linear_link
from support.scales import close
from support.switching_oracles import positive

F64 = torch.float64


def message(n=5, d=3, *, weighted=True, spread=True, batch=()):
    return Slots(
        torch.randn(*batch, n, d, dtype=F64),
        positive(*batch, n, d, scale=0.4) if spread else None,
        torch.randn(*batch, n, dtype=F64).log_softmax(-1) if weighted else None,
    )


def by_enumeration(slots, eta, value, noise, log_psi, scale=1.0):
    """P(i, j), and mean and covariance of x' given j, slot by slot in numpy."""
    mu, S = slots.mean.numpy(), slots.covariance
    n, d = mu.shape
    S = np.zeros((n, d, d)) if S is None else S.numpy()
    pi = np.full(n, 1 / n) if slots.log_probability is None else slots.log_probability.exp().numpy()
    m, e = len(eta), value.shape[-1]
    maps, noises, queries = value.expand(m, d, e).numpy(), noise.expand(m, e, e).numpy(), eta.numpy()
    joint = np.array(
        [[pi[i] * math.exp(log_psi[j] + scale * mu[i] @ q) for j, q in enumerate(queries)] for i in range(n)]
    )
    joint /= joint.sum()
    means, covariances = [], []
    for j in range(len(queries)):
        w, W, Q = joint[:, j] / joint[:, j].sum(), maps[j], noises[j]
        mean = sum(w[i] * mu[i] @ W for i in range(n))
        second = sum(w[i] * (W.T @ S[i] @ W + Q + np.outer(mu[i] @ W, mu[i] @ W)) for i in range(n))
        means.append(mean)
        covariances.append(second - np.outer(mean, mean))
    return tuple(torch.tensor(np.array(x), dtype=F64) for x in (joint, means, covariances))


@pytest.mark.parametrize("weights", ["one", "normalizer"])
@pytest.mark.parametrize("spread", [True, False])
@pytest.mark.parametrize("maps", [(), (4,)], ids=["one map", "a map for each slot"])
def test_a_step_is_the_collapse_of_the_pairwise_model(weights, spread, maps):
    torch.manual_seed(0)
    slots, eta = message(spread=spread), torch.randn(4, 3, dtype=F64)
    value, noise = torch.randn(*maps, 3, 2, dtype=F64), positive(*maps, 2)
    chosen = AttentionFilter(value=value, noise=noise, scale=0.7, message="covariance", weights=weights)
    sent = chosen.step(slots, eta)
    h = Empirical(slots.mean, slots.log_probability)
    log_psi = torch.zeros(4, dtype=F64) if weights == "one" else -h.log_normalizer(0.7 * eta)
    joint, mean, covariance = by_enumeration(slots, eta, value, noise, log_psi.tolist(), 0.7)
    close(sent.slots.mean, mean, 10.0)
    close(sent.slots.covariance, covariance, 100.0)
    close(sent.slots.log_probability.exp(), joint.sum(0))
    close(sent.log_received.exp(), joint.sum(1))
    close(sent.log_normalizer, h.log_normalizer(0.7 * eta), 10.0)
    close(chosen.dropped(slots, eta), covariance, 100.0)
    coupling = chosen.chain(slots, eta)
    close(coupling.log_probability.exp(), joint.sum(1))
    close(coupling.transition, joint / joint.sum(1, keepdim=True))


def test_with_means_alone_it_is_softmax_attention():
    torch.manual_seed(1)
    x, W_q, W_v = torch.randn(2, 6, 8, dtype=F64), *torch.randn(2, 8, 8, dtype=F64)
    sent = AttentionFilter(value=W_v, scale=8**-0.5).step(Slots(x), x @ W_q)
    close(sent.slots.mean, scaled_dot_product_attention(x @ W_q, x, x @ W_v), 10.0)
    assert sent.slots.covariance is None
    bias = torch.randn(2, 6, dtype=F64)
    weighted = AttentionFilter(value=W_v, scale=8**-0.5).step(Slots(x, None, bias), x @ W_q)
    mask = bias.unsqueeze(-2).expand(2, 6, 6)
    close(weighted.slots.mean, scaled_dot_product_attention(x @ W_q, x, x @ W_v, attn_mask=mask), 10.0)


def test_the_dropped_covariance_is_the_fisher_information():
    """∇² log Z by automatic differentiation."""
    torch.manual_seed(2)
    keys, eta = torch.randn(7, 3, dtype=F64), torch.randn(4, 3, dtype=F64)
    hessian = torch.stack([torch.func.hessian(lambda q: (keys @ q).logsumexp(0))(q) for q in eta])
    close(AttentionFilter().dropped(Slots(keys), eta), hessian, 10.0)


@pytest.mark.parametrize("maps", [(), (4,)], ids=["one map", "a map for each slot"])
def test_attention_is_imm_without_observations(maps):
    """The same slots as modes of a switching system, nothing observed; mode j may have its own map W_j."""
    torch.manual_seed(3)
    n, d = 4, 3
    slots, eta = message(n, d), torch.randn(n, d, dtype=F64)
    value, noise = torch.randn(*maps, d, d, dtype=F64), positive(*maps, d)
    attention = AttentionFilter(value=value, noise=noise, message="covariance")
    sent, coupling = attention.step(slots, eta), attention.chain(slots, eta)
    model = SwitchingModel(
        transition=coupling.transition,
        F=value.mT.expand(n, d, d),
        Q=noise.expand(n, d, d),
        H=torch.eye(d, dtype=F64).expand(n, d, d),
        R=torch.eye(d, dtype=F64).expand(n, d, d),
    )
    nothing = torch.full((1, d), torch.nan, dtype=F64)
    found = imm(model, nothing, Prior(slots.mean, slots.covariance, coupling.log_probability))
    close(found.mode_mean[0], sent.slots.mean, 10.0)
    close(found.mode_covariance[0], sent.slots.covariance, 100.0)
    close(found.log_mode_probability[0], sent.slots.log_probability, 10.0)


def test_a_map_for_each_slot_moves_the_mean_of_its_mixture():
    """Means alone, in a batch: slot j has the mean (sum_i A_ij mu_i) W_j; equal maps are one map.   [theory E55]"""
    torch.manual_seed(12)
    x, eta, W = torch.randn(2, 5, 3, dtype=F64), torch.randn(2, 4, 3, dtype=F64), torch.randn(4, 3, 6, dtype=F64)
    sent = AttentionFilter(value=W).step(Slots(x), eta).slots.mean
    A = (eta @ x.mT).softmax(-1)
    by_slot = [torch.stack([A[b, j] @ x[b] @ W[j] for j in range(4)]) for b in range(2)]
    close(sent, torch.stack(by_slot), 10.0)
    alike = AttentionFilter(value=W[:1].expand(4, 3, 6)).step(Slots(x), eta).slots.mean
    close(alike, AttentionFilter(value=W[0]).step(Slots(x), eta).slots.mean, 10.0)


def test_slots_with_covariances_may_couple_through_their_state():
    """logits log pi_i + b mu_i.q + b² q' S_i q / 2, means mu_i + b S_i q; S -> 0 is attention.   [theory 8.4]"""
    torch.manual_seed(4)
    slots, eta, b = message(), torch.randn(2, 3, dtype=F64), 0.8
    sent = AttentionFilter(scale=b, message="covariance", coupling="state").step(slots, eta)
    mu, S, log_pi = slots
    logits = log_pi + b * eta @ mu.mT + b**2 / 2 * torch.einsum("md,nde,me->mn", eta, S, eta)
    r = logits.softmax(-1)
    moved = mu + b * torch.einsum("nde,me->mnd", S, eta)
    mean = torch.einsum("mn,mnd->md", r, moved)
    off = moved - mean.unsqueeze(-2)
    covariance = torch.einsum("mn,nde->mde", r, S) + torch.einsum("mn,mnd,mne->mde", r, off, off)
    close(sent.slots.mean, mean, 10.0)
    close(sent.slots.covariance, covariance, 100.0)
    close(sent.log_normalizer, logits.logsumexp(-1), 10.0)
    joint = (r * sent.slots.log_probability.exp().unsqueeze(-1)).mT
    close(sent.log_received.exp(), joint.sum(-1))
    sharp = slots._replace(covariance=1e-12 * S)
    sent = AttentionFilter(scale=b, coupling="state").step(sharp, eta)
    close(sent.slots.mean, AttentionFilter(scale=b).step(Slots(mu, None, log_pi), eta).slots.mean, 1.0, tolerance=1e-10)


@pytest.mark.parametrize("m", [5, 3])
def test_sinkhorn_weights_have_both_marginals(m):
    """Uniform slots, as many after as before: the weights are doubly stochastic.   [theory E54]"""
    torch.manual_seed(5)
    slots, eta = message(weighted=False, batch=(2,)), torch.randn(2, m, 3, dtype=F64)
    chosen = AttentionFilter(weights="sinkhorn")
    sent, coupling = chosen.step(slots, eta), chosen.chain(slots, eta)
    close(sent.log_received.exp(), torch.full((2, 5), 0.2, dtype=F64), tolerance=1e-11)
    close(sent.slots.log_probability.exp(), torch.full((2, m), 1 / m, dtype=F64))
    joint = coupling.log_probability.exp().unsqueeze(-1) * coupling.transition
    close(joint.sum(-1), torch.full((2, 5), 0.2, dtype=F64), tolerance=1e-11)
    close(joint.sum(-2), torch.full((2, m), 1 / m, dtype=F64))
    logits = slots.mean @ eta.mT
    # Only potentials of slots differ from the logits: double differences of log P are those of the logits.
    rest = joint.log() - logits
    rest = rest - rest[:, :1] - rest[:, :, :1] + rest[:, :1, :1]
    close(rest, torch.zeros_like(rest), 10.0, tolerance=1e-11)


def test_given_probabilities_are_the_marginal_of_sinkhorns_slots():
    torch.manual_seed(6)
    slots, eta = message(), torch.randn(4, 3, dtype=F64)
    sent = AttentionFilter(weights="sinkhorn").step(slots, eta)
    close(sent.log_received, slots.log_probability, 10.0, tolerance=1e-11)


def test_steps_have_derivatives():
    torch.manual_seed(7)

    def run(mean, root, log_pi, eta, value, weights):
        slots = Slots(mean, root @ root.mT, log_pi)
        chosen = AttentionFilter(value=value, message="covariance", weights=weights, scale=0.5, tolerance=1e-14)
        sent = chosen.step(slots, eta)
        return sent.slots.mean, sent.slots.covariance, sent.slots.log_probability, sent.log_received

    shapes = ((3, 2), (3, 2, 2), (3,), (2, 2), (2, 2))
    arguments = tuple(torch.randn(*s, dtype=F64, requires_grad=True) for s in shapes)
    for weights in ("one", "normalizer", "sinkhorn"):
        assert torch.autograd.gradcheck(lambda *a, w=weights: run(*a, w), arguments)


# The linear link ------------------------------------------------------------------------------------------------------


def test_the_link_of_a_gaussian_is_linear():
    torch.manual_seed(10)
    S = positive(3)
    found = linear_link(Gaussian(torch.randn(3, dtype=F64), S), torch.randn(30, 3, dtype=F64))
    close(found.matrix, S.inverse(), 10.0)
    close(found.r_squared, torch.ones((), dtype=F64))
    assert abs(float(found.divergence)) < 1e-12


def test_the_link_of_keys_is_less_linear_the_further_queries_reach():
    torch.manual_seed(11)
    h = Empirical(torch.randn(40, 3, dtype=F64))
    eta = torch.randn(200, 3, dtype=F64)
    errors = [linear_link(h, reach * eta) for reach in (0.1, 0.5, 1.5)]
    unexplained = [1 - float(e.r_squared) for e in errors]
    assert unexplained[0] < 0.02
    assert unexplained[0] < unexplained[1] < unexplained[2]
    assert float(errors[0].divergence) < float(errors[1].divergence) < float(errors[2].divergence)


# At the edges -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"coupling": "state"}, {"weights": "normalizer"}, {"weights": "sinkhorn"}])
def test_slots_of_probability_0_are_slots_that_are_not_there(options):
    torch.manual_seed(0)
    x, eta = torch.randn(4, 2, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)
    spread = 0.3 * torch.eye(2, dtype=torch.float64).expand(4, 2, 2)
    log_pi = torch.tensor([-0.5, -torch.inf, -1.0, -2.0], dtype=torch.float64).log_softmax(-1)
    there, attention = log_pi > -torch.inf, AttentionFilter(message="covariance", **options)
    x, eta = x.requires_grad_(), eta.requires_grad_()
    found = attention.step(Slots(x, spread, log_pi), eta)
    expected = attention.step(Slots(x[there], spread[there], log_pi[there]), eta)
    close(found.slots.mean, expected.slots.mean, 10.0)
    close(found.slots.covariance, expected.slots.covariance, 10.0)
    close(found.log_received[there], expected.log_received, 10.0)
    assert found.log_received[1] == -torch.inf
    slopes = torch.autograd.grad(found.log_received[there].sum() + found.slots.mean.sum(), (x, eta))
    others = torch.autograd.grad(expected.log_received.sum() + expected.slots.mean.sum(), (x, eta))
    for slope, other in zip(slopes, others, strict=True):
        close(slope, other, 100.0)
    chain_ = attention.chain(Slots(x, spread, log_pi), eta)
    close(chain_.transition.sum(-1), torch.ones(4, dtype=torch.float64), 1.0)
    close(chain_.transition[there], attention.chain(Slots(x[there], spread[there], log_pi[there]), eta).transition, 1.0)


@pytest.mark.parametrize("weights", ["one", "sinkhorn"])
def test_a_batch_may_be_empty(weights):
    none = torch.zeros(0, 3, 2, dtype=torch.float64)
    assert AttentionFilter(weights=weights).step(Slots(none), none).slots.mean.shape == none.shape
