"""evolve, GaussianCloud and the growth factors say what is wrong with a cloud, an ascent or a contraction."""

import torch

from gradlogz import Ascent, GaussianCloud, equilibrium, evolve, retrieve
from gradlogz.dynamics import (
    EquilibriumAttention,
    capacity_constant,
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
    (ValueError, "evolve: cloud must be [*b, n, d]; got shape (3,).", lambda: run(x[0])),
    (ValueError, "evolve: cloud must be [*b, n, d]; got shape (0, 3).", lambda: run(x[:0])),
    (
        ValueError,
        "evolve: B must be [d, d] or [h, d, d] with d=3 of the cloud; got shape (2, 2).",
        lambda: run(ascent=Ascent(B=torch.eye(2, dtype=F64))),
    ),
    (
        ValueError,
        "evolve: keys must end in d with d=3 of the cloud; got shape (4, 2).",
        lambda: run(ascent=Ascent(keys=torch.zeros(4, 2, dtype=F64))),
    ),
    (
        ValueError,
        "evolve: keys must be None under a causal mask; got shape (4, 3).",
        lambda: run(ascent=Ascent(keys=torch.zeros(4, 3, dtype=F64), causal=True)),
    ),
    (
        TypeError,
        "evolve: precision must be a floating dtype; got torch.int8.",
        lambda: run(ascent=Ascent(precision=torch.int8)),
    ),
    (ValueError, "evolve: steps must be a positive integer; got -1.", lambda: run(steps=-1)),
    (ValueError, "evolve: observe must name observables; got 'energy'.", lambda: run(observe=["energy"])),
    (ValueError, 'evolve: placement must be "post", "pre" or "peri"; got \'mid\'.', lambda: run(placement="mid")),
    (ValueError, "evolve: contraction must be a known name; got 'batchnorm'.", lambda: run(contraction="batchnorm")),
    (TypeError, "evolve: contraction must be a name or a function; got int.", lambda: run(contraction=3)),
    (
        ValueError,
        "evolve: contraction must keep the shape (9, 3) of the cloud; got shape (9, 2).",
        lambda: run(contraction=lambda y: y[:, :2]),
    ),
    (
        ValueError,
        "evolve: a cloud under whitening must have a covariance of full rank 3; got 1 of 1 clouds without.",
        lambda: run(x[:2], contraction="zca"),
    ),
    (
        ValueError,
        "evolve: a cloud under scalar must have distinct tokens; got 1 of 1 clouds without.",
        lambda: run(x[:1], contraction="scalar"),
    ),
    (
        ValueError,
        "Trajectory.verdict: there must be one cloud; got a batch of shape (2,).",
        lambda: run(torch.randn(2, 4, 3, dtype=F64)).verdict,
    ),
    (
        TypeError,
        "GaussianCloud: contraction must be known in closed form; got a function of tokens.",
        lambda: law.evolve(Ascent(), contraction=torch.tanh),
    ),
    (
        ValueError,
        "GaussianCloud: covariance must end in [2, 2]; got shape (3, 3).",
        lambda: GaussianCloud(law.mean, torch.eye(3, dtype=F64)).evolve(Ascent()),
    ),
    (
        TypeError,
        "GaussianCloud: ascent must have no keys; got some.",
        lambda: law.evolve(Ascent(keys=torch.zeros(4, 2, dtype=F64))),
    ),
    (
        TypeError,
        "GaussianCloud: every token must see the same law by one head; got a causal mask.",
        lambda: law.evolve(Ascent(causal=True)),
    ),
    (
        ValueError,
        "GaussianCloud.flow: time must be before the blow-up; got 0.6 and a cloud that is infinite at 0.5.",
        lambda: law.flow(0.6),
    ),
    (
        ValueError,
        "hermite_growth: order must be a positive integer, or one >= 0 for each variance; got 0 and 1 variances.",
        lambda: hermite_growth(0, variance=1.0, beta=1.0, tau=1.0),
    ),
    (
        ValueError,
        "sphere_growth: degree must be >= 1, dim >= 2 and beta > 0; got 0, 3 and 1.0.",
        lambda: sphere_growth(0, dim=3, beta=1.0, tau=1.0),
    ),
    (
        ValueError,
        'equilibrium: method must be "anderson", "newton" or "iterate"; got \'broyden\'.',
        lambda: equilibrium(torch.cos, x, method="broyden"),
    ),
    (
        ValueError,
        "equilibrium: start must be [*b, n, d]; got shape (3,).",
        lambda: equilibrium(torch.cos, x[0], tokens_interact=True),
    ),
    (
        RuntimeError,
        "equilibrium: every token must have a gradient; got 9 of 9 tokens without.",
        lambda: equilibrium(lambda y: y + 0 * weight, x).state.sum().backward(),
    ),
    (
        RuntimeError,
        "equilibrium: its gradient must not be differentiated again; got create_graph=True.",
        lambda: torch.autograd.grad(
            equilibrium(lambda y: torch.cos(weight * y), x).state.sum(), weight, create_graph=True
        ),
    ),
    (
        ValueError,
        "EquilibriumAttention: embed_dim must be a multiple of num_heads; got embed_dim=6 and num_heads=4.",
        lambda: EquilibriumAttention(6, 4),
    ),
    (
        ValueError,
        "EquilibriumAttention: contraction must be one of layer_norm, rms_norm, sphere, resolvent; got 'zca'.",
        lambda: EquilibriumAttention(6, 3, contraction="zca"),
    ),
    (ValueError, "EquilibriumAttention: tau must be positive; got 0.0.", lambda: EquilibriumAttention(6, 3, tau=0.0)),
    (
        ValueError,
        "EquilibriumAttention: key must not be given where the tokens are the keys; got one.",
        lambda: EquilibriumAttention(3, 1, moving=True, dtype=F64)(x, x),
    ),
    (
        ValueError,
        "EquilibriumAttention: key must be [*b, tokens, 3], with one batch for query and key; got shape (9, 2).",
        lambda: EquilibriumAttention(3, 1, dtype=F64)(x, x[:, :2]),
    ),
    (
        ValueError,
        "EquilibriumAttention: key_padding_mask must be bool of shape (9,); got torch.float64 of shape (9,).",
        lambda: EquilibriumAttention(3, 1, dtype=F64)(x, key_padding_mask=x[:, 0]),
    ),
    (
        RuntimeError,
        "equilibrium: every token must come to rest; got 9 of 9 tokens that still move after 1 steps.",
        lambda: equilibrium(torch.cos, x, max_iterations=1),
    ),
    (
        ValueError,
        "equilibrium: step must keep the shape (9, 3); got shape (9, 2).",
        lambda: equilibrium(lambda y: y[:, :2], x),
    ),
    (
        ValueError,
        "secular_equilibrium: radius must be positive and mean not 0; got 1.0 and a mean of length 0.",
        lambda: secular_equilibrium(law.mean, law.covariance),
    ),
    (ValueError, "retrieve: damping must be in (0, 2); got 2.0.", lambda: retrieve(x, x, damping=2.0)),
    (
        RuntimeError,
        "retrieve: every state must come to rest; got 9 of 9 states that still move after 1 steps.",
        lambda: retrieve(10 + x, x, max_iterations=1),
    ),
    (
        ValueError,
        "pattern_separation: state must be [*b, m, d] and patterns [*b, n, d]; got (3,) and (3,).",
        lambda: pattern_separation(x[0]),
    ),
    (ValueError, "hopfield_energy: beta must be positive; got 0.0.", lambda: hopfield_energy(x, x, beta=0.0)),
    (
        ValueError,
        "capacity_constant: beta and K must be positive, d > 1 and 0 < p <= 1; got 1.0, 1.0, 1 and 0.1.",
        lambda: capacity_constant(beta=1.0, K=1.0, d=1, p=0.1),
    ),
    (ValueError, "critical_beta: n and dim must be positive; got 0 and 3.", lambda: critical_beta(0, 3)),
]


@each_of(ERRORS)
def test_what_is_wrong_is_said(refusal):
    refused(refusal)
