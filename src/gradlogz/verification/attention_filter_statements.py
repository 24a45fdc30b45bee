"""Attention as a filter without observations, compared with an enumeration.   [note 2, Eq. 11-14; theory 8.1-8.4]

    P(A = i, A' = j) ∝ π_i ψ_j e^(β<μ_i,η_j>),   X given A = i has mean μ_i and covariance Σ_i,   X' = X W_v + N(0, Q)

The right-hand sides sum over all slots i and j and over the points of a finite distribution of X in each slot.

Read next: ../filters/conjugate/attention_filter.py, link_statements.py (Eq. 15).
"""

from typing import NamedTuple

import torch

from .. import measures as gz
from .._typing import Float, Tensor
from ..filters.conjugate.attention_filter import AttentionFilter, Slots
from ..filters.gaussian import attentive_switching, switching
from ..filters.models.switching_model import SwitchingModel
from ..filters.prior_and_series import Prior
from .definition import FLOAT, gaussian_nodes, normal, number, power, spread
from .statement import Outcome, gap, statement

BETA = 0.7
CORNERS = torch.cartesian_prod(*(number(-1.0, 1.0),) * 2)  # four points with mean 0 and covariance I


class _Setting(NamedTuple):
    """Four slots before, four after, and the dynamics."""

    mu: Float[Tensor, "n d"]
    Sigma: Float[Tensor, "n d d"]
    pi: Float[Tensor, "n"]
    eta: Float[Tensor, "m d"]
    W_v: Float[Tensor, "d d"]
    Q: Float[Tensor, "d d"]

    def slots(self) -> Slots:
        """The slots before, as a message of the library."""
        return Slots(self.mu, self.Sigma, self.pi.log())

    def points(self) -> Float[Tensor, "n c d"]:
        """Equally probable points of X in each slot, with the moments of that slot."""
        return torch.stack([m + CORNERS @ power(S, 0.5) for m, S in zip(self.mu, self.Sigma, strict=True)])

    def joint(self, weights: str) -> Float[Tensor, "n m"]:
        """P(A = i, A' = j) for the choice of ψ that `weights` names."""
        table = self.pi.unsqueeze(-1) * (BETA * self.mu @ self.eta.T).exp()
        if weights == "normalizer":
            table = table / table.sum(0)
        for _ in range(300 if weights == "sinkhorn" else 0):  # uniform columns and rows π, in turn
            table = table / table.sum(0) / len(self.eta)
            table = table * (self.pi / table.sum(1)).unsqueeze(-1)
        return table / table.sum()

    def moments(self, joint: Float[Tensor, "n m"]) -> tuple[Float[Tensor, "m d"], Float[Tensor, "m d d"]]:
        """Mean and covariance of X' in each slot j, by sums over slots and points."""
        x = self.points() @ self.W_v
        share = (joint / joint.sum(0)).T / x.shape[1]
        mean = torch.einsum("ji,icd->jd", share, x)
        away = x - mean.reshape(-1, 1, 1, 2)
        return mean, torch.einsum("ji,jicd,jice->jde", share, away, away) + self.Q


def _setting() -> _Setting:
    Sigma = torch.stack([0.5 * spread(2, seed=s) for s in range(4)])
    pi = torch.softmax(normal(4, seed=5), 0)
    return _Setting(normal(4, 2, seed=6), Sigma, pi, normal(4, 2, seed=7), normal(2, 2, seed=8), spread(2, seed=9))


def _filter(one: _Setting, weights: str = "one") -> AttentionFilter:
    """The filter of the library for this setting."""
    return AttentionFilter(value=one.W_v, noise=one.Q, scale=BETA, message="covariance", weights=weights)  # type: ignore[arg-type]


@statement(
    "N2 Eq. 11",
    "note 2 4",
    corrected="σ(A,X) = σ(A) σ(X|A): π'_j ∝ ψ_j Z_j, mean and covariance of X' in each slot, three choices of ψ",
)
def factorised_message() -> Outcome:
    one, worst = _setting(), 0.0
    for weights in ("one", "normalizer", "sinkhorn"):
        joint = one.joint(weights)
        after = _filter(one, weights).step(one.slots(), one.eta).slots
        mean, covariance = one.moments(joint)
        assert after.covariance is not None
        assert after.log_probability is not None
        worst = max(
            worst,
            gap(after.log_probability.exp(), joint.sum(0)),
            gap(after.mean, mean, 10.0),
            gap(after.covariance, covariance, 10.0),
        )
    return Outcome(worst)


@statement(
    "N2 Eq. 12, E53",
    "note 2 4",
    printed="P(A'=j|A=i) = softmax_i(<μ_i,η_j>)/M",
    corrected="A_ij = P(A=i|A'=j) of the pairwise model π_i ψ_j e^<μ_i,η_j>, for any ψ",
)
def attention_is_a_backward_probability() -> Outcome:
    mu, eta, log_pi, log_psi = (
        normal(5, 3, seed=1),
        normal(4, 3, seed=2),
        torch.log_softmax(normal(5, seed=3), 0),
        normal(4, seed=4),
    )
    joint = torch.softmax((log_pi.unsqueeze(-1) + log_psi + mu @ eta.T).flatten(), 0).reshape(5, 4)
    backward = (joint / joint.sum(0)).T
    A = gz.Empirical(mu, log_pi).probabilities(eta)
    forward = gz.Empirical(mu).probabilities(eta).T / 5  # as printed; rows should sum to one
    return Outcome(gap(A, backward), gap(forward.sum(1), torch.ones(5, dtype=FLOAT)))


@statement(
    "N2 Eq. 12 (forward)",
    "note 2 4",
    corrected="a transition normalises over j: P(A'=j|A=i) = softmax_j(log T_ij + <μ_i,η_j>), the attentive IMM",
)
def forward_transition() -> Outcome:
    one, T = _setting(), torch.softmax(normal(4, 4, seed=10), -1)
    W = one.W_v.T.expand(4, 2, 2)
    identity = torch.eye(2, dtype=FLOAT).expand(4, 2, 2)
    model = SwitchingModel(T, W, one.Q.expand(4, 2, 2), identity, identity)
    prior = Prior(one.mu.clone().requires_grad_(), one.Sigma, one.pi.log())  # traced: nothing is compiled
    filtered = attentive_switching.attentive_imm(model, torch.full((1, 2), torch.nan, dtype=FLOAT), prior, eta=one.eta)
    forward = T * (one.mu @ one.eta.T).exp()
    joint = one.pi.unsqueeze(-1) * forward / forward.sum(-1, keepdim=True)
    mean, covariance = one.moments(joint)
    return Outcome(
        max(
            gap(filtered.log_mode_probability[0].exp(), joint.sum(0)),
            gap(filtered.mode_mean[0], mean, 10.0),
            gap(filtered.mode_covariance[0], covariance, 10.0),
        )
    )


@statement(
    "E54",
    "note 2 4",
    printed="σ(A_t) = 1/M",
    corrected="A' uniform forces σ(A_t=i) = (1/M) Σ_j A_ij, the attention received; both uniform: Sinkhorn",
)
def received_attention() -> Outcome:
    one, worst = _setting(), 0.0
    even = torch.full((4,), 0.25, dtype=FLOAT)
    for weights, slots in (
        ("normalizer", one.slots()),
        ("sinkhorn", one.slots()),
        ("sinkhorn", one.slots()._replace(log_probability=None)),
    ):
        setting = one if slots.log_probability is not None else one._replace(pi=even)
        joint = setting.joint(weights)
        received = _filter(one, weights).step(slots, one.eta).log_received.exp()
        chain = _filter(one, weights).chain(slots, one.eta)
        worst = max(
            worst,
            gap(received, joint.sum(1)),
            gap(chain.log_probability.exp(), joint.sum(1)),
            gap(chain.transition, joint / joint.sum(1, keepdim=True)),
            gap(joint.sum(0), even),
        )
    uniform = one._replace(pi=even).joint("normalizer")
    plain = _filter(one, "normalizer").step(Slots(one.mu, one.Sigma), one.eta).log_received.exp()
    return Outcome(max(worst, gap(plain, uniform.sum(1))), gap(uniform.sum(1), even))


@statement(
    "N2 Eq. 13, E55",
    "note 2 4",
    printed="E[X'|A=j] = H_j W_v, j the slot after",
    corrected="E[X'|A=i] = H_i W_v: the index is that of the slot before; one W_v for all slots",
)
def mean_given_the_slot_before() -> Outcome:
    one = _setting()
    x = (one.points() @ one.W_v).mean(1)
    by_slot = torch.stack(
        [
            _filter(one).step(Slots(one.mu, one.Sigma, torch.eye(4, dtype=FLOAT)[i].log()), one.eta).slots.mean
            for i in range(4)
        ]
    )  # [slot before, slot after]
    return Outcome(gap(by_slot, x.unsqueeze(1).expand(4, 4, 2), 10.0), gap(by_slot[0], x))


@statement(
    "N2 Eq. 14, E56",
    "note 2 4",
    printed="E[X'|A'=j] = Σ_i P(A'=j|A=i) E[X'|A=i]",
    corrected="E[X'|A'=j] = Σ_i P(A=i|A'=j) ∫∫ x' P(x'|x) P(x|A=i) = Σ_i A_ij H_i W_v; the IMM with this chain",
)
def collapsed_mean() -> Outcome:
    one = _setting()
    joint, nothing = one.joint("one"), torch.full((1, 2), torch.nan, dtype=FLOAT)
    mean, covariance = one.moments(joint)
    attention = _filter(one)
    chain = attention.chain(one.slots(), one.eta)
    identity = torch.eye(2, dtype=FLOAT).expand(4, 2, 2)
    model = SwitchingModel(chain.transition, one.W_v.T.expand(4, 2, 2), one.Q.expand(4, 2, 2), identity, identity)
    filtered = switching.imm(model, nothing, Prior(one.mu, one.Sigma, chain.log_probability))
    A = torch.softmax(one.pi.log() + BETA * one.eta @ one.mu.T, -1)
    corrected = max(
        gap(attention.step(one.slots(), one.eta).slots.mean, mean, 10.0),
        gap(A @ one.mu @ one.W_v, mean, 10.0),
        gap(filtered.mode_mean[0], mean, 10.0),
        gap(filtered.mode_covariance[0], covariance, 10.0),
    )
    forward = joint / joint.sum(1, keepdim=True)
    return Outcome(corrected, gap(forward.T @ one.mu @ one.W_v, mean))


@statement(
    "8.3 filter", "theory", corrected="the covariance that attention drops: W_v^T (Σ_i A_ij Σ_i + Cov_A(μ)) W_v + Q"
)
def dropped_covariance() -> Outcome:
    one = _setting()
    _, covariance = one.moments(one.joint("one"))
    bare = one._replace(Sigma=0 * one.Sigma, Q=0 * one.Q, W_v=torch.eye(2, dtype=FLOAT))
    points = gz.Empirical(one.mu, one.pi.log()).covariance(BETA * one.eta)  # with values = keys it is ∇² log Z
    plain = AttentionFilter(scale=BETA).dropped(Slots(one.mu, None, one.pi.log()), one.eta)
    return Outcome(
        max(
            gap(_filter(one).dropped(one.slots(), one.eta), covariance, 10.0),
            gap(plain, bare.moments(bare.joint("one"))[1], 10.0),
            gap(plain, points, 10.0),
        )
    )


@statement(
    "8.4",
    "theory",
    corrected="Gaussian messages: P(A=i,A'=j) ∝ π_i ∫ e^(β<x,η_j>) N(x;μ_i,Σ_i) dx, moments of the tilted mixture",
)
def gaussian_messages() -> Outcome:
    one = _setting()
    state = AttentionFilter(scale=BETA, message="covariance", coupling="state").step(one.slots(), one.eta)
    nodes = [gaussian_nodes(m, S) for m, S in zip(one.mu, one.Sigma, strict=True)]
    x = torch.cat([n.points for n in nodes])
    log_p = torch.cat([n.log_masses + one.pi[i].log() for i, n in enumerate(nodes)])
    log_joint = log_p.unsqueeze(-1) + BETA * x @ one.eta.T  # [points, slots after]
    log_Z = log_joint.logsumexp(0)
    p = (log_joint - log_Z).exp()
    mean = p.T @ x
    second = torch.einsum("xj,xd,xe->jde", p, x, x)
    by_slot = (log_joint - log_joint.flatten().logsumexp(0)).exp().reshape(4, -1, 4).sum((1, 2))
    assert state.slots.covariance is not None
    return Outcome(
        max(
            gap(state.log_normalizer, log_Z, 10.0),
            gap(state.slots.mean, mean, 10.0),
            gap(state.slots.covariance, second - mean.unsqueeze(-1) * mean.unsqueeze(-2), 10.0),
            gap(state.log_received.exp(), by_slot),
        )
    )
