"""evolve, GaussianCloud and the growth factors say what is wrong with a cloud, an ascent or a contraction."""

import torch

from gradlogz import Ascent, Gaussian, GaussianCloud, equilibrium, evolve, retrieve
from gradlogz.dynamics import (
    EquilibriumAttention,
    LayerNorm,
    capacity_constant,
    centered_simplex_factors,
    cluster_stability,
    critical_beta,
    hermite_growth,
    hopfield_energy,
    pattern_separation,
    secular_equilibrium,
    sphere_growth,
)
from support.error_form import each_of, refused

F64 = torch.float64
x = torch.randn(9, 3, dtype=F64)
weight = torch.ones((), dtype=F64, requires_grad=True)
law = GaussianCloud(torch.zeros(2, dtype=F64), torch.eye(2, dtype=F64))


def run(cloud=x, ascent=None, **options):
    return evolve(cloud, ascent or Ascent(), **{"steps": 1, **options})


ERRORS = [
    (ValueError, "evolve: cloud", "[*b,", lambda: run(x[0])),
    (ValueError, "evolve: cloud", "[*b,", lambda: run(x[:0])),
    (ValueError, "evolve: cloud", "[*b,", lambda: run(x.expand(0, *x.shape))),
    *(
        (ValueError, f"evolve: {name}", "batch", lambda name=name: run(ascent=Ascent(**{name: torch.ones(3)})))
        for name in ("beta", "tau")
    ),
    (
        ValueError,
        "evolve: beta",
        "batch",
        lambda: run(ascent=Ascent(beta=torch.ones(3, dtype=x.dtype), keys=Gaussian(x[0], torch.eye(len(x[0])).to(x)))),
    ),
    (
        ValueError,
        "evolve: B",
        "cloud",
        lambda: run(ascent=Ascent(B=torch.eye(2, dtype=F64))),
    ),
    (
        ValueError,
        "evolve: keys",
        "cloud",
        lambda: run(ascent=Ascent(keys=torch.zeros(4, 2, dtype=F64))),
    ),
    (
        ValueError,
        "evolve: keys",
        "causal",
        lambda: run(ascent=Ascent(keys=torch.zeros(4, 3, dtype=F64), causal=True)),
    ),
    (
        TypeError,
        "evolve: precision",
        "floating",
        lambda: run(ascent=Ascent(precision=torch.int8)),
    ),
    (ValueError, "evolve: steps", "integer", lambda: run(steps=-1)),
    (ValueError, "evolve: observe", "observables", lambda: run(observe=["energy"])),
    (ValueError, "evolve: placement", "post", lambda: run(placement="mid")),
    (ValueError, "evolve: contraction", "known", lambda: run(contraction="batchnorm")),
    (TypeError, "evolve: contraction", "function", lambda: run(contraction=3)),
    (
        ValueError,
        "evolve: contraction",
        "shape",
        lambda: run(contraction=lambda y: y[:, :2]),
    ),
    (
        ValueError,
        "evolve: cloud",
        "covariance",
        lambda: run(x[:2], contraction="zca"),
    ),
    (
        ValueError,
        "evolve: cloud",
        "distinct tokens",
        lambda: run(x[:1], contraction="scalar"),
    ),
    (
        ValueError,
        "Trajectory.verdict: cloud",
        "one cloud",
        lambda: run(torch.randn(2, 4, 3, dtype=F64)).verdict,
    ),
    (
        TypeError,
        "GaussianCloud: contraction",
        "closed",
        lambda: law.evolve(Ascent(), contraction=torch.tanh),
    ),
    (
        ValueError,
        "GaussianCloud: covariance",
        "shape",
        lambda: GaussianCloud(law.mean, torch.eye(3, dtype=F64)).evolve(Ascent()),
    ),
    (
        ValueError,
        "evolve: keys",
        "R^3",
        lambda: run(ascent=Ascent(keys=Gaussian(*law))),
    ),
    (
        ValueError,
        "evolve: keys",
        "causal",
        lambda: run(x[:, :2], ascent=Ascent(keys=Gaussian(*law), causal=True)),
    ),
    (
        ValueError,
        "evolve: natural",
        "value matrix",
        lambda: run(ascent=Ascent(natural=True, W_v=torch.eye(3, dtype=F64))),
    ),
    (ValueError, "evolve: draws", "integer", lambda: run(ascent=Ascent(draws=0))),
    (
        ValueError,
        "evolve: precision",
        "points",
        lambda: run(ascent=Ascent(draws=1, precision=torch.bfloat16)),
    ),
    (
        TypeError,
        "Ascent.inverse_step: keys",
        "Gaussian",
        lambda: run(contraction="inverse_step"),
    ),
    (
        ValueError,
        "InverseStep: matrix",
        "singular",
        lambda: run(x[:, :2], ascent=Ascent(tau=-1.0, keys=Gaussian(*law)), contraction="inverse_step"),
    ),
    (
        ValueError,
        "Ascent.recoloring: B",
        "heads",
        lambda: Ascent(keys=Gaussian(*law), B=torch.ones(2, 2, 2, dtype=F64)).recoloring(),
    ),
    (
        ValueError,
        "Ascent.recoloring: keys",
        "regular",
        lambda: Ascent(keys=Gaussian(*law), B=torch.zeros(2, 2, dtype=F64)).recoloring(),
    ),
    (
        ValueError,
        "LayerNorm.moments: eps",
        "closed form",
        lambda: LayerNorm(eps=1e-5).moments(x[0], torch.eye(3, dtype=F64)),
    ),
    (
        ValueError,
        "LayerNorm: gain",
        "coordinates",
        lambda: run(contraction=LayerNorm(torch.ones(2, dtype=F64))),
    ),
    (
        TypeError,
        "GaussianCloud: ascent",
        "dimensions",
        lambda: GaussianCloud(torch.zeros(5, dtype=F64), torch.eye(5, dtype=F64)).evolve(
            Ascent(keys=torch.zeros(4, 5, dtype=F64))
        ),
    ),
    (
        TypeError,
        "GaussianCloud: ascent",
        "causal",
        lambda: law.evolve(Ascent(causal=True)),
    ),
    (
        ValueError,
        "GaussianCloud.flow: time",
        "blow-up",
        lambda: law.flow(0.6),
    ),
    (
        ValueError,
        "hermite_growth: order",
        "positive",
        lambda: hermite_growth(0, variance=1.0, beta=1.0, tau=1.0),
    ),
    (
        ValueError,
        "sphere_growth: degree",
        "beta",
        lambda: sphere_growth(0, dim=3, beta=1.0, tau=1.0),
    ),
    (
        ValueError,
        "equilibrium: method",
        "anderson",
        lambda: equilibrium(torch.cos, x, method="broyden"),
    ),
    (
        ValueError,
        "equilibrium: start",
        "[*b,",
        lambda: equilibrium(torch.cos, x[0], tokens_interact=True),
    ),
    (
        RuntimeError,
        "equilibrium: None",
        "gradient",
        lambda: equilibrium(lambda y: y + 0 * weight, x).state.sum().backward(),
    ),
    (
        RuntimeError,
        "equilibrium: None",
        "differentiated again",
        lambda: torch.autograd.grad(
            equilibrium(lambda y: torch.cos(weight * y), x).state.sum(), weight, create_graph=True
        ),
    ),
    (
        ValueError,
        "EquilibriumAttention: embed_dim",
        "num_heads",
        lambda: EquilibriumAttention(6, 4),
    ),
    (
        ValueError,
        "EquilibriumAttention: contraction",
        "layer_norm",
        lambda: EquilibriumAttention(6, 3, contraction="group_norm"),
    ),
    (ValueError, "EquilibriumAttention: tau", "positive", lambda: EquilibriumAttention(6, 3, tau=0.0)),
    (
        ValueError,
        "EquilibriumAttention: key",
        "tokens",
        lambda: EquilibriumAttention(3, 1, moving=True, dtype=F64)(x, x),
    ),
    (
        ValueError,
        "EquilibriumAttention: key",
        "tokens",
        lambda: EquilibriumAttention(3, 1, dtype=F64)(x, x[:, :2]),
    ),
    (
        ValueError,
        "EquilibriumAttention: key_padding_mask",
        "shape",
        lambda: EquilibriumAttention(3, 1, dtype=F64)(x, key_padding_mask=x[:, 0]),
    ),
    (
        RuntimeError,
        "equilibrium: max_iterations",
        "converge",
        lambda: equilibrium(torch.cos, x, max_iterations=1),
    ),
    (
        ValueError,
        "equilibrium: step",
        "shape",
        lambda: equilibrium(lambda y: y[:, :2], x),
    ),
    (
        ValueError,
        "secular_equilibrium: radius",
        "positive",
        lambda: secular_equilibrium(law.mean, law.covariance),
    ),
    (ValueError, "retrieve: damping", "(0, 2)", lambda: retrieve(x, x, damping=2.0)),
    (
        RuntimeError,
        "retrieve: max_iterations",
        "converge",
        lambda: retrieve(10 + x, x, max_iterations=1),
    ),
    (
        ValueError,
        "pattern_separation: state",
        "patterns",
        lambda: pattern_separation(x[0]),
    ),
    (ValueError, "hopfield_energy: beta", "positive", lambda: hopfield_energy(x, x, beta=0.0)),
    (
        ValueError,
        "capacity_constant: beta",
        "positive",
        lambda: capacity_constant(beta=1.0, K=1.0, d=1, p=0.1),
    ),
    (ValueError, "critical_beta: n", "positive", lambda: critical_beta(0, 3)),
    (
        ValueError,
        "centered_simplex_factors: dim",
        "share",
        lambda: centered_simplex_factors(3, beta=1.0, tau=1.0, share=1.0),
    ),
    (
        ValueError,
        "cluster_stability: centers",
        "shapes",
        lambda: cluster_stability(x, x, beta=1.0, tau=1.0),
    ),
    (
        ValueError,
        "cluster_stability: centers",
        "covariance",
        lambda: cluster_stability(x, x[:, 0], beta=1.0, tau=1.0),
    ),
]


@each_of(ERRORS)
def test_what_is_wrong_is_said(refusal):
    refused(refusal)
