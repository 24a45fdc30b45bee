"""Layers that have an energy or a unique fixed point, and attention as a mean field.   [theory 5.10-5.12]

    monotone        x = u + τ Σ_n p_n v_n,  p = softmax(β<x,k_n>)        one solution if |τ|β diam(v) diam(k) < 4
    feed-forward    y = W^T f(Wx + b),      E = |x|²/2 - Σ_a F(<w_a,x> + b_a)
    block           y = Σ_h W_qh^T att_h(x) + W^T f(Wx + b), attention to a fixed context
    spins           P ∝ exp β(Σ_i <b_i,s_i> + Σ_{i<j} <s_i,J_ij s_j>) on points; enumerated over all states

Read next: ../dynamics/monotone.py, ../dynamics/block_energy.py, ../dynamics/vector_spins.py.
"""

import itertools
import math

import torch

from .. import dynamics as dyn
from .._typing import Tensor
from ..measures import Empirical, Gaussian
from .definition import FLOAT, normal, number, softmax_average, uniform
from .statement import Outcome, gap, statement, violation

BETA = 0.8


def _attended(x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Σ_n p_n v_n with p = softmax(β<x,k_n>), by sums."""
    weights = (BETA * x @ keys.T).exp()
    return weights @ values / weights.sum(-1, keepdim=True)


def _diameter(points: Tensor) -> Tensor:
    return max((a - b).norm() for a, b in itertools.combinations(points, 2))


# Unique fixed points ------------------------------------------------------------------------------------------------


@statement(
    "5.10 bound",
    "paper 2.3",
    corrected="the Jacobian of τ Σ p_n v_n is τβ Cov_p(v,k), of norm at most |τ|β diam(v) diam(k)/4",
)
def jacobian_is_a_covariance() -> Outcome:
    keys, values, x, tau = normal(5, 3, seed=1), normal(5, 3, seed=2), 2 * normal(20, 3, seed=3), -1.3
    jacobian = torch.func.vmap(torch.func.jacrev(lambda y: tau * _attended(y, keys, values)))(x)
    p = torch.softmax(BETA * x @ keys.T, -1)
    second = torch.einsum("mn,nd,ne->mde", p, values, keys)
    covariance = second - (p @ values).unsqueeze(-1) * (p @ keys).unsqueeze(-2)
    bound = abs(tau) * BETA * _diameter(values) * _diameter(keys) / 4
    certificate = dyn.attention_certificate(keys, values, beta=BETA, tau=tau)
    return Outcome(
        max(
            gap(jacobian, tau * BETA * covariance, 10.0),
            gap(certificate.monotonicity, 1 - bound, 10.0),
            gap(certificate.lipschitz, 1 + bound, 10.0),
            violation(torch.linalg.matrix_norm(jacobian, 2), bound.expand(20)),
        )
    )


@statement(
    "5.10 unique",
    "paper 2.3",
    corrected="if |τ|β diam(v) diam(k) < 4, or v = k and τ <= 0, x = u + τ att(x) has exactly one solution",
)
def fixed_points_are_unique() -> Outcome:
    keys, u, starts = normal(5, 3, seed=1), normal(3, seed=2), 5 * normal(6, 3, seed=3)
    near = 2.0 / (BETA * float(_diameter(keys)) ** 2)  # half of the bound: plain iteration is a contraction
    x = starts[0]
    for _ in range(200):
        x = u + near * _attended(x, keys, keys)
    worst = 0.0
    for tau in (near, -3.0):

        def F(y: Tensor, tau: float = tau) -> Tensor:
            return u + tau * _attended(y, keys, keys)

        certificate = dyn.attention_certificate(keys, beta=BETA, tau=tau)
        ends = dyn.monotone_equilibrium(F, starts, certificate, tolerance=1e-14).state
        worst = max(
            worst,
            float(not certificate.unique),
            gap(ends, F(ends), 10.0),
            gap(ends, (x if tau > 0 else ends[0]).expand(6, 3), 10.0),
        )
    return Outcome(worst)


@statement(
    "5.10 sharp", "paper 2.3", corrected="keys a and -a: x = τ a tanh(βax) has a second solution as soon as τβa² > 1"
)
def the_condition_is_sharp() -> Outcome:
    a = float(uniform(0.5, 2.0, seed=1))
    keys, worst = number(a, -a).reshape(2, 1), 0.0
    for excess in (0.99, 1.05):
        tau = excess / (BETA * a**2)
        certificate = dyn.attention_certificate(keys, beta=BETA, tau=tau)
        x = keys[:1]
        for _ in range(4000):
            x = tau * a * torch.tanh(BETA * a * x)
        worst = max(
            worst,
            gap(certificate.monotonicity, number(1 - excess)),
            gap(x, tau * _attended(x, keys, keys), 10.0),
            float((float(x) > 1e-3) is bool(certificate.unique)),
        )
    return Outcome(worst)


# Energies -----------------------------------------------------------------------------------------------------------


def _random(layer: torch.nn.Module) -> None:
    with torch.no_grad():
        for i, parameter in enumerate(layer.parameters()):
            parameter.copy_(0.6 * normal(*parameter.shape, seed=50 + i))


def _gelu(u: Tensor) -> tuple[Tensor, Tensor]:
    """u Φ(u) and its integral ((u² - 1) Φ + u φ)/2."""
    Phi, phi = (1 + torch.erf(u / math.sqrt(2))) / 2, (-u.square() / 2).exp() / math.sqrt(2 * math.pi)
    return u * Phi, ((u.square() - 1) * Phi + u * phi) / 2


@statement(
    "5.11 layer",
    "appendix",
    corrected="y = W^T f(Wx+b) is the gradient of ΣF, F' = f; (1-s)x+sy lowers |x|²/2 - ΣF by s(1-s(1+c|W|²)/2)|x-y|²",
)
def feed_forward_layers_descend() -> Outcome:
    x, worst = normal(6, 3, seed=1), 0.0
    for name in ("tanh", "gelu"):
        layer = dyn.HopfieldFeedForward(3, 5, activation=name, dtype=FLOAT)
        _random(layer)
        W, b = (parameter.detach() for parameter in layer.parameters())

        def parts(x: Tensor, name: str = name, W: Tensor = W, b: Tensor = b) -> tuple[Tensor, Tensor]:
            """y and the energy."""
            u = x @ W.T + b
            f, F = _gelu(u) if name == "gelu" else (torch.tanh(u), (u.exp() + (-u).exp()).log() - math.log(2))
            return f @ W, (x**2).sum(-1) / 2 - F.sum(-1)

        y, energy = parts(x)
        gradient = torch.func.grad(lambda t, parts=parts: parts(t)[1].sum())(x)
        # The smallest slope of gelu is at -√2: Φ + uφ = 1 - (Φ(√2) + √2 φ(√2)).
        c = 0.0 if name == "tanh" else (1 + math.erf(1)) / 2 + math.exp(-1) / math.sqrt(math.pi) - 1
        curvature = c * torch.linalg.matrix_norm(W, 2) ** 2
        worst = max(worst, gap(layer(x), y, 10.0), gap(layer.energy(x), energy, 10.0), gap(gradient, x - y, 10.0))
        for s in (0.4, 1.0):
            promised = s * (1 - s * (1 + curvature) / 2) * ((x - y) ** 2).sum(-1)
            after = layer.step(x, damping=s).detach()
            worst = max(
                worst,
                gap(after, (1 - s) * x + s * y, 10.0),
                gap(layer.descent(x, damping=s), promised, 10.0),
                violation(promised, energy - parts(after)[1], 10.0),
            )
    return Outcome(worst)


@statement(
    "5.11 block",
    "paper 2.4",
    corrected="|x|²/2 - Σ_h G_h/β - ΣF falls by s(1-s/2)|y-x|², y = Σ_h W_qh^T att_h(x) + W^T relu(Wx+b): in parallel",
)
def parallel_blocks_descend() -> Outcome:
    x, context, s = normal(6, 4, seed=1), normal(5, 4, seed=2), 0.5
    block = dyn.EnergyBlock(4, 2, 7, beta=BETA, damping=s, dtype=FLOAT)
    _random(block)
    W_q, W_k, W, b = (t.detach() for t in (block.q_proj.weight, block.k_proj.weight, *block.feed_forward.parameters()))

    def energy(x: Tensor) -> Tensor:
        q, k = ((t @ M.T).reshape(-1, 2, 2).transpose(0, 1) for t, M in ((x, W_q), (context, W_k)))
        G = (BETA * q @ k.mT).exp().sum(-1).log().sum(0)
        return (x**2).sum(-1) / 2 - G / BETA - ((x @ W.T + b).clamp(min=0) ** 2).sum(-1) / 2

    gradient = torch.func.grad(lambda t: energy(t).sum())(x)
    after = block(x, context).detach()
    promised = s * (1 - s / 2) * (gradient**2).sum(-1)
    return Outcome(
        max(
            gap(block.energy(x, context), energy(x), 10.0),
            gap(after, x - s * gradient, 10.0),
            gap(block.descent(x, context), promised, 10.0),
            violation(promised, energy(x) - energy(after), 10.0),
        )
    )


# Mean fields --------------------------------------------------------------------------------------------------------


@statement(
    "5.12",
    "paper 2.4",
    corrected="spins on points: m_i = att(β(b_i + ΣJ_ij m_j)), a stationary point of a bound of log Z; exact if J = 0",
)
def attention_is_a_mean_field() -> Outcome:
    keys, fields, beta = normal(3, 2, seed=1), normal(3, 2, seed=2), 0.4
    W = normal(3, 3, seed=3)
    J = (W + W.T) * (1 - torch.eye(3, dtype=FLOAT)) / 2
    states = torch.stack([keys[list(index)] for index in itertools.product(range(3), repeat=3)])  # [27, spins, 2]

    def energy(spins: Tensor, J: Tensor) -> Tensor:
        pairs = sum(J[i, j] * (spins[:, i] * spins[:, j]).sum(-1) for i, j in ((0, 1), (0, 2), (1, 2)))
        return -(spins * fields).sum((-2, -1)) - pairs

    def bound(eta: Tensor) -> Tensor:
        """Mean of -log p - β E over all states of independent spins."""
        log_p = torch.log_softmax(eta @ keys.T, -1)
        joint = (log_p[0, :, None, None] + log_p[1, None, :, None] + log_p[2, None, None, :]).reshape(-1)
        return (joint.exp() * (-joint - beta * energy(states, J))).sum()

    model = dyn.VectorSpins(Empirical(keys), J, fields)
    m = model.mean_field(torch.zeros(3, 2, dtype=FLOAT), beta=beta, tolerance=1e-14).state
    eta = beta * (fields + J @ m)
    slope = torch.func.grad(bound)(eta)
    others = normal(8, 3, 2, seed=4)
    log_Z = (-beta * energy(states, J)).exp().sum().log()
    free = dyn.VectorSpins(Empirical(keys), 0 * J, fields)
    weights = (-beta * energy(states, 0 * J)).exp()
    alone = torch.einsum("n,nsd->sd", weights, states) / weights.sum()
    return Outcome(
        max(
            gap(m, softmax_average(eta, keys), 10.0),
            gap(slope, 0 * slope, 10.0),
            gap(model.energy(states), energy(states, J), 10.0),
            gap(model.bound(others, beta=beta), torch.stack([bound(each) for each in others]), 10.0),
            violation(model.bound(others, beta=beta), log_Z.expand(8)),
            gap(free.mean_field(torch.zeros(3, 2, dtype=FLOAT), beta=beta, tolerance=1e-14).state, alone, 10.0),
        )
    )


@statement(
    "5.12 Hopfield",
    "appendix",
    corrected="a Gaussian spin coupled to a spin of points has the mean field m = att(m), as retrieval has",
)
def retrieval_is_a_mean_field() -> Outcome:
    patterns = normal(5, 3, seed=1)
    beta = 2.0 / float(_diameter(patterns)) ** 2  # one fixed point, found by plain iteration
    gaussian = Gaussian(torch.zeros(3, dtype=FLOAT), torch.eye(3, dtype=FLOAT) / beta)
    exchange = number(0.0, 1.0, 1.0, 0.0).reshape(2, 2)
    spins = dyn.VectorSpins((gaussian, Empirical(patterns)), exchange, torch.zeros(2, 3, dtype=FLOAT))
    m = spins.mean_field(0.1 * normal(2, 3, seed=2), beta=beta, tolerance=1e-14).state
    end = dyn.retrieve(m[:1], patterns, beta=beta, tolerance=1e-14).state
    return Outcome(max(gap(m, softmax_average(m, patterns, beta), 10.0), gap(end, m[1:], 10.0)))
