"""Theory 4.4: normalising ranks removes every mode; attention to centred Gaussian keys is power iteration."""

import torch

import gradlogz
from support.scales import close

STATEMENTS = ("4.4 moments", "4.4 secular")

GENERATOR = torch.Generator().manual_seed(0)


def ranks(x):
    """In one dimension: the tokens moved to the quantiles of N(0, 1), in their order."""
    n = x.shape[-2]
    places = x.argsort(-2).argsort(-2)
    return torch.special.ndtri((places.to(x.dtype) + 0.5) / n)


def test_normalised_ranks_are_gaussian_by_construction():
    """All modes are removed: whatever the start, the cloud is Gaussian after one step and rests."""
    start = torch.rand(500, 1, generator=GENERATOR, dtype=torch.float64).exp()
    ascent = gradlogz.Ascent(tau=0.5, beta=0.8)
    once = gradlogz.evolve(start, ascent, contraction=ranks, steps=1)
    assert once.verdict.kind == "gaussian"
    # The ascent is monotone in one dimension, so that no token passes another.
    later = gradlogz.evolve(once, ascent, contraction=ranks, steps=20)
    close(later.cloud, once.cloud, scale=1.0)
    assert gradlogz.evolve(start, ascent, contraction="zca", steps=200).verdict.kind == "clusters"


def test_centred_gaussian_keys_turn_tokens_to_the_longest_axis():
    """h = N(0, Sigma): a step and a projection are one step of power iteration of I + tau beta Sigma."""
    A = torch.randn(4, 4, generator=GENERATOR, dtype=torch.float64)
    Sigma = A @ A.mT
    h = gradlogz.Gaussian(torch.zeros(4, dtype=torch.float64), Sigma)
    tau, beta = 0.7, 0.5
    x = torch.nn.functional.normalize(torch.randn(50, 4, generator=GENERATOR, dtype=torch.float64), dim=-1)
    y = x
    for _ in range(600):
        x = torch.nn.functional.normalize(x + tau * h.mean(beta * x), dim=-1)
        y = torch.nn.functional.normalize(y + tau * beta * y @ Sigma, dim=-1)
    close(x, y, scale=10.0)
    values, axes = torch.linalg.eigh(Sigma)
    assert values[-1] > 1.2 * values[-2]  # far enough apart to converge
    close((x @ axes[:, -1]).abs(), torch.ones(50, dtype=torch.float64), scale=10.0)
