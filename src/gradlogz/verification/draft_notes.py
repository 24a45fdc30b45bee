"""Statements about measures in the two draft notes: exponential families (note 1) and filters (note 2).

Read next: measure_families.py (closed forms of each measure).
"""

import torch
from torch.nn.functional import layer_norm, scaled_dot_product_attention

from .. import measures as gz
from .._typing import Tensor
from .definition import FLOAT, Nodes, by_definition, generator, line, normal, number, spread
from .statement import Outcome, gap, statement, violation

# Note 1: exponential families ---------------------------------------------------------------------------------------


@statement("N1 Eq. 3", "note 1", corrected="G(y) = log L{h}(-y) = log ∫ e^<y,x> h(dx)")
def log_laplace_transform() -> Outcome:
    x, log_step = line(-30.0, 30.0)
    mu, sigma, y = 0.4, 1.3, number(0.9)
    log_h = -(((x - mu) / sigma) ** 2) / 2 - number(sigma).log() - number(2 * torch.pi).log() / 2
    h = gz.Gaussian(number(mu).reshape(1), number(sigma**2).reshape(1, 1))
    return Outcome(gap(h.log_normalizer(y.reshape(1)), (log_h + y * x + log_step).logsumexp(0)))


@statement(
    "N1 Eq. 4, E30",
    "note 1",
    printed="p(x) = e^<y,x> / Σ over distinct points",
    corrected="duplicates count: p(x_n) = m_n e^<y,x_n> / Σ m e^<y,x>",
)
def multiplicities() -> Outcome:
    x, y = normal(4, 3, seed=1), normal(5, 3, seed=2)
    repeated = torch.cat((x, x[:1], x[:1]))
    counted = gz.Empirical.weighted(x, number(3.0, 1.0, 1.0, 1.0))
    twice = gz.Empirical(repeated)
    corrected = max(
        gap(counted.log_normalizer(y), torch.logsumexp(y @ repeated.T, -1)),
        gap(counted.mean(y), torch.softmax(y @ repeated.T, -1) @ repeated),
        gap(twice.covariance(y), counted.covariance(y)),
    )
    return Outcome(corrected, gap(gz.Empirical(x).mean(y), twice.mean(y)))


@statement("N1 Eq. 5", "note 1", corrected="self-attention: p(x_i | x_k) = softmax_i <x_k, x_i>")
def self_attention() -> Outcome:
    x = normal(6, 3, seed=1)
    return Outcome(gap(gz.Empirical(x).probabilities(x), torch.softmax(x @ x.T, -1)))


@statement(
    "E31",
    "note 1",
    printed="contrastive divergence: a sampled ∇ log Z",
    corrected="contrastive learning: loss G - <η,x₊>, gradient attention - x₊, exact",
)
def contrastive_learning() -> Outcome:
    x, eta = normal(6, 3, seed=1), normal(3, seed=2)
    h = gz.Empirical(x)
    loss = torch.nn.functional.cross_entropy(x @ eta, torch.tensor(2))
    gradient = torch.func.grad(lambda e: -h.log_density(x[2], e))(eta)
    sampled = h.sample(eta, generator=generator(3)) - x[2]
    exact = h.mean(eta) - x[2]
    return Outcome(max(gap(-h.log_density(x[2], eta), loss), gap(gradient, exact)), gap(sampled, exact))


@statement(
    "N1 Eq. 7, E33",
    "note 1",
    printed="∇G = Gaussian-kernel Nadaraya-Watson",
    corrected="kernel e^<x,y>; Gaussian iff keys have weights exp(-β|x|²/2), or one norm",
)
def nadaraya_watson() -> Outcome:
    x, q, v, beta = normal(6, 3, seed=1), normal(4, 3, seed=2), normal(6, 2, seed=3), 0.7

    def estimate(kernel: Tensor) -> Tensor:
        return kernel @ v / kernel.sum(-1, keepdim=True)

    def gaussian(keys: Tensor) -> Tensor:
        return estimate(torch.exp(-beta * torch.cdist(q, keys) ** 2 / 2))

    h, even = gz.Empirical(x), x / x.norm(dim=-1, keepdim=True)
    corrected = max(
        gap(h.expect(v, beta * q), estimate(torch.exp(beta * q @ x.T))),
        gap(gz.Empirical(x, -beta * (x**2).sum(-1) / 2).expect(v, beta * q), gaussian(x)),
        gap(gz.Empirical(even).expect(v, beta * q), gaussian(even)),
    )
    return Outcome(corrected, gap(h.expect(v, beta * q), gaussian(x)))


@statement(
    "E34",
    "note 1",
    printed="ascent always diverges",
    corrected="G(η_t) >= G(η_0) + tτ|∇G(η_0)|²; it diverges iff ∇G(η_0) ≠ 0",
)
def divergence() -> Outcome:
    x, tau = normal(6, 3, seed=1), 0.3
    h, start = gz.Empirical(x), normal(4, 3, seed=2)
    eta, bound = start, h.log_normalizer(start)
    slope, shortfall = (h.mean(start) ** 2).sum(-1), 0.0
    for _ in range(20):
        eta, bound = eta + tau * h.mean(eta), bound + tau * slope
        shortfall = max(shortfall, violation(bound, h.log_normalizer(eta)))
    still = gz.Empirical(torch.cat((x, -x)))  # ∇G(0) = 0
    rest = torch.zeros(3, dtype=FLOAT)
    moved = gap(rest + tau * still.mean(rest), rest)
    return Outcome(max(shortfall, moved))


@statement(
    "E35",
    "note 1",
    printed="layer norm makes the set of tokens a standard Gaussian",
    corrected="LN(x) = √D P x/|P x| token by token, P = I - 11^T/D",
)
def layer_norm_per_token() -> Outcome:
    x = normal(50, 6, seed=1) * number(1.0, 5.0, 1.0, 1.0, 1.0, 1.0) + 2.0
    P = torch.eye(6, dtype=FLOAT) - torch.full((6, 6), 1 / 6, dtype=FLOAT)
    normed = layer_norm(x, (6,), eps=0.0)
    formula = 6**0.5 * (x @ P) / (x @ P).norm(dim=-1, keepdim=True)
    across = torch.cov(normed.T)
    return Outcome(gap(normed, formula), gap(across, torch.eye(6, dtype=FLOAT)))


# Note 2: filters ----------------------------------------------------------------------------------------------------


def _projected(seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states and the query and key matrices of one head."""
    return normal(5, 4, seed=seed), normal(4, 3, seed=seed + 1), normal(4, 3, seed=seed + 2)


@statement(
    "N2 Eq. 2, E39",
    "note 2",
    printed="A_ij = softmax_i <H_j W_k, H_i W_q>",
    corrected="A_ij = softmax_i <H_j W_q, H_i W_k>/√d: j the query, i the key",
)
def queries_and_keys() -> Outcome:
    H, W_q, W_k = _projected()
    attention = scaled_dot_product_attention(H @ W_q, H @ W_k, H)
    h, swapped = gz.Empirical(H @ W_k), gz.Empirical(H @ W_q)
    return Outcome(gap(h.expect(H, H @ W_q / 3**0.5), attention), gap(swapped.expect(H, H @ W_k / 3**0.5), attention))


@statement(
    "N2 Eq. 3, E40",
    "note 2",
    printed="P(K|Q) = h e^(<K,Q> - log G), G = log Z",
    corrected="P(K|Q) = h e^(<K,Q> - log Z)",
)
def normaliser_of_the_weights() -> Outcome:
    k, q = normal(5, 3, seed=1), normal(4, 3, seed=2)
    h = gz.Empirical(k)
    G, one = h.log_normalizer(q), torch.ones(4, dtype=FLOAT)
    mass = (q @ k.T - G.unsqueeze(-1)).exp().sum(-1)
    printed = (q @ k.T).exp().sum(-1) / G.abs()
    return Outcome(gap(mass, one), gap(printed, one))


@statement(
    "N2 Eq. 9, E49",
    "note 2",
    printed="p(x') = p(x')/|W|",
    corrected="X' = WX: G'(s) = G(W^T s), mean W∇G(W^T s), for every W; density p(W⁻¹x')/|det W|",
)
def change_of_variables() -> Outcome:
    x, W, s = normal(5, 3, seed=1), normal(2, 3, seed=2), normal(4, 2, seed=3)
    moved = gz.pushforward(gz.Empirical(x), W)
    truth = by_definition(Nodes(x @ W.T, torch.zeros(5, dtype=FLOAT)), s)
    corrected = max(
        gap(moved.log_normalizer(s), truth.log_normalizer),
        gap(moved.mean(s), truth.mean),
        gap(moved.covariance(s), truth.covariance, 10.0),
    )
    eta = normal(3, seed=4)  # the image of a tilted measure: log E_η exp<Wx,s> = G(η + W^T s) - G(η)
    image, p = gz.pushforward(gz.tilt(gz.Empirical(x), eta), W), torch.softmax(x @ eta, 0)
    corrected = max(
        corrected,
        gap(image.log_normalizer(s), ((s @ W @ x.T).exp() @ p).log(), 10.0),
        gap(image.mean(0 * s[0]), W @ (p @ x), 10.0),
    )
    y, log_step = line(-40.0, 40.0)
    density = (-(y**2) / 2).exp() / (2 * torch.pi) ** 0.5 / 3.0 * log_step.exp()  # W = 3, argument not moved
    return Outcome(corrected, gap(density.sum(), number(1.0)))


@statement("N2 Eq. 10", "note 2", corrected="E[WX] = W E[X] for every distribution and every W")
def means_transform_linearly() -> Outcome:
    mu, Sigma, W, b = normal(3, seed=1), spread(3, seed=2), normal(2, 3, seed=3), normal(2, seed=4)
    h, zero = gz.pushforward(gz.Gaussian(mu, Sigma), W, b), torch.zeros(2, dtype=FLOAT)
    return Outcome(max(gap(h.mean(zero), W @ mu + b), gap(h.covariance(zero), W @ Sigma @ W.T, 10.0)))


@statement("E51", "note 2", printed="E[∇G0(θ)] = ξ", corrected="E[∇G0(θ)] = ξ/ν under the conjugate prior (ξ, ν)")
def prior_mean_of_the_statistic() -> Outcome:
    theta, _ = line(-40.0, 8.0)
    xi, nu = 2.5, 3.0
    prior = gz.ConjugatePrior(number(xi).reshape(1), number(nu), base="poisson")
    log_p = xi * theta - nu * theta.exp()
    log_p = log_p - log_p.logsumexp(0)
    expected = (log_p.exp() * theta.exp()).sum()  # ∇G0 = exp for the Poisson family
    zero = torch.zeros(1, dtype=FLOAT)
    mean = gap(prior.mean(zero)[0], (log_p.exp() * theta).sum())
    slope = prior.log_normalizer(torch.ones(1, dtype=FLOAT)).exp()  # E e^θ = Z(1)
    return Outcome(max(gap(expected, number(xi / nu)), gap(slope, expected), mean), gap(expected, number(xi)))


@statement(
    "N2 Eq. 12, E53",
    "note 2",
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
    "E54",
    "note 2",
    printed="σ(A_t) = 1/M",
    corrected="A' uniform forces σ(A_t=i) = (1/M) Σ_j A_ij: the attention received",
)
def received_attention() -> Outcome:
    x = normal(5, 3, seed=1)
    A = gz.Empirical(x).probabilities(x)  # row j: the query
    joint = A / 5
    received = A.mean(0)
    return Outcome(
        max(gap(joint.sum(0), received), gap(received.sum(), number(1.0))),
        gap(received, torch.full((5,), 0.2, dtype=FLOAT)),
    )


@statement(
    "N2 Eq. 15, E57",
    "note 2",
    printed="<f(η_i), μ_j>",
    corrected="η_i = f(μ_i), f = (∇G)⁻¹ = ∇G*: for spins f = artanh",
    tolerance=1e-9,
)
def canonical_link() -> Outcome:
    eta = 0.5 * normal(4, 3, seed=1).clamp(-1.9, 1.9)  # where the printed f(η) is defined
    h = gz.Spins(torch.zeros(3, dtype=FLOAT))
    mu = h.mean(eta)
    return Outcome(
        max(gap(gz.mean_to_natural(h, mu), torch.atanh(mu)), gap(mu, eta.tanh())),
        gap(torch.atanh(eta), torch.atanh(mu)),
    )


@statement(
    "E58",
    "note 2",
    printed="P(η_i|μ_j) ∝ e^<η_i,μ_j>",
    corrected="P(η_i|μ_j) ∝ e^(ν(<η_i,μ_j> - G(η_i))) ∝ e^(-ν KL(μ_j‖η_i))",
    tolerance=1e-9,
)
def conjugate_weights() -> Outcome:
    h, eta, nu = gz.Empirical(normal(7, 3, seed=1)), normal(4, 3, seed=2), 2.0
    mu = h.mean(normal(3, 3, seed=3))
    natural = gz.mean_to_natural(h, mu)
    logits = nu * (mu @ eta.T - h.log_normalizer(eta))
    kl = torch.stack([h.kl(natural, e.expand_as(natural)) for e in eta], -1)
    weights = torch.softmax(-nu * kl, -1)
    attention = gz.Empirical(eta, -nu * h.log_normalizer(eta)).probabilities(nu * mu)  # keys η with a bias
    corrected = max(gap(torch.softmax(logits, -1), weights), gap(attention, weights))
    return Outcome(corrected, gap(torch.softmax(nu * mu @ eta.T, -1), weights))


@statement(
    "E59",
    "note 2",
    printed="alternating ∇G and its link moves",
    corrected="link(∇G(η)) = η: the alternation of one family is the identity",
    tolerance=1e-8,
)
def mean_then_link_is_the_identity() -> Outcome:
    h, eta = gz.Empirical(normal(7, 3, seed=1)), normal(4, 3, seed=2)
    linear = gz.Gaussian(h.mean(0 * eta[0]), h.covariance(0 * eta[0]))  # an approximate link does move
    return Outcome(gap(gz.mean_to_natural(h, h.mean(eta)), eta), gap(gz.mean_to_natural(linear, h.mean(eta)), eta))
