"""Every statistic of every kind of measure compiles into one graph and gives the same numbers."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import gradlogz as gz
from support.measure_registry import NAMES, case
from support.scales import close, scale_of

# One measure of each class, and the forms of those that have several.
KINDS = {type(case(name).measure): name for name in reversed(NAMES)}
NAMED = sorted(
    {
        *KINDS.values(),
        "empirical, weighted",
        "gaussian, low rank",
        "normal statistic",
        "gaussian prior",
        "exponential prior",
    }
)


def statistics(h, eta, other):
    """All that a measure says, with its order in x: 0 for logarithms, 1 for means, 2 and 3 for cumulants."""
    said = [
        (0, h.log_normalizer(eta)),
        (1, h.mean(eta)),
        (2, h.covariance(eta)),
        (2, h.covariance_product(eta, other)),
        (3, h.third_cumulant(eta, other, other)),
        (0, h.kl(eta, torch.zeros_like(eta))),
        (0, h.relative_entropy(eta)),
        (0, h.log_density(other, eta)),
        (1, h.support(other)),
    ]
    if isinstance(h, gz.Empirical):
        said += [(0, h.entropy(eta)), (0, h.probabilities(eta))]
    if isinstance(h, gz.Mixture):
        said += [(0, h.responsibilities(eta)), *enumerate(h.lower_bound(eta)[1:])]
    return said, h.natural_gradient(eta)


# aot_eager also decomposes the graph. test_derivatives_pass_through_compiled_functions.py has it for the gradient of
# every class; here it is for four of them, and for all in the long suite.
DECOMPOSED = ("empirical", "gaussian", "mixture of gaussians", "sphere")


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "aot_eager" if name in DECOMPOSED else "eager") for name in NAMED),
        *(
            pytest.param(name, "aot_eager", marks=pytest.mark.long)
            for name in sorted({*KINDS.values()} - {*DECOMPOSED})
        ),
    ],
)
def test_every_statistic_compiles(name, backend, monkeypatch):
    # Where a tensor of a measure is a single number, torch searches the graph for Python scalars, finds none and
    # compiles it again. test_derivatives_pass_through_compiled_functions.py compiles every kind with this search.
    monkeypatch.setenv("TENSORIFY_PYTHON_SCALARS", "0")
    h, eta, source = case(name)
    other = source.normal(*eta.shape)
    compiled = torch.compile(statistics, fullgraph=True, backend=backend)
    (said, natural), (expected, plain) = compiled(h, eta, other), statistics(h, eta, other)
    size = 1 + other.norm(dim=-1).amax() ** 2
    for (order, actual), (_, value) in zip(said, expected, strict=True):
        close(actual, value, size * scale_of(h, eta, order))
    values = torch.linalg.eigvalsh(h.covariance(eta))
    condition = values[..., -1:] / values.masked_fill(values <= 1e-10 * values[..., -1:], torch.inf)
    close(natural, plain, condition.amax() ** 2 * plain.norm(dim=-1).amax())


def test_more_queries_need_no_other_program():
    """The number of queries may be dynamic: one graph for all of them."""
    h, _, source = case("empirical")
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda e: h.mean(e), fullgraph=True, backend=counter, dynamic=True)
    for m in (4, 5, 17):
        eta = source.normal(m, 3)
        close(compiled(eta), h.mean(eta), scale_of(h, eta))
    assert counter.frame_count == 1
