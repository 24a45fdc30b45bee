"""Each cell of the promise: reverse, forward, double backward, forward over reverse, and the vmap of each.

torch's numerical checks (gradcheck, gradgradcheck) for every convention of masks
torch.func's transforms, nested to third order, against the same transforms of the definition
"""

import warnings

import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.utils.flop_counter import FlopCounterMode

from gradlogz import attend
from gradlogz.kernels.attention import blocked, derivatives
from gradlogz.kernels.attention.operator import attention
from gradlogz.kernels.attention.scoring import Scoring, Sight
from support.enumerated_attention import NAMES, Case, cases
from support.scales import close


@pytest.fixture(autouse=True)
def _several_blocks(monkeypatch):
    """Blocks of two rows and few logits: derivatives must add up over them."""
    monkeypatch.setattr(blocked, "LOGITS_ON_CPU", 24)
    monkeypatch.setattr(blocked, "ROWS", 2)


def finite(case: Case, statistics="scalar"):
    """attend as a function of everything that can be differentiated; -inf of empty rows made 0 for numerical checks."""
    differentiable = {k: t for k, t in case.options.items() if isinstance(t, torch.Tensor) and t.is_floating_point()}
    fixed = {k: t for k, t in case.options.items() if k not in differentiable}

    def function(q, k, v, *rest):
        options = dict(zip(differentiable, rest, strict=True))
        found = attend(q, k, v, **fixed, **options, statistics=statistics)
        return tuple(t.masked_fill(t == -torch.inf, 0.0) for t in found if t is not None)

    # A numerical check would move the -inf of an additive mask: that one is held fixed, biases are not.
    inputs = [*case[:3], *differentiable.values()]
    return function, tuple(t.detach().requires_grad_(bool(t.isfinite().all())) for t in inputs)


@pytest.mark.parametrize("name", NAMES)
def test_first_derivatives_in_both_modes(name):
    function, inputs = finite(cases()[name])
    assert gradcheck(function, inputs, check_forward_ad=True, fast_mode=True)


@pytest.mark.parametrize("name", NAMES)
def test_second_derivatives_reverse_and_forward_over_reverse(name):
    function, inputs = finite(cases()[name])
    assert gradgradcheck(function, inputs, check_fwd_over_rev=True, fast_mode=True)


@pytest.mark.parametrize("name", ["plain", "bool mask with an empty row", "grouped heads", "everything"])
def test_derivatives_of_moments(name):
    function, inputs = finite(cases()[name], "moments")
    assert gradcheck(function, inputs, check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(function, inputs, check_fwd_over_rev=True, fast_mode=True)


@pytest.mark.parametrize("name", ["causal", "bias beside a bool mask"])
def test_batched_gradients(name):
    """torch.autograd's own vmap over gradients and tangents, and every entry of the Jacobian."""
    function, inputs = finite(cases()[name])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the fallback to a loop
        assert gradcheck(
            function, inputs, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
        )


def test_dropout_finds_its_mask_again():
    case = cases()["plain"]

    def function(q, k, v):
        torch.manual_seed(1)
        return attend(q, k, v, dropout_p=0.5).output

    inputs = tuple(t.requires_grad_() for t in case[:3])
    assert gradcheck(function, inputs, check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(function, inputs, check_fwd_over_rev=True, fast_mode=True)


# torch.func ----------------------------------------------------------------------------------------------------------

TRANSFORMS = {
    "grad": grad,
    "jacfwd": jacfwd,
    "hessian": hessian,
    "reverse over reverse": lambda f: jacrev(jacrev(f)),
    "forward over forward": lambda f: jacfwd(jacfwd(f)),
    "reverse over forward": lambda f: jacrev(jacfwd(f)),
    "third, all reverse": lambda f: jacrev(jacrev(jacrev(f))),
    "third, forward twice": lambda f: jacfwd(jacrev(jacfwd(f))),
    "third, forward last": lambda f: jacfwd(jacrev(jacrev(f))),
}
SIGHTS = {
    "plain": (Sight(), Scoring(0.7)),
    "all": (
        Sight(
            torch.randn(1, 2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
            torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [1, 0, 1, 1]]).bool().view(1, 1, 3, 4),
            torch.tensor([[0, 0, 1, 1]]),
        ),
        Scoring(0.7, 2.0, 3, 1),
    ),
}


def operands():
    return tuple(torch.randn(1, h, m, 2, dtype=torch.float64) for h, m in ((2, 3), (1, 4), (1, 4)))


def number(kernel, field, sight, scoring, others):
    """A number that depends on one statistic in a curved way, as a function of the query."""

    def function(query):
        found = getattr(kernel(query, *others, sight, scoring, None), field)
        return torch.sin(found.masked_fill(found == -torch.inf, 0.0)).sum()

    return function


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_are_those_of_the_definition(transform, sight):
    query, *others = operands()
    for field in ("output", "log_normalizer", "entropy", "logit_variance", "max_logit"):
        ours, definition = (
            TRANSFORMS[transform](number(kernel, field, *SIGHTS[sight], others))(query)
            for kernel in (attention, derivatives.by_definition)
        )
        assert field == "max_logit" or definition.abs().max() > 1e-3, "a comparison of zeros says nothing"
        close(ours, definition, 100.0)


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("transform", ["grad", "jacfwd", "hessian"])
def test_vmap_of_transforms_is_a_loop(transform, sight):
    _, *others = operands()
    queries = torch.randn(5, 1, 2, 3, 2, dtype=torch.float64)
    for field in ("output", "log_normalizer", "entropy", "logit_variance", "max_logit"):
        function = TRANSFORMS[transform](number(attention, field, *SIGHTS[sight], others))
        close(vmap(function)(queries), torch.stack([function(q) for q in queries]), 100.0)


@pytest.mark.parametrize("in_dim", [0, 2, None])
def test_vmap_over_a_bias_and_over_shared_operands(in_dim):
    query, *others = operands()
    biases = torch.randn(5, 1, 2, 3, 4, dtype=torch.float64)
    given = biases[0] if in_dim is None else biases.movedim(0, in_dim)
    queries = torch.randn(5, *query.shape, dtype=torch.float64)

    def of_bias(q, bias):
        return grad(lambda b: attention(q, *others, Sight(b), Scoring(0.7)).entropy.sin().sum())(bias)

    found = vmap(of_bias, in_dims=(0, in_dim))(queries, given)
    expected = torch.stack([of_bias(q, biases[0 if in_dim is None else i]) for i, q in enumerate(queries)])
    close(found, expected, 10.0)


def test_vmap_over_everything_at_once():
    q, k, v = (torch.randn(3, *t.shape, dtype=torch.float64) for t in operands())
    masks = torch.rand(3, 1, 1, 3, 4) > 0.3
    segments = torch.randint(2, (3, 1, 4))

    def one(q, k, v, mask, segments):
        return tuple(attention(q, k, v, Sight(None, mask, segments), Scoring(0.7)))

    for found, expected in zip(
        vmap(one)(q, k, v, masks, segments),
        zip(*(one(*each) for each in zip(q, k, v, masks, segments, strict=True)), strict=True),
        strict=True,
    ):
        close(found, torch.stack(expected), 10.0)


def test_vmap_with_dropout_is_refused():
    q, k, v = (torch.randn(3, 1, 1, 4, 2) for _ in range(3))
    with pytest.raises(NotImplementedError, match=r"dropout_p.*vmap"):
        vmap(lambda q, k, v: attend(q, k, v, dropout_p=0.5).output, randomness="different")(q, k, v)


# Where torch itself would be silently wrong ---------------------------------------------------------------------------


def test_a_custom_operator_has_no_tangents_and_we_do_not_use_it_there():
    """torch gives zero tangents of an operator in forward mode, without a word; attend must not."""
    query, *others = operands()
    scoring = Scoring(0.7)
    direction = torch.ones_like(query)

    def operator(q):
        return torch.ops.gradlogz.attention(q, *others, None, None, None, None, *scoring, 0.0, True)[1]

    assert not jvp(operator, (query,), (direction,))[1].any(), "torch has learnt it: the detour can go"
    _, ours = jvp(lambda q: attention(q, *others, Sight(), scoring).log_normalizer, (query,), (direction,))
    _, definition = jvp(
        lambda q: derivatives.by_definition(q, *others, Sight(), scoring, None).log_normalizer, (query,), (direction,)
    )
    close(ours, definition)


def test_a_dispatch_mode_takes_no_tangents_away():
    """Under a mode operators are seen, and an operator has no tangents: inside transforms the definition is taken."""
    query, *others = operands()

    def number(q):
        return attend(q, *others).log_normalizer

    expected = jvp(number, (query,), (torch.ones_like(query),))[1]
    with FlopCounterMode(display=False):
        close(jvp(number, (query,), (torch.ones_like(query),))[1], expected)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(query, torch.ones_like(query))
            close(forward_ad.unpack_dual(number(dual)).tangent, expected)


def test_forward_mode_inside_forward_mode_is_not_zero():
    """torch gives zero second tangents of a Function; attend takes the definition there."""
    query, *others = operands()

    def second(kernel):
        def first(q):
            found = kernel(q, *others, Sight(), Scoring(0.7), None)
            return found.log_normalizer

        return jvp(lambda q: jvp(first, (q,), (torch.ones_like(q),))[1], (query,), (torch.ones_like(query),))[1]

    assert second(derivatives.by_definition).abs().min() > 1e-3
    close(second(attention), second(derivatives.by_definition))


def test_the_gradient_of_max_logit_goes_to_one_key():
    q = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    k = torch.tensor([[2.0, 0.0], [2.0, 0.0], [1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    attend(q, k, k, scale=1.0).max_logit.sum().backward()
    assert k.grad is not None
    assert k.grad.tolist() in ([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [1.0, 0.0], [0.0, 0.0]])


def test_rows_without_keys_have_zero_gradients():
    q, k, v = (torch.randn(1, 1, 4, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[1] = False
    found = attend(q, k, v, attn_mask=mask, statistics="moments")
    for field in found[:9]:
        gradient = torch.autograd.grad(field.sum(), q, retain_graph=True, allow_unused=True)[0]
        assert gradient is None or bool(gradient.isfinite().all())
        assert gradient is None or not gradient[0, 0, 1].any()
