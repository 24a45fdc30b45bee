"""Monotone equilibria, layers with an energy and vector spins say what is wrong with sizes, bounds and couplings."""

import torch

from gradlogz import Empirical, Gaussian
from gradlogz.dynamics import (
    Certificate,
    EnergyBlock,
    EquilibriumAttention,
    HopfieldFeedForward,
    MonotoneAttention,
    VectorSpins,
    attention_certificate,
    monotone_equilibrium,
)
from support.error_form import each_of, refused

F64 = torch.float64
x = torch.randn(4, 6, dtype=F64)
good, bad = (Certificate(torch.tensor(m, dtype=F64), torch.tensor(1.0, dtype=F64)) for m in (0.5, -0.1))
pair = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=F64)
zeros = torch.zeros(2, 3, dtype=F64)
points = Empirical(torch.randn(5, 3, dtype=F64))
many = VectorSpins(points, torch.zeros(12, 12, dtype=F64), torch.zeros(12, 3, dtype=F64))
gaussian = Gaussian(torch.zeros(3, dtype=F64), torch.eye(3, dtype=F64))


def solve(certificate=good, **options):
    return monotone_equilibrium(lambda y: 0.5 * y, x, certificate, **options)


ERRORS = [
    (ValueError, "attention_certificate: keys", "values", lambda: attention_certificate(x, x[:2])),
    (ValueError, "monotone_equilibrium: certificate", "monotonicity", lambda: solve(bad)),
    (ValueError, "monotone_equilibrium: method", "peaceman_rachford", lambda: solve(method="newton")),
    (ValueError, "monotone_equilibrium: prox", "relu", lambda: solve(prox="gelu")),
    (ValueError, "MonotoneAttention: embed_dim", "num_heads", lambda: MonotoneAttention(6, 4)),
    (ValueError, "MonotoneAttention: margin", "(0, 1]", lambda: MonotoneAttention(6, 2, margin=0.0)),
    (ValueError, "MonotoneAttention: key", "tokens", lambda: MonotoneAttention(6, 2, dtype=F64)(x, x[:, :5])),
    (
        ValueError,
        "MonotoneAttention: key_padding_mask",
        "bool",
        lambda: MonotoneAttention(6, 2, dtype=F64)(x, key_padding_mask=x[:, 0]),
    ),
    (
        ValueError,
        "EquilibriumAttention.certificate: None",
        "fixed keys",
        lambda: EquilibriumAttention(6, 2, dtype=F64).certificate(x),
    ),
    (ValueError, "HopfieldFeedForward: activation", "relu", lambda: HopfieldFeedForward(6, 8, activation="silu")),
    (ValueError, "HopfieldFeedForward: x", "embed_dim", lambda: HopfieldFeedForward(5, 8, dtype=F64)(x)),
    (ValueError, "EnergyBlock: embed_dim", "num_heads", lambda: EnergyBlock(6, 4, 8)),
    (ValueError, "EnergyBlock: damping", "(0, 2)", lambda: EnergyBlock(6, 2, 8, damping=2.0)),
    (ValueError, "EnergyBlock: beta", "positive", lambda: EnergyBlock(6, 2, 8, beta=0.0)),
    (ValueError, "EnergyBlock: beta", "got -1", lambda: EnergyBlock(6, 2, 8, beta=-1.0)),
    (ValueError, "EnergyBlock: beta", "got nan", lambda: EnergyBlock(6, 2, 8, beta=float("nan"))),
    (ValueError, "EnergyBlock: context", "batch", lambda: EnergyBlock(6, 2, 8, dtype=F64)(x, x[None])),
    (TypeError, "VectorSpins: None", "dtype", lambda: VectorSpins(points, pair.float(), zeros)),
    (ValueError, "VectorSpins: couplings", "fields", lambda: VectorSpins(points, pair, zeros[:, :2])),
    (ValueError, "VectorSpins: couplings", "measures", lambda: VectorSpins((points,), pair, zeros)),
    (ValueError, "VectorSpins: couplings", "symmetric", lambda: VectorSpins(points, pair.triu(), zeros)),
    (ValueError, "VectorSpins: couplings", "diagonal", lambda: VectorSpins(points, pair + torch.eye(2), zeros)),
    (
        ValueError,
        "VectorSpins.mean_field: means",
        "[*b,",
        lambda: VectorSpins(points, pair, zeros).mean_field(zeros[:1]),
    ),
    (TypeError, "VectorSpins.exact: measure", "Empirical", lambda: VectorSpins(gaussian, pair, zeros).exact()),
    (
        TypeError,
        "VectorSpins.exact: measure",
        "weights",
        lambda: VectorSpins(
            Empirical(points.points, torch.zeros(2, len(points.points)).to(zeros)), pair, zeros
        ).exact(),
    ),
    (ValueError, "VectorSpins.exact: measure", "states", many.exact),
]


@each_of(ERRORS)
def test_an_equilibrium_refuses(refusal):
    refused(refusal)
