"""All statistics of every measure, compared with sums over its points or over quadrature nodes.

    closed forms of theory 3.4 and 6.3, torch distributions, operations of theory 3.8

Read next: measure_operations.py (relations between measures).
"""

import torch
from torch import distributions as D

from .. import measures as gz
from .._typing import Tensor
from .definition import FLOAT, Nodes, by_definition, distance, line, normal, number, plane, spread
from .statement import Outcome, gap, statement


def _points(n: int = 5, d: int = 2, seed: int = 1) -> Nodes:
    return Nodes(normal(n, d, seed=seed), 0.5 * normal(n, seed=seed + 50))


def _empirical(nodes: Nodes) -> gz.Empirical:
    return gz.Empirical(nodes.points, nodes.log_masses)


def _one(value: float) -> Tensor:
    return number(value).reshape(1)


def _row(*values: float) -> Tensor:
    """Natural parameters of a measure on the line, [m, 1]."""
    return number(*values).reshape(-1, 1)


@statement("3.2", "theory", corrected="Empirical with weights: all statistics by definition")
def empirical() -> Outcome:
    nodes, eta = _points(7, 3), normal(4, 3, seed=2)
    h = _empirical(nodes)
    p = torch.softmax(eta @ nodes.points.T + nodes.log_masses, -1)
    values = normal(7, 2, seed=3)
    by_hand = max(
        gap(h.entropy(eta), -(p * p.log()).sum(-1)),
        gap(h.expect(values, eta), p @ values),
        gap(h.support(eta), (eta @ nodes.points.T).amax(-1)),
    )
    return Outcome(max(distance(h, nodes, eta), by_hand))


@statement("3.4 Gaussian", "theory", corrected="G = <μ,η> + ηΣη/2, dense, diagonal and low rank")
def gaussian() -> Outcome:
    mu, Sigma, eta, v = normal(3, seed=1), spread(3, seed=2), normal(4, 3, seed=3), normal(4, 3, seed=4)
    W, diagonal = normal(3, 1, seed=5), number(0.5, 1.0, 2.0)
    worst = 0.0
    for h, S in (
        (gz.Gaussian(mu, Sigma), Sigma),
        (gz.Gaussian.diagonal(mu, diagonal), diagonal.diag()),
        (gz.Gaussian.low_rank(mu, W, diagonal), W @ W.T + diagonal.diag()),
    ):
        worst = max(
            worst,
            gap(h.log_normalizer(eta), eta @ mu + ((eta @ S) * eta).sum(-1) / 2, 10.0),
            gap(h.mean(eta), mu + eta @ S, 10.0),
            gap(h.covariance(eta), S.expand(4, 3, 3)),
            gap(h.covariance_product(eta, v), v @ S, 10.0),
            gap(h.third_cumulant(eta, v, v), torch.zeros_like(v)),
        )
    return Outcome(worst)


@statement("3.4 Gamma", "theory", corrected="G = -k log(1 - η/r), mean k/(r-η), η < r")
def gamma() -> Outcome:
    u, log_step = line(-40.0, 6.0)
    k, r = 2.5, 1.5
    log_h = k * number(r).log() - torch.lgamma(number(k)) + k * u - r * u.exp() + log_step
    h = gz.Gamma(_one(k), _one(r))
    legal = h.in_domain(_row(1.4, 1.5, 1.6))
    return Outcome(
        max(
            distance(h, Nodes(u.exp().unsqueeze(-1), log_h), _row(-2.0, 0.0, 0.8)),
            float(legal.tolist() != [True, False, False]),
        )
    )


@statement("3.4 inverse Gaussian", "theory", corrected="G = (l/m)(1 - √(1 - 2m²η/l)), mean m/√(1 - 2m²η/l)")
def inverse_gaussian() -> Outcome:
    u, log_step = line(-12.0, 8.0, 4001)
    m, l = 1.2, 2.0  # noqa: E741
    x = u.exp()
    log_h = (number(l) / (2 * torch.pi)).log() / 2 - 1.5 * u - l * (x - m) ** 2 / (2 * m * m * x) + u + log_step
    return Outcome(distance(gz.InverseGaussian(_one(m), _one(l)), Nodes(x.unsqueeze(-1), log_h), _row(-1.0, 0.0, 0.4)))


@statement("3.4 Poisson", "theory", corrected="G = r(e^η - 1), mean r e^η")
def poisson() -> Outcome:
    x, r = torch.arange(120, dtype=FLOAT), 1.7
    log_h = x * number(r).log() - r - torch.lgamma(x + 1)
    return Outcome(distance(gz.Poisson(_one(r)), Nodes(x.unsqueeze(-1), log_h), _row(-1.0, 0.0, 1.2)))


@statement("3.4 spins", "theory", corrected="spins on the cube: G = Σ log cosh(b+η) - log cosh b, mean tanh(b+η)")
def spins() -> Outcome:
    corners, b = torch.cartesian_prod(*(number(-1.0, 1.0),) * 3), normal(3, seed=1)
    log_h = corners @ b - (corners @ b).logsumexp(0)
    return Outcome(distance(gz.Spins(b), Nodes(corners, log_h), normal(4, 3, seed=2)))


@statement("3.4 categories", "theory", corrected="one-hot categories: G = log Σ p_i e^η_i, mean softmax")
def categories() -> Outcome:
    log_p = torch.log_softmax(normal(4, seed=1), 0)
    return Outcome(distance(gz.OneHot(log_p), Nodes(torch.eye(4, dtype=FLOAT), log_p), normal(3, 4, seed=2)))


@statement("3.4 sphere", "theory", corrected="G = log[Γ(D/2)(2/k)^(D/2-1) I_{D/2-1}(k)], mean length I_{D/2}/I_{D/2-1}")
def sphere() -> Outcome:
    angle = torch.arange(400, dtype=FLOAT) * (2 * torch.pi / 400)
    circle = torch.stack((angle.cos(), angle.sin()), -1) * 1.5
    even = torch.full((400,), -number(400.0).log().item(), dtype=FLOAT)
    flat = distance(
        gz.Sphere(2, number(1.5)), Nodes(circle, even), normal(4, 2, seed=1) * number(0.1, 1.0, 3.0, 20.0).unsqueeze(-1)
    )
    k = number(0.5, 2.0, 30.0)
    eta = torch.stack((k, 0 * k, 0 * k), -1)
    h = gz.Sphere(3, number(1.0))
    solid = max(
        gap(h.log_normalizer(eta), k + torch.log(-torch.expm1(-2 * k) / (2 * k)), 10.0),
        gap(h.mean(eta)[:, 0], 1 / torch.tanh(k) - 1 / k),
        gap(h.covariance(eta)[:, 0, 0], 1 / k**2 - 1 / torch.sinh(k) ** 2),
        gap(h.covariance(eta)[:, 1, 1], (1 / torch.tanh(k) - 1 / k) / k),
    )
    return Outcome(max(flat, solid))


@statement("3.4 Wishart", "theory", corrected="G = -(n/2) log det(I - 2VT), mean n(V⁻¹ - 2T)⁻¹")
def wishart() -> Outcome:
    # A Wishart of n degrees of freedom is the n-fold convolution of the distribution of x x^T, x ~ N(0, V).
    V, n = number(0.5, 0.1, 0.1, 0.3).reshape(2, 2), 3
    x, log_area = plane(-9.0, 9.0, 181)
    log_h = -(x * torch.linalg.solve(V, x.T).T).sum(-1) / 2 - torch.linalg.det(2 * torch.pi * V).log() / 2 + log_area
    outer = Nodes(gz.svec(x.unsqueeze(-1) * x.unsqueeze(-2)), log_h)
    eta = 0.1 * normal(3, 3, seed=1)
    h, one = gz.Wishart(number(float(n)), V), by_definition(outer, eta)
    S = torch.linalg.inv(torch.linalg.inv(V) - 2 * gz.smat(eta))
    v = normal(3, 3, seed=2)
    return Outcome(
        max(
            gap(h.log_normalizer(eta), n * one.log_normalizer),
            gap(h.mean(eta), n * one.mean, 10.0),
            gap(h.covariance(eta), n * one.covariance, 10.0),
            gap(h.covariance_product(eta, v), n * (one.covariance @ v.unsqueeze(-1))[..., 0], 10.0),
            gap(gz.smat(h.mean(eta)), n * S, 10.0),
        )
    )


@statement(
    "1b torch", "theory", corrected="from_distribution: G = A(θ+η) - A(θ), distribution of the sufficient statistic"
)
def torch_distributions() -> Outcome:
    u, log_step = line(-40.0, 6.0)
    y, log_gap = line(-40.0, 40.0)
    s, log_slope = line(-60.0, 60.0, 4001)
    positive = u.exp()
    log_in, log_out = torch.nn.functional.logsigmoid(s), torch.nn.functional.logsigmoid(-s)
    normal_, gamma_ = D.Normal(number(0.3), number(0.8)), D.Gamma(number(2.5), number(1.5))
    beta_ = D.Beta(number(2.0), number(3.0))
    log_beta = number(12.0).log() + 2 * log_in + 3 * log_out + log_slope  # y = sigmoid(s), dy = y (1-y) ds
    dirichlet = D.Dirichlet(number(2.0, 3.0))
    cases = [
        (normal_, Nodes(torch.stack((y, y * y), -1), normal_.log_prob(y) + log_gap), number(0.5, -0.3, -1.0, 0.2)),
        (
            gamma_,
            Nodes(torch.stack((u, positive), -1), gamma_.log_prob(positive) + u + log_step),
            number(0.5, -0.3, -1.0, 0.4),
        ),
        (
            beta_,
            Nodes(torch.stack((log_in, log_out), -1), log_beta),
            number(0.5, -0.3, -1.0, 0.4),
        ),
        (
            dirichlet,
            Nodes(torch.stack((log_in, log_out), -1), log_beta),
            number(0.5, -0.3, -1.0, 0.4),
        ),
        (D.Bernoulli(number(0.3)), Nodes(number(0.0, 1.0).unsqueeze(-1), number(0.7, 0.3).log()), number(0.5, -0.3)),
        (
            D.Exponential(number(1.5)),
            Nodes(positive.unsqueeze(-1), number(1.5).log() - 1.5 * positive + u + log_step),
            number(0.5, -0.3),
        ),
        (
            D.Categorical(number(0.2, 0.8)),
            Nodes(torch.eye(2, dtype=FLOAT), number(0.2, 0.8).log()),
            number(0.5, -0.3, 1.0, 2.0),
        ),
        (D.Poisson(number(1.7)), _counts(1.7), number(0.5, -0.3)),
    ]
    worst = 0.0
    for p, nodes, eta in cases:
        h = gz.from_distribution(p)
        worst = max(worst, distance(h, nodes, eta.reshape(2, -1)))
    return Outcome(worst)


def _counts(rate: float) -> Nodes:
    x = torch.arange(120, dtype=FLOAT)
    return Nodes(x.unsqueeze(-1), x * number(rate).log() - rate - torch.lgamma(x + 1))


@statement("1b back", "theory", corrected="to_distribution(h, η) is the tilted distribution")
def back_to_torch() -> Outcome:
    """log P_η(y) - log p(y) = <T(y),η> - G(η), where p is torch's density at η = 0."""
    vector, line_, plane_ = normal(2, seed=1), _one(0.3), number(0.4, -0.3)
    k, r = number(2.5), number(1.5)
    gaussian = gz.Gaussian(normal(2, seed=2), spread(2, seed=3))
    wishart, T, X = gz.Wishart(number(4.0), 0.3 * spread(2, seed=4)), 0.05 * normal(3, seed=5), spread(2, seed=6)
    hot = gz.OneHot(torch.log_softmax(normal(2, seed=6), 0))
    simplex, y = number(0.3, 0.7), number(0.3)
    shifted = D.MultivariateNormal(gaussian.loc, gaussian.covariance_matrix)
    rows = [  # the measure, its distribution at 0, η, y, T(y)
        (gaussian, shifted, vector, plane_, plane_),
        (gz.Gamma(_one(2.5), _one(1.5)), D.Independent(D.Gamma(_one(2.5), _one(1.5)), 1), line_, _one(0.7), _one(0.7)),
        (gz.Poisson(_one(1.7)), D.Independent(D.Poisson(_one(1.7)), 1), line_, _one(3.0), _one(3.0)),
        (hot, D.OneHotCategorical(logits=hot.log_probabilities), vector, number(0.0, 1.0), number(0.0, 1.0)),
        (wishart, D.Wishart(number(4.0), wishart.covariance_matrix), T, X, gz.svec(X)),
    ]
    for p, statistic, at in (
        (D.Normal(number(0.3), number(0.8)), torch.stack((y, y * y)), y),
        (D.Gamma(k, r), torch.stack((y.log(), y)), y),
        (D.Beta(k, r), torch.stack((y.log(), (1 - y).log())), y),
        (D.Dirichlet(torch.stack((k, r))), simplex.log(), simplex),
        (D.Bernoulli(number(0.3)), _one(1.0), number(1.0)),
    ):
        rows.append((gz.from_distribution(p), p, line_ if statistic.shape == (1,) else plane_, at, statistic))
    worst = 0.0
    for h, member, eta, at, statistic in rows:
        change = gz.to_distribution(h, eta).log_prob(at) - member.log_prob(at)
        worst = max(worst, gap(change, (statistic * eta).sum() - h.log_normalizer(eta), 10.0))
    return Outcome(worst)


@statement("6.3", "theory", corrected="conjugate prior: G(y) = A(ξ+y,ν) - A(ξ,ν), for five base families")
def conjugate_priors() -> Outcome:
    theta, log_step = line(-60.0, 60.0, 4001)
    soft, u = torch.logaddexp(theta, 0 * theta), theta
    cases = [
        ("gaussian", 1.3, 2.0, theta, theta**2 / 2, 0 * u),
        ("poisson", 2.5, 2.0, theta, theta.clamp(max=9.0).exp(), 0 * u),
        ("bernoulli", 2.0, 5.0, theta, soft, 0 * u),
        ("categorical", 2.0, 5.0, theta, soft, 0 * u),
        ("exponential", 1.4, 2.0, -theta.clamp(max=9.0).exp(), -theta, u),  # θ = -e^u, dθ = e^u du
    ]
    worst = 0.0
    for base, xi, nu, t, G0, jacobian in cases:
        h = gz.ConjugatePrior(_one(xi), number(nu), base=base)
        log_h = xi * t - nu * G0 + jacobian + log_step
        keep = log_h > -700.0  # beyond these nodes the mass underflows float64
        nodes = Nodes(t[keep].unsqueeze(-1), (log_h - log_h[keep].logsumexp(0))[keep])
        worst = max(
            worst,
            distance(h, nodes, _row(-0.4, 0.0, 0.6)),
            gap(h.base_log_normalizer(t[keep].unsqueeze(-1)) / (1 + G0[keep].abs()), G0[keep] / (1 + G0[keep].abs())),
        )
    return Outcome(worst)


# Operations ---------------------------------------------------------------------------------------------------------


@statement("3.3 tilt", "theory", corrected="cocycle: G_tilted(η) = G(a+η) - G(a)")
def tilted() -> Outcome:
    nodes, a = _points(), normal(2, seed=3)
    tilt = nodes.points @ a
    log_masses = nodes.log_masses + tilt - (nodes.log_masses + tilt).logsumexp(0)
    return Outcome(distance(gz.tilt(_empirical(nodes), a), Nodes(nodes.points, log_masses), normal(4, 2, seed=4)))


@statement("3.8 convolution", "theory", corrected="distribution of x1 + x2: G1 + G2, means and covariances add")
def convolution() -> Outcome:
    a, b = _points(5, 2, 1), _points(4, 2, 2)
    sums = (a.points.unsqueeze(1) + b.points).reshape(-1, 2)
    masses = (a.log_masses.unsqueeze(1) + b.log_masses).reshape(-1)
    return Outcome(distance(gz.convolve(_empirical(a), _empirical(b)), Nodes(sums, masses), normal(4, 2, seed=4)))


@statement("3.8 sum", "theory", corrected="h1 + h2: G = logaddexp, F = r1F1 + r2F2 + r1r2 (m1-m2)(m1-m2)^T")
def sum_of_measures() -> Outcome:
    a, b, eta = _points(5, 2, 1), _points(4, 2, 2), normal(4, 2, seed=4)
    nodes = Nodes(torch.cat((a.points, b.points)), torch.cat((a.log_masses, b.log_masses)))
    first, second = _empirical(a), _empirical(b)
    merged = gz.merge(
        gz.PartialStatistics(
            torch.stack((first.log_normalizer(eta), second.log_normalizer(eta)), -1),
            torch.stack((first.mean(eta), second.mean(eta)), -2),
            torch.stack((first.covariance(eta), second.covariance(eta)), -3),
        )
    )
    total = gz.add(first, second)
    same = max(gap(merged.log_normalizer, total.log_normalizer(eta)), gap(merged.mean, total.mean(eta)))
    covariance = gap(torch.zeros(1) if merged.covariance is None else merged.covariance, total.covariance(eta))
    return Outcome(max(distance(total, nodes, eta), same, covariance, _points_and_a_gaussian(a, eta)))


def _points_and_a_gaussian(nodes: Nodes, eta: Tensor) -> float:
    """Residual for the sum of an empirical measure and a Gaussian, by the formula of the sum."""
    mu, Sigma, one = normal(2, seed=6), spread(2, seed=7), by_definition(nodes, eta)
    G = torch.stack((one.log_normalizer, eta @ mu + ((eta @ Sigma) * eta).sum(-1) / 2))
    r, away = G.softmax(0).unsqueeze(-1), one.mean - mu - eta @ Sigma
    spreads = r[0].unsqueeze(-1) * one.covariance + r[1].unsqueeze(-1) * Sigma
    h = gz.add(_empirical(nodes), gz.Gaussian(mu, Sigma))
    return max(
        gap(h.log_normalizer(eta), G.logsumexp(0), 10.0),
        gap(h.mean(eta), r[0] * one.mean + r[1] * (mu + eta @ Sigma), 10.0),
        gap(
            h.covariance(eta),
            spreads + (r[0] * r[1]).unsqueeze(-1) * away.unsqueeze(-1) * away.unsqueeze(-2),
            100.0,
        ),
    )


@statement("3.8 product", "theory", corrected="distribution of (x1, x2): G = G1(η1) + G2(η2)")
def product_of_measures() -> Outcome:
    a, b = _points(5, 2, 1), _points(4, 1, 2)
    pairs = torch.cat((a.points.unsqueeze(1).expand(5, 4, 2), b.points.expand(5, 4, 1)), -1).reshape(-1, 3)
    masses = (a.log_masses.unsqueeze(1) + b.log_masses).reshape(-1)
    return Outcome(distance(gz.product(_empirical(a), _empirical(b)), Nodes(pairs, masses), normal(4, 3, seed=4)))


@statement(
    "3.8 pushforward",
    "theory",
    corrected="distribution of Wx + b: G'(s) = G(W^T s) + <b,s>; a scalar W is a temperature",
)
def pushforward() -> Outcome:
    a, W, b = _points(5, 2, 1), normal(3, 2, seed=2), normal(3, seed=3)
    affine = distance(
        gz.pushforward(_empirical(a), W, b), Nodes(a.points @ W.T + b, a.log_masses), normal(4, 3, seed=4)
    )
    cooled = distance(gz.pushforward(_empirical(a), 0.4), Nodes(0.4 * a.points, a.log_masses), normal(4, 2, seed=4))
    return Outcome(max(affine, cooled))


@statement("3.8 mass", "theory", corrected="c h: G + log c, the same mean and covariance")
def reweighted() -> Outcome:
    a = _points()
    return Outcome(
        distance(gz.reweight(_empirical(a), number(0.7)), Nodes(a.points, a.log_masses + 0.7), normal(4, 2, seed=4))
    )
