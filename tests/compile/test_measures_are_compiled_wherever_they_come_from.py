"""A measure may be an argument of a compiled function, live in its closure, or be built inside it.

Where a measure comes from is what torch._dynamo traces: graphs are run as they are. What autograd's compiler makes of
the same operations is in test_every_statistic_compiles.py, for every kind.
"""

import dataclasses

import pytest
import torch

import gradlogz as gz
from support.measure_registry import NAMES, case
from support.scales import close, scale_of

KINDS = sorted({type(case(name).measure): name for name in reversed(NAMES)}.values())


def built(part):
    """The measure made anew by its own constructors, from the same tensors."""
    if isinstance(part, gz.Measure):
        return dataclasses.replace(part, **{n: built(getattr(part, n)) for n in part._free})
    return tuple(map(built, part)) if isinstance(part, tuple) else part


@pytest.mark.parametrize("name", KINDS)
def test_argument_closure_and_built_inside_agree(name):
    h, eta, _ = case(name)

    def everywhere(argument, e):
        return argument.mean(e), h.mean(e), built(h).mean(e), built(argument).log_normalizer(e)

    compiled = torch.compile(everywhere, fullgraph=True, backend="eager")
    argument, closure, inside, G = compiled(h, eta)
    for actual in (argument, closure, inside):
        close(actual, h.mean(eta), scale_of(h, eta))
    close(G, h.log_normalizer(eta), scale_of(h, eta, 0))


BUILT = {
    "tilt": lambda x, s: gz.tilt(gz.Empirical(x), x[0]),
    "convolve": lambda x, s: gz.convolve(gz.Empirical(x), gz.Gaussian.diagonal(x[0], s)),
    "add": lambda x, s: gz.add(gz.Empirical(x), gz.Gaussian.diagonal(x[0], s)),
    "product": lambda x, s: gz.pushforward(gz.product(gz.Empirical(x), gz.Poisson(s)), torch.cat((x, x), -1)[:3]),
    "pushforward": lambda x, s: gz.pushforward(gz.Empirical(x), 0.25),
    "reweight": lambda x, s: gz.reweight(gz.Empirical(x), s[0].log()),
    "mixture": lambda x, s: gz.Mixture(torch.log_softmax(x[:, 0], 0), gz.Gaussian(x, torch.diag_embed(s.expand(5, 3)))),
    "masked": lambda x, s: gz.Empirical(x, x[:, 0] < 1),
    "weighted": lambda x, s: gz.Empirical.weighted(x, x[:, 0].abs()),
    "distribution": lambda x, s: gz.measures.from_distribution(
        torch.distributions.Dirichlet(s + 2, validate_args=False)
    ),
}


@pytest.mark.parametrize("name", list(BUILT))
def test_the_algebra_runs_inside_a_compiled_function(name):
    _, _, source = case("empirical")
    x, s, eta = source.normal(5, 3), source.positive(3), 0.3 * source.normal(4, 3)
    compiled = torch.compile(lambda x, s, e: BUILT[name](x, s).mean(e), fullgraph=True, backend="eager")
    h = BUILT[name](x, s)
    close(compiled(x, s, eta), h.mean(eta), scale_of(h, eta))
