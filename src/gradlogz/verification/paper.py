"""Statements of the paper outside section 3.3: equations 1-6, Proposition 1, Corollary 1, errata E1-E20.

E21 is in contrastive_statements.py.

Keys are those of the paper [shim22] (Eq. 4, Prop. 1a) or, for corrected statements, of docs/errata.md (E8).

Read next: paper_section_3_3.py (section 3.3 and Theorem 1).
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from .. import measures as gz
from .._typing import Tensor
from .definition import FLOAT, Nodes, by_definition, distance, line, normal, number, plane, spread
from .statement import Outcome, gap, statement, violation


def _keys(n: int = 7, d: int = 3, seed: int = 1) -> Tensor:
    return normal(n, d, seed=seed)


def _counting(points: Tensor) -> Nodes:
    return Nodes(points, torch.zeros(len(points), dtype=FLOAT))


def _gamma_nodes(k: float, rate: float) -> Nodes:
    """Quadrature nodes of Gamma(k, rate), with x = exp(u)."""
    u, log_step = line(-40.0, 6.0)
    density = k * number(rate).log() - torch.lgamma(number(k)) + k * u - rate * u.exp()
    return Nodes(u.exp().unsqueeze(-1), density + log_step)


# Equations ----------------------------------------------------------------------------------------------------------


@statement("Eq. 1, E1", "paper 3.1", printed="Z = ∫ h e^<u,η> (no dx)", corrected="∫ e^(<x,η> - G(η)) h(dx) = 1")
def density_integrates_to_one() -> Outcome:
    h, nodes = gz.Gamma(number(2.5).reshape(1), number(1.5).reshape(1)), _gamma_nodes(2.5, 1.5)
    eta = number(-1.0, 0.2, 0.9).unsqueeze(-1)
    x, every = nodes.points.unsqueeze(1).expand(-1, 3, 1), eta.expand(len(nodes.points), 3, 1)
    mass = (h.log_density(x, every) + nodes.log_masses.unsqueeze(-1)).exp()
    return Outcome(gap(mass.sum(0), torch.ones(3, dtype=FLOAT)))


@statement("Eq. 2, E2", "paper 3.1", printed="Z(η) = L{h}(η)", corrected="Z(η) = L{h}(-η)")
def normalizer_is_a_laplace_transform() -> Outcome:
    h, nodes, eta = gz.Gamma(number(2.5).reshape(1), number(1.5).reshape(1)), _gamma_nodes(2.5, 1.5), number(0.7)
    Z = h.log_normalizer(eta.reshape(1)).exp()

    def laplace(s: Tensor) -> Tensor:
        return (nodes.log_masses - s * nodes.points[:, 0]).exp().sum()

    return Outcome(gap(Z, laplace(-eta), float(Z)), gap(Z, laplace(eta), float(Z)))


@statement(
    "E3",
    "paper 3.1",
    printed="counting = 1/N",
    corrected="G_counting = G_1/N + log N; ∇G, ∇²G equal; G*_1/N = G*_counting + log N",
)
def counting_and_probability() -> Outcome:
    x, eta, log_n = _keys(), normal(4, 3, seed=2), number(7.0).log()
    G, p, u, F = by_definition(_counting(x), eta)
    negative_entropy = (p * p.log()).sum(-1)
    worst = 0.0
    for h, off in ((gz.Empirical(x), 0 * log_n), (gz.reweight(gz.Empirical(x), -log_n), log_n)):
        worst = max(
            worst,
            gap(h.log_normalizer(eta), G - off),
            gap(h.mean(eta), u),
            gap(h.covariance(eta), F),
            gap(gz.dual(h, u).value, negative_entropy + off),
        )
    return Outcome(worst, float(log_n))


@statement("Eq. 3", "paper 3.1", corrected="p(k_j | q_i) = e^<k_j,q_i> / Z(q_i)")
def attention_weights() -> Outcome:
    k, q = _keys(), normal(4, 3, seed=2)
    weights = (q @ k.T).exp()
    weights = weights / weights.sum(-1, keepdim=True)
    h = gz.Empirical(k)
    densities = h.log_density(k.expand(4, 7, 3), q.unsqueeze(1).expand(4, 7, 3)).exp()
    return Outcome(max(gap(h.probabilities(q), weights), gap(densities, weights)))


@statement(
    "E4", "paper Eq. 3", printed="∇_q log Z(βq) = attention", corrected="attention = ∇G at η = βq = ∇_q (1/β) G(βq)"
)
def temperature() -> Outcome:
    k, q, beta = _keys(), normal(4, 3, seed=2), 3**-0.5
    h, attention = gz.Empirical(k), scaled_dot_product_attention(q, k, k)
    gradient = torch.func.grad(lambda x: h.log_normalizer(beta * x).sum())(q)
    cooled = gz.pushforward(h, beta)
    corrected = max(
        gap(h.mean(beta * q), attention), gap(gradient / beta, attention), gap(cooled.mean(q) / beta, attention)
    )
    return Outcome(corrected, gap(gradient, attention))


@statement("Eq. 4", "paper 3.1", corrected="E_η[x] = ∇ log Z(η)")
def expected_statistic_is_the_gradient() -> Outcome:
    x, eta = _keys(), normal(4, 3, seed=2)
    gradient = torch.func.grad(lambda e: (e @ x.T).exp().sum(-1).log().sum())(eta)
    return Outcome(max(gap(gz.Empirical(x).mean(eta), gradient), distance(gz.Empirical(x), _counting(x), eta)))


@statement(
    "E5",
    "paper Eq. 4",
    printed="η -> ∇G(η) is one-to-one",
    corrected="one-to-one modulo the complement of the key differences; rank ∇²G = dim aff(keys)",
    tolerance=1e-8,
)
def one_to_one_modulo_lineality() -> Outcome:
    basis = torch.linalg.qr(normal(3, 3, seed=3)).Q
    flat = normal(6, 2, seed=4) @ basis[:2] + 0.7 * basis[2]  # six keys on a plane
    h, eta = gz.Empirical(flat), normal(3, seed=5)
    moved = eta + 2.0 * basis[2]
    rank = int((torch.linalg.eigvalsh(h.covariance(eta)) > 1e-10).sum())
    mean = torch.softmax(flat @ eta, 0) @ flat
    linked = gz.mean_to_natural(h, mean)
    corrected = max(gap(h.mean(moved), mean), gap(basis[:2] @ linked, basis[:2] @ eta), float(rank != 2))
    return Outcome(corrected, float((moved - eta).norm()))


@statement("Prop. 1a", "paper 3.1", corrected="h = Σ δ(x_n): ∇G = Σ_n softmax_n(<x,η>) x_n")
def dirac_sum_gives_softmax_average() -> Outcome:
    x, eta = _keys(), normal(4, 3, seed=2)
    return Outcome(gap(gz.Empirical(x).mean(eta), torch.softmax(eta @ x.T, -1) @ x))


@statement("Prop. 1b, E6", "paper 3.1", corrected="h = p_0(.|η1,η2): ∇G(η) = E[x | η1+η, η2] inside the domain")
def tilting_is_a_translation() -> Outcome:
    h, eta = gz.Gamma(number(2.5).reshape(1), number(1.5).reshape(1)), number(0.7).reshape(1, 1)
    shifted = by_definition(_gamma_nodes(2.5, 1.5 - 0.7), torch.zeros(1, 1, dtype=FLOAT))
    return Outcome(max(gap(h.mean(eta), shifted.mean), distance(h, _gamma_nodes(2.5, 1.5), eta)))


@statement("Cor. 1", "paper 3.1", corrected="h = N(μ,Σ): ∇G(η) = μ + Ση")
def gaussian_attention_is_affine() -> Outcome:
    mu, Sigma, eta = normal(2, seed=6), spread(2, seed=7), normal(3, 2, seed=8)
    x, log_area = plane(-24.0, 24.0, 401)
    away = x - mu
    log_density = (
        -(away * torch.linalg.solve(Sigma, away.T).T).sum(-1) / 2 - torch.linalg.det(2 * torch.pi * Sigma).log() / 2
    )
    h = gz.Gaussian(mu, Sigma)
    return Outcome(max(gap(h.mean(eta), mu + eta @ Sigma), distance(h, Nodes(x, log_density + log_area), eta)))


@statement("Eq. 5", "paper 3.1", corrected="log Z(q) = log Σ_j e^<k_j,q>")
def log_sum_exp() -> Outcome:
    k, q = _keys(), normal(4, 3, seed=2)
    return Outcome(gap(gz.Empirical(k).log_normalizer(q), torch.logsumexp(q @ k.T, -1)))


@statement(
    "Eq. 6", "paper 3.2", corrected="G*(u) = sup <η,u> - G(η), attained where u = ∇G(η); ∇G* = η", tolerance=1e-9
)
def convex_conjugate() -> Outcome:
    h, eta = gz.Empirical(_keys()), normal(4, 3, seed=2)
    G, _, u, _ = by_definition(_counting(_keys()), eta)
    at_eta = (eta * u).sum(-1) - G
    result = gz.dual(h, u)
    others = normal(50, 4, 3, seed=9)
    below = violation((others * u).sum(-1) - h.log_normalizer(others), result.value.expand(50, 4))
    w = u.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(gz.dual(h, w).value.sum(), w)
    return Outcome(max(gap(result.value, at_eta), gap(result.eta, eta), gap(gradient, eta), below))


# Section 3.2: duality -----------------------------------------------------------------------------------------------


@statement("E8", "paper 3.2", printed="B_G(η1,η2) = KL(p1‖p2)", corrected="KL(p1‖p2) = B_G(η2,η1)")
def kl_is_bregman_reversed() -> Outcome:
    h, a, b = gz.Empirical(_keys()), normal(4, 3, seed=2), normal(4, 3, seed=10)
    p, q = torch.softmax(a @ h.points.T, -1), torch.softmax(b @ h.points.T, -1)
    kl = (p * (p.log() - q.log())).sum(-1)
    corrected = max(gap(h.kl(a, b), kl), gap(gz.bregman(h.log_normalizer, b, a), kl))
    return Outcome(corrected, gap(gz.bregman(h.log_normalizer, a, b), kl))


@statement("E8 (dual)", "paper 3.2", corrected="KL(p1‖p2) = B_G*(u1,u2)", tolerance=1e-8)
def kl_is_bregman_of_the_conjugate() -> Outcome:
    h, a, b = gz.Empirical(_keys()), normal(4, 3, seed=2), normal(4, 3, seed=10)
    (_, p, u, _), (_, q, v, _) = (by_definition(_counting(_keys()), eta) for eta in (a, b))
    star = gz.dual(h, u).value - gz.dual(h, v).value - (gz.mean_to_natural(h, v) * (u - v)).sum(-1)
    return Outcome(gap(star, (p * (p / q).log()).sum(-1)))


@statement(
    "E9", "paper 3.2", printed="G*(u) = -(H(p) - E log h)", corrected="G*(u) = -H(p) - E_p[log h]", tolerance=1e-9
)
def conjugate_is_negative_entropy() -> Outcome:
    x, log_w, eta = _keys(), normal(7, seed=3), normal(4, 3, seed=2)
    h = gz.Empirical(x, log_w)
    p = torch.softmax(eta @ x.T + log_w, -1)
    H, expected_log_h = -(p * p.log()).sum(-1), p @ log_w
    star = gz.dual(h, h.mean(eta)).value
    corrected = max(
        gap(star, -H - expected_log_h), gap(h.entropy(eta), H), gap(h.relative_entropy(eta), -H - expected_log_h)
    )
    return Outcome(max(corrected, _conjugate_of_a_density()), gap(star, -H + expected_log_h))


def _conjugate_of_a_density() -> float:
    """Residual of E9 for Gamma(k, r) in u = log x: H + E log h is invariant to the choice of coordinate."""
    h, (x, log_mass), eta = (
        gz.Gamma(number(2.5).reshape(1), number(1.5).reshape(1)),
        _gamma_nodes(2.5, 1.5),
        number(0.7),
    )
    _, log_step = line(-40.0, 6.0)
    log_h = log_mass - log_step
    log_p = log_h + eta * x[:, 0]
    log_p = log_p - (log_p + log_step).logsumexp(0)
    p = (log_p + log_step).exp()
    H, expected_log_h = -(p * log_p).sum(), (p * log_h).sum()
    return gap(h.relative_entropy(eta.reshape(1)), -H - expected_log_h)


@statement("E10", "paper 3.2", printed="∇² log Z = E[x x^T]", corrected="∇² log Z = Cov_η[x]")
def hessian_is_the_covariance() -> Outcome:
    x, eta = _keys(), normal(3, seed=2)
    hessian = torch.func.hessian(lambda e: (x @ e).exp().sum().log())(eta)
    p = torch.softmax(x @ eta, -1)
    return Outcome(gap(gz.Empirical(x).covariance(eta), hessian), gap((x.T * p) @ x, hessian))


@statement("E11", "paper 3.2", corrected="KL(q‖h) = KL(q‖P_η) + G*(u) for every q with mean u", tolerance=1e-9)
def maximum_entropy() -> Outcome:
    x, eta = _keys(), normal(3, seed=2)
    h, p = gz.Empirical(x), torch.softmax(x @ eta, 0)
    constraints = torch.cat((x.T, torch.ones(1, 7, dtype=FLOAT)))
    kernel = torch.linalg.svd(constraints).Vh[4:]  # directions that change neither the mean nor the mass
    q = p + 0.5 * p.min() * kernel[0]
    result = gz.maximum_entropy(h, p @ x)
    left = (q * q.log()).sum()
    right = (q * (q / p).log()).sum() + result.relative_entropy
    return Outcome(
        max(gap(left, right), gap(result.eta, eta), gap(result.distribution.mean(torch.zeros(3, dtype=FLOAT)), p @ x))
    )


@statement(
    "E12",
    "paper 3.2",
    printed="key of η is Cov(hidden)⁻¹ η",
    corrected="key of η is ∇G(η0) + ∇²G(η0)(η - η0): exact for Gaussians",
)
def affine_key_map() -> Outcome:
    mu, Sigma, hidden = normal(3, seed=6), spread(3, seed=7), normal(50, 3, seed=8) @ spread(3, seed=10)
    h, eta0 = gz.Gaussian(mu, Sigma), normal(3, seed=9)
    keys = mu + hidden @ Sigma  # grad of <μ,η> + ηΣη/2
    affine = h.mean(eta0) + h.covariance_product(hidden, hidden - eta0)
    return Outcome(gap(affine, keys, 10.0), gap(hidden @ torch.linalg.inv(torch.cov(hidden.T)), keys))


@statement(
    "E13", "paper 3.2", corrected="softmax_j <η_i, key(η_j)> = softmax_j η_i^T F η_j: constants of the query drop out"
)
def fisher_form_of_the_logits() -> Outcome:
    mu, Sigma, eta = normal(3, seed=6), spread(3, seed=7), normal(5, 3, seed=8)
    exact = gz.Empirical(gz.Gaussian(mu, Sigma).mean(eta)).probabilities(eta)
    h, eta0 = gz.Empirical(_keys()), normal(3, seed=9)  # in general the key map is affine to first order only
    F = h.covariance(eta0)
    affine = gz.Empirical(h.mean(eta0) + (eta - eta0) @ F).probabilities(eta)
    return Outcome(
        max(gap(exact, torch.softmax(eta @ Sigma @ eta.T, -1)), gap(affine, torch.softmax(eta @ F @ eta.T, -1)))
    )


# Errata of other sections --------------------------------------------------------------------------------------------


@statement(
    "E7",
    "paper 3.1",
    printed="x + Σ_j a_j x_j is an ascent step for any weights",
    corrected="∇_x (1/β) log Σ_j exp(β q.k_j) = W_q^T W_k Σ_j a_j x_j: ascent iff W_O W_V = τ W_q^T W_k",
)
def residual_step_is_ascent() -> Outcome:
    tokens, x, W_q, W_k, beta = _keys(), normal(3, seed=2), normal(2, 3, seed=3), normal(2, 3, seed=4), 0.5
    keys = tokens @ W_k.T
    gradient = torch.func.grad(lambda y: torch.logsumexp(beta * keys @ (W_q @ y), 0) / beta)(x)
    attended = gz.Empirical(keys).expect(tokens, beta * W_q @ x)
    return Outcome(gap(W_q.T @ W_k @ attended, gradient), gap(attended, gradient))


@statement(
    "E7 (moving keys)",
    "paper 5",
    printed="∇_i Σ_l log Z_l = Σ_j a_ij x_j",
    corrected="∇_i Σ_l log Z_l = Σ_j a_ij x_j + Σ_l a_li x_l",
)
def moving_keys_add_a_column_term() -> Outcome:
    x = _keys()
    gradient = torch.func.grad(lambda y: torch.logsumexp(y @ y.T, -1).sum())(x)
    a = gz.Empirical(x).probabilities(x)
    return Outcome(gap(a @ x + a.T @ x, gradient), gap(gz.Empirical(x).mean(x), gradient))


@statement(
    "E18",
    "paper 4",
    printed="boosting weights w_i = exp(-F(x_i))",
    corrected="w_i = exp(-y_i F(x_i)); α = ½ log(w_right/w_wrong)",
)
def boosting_weights() -> Outcome:
    y, f, scores = normal(9, seed=1).sign(), normal(9, 3, seed=2).sign(), normal(9, seed=3)
    h, step = gz.margin_measure(y, f, scores), normal(3, seed=4)
    loss = torch.exp(-y * (scores + f @ step)).sum()
    w = torch.exp(-y * scores)
    right = (w * (y * f[:, 0] > 0)).sum()
    alpha = (right / (w.sum() - right)).log() / 2
    after = gz.boost(h, 0)
    corrected = max(
        gap(h.log_normalizer(step).exp(), loss, float(loss)),
        gap(after.weight, alpha),
        gap(after.h.log_normalizer(step), h.log_normalizer(step + alpha * torch.eye(3, dtype=FLOAT)[0])),
    )
    return Outcome(corrected, gap(torch.exp(-scores), w))


@statement(
    "E19",
    "paper 2.4",
    printed="log normaliser of the joint = ELBO",
    corrected="log normaliser of the joint = log p(x) = ELBO(q) + KL(q‖p(z|x))",
)
def evidence() -> Outcome:
    centres, log_prior, x = normal(6, 3, seed=1), torch.log_softmax(normal(6, seed=2), 0), normal(3, seed=3)
    unit = 1.5 * number(2 * torch.pi).log()
    log_joint = log_prior - ((x - centres) ** 2).sum(-1) / 2 - unit  # z picks a centre, x ~ N(centre, I)
    log_q = torch.log_softmax(normal(6, seed=4), 0)
    q, posterior = log_q.exp(), torch.softmax(log_joint, 0)
    elbo = (q * (log_joint - log_q)).sum()
    log_weights = log_prior - (centres**2).sum(-1) / 2
    h, rest = gz.Empirical(centres, log_weights), -(x**2).sum() / 2 - unit
    evidence = h.log_normalizer(x) + rest
    mass = log_weights.logsumexp(0)  # a mixture of one-point measures has the same bound
    bound = gz.Mixture(log_weights - mass, gz.Empirical(centres.unsqueeze(-2))).lower_bound(x, log_q)
    corrected = max(
        gap(evidence, log_joint.exp().sum().log()),
        gap(evidence, elbo + (q * (log_q - posterior.log())).sum()),
        gap(h.probabilities(x), posterior),
        gap(bound.value + mass + rest, elbo),
    )
    return Outcome(corrected, gap(evidence, elbo))


@statement("E20", "paper 2.4", printed="free energy = log Z", corrected="free energy F = U - S/β = -(1/β) log Z")
def free_energy() -> Outcome:
    energy, beta = normal(6, 1, seed=1), 1.7
    h, eta = gz.Empirical(energy), number(-beta).reshape(1)
    p, G = torch.softmax(-beta * energy[:, 0], 0), h.log_normalizer(eta)
    U, S = (p * energy[:, 0]).sum(), -(p * p.log()).sum()
    return Outcome(max(gap(-G / beta, U - S / beta), gap(h.entropy(eta), S)), gap(G, U - S / beta))
