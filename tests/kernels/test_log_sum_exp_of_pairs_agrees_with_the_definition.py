"""log sum exp over all pairs, fused and block after block: values, gradients and second derivatives by definition."""

import pytest
import torch

from gradlogz.kernels.attention import blocked
from gradlogz.kernels.losses.pairwise_log_sum_exp import VisiblePairs, log_sum_exp
from gradlogz.kernels.losses.rowwise import rowwise
from support.scales import close

LABELS = torch.arange(70) % 3


def by_definition(query, key, bias, seen):
    """One matrix of logits, -inf where a key is not seen."""
    s = query @ key.mT if bias is None else query @ key.mT + bias
    m, n = s.shape
    hidden = torch.zeros(m, n, dtype=torch.bool)
    if seen.labels is not None:
        same = seen.labels[0].unsqueeze(-1) == seen.labels[1]
        hidden |= ~same if seen.same else same
    if seen.mask is not None:
        hidden |= ~seen.mask
    if seen.included is not None:
        hidden[torch.arange(m), seen.included] = False
    if not seen.itself:
        hidden.fill_diagonal_(True)
    if seen.excluded is not None:
        hidden[torch.arange(m), seen.excluded] = True
    return s.masked_fill(hidden, -torch.inf).logsumexp(-1)


def labels(m, n):
    return LABELS[:m], LABELS[:n].flip(0)


SEEN = {
    "all": lambda m, n: VisiblePairs(),
    "others": lambda m, n: VisiblePairs(itself=False),
    "same labels": lambda m, n: VisiblePairs(labels=labels(m, n)),
    "other labels": lambda m, n: VisiblePairs(labels=labels(m, n), same=False, included=torch.arange(m) % n),
    "other labels of others": lambda m, n: VisiblePairs(itself=False, labels=labels(m, n), same=False),
    "all but one": lambda m, n: VisiblePairs(excluded=torch.arange(m).flip(0) % n),
    "mask": lambda m, n: VisiblePairs(mask=torch.rand(m, n) > 0.3, included=torch.arange(m) % n),
}


@pytest.fixture
def _small_blocks(monkeypatch):
    """Several blocks for a few rows."""
    monkeypatch.setattr(blocked, "LOGITS_ON_CPU", 200)


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize(
    ("shape", "dtype", "biased"),
    [((70, 70), torch.float64, True), ((7, 30), torch.float64, False), ((30, 7), torch.float32, True)],
)
@pytest.mark.parametrize("name", SEEN)
def test_values_and_derivatives_of_first_and_second_order(name, shape, dtype, biased):
    (m, n), d = shape, 20
    query, key = torch.randn(m, d, dtype=dtype, requires_grad=True), torch.randn(n, d, dtype=dtype, requires_grad=True)
    bias = torch.randn(n, dtype=dtype, requires_grad=True) if biased else None
    seen = SEEN[name](m, n)
    inputs = [t for t in (query, key, bias) if t is not None]
    # Weights of both signs, and a row without one.
    weights = torch.randn(m, dtype=dtype)
    weights[0] = 0.0
    weights.requires_grad_()
    toward = [torch.randn_like(t) for t in inputs]

    def everything(function):
        G = function(query, key, bias, seen)
        first = torch.autograd.grad((G * weights).sum(), inputs, retain_graph=True)
        again = torch.autograd.grad((G * weights).sum(), inputs, create_graph=True)
        along = sum((g * t).sum() for g, t in zip(again, toward, strict=True))
        return [t.detach() for t in (G, *first, *torch.autograd.grad(along, [*inputs, weights]))]

    for actual, expected in zip(everything(log_sum_exp), everything(by_definition), strict=True):
        close(actual, expected, 100.0)


@pytest.mark.parametrize("name", SEEN)
def test_transforms_see_through_it(name):
    query, key, bias = (torch.randn(*shape, dtype=torch.float64) for shape in ((6, 3), (6, 3), (6,)))
    seen = SEEN[name](6, 6)

    def of(function):
        return lambda q, k, b: function(q, k, b, seen).sin().sum()

    ours, expected = of(log_sum_exp), of(by_definition)
    moves = tuple(torch.randn_like(t) for t in (query, key, bias))
    for transform in (
        lambda f: torch.func.grad(f, (0, 1, 2))(query, key, bias),
        lambda f: torch.func.jvp(f, (query, key, bias), moves),
        lambda f: torch.func.hessian(f, (0, 1, 2))(query, key, bias),
        lambda f: torch.func.vmap(f, (0, None, None))(torch.stack([query, 2 * query]), key, bias),
    ):
        actual, wanted = (torch.utils._pytree.tree_leaves(transform(f)) for f in (ours, expected))
        for a, w in zip(actual, wanted, strict=True):
            close(a, w, 1000.0)


@pytest.mark.parametrize(
    "seen", [VisiblePairs(mask=torch.eye(6).bool(), itself=False), VisiblePairs(labels=(LABELS[:6], LABELS[:6] + 9))]
)
def test_a_query_that_sees_nothing_has_no_mass_and_no_gradient(seen):
    query, key = (torch.randn(6, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    G = log_sum_exp(query, key, None, seen)
    assert bool((G == -torch.inf).all())
    for gradient in torch.autograd.grad(G, (query, key), torch.ones_like(G)):
        assert bool((gradient == 0).all())


def test_one_vector_alone_has_no_others():
    x = torch.randn(1, 3, dtype=torch.float64, requires_grad=True)
    G = log_sum_exp(x, x, None, VisiblePairs(itself=False))
    assert bool((G == -torch.inf).all())
    assert bool((torch.autograd.grad(G, x, torch.ones_like(G))[0] == 0).all())


def test_keys_of_weight_zero_are_not_there():
    query, key = (torch.randn(5, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    bias = torch.tensor([0.0, -torch.inf, 0.3, 0.0, -torch.inf], dtype=torch.float64, requires_grad=True)
    found = log_sum_exp(query, key, bias)
    some = [0, 2, 3]
    expected = log_sum_exp(query, key[some], bias[some])
    close(found.detach(), expected.detach(), 10.0)
    (actual, of_bias), (wanted,) = (
        torch.autograd.grad(found.sum(), (key, bias)),
        torch.autograd.grad(expected.sum(), (key,)),
    )
    close(actual, wanted, 10.0)
    assert bool((of_bias[[1, 4]] == 0).all())


def test_only_what_is_asked_for_has_a_gradient():
    query, key = torch.randn(5, 3, requires_grad=True), torch.randn(6, 3, requires_grad=True)
    for a, b in ((query, key.detach()), (query.detach(), key)):
        expected = torch.autograd.grad(
            by_definition(a, b, None, VisiblePairs()).sum(), [t for t in (a, b) if t.requires_grad]
        )
        actual = torch.autograd.grad(log_sum_exp(a, b, None).sum(), [t for t in (a, b) if t.requires_grad])
        close(actual[0], expected[0], 10.0)


@pytest.mark.usefixtures("_small_blocks")
def test_rows_are_cut_and_joined():
    """A function with several results in each row, of rows and of what they share, with integers between them."""
    x, y = torch.randn(23, 2, dtype=torch.float64, requires_grad=True), torch.randn(9, 2, dtype=torch.float64)
    y.requires_grad_()
    index = torch.arange(23)

    def function(rows, numbers, nothing, shared):
        assert nothing is None
        return (rows * numbers.unsqueeze(-1)) @ shared.mT

    found = rowwise(function, (x, index, None), (y,), width=50)
    expected = (x * index.unsqueeze(-1)) @ y.mT
    close(found.detach(), expected.detach(), 100.0)
    for actual, wanted in zip(
        torch.autograd.grad(found.sin().sum(), (x, y)),
        torch.autograd.grad(expected.sin().sum(), (x, y)),
        strict=True,
    ):
        close(actual, wanted, 1e4)


@pytest.mark.parametrize("name", ["all", "others", "other labels"])
def test_no_matrix_of_pairs_is_kept(name):
    """Bytes of the largest tensor made, forward and backward: blocks of 2^20 logits and nothing of n²."""
    n = 4096
    query, key = torch.randn(n, 16, requires_grad=True), torch.randn(n, 16, requires_grad=True)
    seen = VisiblePairs(itself=False) if name == "others" else SEEN[name](70, 70)
    if not seen.plain:
        groups = torch.arange(n) % 300
        seen = VisiblePairs(itself=seen.itself, labels=(groups, groups), same=seen.same, included=torch.arange(n))
    with torch.profiler.profile(profile_memory=True) as profile:
        torch.autograd.grad(log_sum_exp(query, key, None, seen).sum(), (query, key))
    largest = max(event.cpu_memory_usage for event in profile.events() if event.name.startswith("aten::empty"))
    assert 4 * query.numel() <= largest <= 4 * blocked.LOGITS_ON_CPU < 4 * n * n
