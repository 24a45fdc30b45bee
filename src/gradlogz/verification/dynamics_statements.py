"""Tokens under repeated attention: ascent, energy, collapse and equilibria.   [paper 2.3, 3.3, 5; theory 5.1-5.8]

    x_i' = N(x_i + τ W_v Σ_j a_ij k_j),   a_ij = softmax_j β<x_i, B k_j>

Steps of the library are compared with the softmax written out.

Read next: ../dynamics/evolution.py, hopfield_statements.py (5.6, 5.7).
"""

import torch
from torch.nn.functional import normalize

from .. import dynamics as dyn
from .._typing import Tensor
from .definition import FLOAT, normal, softmax_average
from .statement import Outcome, gap, statement, violation


@statement(
    "5.1",
    "paper 3.3",
    corrected="fixed keys: G(x') >= G(x) + τ|∇G|², |∇G| does not fall, no distance of two tokens shrinks",
)
def ascent_expands() -> Outcome:
    keys, x, tau = normal(7, 3, seed=1), normal(9, 3, seed=2), 0.6
    y = dyn.evolve(x, dyn.Ascent(tau=tau, keys=keys), steps=1).cloud
    slope, after = softmax_average(x, keys), softmax_average(y, keys)
    G, G_after = ((t @ keys.T).exp().sum(-1).log() for t in (x, y))
    pairs, pairs_after = (((t.unsqueeze(1) - t) ** 2).sum(-1) for t in (x, y))
    return Outcome(
        max(
            gap(y, x + tau * slope, 10.0),
            violation(G + tau * (slope**2).sum(-1), G_after, 10.0),
            violation(slope.norm(dim=-1), after.norm(dim=-1)),
            violation(pairs, pairs_after, 10.0),
        )
    )


@statement(
    "5.3",
    "paper 5",
    corrected="all tokens at once, W_v = B >= 0: E = Σ_ij e^(β<x_i,Bx_j>) never falls; dE/dt = Σ_i |∇_i E|²/(2βZ_i)",
)
def pair_energy_never_falls() -> Outcome:
    x, A, beta = normalize(normal(8, 3, seed=1), dim=-1), normal(3, 3, seed=2), 0.9
    B, worst = A @ A.T / 3, 0.0

    def log_energy(cloud: Tensor) -> Tensor:
        return (beta * cloud @ B @ cloud.T).flatten().logsumexp(0)

    for tau in (0.3, 2.0):
        for name in ("sphere", "none"):
            ascent, steps = dyn.Ascent(tau=tau, beta=beta, B=B), 4 if name == "sphere" else 2
            run = dyn.evolve(x, ascent, contraction=name, steps=steps, observe=["log_pair_energy"])
            energies = run.observed["log_pair_energy"]
            scale = 1 + float(energies.abs().max())
            ends = torch.stack((log_energy(x), log_energy(run.cloud)))
            worst = max(worst, gap(energies[[0, -1]], ends, scale), violation(energies[:-1], energies[1:], scale))
    E = torch.func.grad(lambda cloud: log_energy(cloud).exp())(x)
    velocity = dyn.evolve(x, dyn.Ascent(tau=1.0, beta=beta, B=B, residual=False), steps=1).cloud
    Z = (beta * x @ B @ x.T).exp().sum(-1)
    rate = ((E**2).sum(-1) / (2 * beta * Z)).sum()
    return Outcome(max(worst, gap((E * velocity).sum(), rate, 10.0 * float(rate))))


@statement(
    "5.4",
    "theory",
    corrected="fixed keys and projection to the sphere: G never falls, to a point where ∇G is parallel to x",
)
def ascent_on_the_sphere() -> Outcome:
    keys, x = normal(7, 3, seed=1), normalize(normal(6, 3, seed=2), dim=-1)
    ascent, worst = dyn.Ascent(tau=2.0, keys=keys), 0.0
    for _ in range(5):
        y = dyn.evolve(x, ascent, contraction="sphere", steps=1).cloud
        worst = max(worst, violation((x @ keys.T).logsumexp(-1), (y @ keys.T).logsumexp(-1), 10.0))
        x = y
    x = dyn.evolve(x, ascent, contraction="sphere", steps=2000).cloud
    slope = softmax_average(x, keys)
    across = slope - (slope * x).sum(-1, keepdim=True) * x
    return Outcome(max(worst, gap(across, 0 * across, 10.0)))


@statement(
    "5.5",
    "paper 3.3",
    corrected="no residual: conv(x') is in conv(x), diam' <= (1 - Σ_j min_i a_ij) diam; all tokens meet in one point",
)
def collapse_without_the_residual() -> Outcome:
    x, beta, directions = normal(8, 3, seed=1), 0.5, normal(30, 3, seed=2)
    ascent = dyn.Ascent(beta=beta, residual=False)
    y = dyn.evolve(x, ascent, steps=1).cloud
    weights = torch.softmax(beta * x @ x.T, -1)

    def diameter(cloud: Tensor) -> Tensor:
        return ((cloud.unsqueeze(1) - cloud) ** 2).sum(-1).max().sqrt()

    end = dyn.evolve(x, ascent, steps=300).cloud
    return Outcome(
        max(
            gap(y, weights @ x, 10.0),
            violation((y @ directions.T).amax(0), (x @ directions.T).amax(0)),
            violation(diameter(y), (1 - weights.amin(0).sum()) * diameter(x)),
            gap(end, end[:1].expand_as(end), 10.0),
        )
    )


# Equilibria ---------------------------------------------------------------------------------------------------------


@statement(
    "5.8",
    "paper 2.3",
    corrected="x* = N(x* + τ att(x*)), fixed keys: the fixed point of the written map, and dx*/dk = (I - J)⁻¹ ∂f/∂k",
)
def equilibrium_of_attention() -> Outcome:
    keys, start, tau, beta = normal(5, 3, seed=1), normal(1, 3, seed=2), 0.7, 0.8

    def step(x: Tensor, keys: Tensor) -> Tensor:
        y = x + tau * softmax_average(x, keys, beta)
        return y / y.norm(dim=-1, keepdim=True)

    def solved(keys: Tensor, method: str) -> Tensor:
        result = dyn.equilibrium(lambda x: step(x, keys), start, method=method, tolerance=1e-14, throw=False)  # type: ignore[arg-type]
        return result.state

    x = start
    for _ in range(3000):
        x = step(x, keys)
    J, to_keys = torch.func.jacrev(step, argnums=(0, 1))(x, keys)
    by_hand = torch.linalg.solve(torch.eye(3, dtype=FLOAT) - J.reshape(3, 3), to_keys.reshape(3, 15))
    worst = 0.0
    for method in ("anderson", "iterate"):
        traced = keys.clone().requires_grad_()
        state = solved(traced, method)
        rows = [torch.autograd.grad(state[0, i], traced, retain_graph=True)[0].flatten() for i in range(3)]
        worst = max(worst, gap(state, x), gap(torch.stack(rows), by_hand, 10.0))
    return Outcome(worst)


@statement(
    "5.8 layer",
    "paper 2.3",
    corrected="the layer rests at x* = LN(x* + W_u s + τ W_o att(W_q x*)), with the implicit gradient",
)
def equilibrium_layer() -> Outcome:
    d, heads, tau = 4, 2, 0.6
    layer = dyn.EquilibriumAttention(d, heads, tau=tau, bias=False, dtype=FLOAT, tolerance=1e-14, throw=False)
    names = ("in_proj", "q_proj", "k_proj", "v_proj", "out_proj")
    weights = {name: 0.4 * normal(d, d, seed=i) for i, name in enumerate(names, 1)}
    weights["in_proj"] = normal(d, d, seed=1)
    layer.load_state_dict({f"{name}.weight": w for name, w in weights.items()})
    s = normal(1, 3, d, seed=7)

    def step(x: Tensor, s: Tensor) -> Tensor:
        q, k, v = ((t @ weights[n].T).reshape(-1, heads, 2) for t, n in ((x, "q_proj"), (s, "k_proj"), (s, "v_proj")))
        p = torch.softmax(torch.einsum("mhd,nhd->hmn", q, k) / 2**0.5, -1)
        attended = torch.einsum("hmn,nhd->mhd", p, v).reshape(-1, d)
        y = x + s @ weights["in_proj"].T + tau * attended @ weights["out_proj"].T
        y = y - y.mean(-1, keepdim=True)
        return d**0.5 * y / y.norm(dim=-1, keepdim=True)

    x = step(torch.zeros(3, d, dtype=FLOAT), s[0])
    for _ in range(500):
        x = step(x, s[0])
    traced = s.clone().requires_grad_()
    state = layer(traced)
    direction = normal(3, d, seed=8)
    (gradient,) = torch.autograd.grad((state[0] * direction).sum(), traced)
    J, to_s = torch.func.jacrev(step, argnums=(0, 1))(x, s[0])
    eye = torch.eye(3 * d, dtype=FLOAT)
    adjoint = torch.linalg.solve((eye - J.reshape(3 * d, 3 * d)).T, direction.flatten())
    implicit = (adjoint @ to_s.reshape(3 * d, 3 * d)).reshape(3, d)
    return Outcome(max(gap(state[0], x), gap(gradient[0], implicit, 10.0)))
