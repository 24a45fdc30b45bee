"""attend compiles into one graph, forward and backward, for every convention of masks; transforms inside are right."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, hessian, jvp, vmap

from gradlogz import attend
from gradlogz.kernels.attention.operator import _operator, _operator_backward
from support.enumerated_attention import NAMES, cases
from support.scales import close


def run(function, case, statistics):
    """The statistics and the gradients of all that can have one."""
    tensors = {
        name: t.detach().clone().requires_grad_()
        for name, t in {**case.options, **dict(zip(("query", "key", "value"), case[:3], strict=True))}.items()
        if isinstance(t, torch.Tensor) and t.is_floating_point()
    }
    fixed = {name: t for name, t in case.options.items() if name not in tensors}
    found = function(**tensors, **fixed, statistics=statistics)
    total = sum(t.masked_fill(t == -torch.inf, 0.0).sin().sum() for t in found if t is not None)
    gradients = torch.autograd.grad(total, tuple(tensors.values()), allow_unused=True)
    return [t.detach() for t in (*found, *gradients) if t is not None]


@pytest.mark.parametrize("name", NAMES)
def test_forward_and_backward_compile_into_one_graph(name):
    case = cases()[name]
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for actual, expected in zip(run(compiled, case, "scalar"), run(attend, case, "scalar"), strict=True):
        close(actual, expected, 10.0)


@pytest.mark.parametrize("statistics", ["none", "moments"])
@pytest.mark.parametrize("name", ["everything"])
def test_inductor_gives_the_same(name, statistics):
    case = cases()[name]
    compiled = torch.compile(attend, fullgraph=True)
    for actual, expected in zip(run(compiled, case, statistics), run(attend, case, statistics), strict=True):
        close(actual, expected, 10.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_kernels_give_results_that_torch_can_own(dtype):
    """Results of an operator may neither share memory nor be laid out otherwise than promised."""
    q = torch.randn(2, 100, 3, 16).to(dtype).transpose(1, 2).requires_grad_()
    k, v = (torch.randn(2, 3, 70, 16).to(dtype).requires_grad_() for _ in range(2))
    bias = torch.randn(100, 70, requires_grad=True)

    def step(q, k, v, bias):
        return attend(q, k, v, bias=bias)

    total = {}
    for name, function in {"eager": step, "compiled": torch.compile(step, fullgraph=True)}.items():
        found = function(q, k, v, bias)
        total[name] = torch.autograd.grad(sum(t.float().sin().sum() for t in found[:6]), (q, k, v, bias))
    for actual, expected in zip(total["compiled"], total["eager"], strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4 if dtype == torch.float32 else 5e-2)


def test_dropout_compiles():
    q, k = (torch.randn(2, 2, 6, 4, dtype=torch.float64) for _ in range(2))
    v = torch.eye(6, dtype=torch.float64).repeat(2, 2, 1, 1).requires_grad_()
    compiled = torch.compile(lambda q, k, v: attend(q, k, v, dropout_p=0.5), fullgraph=True, backend="aot_eager")
    found = compiled(q, k, v)
    close(found.entropy, attend(q, k, v).entropy, 10.0)
    # The backward must drop what the forward dropped: with values = identity the output shows the weights that are
    # left, and the gradient of its sum is the sum of each column of them.
    assert bool((found.output == 0).any())
    (gradient,) = torch.autograd.grad(found.output.sum(), v)
    close(gradient, found.output.detach().sum(-2).unsqueeze(-1).expand_as(gradient), 10.0)


def test_lengths_may_be_dynamic():
    compiled = torch.compile(lambda q, k, v: attend(q, k, v, is_causal=True).entropy, fullgraph=True, dynamic=True)
    for tokens in (4, 7, 130):
        q, k, v = (torch.randn(1, 2, tokens, 8, dtype=torch.float64) for _ in range(3))
        close(compiled(q, k, v), attend(q, k, v, is_causal=True).entropy, 10.0)


INSIDE = {
    "grad": lambda f, x: grad(lambda y: f(y).sum())(x),
    "jvp": lambda f, x: jvp(f, (x,), (torch.ones_like(x),))[1],
    "hessian": lambda f, x: hessian(lambda y: f(y).sum())(x),
    "vmap": lambda f, x: vmap(f)(x),
}


@pytest.mark.parametrize("transform", INSIDE)
def test_transforms_inside_a_compiled_region_are_right(transform):
    """An operator has zero tangents in forward mode, silently: inside transforms the definition is compiled instead.

    With four dimensions: torch 2.13 cannot trace a view of a dual number, and says so.
    """
    x, k = torch.randn(3, 1, 2, 4, 5, dtype=torch.float64), torch.randn(1, 2, 6, 5, dtype=torch.float64)
    x = x if transform == "vmap" else x[0]

    def function(y):
        return attend(y, k, k).log_normalizer

    compiled = torch.compile(lambda y: INSIDE[transform](function, y), fullgraph=True, backend="aot_eager")
    expected = INSIDE[transform](function, x)
    assert expected.abs().max() > 1e-3
    close(compiled(x), expected, 10.0)


def test_dual_numbers_pass_through_a_compiled_function():
    q, k = torch.randn(2, 4, 5, dtype=torch.float64), torch.randn(2, 6, 5, dtype=torch.float64)

    def function(y):
        return attend(y, k, k).entropy

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    compiled(q)  # a graph without tangents is there, and must not be taken
    expected = jvp(function, (q,), (torch.ones_like(q),))[1]
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        close(forward_ad.unpack_dual(compiled(dual)).tangent, expected, 10.0)


@pytest.mark.parametrize("bias", [False, True])
def test_the_operators_are_what_torch_asks_of_operators(bias):
    q, k, v = (torch.randn(1, 2, n, 3, dtype=torch.float64, requires_grad=True) for n in (3, 4, 4))
    near = (torch.randn(1, 1, 3, 4, dtype=torch.float64, requires_grad=True) if bias else None, None, None, None)
    static = (0.7, None, None, 0, 0.0)
    torch.library.opcheck(_operator, (q, k, v, *near, *static, True))
    found = [t.detach() for t in _operator(q, k, v, *near, *static, True)]
    gradients = [torch.ones_like(found[0]), torch.ones_like(found[1]), None, None, None]
    inputs = [None if t is None else t.detach() for t in (q, k, v, *near)]
    torch.library.opcheck(_operator_backward, (*inputs, *found, *gradients, *static, bias))


def test_row_fields_are_part_of_the_graph():
    q, k, v = (torch.randn(2, 2, 6, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def fields(q, k, v):
        found = attend(q, k, v, is_causal=True, fields=("max_key", "min_logit", "first_key_weight"))
        return found.max_key, found.min_logit, found.first_key_weight

    compiled, eager = torch.compile(fields, fullgraph=True, backend="aot_eager")(q, k, v), fields(q, k, v)
    assert torch.equal(compiled[0], eager[0])
    gradients = [torch.autograd.grad(r[1].sum() + r[2].sin().sum(), (q, k)) for r in (compiled, eager)]
    for one, other in zip((*compiled[1:], *gradients[0]), (*eager[1:], *gradients[1]), strict=True):
        close(one, other)
