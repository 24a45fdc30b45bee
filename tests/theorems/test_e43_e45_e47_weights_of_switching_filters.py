"""E43, E45, E47: weights of a filter carry the likelihood, and mixing weights are backward probabilities.

    w_ij ∝ pi_i T_ij L_ij,   pi'_j = sum_i w_ij,   mixing weights w_ij / pi'_j

The note writes sigma(A') = sum_A P(A'|A) sigma(A), without L, and mixes by pi. Theory gives two examples.
"""

import torch

from gradlogz import Prior, SwitchingModel, gpb2, imm
from gradlogz.filters.kalman import predict
from gradlogz.filters.moment_matching import collapse, mix, weigh
from support.scales import close
from support.switching_oracles import F64, positive, system

STATEMENTS = ("N2 Eq. 5, E43", "N2 Eq. 5, E45", "N2 Eq. 8, E47", "7.4 prediction")

T = torch.tensor([[0.95, 0.05], [0.1, 0.9]], dtype=F64)
half = torch.tensor([0.5, 0.5], dtype=F64)


def test_e47_mixing_weights_are_probabilities_of_the_mode_before():
    """Without observations P(A_t = i | A_{t+1} = j) = pi_i T_ij / sum_l pi_l T_lj, not pi_i."""
    shares = weigh(T, half.log().unsqueeze(-1)).shares
    close(shares, half.unsqueeze(-1) * T / (half @ T))
    printed = torch.tensor([[0.905, 0.053], [0.095, 0.947]], dtype=F64)
    torch.testing.assert_close(shares, printed, rtol=0, atol=5e-4)
    independent = torch.tensor([[0.3, 0.7], [0.3, 0.7]], dtype=F64)  # then, and only then, it is pi
    close(weigh(independent, half.log().unsqueeze(-1)).shares, half.unsqueeze(-1).expand(2, 2))


def test_e43_without_the_likelihood_mode_probabilities_can_be_arbitrarily_wrong():
    """Two modes alike a priori and in their chain; one of them expects the observation, the other does not."""
    one = torch.ones(2, 1, 1, dtype=F64)
    offsets = torch.tensor([[0.0], [50.0]], dtype=F64)
    model = SwitchingModel(torch.full((2, 2), 0.5, dtype=F64), one, 0.1 * one, one, one, d=offsets)
    y, start = torch.tensor([[50.0]], dtype=F64), Prior(torch.zeros(1, dtype=F64), one[0])
    for filter in (gpb2, imm):
        found = filter(model, y, start)
        close(found.predicted_log_mode_probability[0].exp(), half)  # as printed
        close(found.log_mode_probability[0].exp(), torch.tensor([0.0, 1.0], dtype=F64))


def test_e45_components_are_weighed_by_what_was_observed_before_they_are_collapsed():
    """L_ij differs between the i of one j, as soon as their Gaussians do: T alone is not the weight."""
    model = system(2, 1, 1, transition=T)
    start = Prior(torch.tensor([[-5.0], [5.0]], dtype=F64), torch.eye(1, dtype=F64))
    y = torch.tensor([[2.0]], dtype=F64)
    found = gpb2(model, y, start)
    F, Q, H, R, b, d = (getattr(model, n)[:, 0].reshape(2) for n in ("F", "Q", "H", "R", "b", "d"))
    m = F * start.mean + b  # [i, j]
    P = F**2 + Q
    S = H**2 * P + R
    L = torch.distributions.Normal(H * m + d, S.sqrt()).log_prob(y).exp()
    w = half.unsqueeze(-1) * T * L
    w = w / w.sum()
    close(found.log_mode_probability[0].exp(), w.sum(0))
    updated = m + P * H / S * (y - H * m - d)
    close(found.mode_mean[0, :, 0], (w / w.sum(0) * updated).sum(0), 10.0)
    unweighed = (half.unsqueeze(-1) * T / (half @ T) * updated).sum(0)
    assert (found.mode_mean[0, :, 0] - unweighed).abs().max() > 1e-3


def test_collapsing_commutes_with_moving():
    """The lemma of theory 7.4: the moments of a moved mixture are the moved moments of the mixture."""
    n, s = 5, 3
    r, m, P = torch.rand(n, dtype=F64).softmax(-1), torch.randn(n, s, dtype=F64), positive(n, s)
    F, Q, b = torch.randn(s, s, dtype=F64), positive(s), torch.randn(s, dtype=F64)
    first = predict(*collapse(r, m, P), F=F, Q=Q, b=b)
    last = collapse(r, *predict(m, P, F=F, Q=Q, b=b))
    close(first.mean, last.mean, 10.0)
    close(first.covariance, last.covariance, 100.0)
    both = mix(torch.stack((r, r.flip(0))), m, P)
    close(both.mean[0], collapse(r, m, P).mean)
    close(both.covariance[1], collapse(r.flip(0), m, P).covariance, 10.0)
