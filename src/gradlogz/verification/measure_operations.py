"""Relations between measures: bounds, values, heads, residuals, mixtures, posteriors.   [theory 3.5-3.9, 6]

These statements express the parts of a transformer as operations on measures.

Read next: ../measures/algebra.py, docs/measures.md (the table of transformer parts).
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from .. import measures as gz
from .._typing import Tensor
from .definition import FLOAT, Nodes, by_definition, distance, line, normal, number, plane, softmax_average, spread
from .statement import Outcome, gap, statement, violation


@statement("3.5 Fenchel-Young", "theory", corrected="G(η) + G*(u) >= <η,u>, equality iff u = ∇G(η)", tolerance=1e-9)
def fenchel_young() -> Outcome:
    x, eta, other = normal(7, 3, seed=1), normal(4, 3, seed=2), normal(4, 3, seed=3)
    h, u, v = gz.Empirical(x), softmax_average(eta, x), softmax_average(other, x)
    equality = gap(h.log_normalizer(eta) + gz.dual(h, u).value, (eta * u).sum(-1))
    return Outcome(max(equality, violation((eta * v).sum(-1), h.log_normalizer(eta) + gz.dual(h, v).value)))


@statement("3.5 Gibbs", "theory", corrected="G(η) = max_q <η,E_q x> - KL(q‖h), gap KL(q‖P_η)")
def gibbs_variational_principle() -> Outcome:
    x, log_w, eta, q = normal(6, 3, seed=1), normal(6, seed=2), normal(3, seed=3), torch.softmax(normal(6, seed=4), 0)
    h, p = gz.Empirical(x, log_w), torch.softmax(x @ eta + log_w, 0)
    bound = (q * (x @ eta - q.log() + log_w)).sum()
    return Outcome(gap(h.log_normalizer(eta), bound + (q * (q / p).log()).sum()))


@statement("3.5 entropy", "theory", corrected="H = G - E[logit]; = G - <η,∇G> for the counting measure")
def entropy_of_attention() -> Outcome:
    x, log_w, eta = normal(6, 3, seed=1), normal(6, seed=2), normal(4, 3, seed=3)
    weighted, counting = gz.Empirical(x, log_w), gz.Empirical(x)
    logits = eta @ x.T + log_w
    left = logits.logsumexp(-1) - (torch.softmax(logits, -1) * logits).sum(-1)
    right = (eta @ x.T).logsumexp(-1) - (eta * softmax_average(eta, x)).sum(-1)
    return Outcome(max(gap(weighted.entropy(eta), left), gap(counting.entropy(eta), right)))


@statement("3.6", "theory", corrected="natural gradient of a Gaussian: F⁻¹∇G = η + Σ⁻¹μ")
def natural_gradient() -> Outcome:
    mu, Sigma, eta = normal(3, seed=1), spread(3, seed=2), normal(4, 3, seed=3)
    return Outcome(gap(gz.Gaussian(mu, Sigma).natural_gradient(eta), eta + torch.linalg.solve(Sigma, mu), 10.0))


@statement("3.7 bounds", "theory", corrected="|∇G| <= max|x|, λ_max(∇²G) <= diam²/4")
def bounds() -> Outcome:
    x, eta = normal(7, 3, seed=1), 3 * normal(50, 3, seed=2)
    h, diameter = gz.Empirical(x), torch.cdist(x, x).max()
    mean = violation(h.mean(eta).norm(dim=-1), x.norm(dim=-1).max().expand(50))
    return Outcome(max(mean, violation(torch.linalg.eigvalsh(h.covariance(eta))[:, -1], (diameter**2 / 4).expand(50))))


@statement("3.7 KL", "theory", corrected="KL(p_a‖p_b) = ½ (a-b)^T F (a-b) + O(|a-b|³)", tolerance=2e-2)
def second_order_kl() -> Outcome:
    x, a, step = normal(7, 3, seed=1), normal(3, seed=2), 2e-3 * normal(3, seed=3)
    F = by_definition(Nodes(x, torch.zeros(7, dtype=FLOAT)), a.unsqueeze(0)).covariance[0]

    def error(t: float) -> Tensor:
        return gz.Empirical(x).kl(a, a + t * step) - t * t * (step @ F @ step) / 2

    return Outcome(abs(float(error(1.0) / error(0.5)) / 8 - 1))  # third order: half the step has an eighth of the error


@statement(
    "3.8 equivariance", "theory", corrected="shift keys by s: G + <η,s>, mean + s; W on keys, W^-T on η: mean -> W mean"
)
def equivariance() -> Outcome:
    x, eta, s, W = normal(7, 3, seed=1), normal(4, 3, seed=2), normal(3, seed=3), normal(3, 3, seed=4)
    G, _, mean, F = by_definition(Nodes(x, torch.zeros(7, dtype=FLOAT)), eta)
    moved, turned, tilted = gz.Empirical(x + s), gz.Empirical(x @ W.T), eta @ torch.linalg.inv(W)
    return Outcome(
        max(
            gap(moved.log_normalizer(eta), G + eta @ s),
            gap(moved.mean(eta), mean + s),
            gap(moved.covariance(eta), F),
            gap(turned.log_normalizer(tilted), G, 10.0),
            gap(turned.mean(tilted), mean @ W.T, 10.0),
            gap(turned.covariance(tilted), W @ F @ W.T, 10.0),
        )
    )


@statement("3.8 smoothing, 6.5", "theory", corrected="keys smoothed by N(0,S): G + ηSη/2, attention + Sη")
def smoothed_keys() -> Outcome:
    x, S, eta = normal(6, 3, seed=1), spread(3, seed=2), normal(4, 3, seed=3)
    h = gz.convolve(gz.Empirical(x), gz.Gaussian(torch.zeros(3, dtype=FLOAT), S))
    p, log_n = torch.softmax(eta @ x.T, -1), number(6.0).log()
    G, attention = torch.logsumexp(eta @ x.T, -1) + ((eta @ S) * eta).sum(-1) / 2, p @ x
    spreads = torch.einsum("mn,nd,ne->mde", p, x, x) - attention.unsqueeze(-1) * attention.unsqueeze(-2) + S
    density = gz.Mixture((-log_n).expand(6), gz.Gaussian(x, S.expand(6, 3, 3)))
    return Outcome(
        max(
            gap(h.log_normalizer(eta), G, 10.0),
            gap(density.log_normalizer(eta), G - log_n, 10.0),
            *(gap(one.mean(eta), attention + eta @ S, 10.0) for one in (h, density)),
            *(gap(one.covariance(eta), spreads, 10.0) for one in (h, density)),
        )
    )


@statement("3.9 values", "theory", corrected="attention with values = ∇_ω log Σ_j exp(<k_j,η> + <v_j,ω>) at ω = 0")
def values_by_the_joint_family() -> Outcome:
    k, v, q = normal(7, 3, seed=1), normal(7, 2, seed=2), normal(4, 3, seed=3)
    joint = gz.Empirical(torch.cat((k, v), -1))
    eta = torch.cat((q / 3**0.5, torch.zeros(4, 2, dtype=FLOAT)), -1)
    attention = scaled_dot_product_attention(q, k, v)
    jacobian = torch.func.vmap(torch.func.jacrev(lambda e: gz.Empirical(k).expect(v, e)))(q / 3**0.5)
    return Outcome(
        max(
            gap(joint.mean(eta)[:, 3:], attention),
            gap(gz.Empirical(k).expect(v, q / 3**0.5), attention),
            gap(joint.covariance(eta)[:, 3:, :3], jacobian),
        )
    )


@statement(
    "3.9 heads, residual", "theory", corrected="x + Σ_h W_o,h att_h = ∇_ω of Dirac(x) * heads at ω = 0, for any weights"
)
def multi_head_attention_with_residual() -> Outcome:
    tokens, x, d = normal(6, 4, seed=1), normal(4, seed=2), 2
    W_q, W_k, W_v, W_o = (normal(2, 4, d, seed=s) for s in (3, 4, 5, 6))
    out = x.clone()
    heads = [gz.Empirical(x.unsqueeze(0))]
    for q, k, v, o in zip(W_q, W_k, W_v, W_o, strict=True):
        logits = (tokens @ k) @ (x @ q) / d**0.5
        out = out + torch.softmax(logits, 0) @ (tokens @ v) @ o.T
        heads.append(gz.Empirical(tokens @ v @ o.T, logits))  # the head as a measure of its values, tilted by the query
    return Outcome(gap(gz.convolve(*heads).mean(torch.zeros(4, dtype=FLOAT)), out, 10.0))


@statement(
    "3.9 masks, sinks", "theory", corrected="masks and biases are per-query log weights; a sink is one more atom at 0"
)
def masks_and_sinks() -> Outcome:
    q, k, sink = normal(5, 3, seed=1), normal(5, 3, seed=2), number(0.3)
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    masked = gap(gz.Empirical(k, causal).mean(q / 3**0.5), scaled_dot_product_attention(q, k, k, is_causal=True))
    scores = (q @ k.T).exp()
    with_sink = gz.add(gz.Empirical(k), gz.Empirical(torch.zeros(1, 3, dtype=FLOAT), sink.reshape(1)))
    return Outcome(max(masked, gap(with_sink.mean(q), scores @ k / (scores.sum(-1, keepdim=True) + sink.exp()))))


@statement("6.1", "theory", corrected="mixture of Gaussians: r = softmax(log π + g), ∇G = Σ r_k (μ_k + Σ_k η)")
def mixture_of_gaussians() -> Outcome:
    log_pi, mu, eta = torch.log_softmax(normal(3, seed=1), 0), normal(3, 2, seed=2), normal(4, 2, seed=3)
    Sigma = torch.stack([spread(2, seed=s) for s in (4, 5, 6)])
    x, log_area = plane(-24.0, 24.0, 401)
    away = x.unsqueeze(1) - mu
    quadratic = torch.einsum("nkd,kde,nke->nk", away, torch.linalg.inv(Sigma), away)
    log_h = (log_pi - quadratic / 2 - torch.linalg.det(2 * torch.pi * Sigma).log() / 2).logsumexp(-1)
    h = gz.Mixture(log_pi, gz.Gaussian(mu, Sigma))
    g = eta @ mu.T + torch.einsum("md,kde,me->mk", eta, Sigma, eta) / 2
    gates = gap(h.responsibilities(eta), torch.softmax(log_pi + g, -1))
    return Outcome(max(distance(h, Nodes(x, log_h + log_area), eta), gates))


@statement("6.1 Jensen", "theory", corrected="G - Σ q_k (G_k + log π_k/q_k) = KL(q‖r) >= 0, tight at q = r")
def jensen_gap() -> Outcome:
    log_pi, log_q = torch.log_softmax(normal(3, seed=1), 0), torch.log_softmax(normal(3, seed=7), 0)
    eta, parts = (
        normal(4, 2, seed=3),
        gz.Gaussian(normal(3, 2, seed=2), torch.stack([spread(2, seed=s) for s in (4, 5, 6)])),
    )
    h = gz.Mixture(log_pi, parts)
    r = h.responsibilities(eta)
    bound = h.lower_bound(eta, log_q)
    kl = (log_q.exp() * (log_q - r.log())).sum(-1)
    gradient = torch.func.grad(lambda e: h.lower_bound(e, log_q).value.sum())(eta)
    corrected = max(
        gap(h.log_normalizer(eta) - bound.value, kl),
        gap(bound.gap, kl),
        violation(-bound.gap, 0 * kl),
        gap(bound.mean, gradient, 10.0),
    )
    return Outcome(corrected)


@statement(
    "6.2",
    "theory",
    corrected="heads as a mixture: one softmax over all (head, key); fixed gates give its Jensen bound",
)
def heads_as_a_mixture() -> Outcome:
    keys, eta = normal(3, 5, 2, seed=1), normal(4, 2, seed=2)  # three heads with five keys each, in one space
    even = torch.full((3,), -number(3.0).log().item(), dtype=FLOAT)
    h = gz.Mixture(even, gz.Empirical(keys))
    together = keys.reshape(15, 2)
    p = torch.softmax(eta @ together.T, -1)
    gates = p.reshape(4, 3, 5).sum(-1)
    ordinary = torch.stack([torch.softmax(eta @ k.T, -1) @ k for k in keys]).mean(0)
    bound = h.lower_bound(eta)
    return Outcome(
        max(
            gap(h.mean(eta), p @ together),
            gap(h.log_normalizer(eta), torch.logsumexp(eta @ together.T, -1) - number(3.0).log()),
            gap(h.responsibilities(eta), gates),
            gap(bound.mean, ordinary),
            gap(bound.gap, -gates.log().mean(-1) - number(3.0).log()),
        )
    )


@statement(
    "6.3 posterior",
    "theory",
    corrected="posterior mean = attention over prior draws, query x, key bias -G0(θ)",
)
def posterior_mean_as_attention() -> Outcome:
    theta, log_step = line(-40.0, 8.0)
    xi, nu, x = 2.5, 3.0, number(4.0).reshape(1)
    prior = gz.ConjugatePrior(number(xi).reshape(1), number(nu), base="poisson")
    keys = theta.unsqueeze(-1)
    log_prior = xi * theta - nu * theta.exp() + log_step
    attention = gz.Empirical(keys, log_prior - prior.base_log_normalizer(keys)).mean(x)
    zero = torch.zeros(1, dtype=FLOAT)
    exact = torch.digamma(number(xi + 4.0)) - number(nu + 1.0).log()
    corrected = max(gap(attention[0], exact), gap(prior.posterior(x).mean(zero)[0], exact))
    return Outcome(corrected)


@statement(
    "7.5 projection",
    "theory",
    corrected="argmin_q KL(p‖q) over a family matches E[T]: normal family, E y and E y²",
    tolerance=1e-8,
)
def moment_projection() -> Outcome:
    y = normal(9, 1, seed=1)
    family = gz.from_distribution(torch.distributions.Normal(number(0.0), number(1.0)))
    eta = gz.moment_project(
        family, gz.Empirical(y), torch.zeros(1, dtype=FLOAT), statistic=lambda t: torch.cat((t, t * t), -1)
    )
    projected = gz.to_distribution(family, eta)
    return Outcome(max(gap(projected.mean, y.mean()), gap(projected.variance, y.var(correction=0))))
