"""Hopfield networks, modern and classical, and Boltzmann machines.   [appendix; paper 5; theory 5.6, 5.7, 5.9]

    modern       E(x) = |x|²/2 - (1/β) log Σ_n e^(β<x_n,x>) + const     patterns are keys
    classical    E(x) = -<x,Wx>/2 - <b,x>,  x in {-1,1}^d               patterns are in W; enumerated over all states

Read next: ../dynamics/hopfield.py, ../dynamics/ising.py.
"""

import itertools
import math

import torch

from .. import dynamics as dyn
from .._typing import Float, Tensor
from .definition import FLOAT, normal, plane, softmax_average
from .statement import Outcome, gap, statement, violation

BETA = 1.4


def _network(d: int = 3) -> tuple[Tensor, Tensor]:
    """Five patterns and four states."""
    return normal(5, d, seed=1), normal(4, d, seed=2)


def _energy(x: Tensor, patterns: Tensor) -> Tensor:
    """|x|²/2 - lse(β, X x) + log N/β + M²/2, by sums."""
    most = (patterns**2).sum(-1).max()
    return ((x**2).sum(-1) + most) / 2 - ((BETA * x @ patterns.T).exp().sum(-1).log() - math.log(5)) / BETA


# Modern networks ----------------------------------------------------------------------------------------------------


@statement(
    "5.6 energy", "appendix", corrected="E = |x|²/2 - G(βx)/β + log N/β + M²/2 >= 0: its lse term is the log normaliser"
)
def energy() -> Outcome:
    patterns, x = _network()
    actual = dyn.hopfield_energy(x, patterns, beta=BETA)
    wide = dyn.hopfield_energy(torch.cat((x, patterns, 10 * x)), patterns, beta=BETA)
    return Outcome(max(gap(actual, _energy(x, patterns), 10.0), violation(-wide, 0 * wide)))


@statement(
    "5.6 gradient",
    "appendix",
    corrected="the update is a gradient step: x' = x - s∇E = (1-s)x + s att(x), s = 1 attention",
)
def update_is_a_gradient_step() -> Outcome:
    patterns, x = _network()
    gradient = torch.func.grad(lambda y: _energy(y, patterns).sum())(x)
    worst = gap(gradient, x - softmax_average(x, patterns, BETA), 10.0)
    for s in (0.4, 1.0, 1.7):
        after = dyn.retrieve(x, patterns, beta=BETA, damping=s, max_iterations=1, throw=False).state
        worst = max(worst, gap(after, x - s * gradient, 10.0))
        layer = dyn.HopfieldRetrieval(patterns, beta=BETA, damping=s)
        worst = max(worst, gap(layer(x), x - s * gradient, 10.0))
    return Outcome(worst)


@statement("5.6 descent", "appendix", corrected="E(x) - E(x') >= s(1-s/2)|x - att(x)|² for 0 < s < 2")
def descent() -> Outcome:
    patterns, x = _network()
    worst = 0.0
    for s in (0.3, 1.0, 1.8):
        y = x
        for _ in range(5):
            after = dyn.retrieve(y, patterns, beta=BETA, damping=s, max_iterations=1, throw=False).state
            promised = s * (1 - s / 2) * ((y - softmax_average(y, patterns, BETA)) ** 2).sum(-1)
            worst = max(worst, violation(promised, _energy(y, patterns) - _energy(after, patterns), 10.0))
            y = after
    return Outcome(worst)


@statement(
    "5.6 mixture",
    "appendix",
    corrected="e^(-βE) ∝ Σ_n e^(β|x_n|²/2) N(x; x_n, I/β): the quadratic term keeps its integral finite",
)
def mixture_of_gaussians() -> Outcome:
    patterns, x = _network(d=2)
    nodes, log_area = plane(-12.0, 12.0, 161)
    log_w = BETA * (patterns**2).sum(-1) / 2
    log_scale = math.log(5) + log_w.max()  # the constant log N/β + M²/2
    integral = (-BETA * dyn.hopfield_energy(nodes, patterns, beta=BETA) + log_area).logsumexp(0)
    distances = ((x.unsqueeze(1) - patterns) ** 2).sum(-1)
    log_mixture = (log_w - BETA * distances / 2).logsumexp(-1) - log_scale
    total = math.log(2 * math.pi / BETA) + log_w.logsumexp(0) - log_scale
    return Outcome(
        max(gap(-BETA * dyn.hopfield_energy(x, patterns, beta=BETA), log_mixture, 10.0), gap(integral, total, 10.0))
    )


@statement(
    "5.6 bridge",
    "appendix",
    corrected="attention, residual and division by 1+τ are the damped update, s = τ/(1+τ): the skip connection",
)
def residual_attention_is_a_damped_update() -> Outcome:
    patterns, x = _network()
    tau = 0.8
    ascent = dyn.Ascent(tau=tau, beta=BETA, keys=patterns)
    moved = dyn.evolve(x, ascent, contraction=lambda y: y / (1 + tau), steps=1).cloud
    s = tau / (1 + tau)
    damped = dyn.retrieve(x, patterns, beta=BETA, damping=s, max_iterations=1, throw=False).state
    expected = (1 - s) * x + s * softmax_average(x, patterns, BETA)
    return Outcome(max(gap(moved, expected, 10.0), gap(damped, expected, 10.0)))


@statement("5.7 bound", "appendix", corrected="|att(x_i) - x_i| <= 2M(N-1) e^(-βΔ_i), Δ_i = min_j <x_i,x_i-x_j>")
def retrieval_bound() -> Outcome:
    patterns, beta = 3 * torch.nn.functional.normalize(normal(6, 8, seed=1), dim=-1), 2.0
    products = patterns @ patterns.T
    separation = torch.stack([min(products[i, i] - products[i, j] for j in range(6) if j != i) for i in range(6)])
    error = (softmax_average(patterns, patterns, beta) - patterns).norm(dim=-1)
    once = dyn.retrieve(patterns, patterns, beta=beta, max_iterations=1, throw=False).state - patterns
    bound = dyn.retrieval_bound(patterns, beta=beta)
    return Outcome(
        max(
            gap(dyn.pattern_separation(patterns), separation, 10.0),
            gap(bound, 2 * 3.0 * 5 * (-beta * separation).exp(), 10.0),
            gap(once.norm(dim=-1), error, 10.0),
            violation(error, bound),
        )
    )


@statement("5.7 one state", "appendix", corrected="if β diam² < 4 every start ends in one state: nothing is retrieved")
def warm_patterns_have_one_fixed_point() -> Outcome:
    patterns, starts = normal(5, 3, seed=1), 3 * normal(6, 3, seed=2)
    beta = 2.0 / float(torch.cdist(patterns, patterns).max()) ** 2
    ends = dyn.retrieve(starts, patterns, beta=beta, max_iterations=400, tolerance=1e-15, throw=False).state
    x = starts[:1]
    for _ in range(200):
        x = softmax_average(x, patterns, beta)
    return Outcome(gap(ends, x.expand(6, 3), 10.0))


@statement(
    "5.7 capacity",
    "appendix",
    corrected="c = b/W(e^(a + log b)): 3.1546 for β=1, K=3, d=20, p=.001; 1.3718 for β=1, K=1, d=75",
)
def capacity() -> Outcome:
    worst = 0.0
    for K, d, quoted in ((3.0, 20, 3.1546), (1.0, 75, 1.3718)):
        c = dyn.capacity_constant(beta=1.0, K=K, d=d, p=0.001)
        a, b = 2 * (1 + math.log(2 * K**2 * 0.001 * (d - 1))) / (d - 1), 2 * K**2 / 5
        # W(z) is b/c: W e^W = z.
        worst = max(
            worst, abs((b / c) * math.exp(b / c) / (math.exp(a) * b) - 1), float(not quoted <= c < quoted + 1e-4)
        )
    return Outcome(worst)


# Classical networks -------------------------------------------------------------------------------------------------


def _states(d: int) -> Float[Tensor, "n d"]:
    """All 2^d states of d spins."""
    return torch.tensor(list(itertools.product((-1.0, 1.0), repeat=d)), dtype=FLOAT)


def _spins() -> tuple[Tensor, Tensor]:
    """Two patterns of five spins, and a bias."""
    return normal(2, 5, seed=1).sign(), 0.3 * normal(5, seed=2)


def _hebbian_energy(x: Tensor, patterns: Tensor, bias: Tensor) -> Tensor:
    """-Σ_{i<j} W_ij x_i x_j - <b,x>, W_ij = Σ_n x_ni x_nj / d."""
    total = -(x @ bias)
    for i, j in itertools.combinations(range(x.shape[-1]), 2):
        total = total - (patterns[:, i] * patterns[:, j]).sum() / x.shape[-1] * x[..., i] * x[..., j]
    return total


@statement(
    "5.9 Hebb",
    "appendix",
    corrected="W = Σ_n x_n x_n^T/d off the diagonal: E = n/2 - Σ_n <x_n,x>²/2d - <b,x>, P ∝ e^(-βE); E never rises",
)
def hebbian_network() -> Outcome:
    (patterns, bias), states, zero = _spins(), _states(5), torch.zeros(5, dtype=FLOAT)
    network = dyn.hebbian(patterns, bias)
    E = _hebbian_energy(states, patterns, bias)
    weights = (-BETA * E).exp()
    exact = network.exact(beta=BETA)
    settled = network.settle(states).state
    flips = settled.unsqueeze(1) * (1 - 2 * torch.eye(5, dtype=FLOAT))  # each spin turned alone
    rest, turned = _hebbian_energy(settled, patterns, bias), _hebbian_energy(flips, patterns, bias)
    return Outcome(
        max(
            gap(network.energy(states), E, 10.0),
            gap(E, 1.0 - ((states @ patterns.T) ** 2).sum(-1) / 10 - states @ bias, 10.0),
            gap(exact.log_normalizer(zero), weights.sum().log(), 10.0),
            gap(exact.mean(zero), weights @ states / weights.sum()),
            violation(rest, E, 10.0),
            violation(rest.unsqueeze(-1).expand_as(turned), turned, 10.0),
        )
    )


@statement(
    "5.9 Ising",
    "paper 5",
    corrected="mean field m = tanh(β(Wm+b)): a stationary point of entropy - β energy, a lower bound of log Z",
)
def mean_field_of_spins() -> Outcome:
    (patterns, bias), states, beta = _spins(), _states(5), 0.5
    network = dyn.hebbian(patterns, bias)
    W = patterns.T @ patterns / 5 - torch.diag((patterns**2).sum(0) / 5)
    m = network.mean_field(0.1 * normal(3, 5, seed=3), beta=beta, tolerance=1e-14).state

    def bound(means: Tensor) -> Tensor:
        """Mean of -log p - βE over all states of independent spins."""
        p = ((1 + states * means.unsqueeze(-2)) / 2).prod(-1)
        return (p * (-p.log() - beta * _hebbian_energy(states, patterns, bias))).sum(-1)

    others = torch.tanh(normal(20, 5, seed=4))
    log_Z = (-beta * _hebbian_energy(states, patterns, bias)).logsumexp(0)
    slope = torch.func.grad(lambda means: bound(means).sum())(m)
    return Outcome(
        max(
            gap(m, torch.tanh(beta * (m @ W + bias)), 10.0),
            gap(slope, 0 * slope, 10.0),
            gap(network.bound(others, beta=beta), bound(others), 10.0),
            violation(network.bound(others, beta=beta), log_Z.expand(20)),
        )
    )


@statement(
    "5.9 hidden Gaussians",
    "appendix",
    corrected="the Hebbian network is a machine of hidden Gaussians: e^(-βE(x)) ∝ ∫ e^(√(β/d) <Xx,z>) dN(0,I)(z)",
)
def gaussian_machine() -> Outcome:
    (patterns, bias), states = _spins(), _states(5)
    z, log_area = plane(-12.0, 12.0, 121)
    log_gauss = log_area - (z**2).sum(-1) / 2 - math.log(2 * math.pi)
    overlaps = math.sqrt(BETA / 5) * states @ patterns.T
    log_p = (overlaps @ z.T + log_gauss).logsumexp(-1) + BETA * states @ bias
    exact = torch.softmax(-BETA * _hebbian_energy(states, patterns, bias), 0)
    visible = dyn.visible_distribution(dyn.gaussian_machine(patterns, bias, beta=BETA))
    probabilities = visible.probabilities(torch.zeros(5, dtype=FLOAT))
    return Outcome(max(gap(probabilities, torch.softmax(log_p, 0)), gap(probabilities, exact)))


@statement(
    "5.9 RBM", "appendix", corrected="P(x) ∝ Σ_y e^(<x,Wy> + <a,x> + <c,y>); means tanh(a + Wy) and tanh(c + W^T x)"
)
def restricted_boltzmann_machine() -> Outcome:
    W, a, c = 0.7 * normal(4, 3, seed=1), normal(4, seed=2), normal(3, seed=3)
    x, y = _states(4), _states(3)
    joint = (x @ W @ y.T + (x @ a).unsqueeze(-1) + y @ c).exp()
    machine = dyn.boltzmann_machine(W, a, c)
    visible = dyn.visible_distribution(machine).probabilities(torch.zeros(4, dtype=FLOAT))
    given_y, given_x = joint / joint.sum(0), joint / joint.sum(1, keepdim=True)
    return Outcome(
        max(
            gap(visible, joint.sum(1) / joint.sum()),
            gap(machine.h.mean(y @ W.T), given_y.T @ x),
            gap(machine.g.mean(x), given_x @ y @ W.T, 10.0),
        )
    )
