"""A_ij = P(A_t = i | A_{t+1} = j) in the pairwise model P(i, j) ∝ pi_i psi_j exp<mu_i, eta_j>, for any psi.

[theory E53, E54, E56] Eq. 12 of the note on filters prints A_ij sigma(A_t) as a FORWARD transition; it is neither a
transition nor a joint. pi enters as a key bias, and log Z_j is the log evidence of slot j.
"""

import torch
from hypothesis import given
from hypothesis import strategies as st

import gradlogz as gz
from support.measure_registry import Source, seeds
from support.scales import close, scale_of

STATEMENTS = ("N2 Eq. 12, E53", "E54")

sizes = {"seed": seeds, "M": st.integers(1, 6), "d": st.integers(1, 4)}


def slots(seed, M, d):
    s = Source(seed)
    mu, eta, log_pi, log_psi = s.normal(M, d), s.normal(M, d), s.log_simplex(M), s.normal(M)
    joint = torch.exp(log_pi.unsqueeze(-1) + log_psi + mu @ eta.mT)
    return gz.Empirical(mu, log_pi), eta, log_psi, joint / joint.sum(), s


def weights(h, eta):
    """A[i, j], columns sum to one."""
    return h.probabilities(eta).mT


@given(**sizes)
def test_the_slot_after_has_the_probability_psi_times_z(seed, M, d):
    h, eta, log_psi, joint, _ = slots(seed, M, d)
    close((log_psi + h.log_normalizer(eta)).softmax(-1), joint.sum(0), scale_of(h, eta, 0))


@given(**sizes)
def test_the_forward_transition_follows_by_bayes(seed, M, d):
    h, eta, log_psi, joint, _ = slots(seed, M, d)
    after = (log_psi + h.log_normalizer(eta)).softmax(-1)
    A = weights(h, eta)
    forward = A * after / (A @ after).unsqueeze(-1)
    close(forward, joint / joint.sum(1, keepdim=True), scale_of(h, eta, 0) / joint.sum(1).min())


@given(**sizes)
def test_if_the_slot_after_is_uniform_the_slot_before_has_the_attention_received(seed, M, d):
    h, eta, _, _, _ = slots(seed, M, d)
    psi = 1 / h.log_normalizer(eta).exp()  # the choice of psi that makes every slot after equally probable
    joint = torch.exp(h.log_weights.unsqueeze(-1) + h.points @ eta.mT) * psi
    joint = joint / joint.sum()
    close(joint.sum(0), torch.full((M,), 1 / M, dtype=torch.float64), scale_of(h, eta, 0))
    close(weights(h, eta).mean(1), joint.sum(1), scale_of(h, eta, 0))


@given(**sizes)
def test_both_are_uniform_only_for_doubly_stochastic_attention(seed, M, d):
    h, eta, _, _, _ = slots(seed, M, d)
    mu, eta = (x / x.norm(dim=-1, keepdim=True) for x in (h.points, eta))
    log_pi, logits = torch.zeros(M, dtype=torch.float64), mu @ eta.mT
    # Sinkhorn finds the weights pi that make the attention received uniform. Logits within [-1, 1] make it contract by
    # tanh(1)² at least, so that 100 rounds are exact.
    for _ in range(100):
        log_pi = log_pi - (log_pi.unsqueeze(-1) + logits).softmax(0).sum(1).log()
    A = weights(gz.Empirical(mu, log_pi), eta)
    close(A.sum(1), torch.ones(M, dtype=torch.float64), M)
    close(A.sum(0), torch.ones(M, dtype=torch.float64), M)
