"""Attention with the statistics of its rows as one differentiable operation of torch.

    query, key, value, bias  ->  output, log_normalizer, entropy, logit_variance, max_logit

    eager      cpp_calls.py on a GPU; else _AttendInReverse, a kernel forward and kernels backward: the case of training
    transforms _Attend and its backward _AttendBackward, each with a rule for reverse mode, forward mode and vmap; the
               second is also the differentiable backward of _AttendInReverse
    compiled   the operator gradlogz::attention with its backward operator: first derivatives only; also for tracers,
               dispatch modes and wrapper subclasses, which intercept operators
    else       the definition, where torch would silently return zero tangents: forward mode inside forward mode, and
               transforms of operators

Read next: dispatch.py (the choice of the kernel), derivatives.py (derivatives without kernels).
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch._C import _get_tracing_state, _len_torch_dispatch_stack
from torch._C._functorch import maybe_current_level
from torch.autograd import forward_ad
from torch.nn.functional import pad
from torch.utils.flop_counter import register_flop_formula

from ..._errors import InputNotImplementedError
from ..._typing import Float, Tensor
from ..tracing import is_traced, under_transform
from . import blocked, cpp_calls, derivatives, dispatch
from .dropout import Dropout
from .extreme_keys import extreme_keys
from .reference import Gradients, Statistics, StatisticsAndMean
from .scoring import Scoring, Sight

_EVERYTHING = Sight()


def attention(
    query: Float[Tensor, "b h m d"],
    key: Float[Tensor, "b hk n d"],
    value: Float[Tensor, "b hk n v"],
    sight: Sight,
    scoring: Scoring,
    dropout: Dropout | None = None,
    *,
    statistics: bool = True,
) -> Statistics:
    """Statistics of every row, differentiable in query, key, value and bias.

    With statistics=False only output and log normaliser are valid.
    """
    operands = (query, key, value) if sight.bias is None else (query, key, value, sight.bias)
    way = eager_way(operands)
    if way != "other":
        return eager(query, key, value, sight, scoring, dropout, statistics=statistics, differentiable=way == "reverse")
    transformed = under_transform() or forward_ad._current_level >= 0
    traced = torch.compiler.is_compiling() or is_traced(operands)
    probability, seed = (0.0, None) if dropout is None else dropout
    if traced:
        if transformed:
            return derivatives.by_definition(query, key, value, sight, scoring, dropout)
        return Statistics(*_operator(query, key, value, *sight, seed, *scoring, probability, statistics))
    if _forward_modes() > 1:
        return derivatives.by_definition(query, key, value, sight, scoring, dropout)
    return Statistics(*_Attend.apply(query, key, value, *sight, seed, scoring, probability, statistics))


def eager_way(operands: tuple[Tensor, ...]) -> Literal["kernel", "reverse", "other"]:
    """How a call is made: by the kernel alone, in reverse mode, or otherwise.

    "kernel": no derivative is needed; "reverse": a derivative in reverse mode, as in training. In both no transform,
    tracer or dispatch mode is active.
    """
    if torch.compiler.is_compiling():
        return "other"
    way: Literal["kernel", "reverse", "other"] = "kernel"
    for t in operands:
        if type(t) is not Tensor and type(t) is not torch.nn.Parameter:
            return "other"
        if t.requires_grad:
            way = "reverse"
    if maybe_current_level() is not None or forward_ad._current_level >= 0:
        return "other"
    if _get_tracing_state() is not None or _len_torch_dispatch_stack():
        return "other"
    return way if torch.is_grad_enabled() else "kernel"


def eager(
    query: Float[Tensor, "b h m d"],
    key: Float[Tensor, "b hk n d"],
    value: Float[Tensor, "b hk n v"],
    sight: Sight,
    scoring: Scoring,
    dropout: Dropout | None,
    *,
    statistics: bool,
    differentiable: bool,
) -> Statistics:
    """Statistics of every row, by the kernel alone or differentiable in reverse mode."""
    in_cpp = query.is_cuda and dropout is None and sight.bias is sight.mask is sight.segments is None
    rows: tuple[Tensor | None, ...] | None = None
    if in_cpp:
        rows = cpp_calls.attend(query, key, value, scoring, statistics)
    if rows is None:
        rows = _in_python(query, key, value, sight, scoring, dropout, statistics, differentiable)
        if in_cpp:
            cpp_calls.record(query, key, value, scoring, statistics, _IN_PYTHON)
    result = StatisticsAndMean(*rows[:5])  # type: ignore[arg-type]
    result.mean_logit = rows[5]
    return result


def _in_python(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sight: Sight,
    scoring: Scoring,
    dropout: Dropout | None,
    statistics: bool,
    differentiable: bool,
) -> tuple[Tensor | None, ...]:
    """Statistics of every row, and their mean where the kernel computes it."""
    if differentiable:
        probability, seed = (0.0, None) if dropout is None else dropout
        return _AttendInReverse.apply(query, key, value, *sight, seed, scoring, probability, statistics)
    return _with_mean(dispatch.forward(query, key, value, sight, scoring, dropout, statistics=statistics))


def _with_mean(result: Statistics) -> tuple[Tensor | None, ...]:
    return *result, result.mean_logit if isinstance(result, StatisticsAndMean) else None


def directional(
    query: Float[Tensor, "b h m d"],
    key: Float[Tensor, "b hk n d"],
    sight: Sight,
    scoring: Scoring,
    direction: Float[Tensor, "b h m d"],
) -> Float[Tensor, "b h m d"]:
    """Fisher-vector product scale Cov(k) direction of every row, without an m x n or d x d matrix.

    It is the backward pass of attention with values = keys, with respect to the query.
    """
    if torch.compiler.is_compiling() or is_traced((query, key, direction)) or _forward_modes() > 1:
        _, pull = torch.func.vjp(lambda q: derivatives.by_definition(q, key, key, sight, scoring, None).output, query)  # type: ignore[misc]
        return pull(direction)[0]
    result = attention(query, key, key, sight, scoring, statistics=False)
    rows = (*result, direction, None, None, None, None)
    if query.is_cuda:  # there one more coordinate would double the tiles
        return _AttendBackward.apply(query, key, key, *sight, None, *rows, scoring, 0.0, False)[0]
    # The weights ds sum to 0 up to rounding, which in a saturated row exceeds the weights. An additional coordinate, 0
    # in the query and 1 in the keys, computes that sum; it is subtracted in proportion to p.
    wider_query, wider_key = pad(query, (0, 1)), pad(key, (0, 1), value=1.0)
    wider = _AttendBackward.apply(wider_query, wider_key, key, *sight, None, *rows, scoring, 0.0, False)[0]
    return wider[..., :-1] - wider[..., -1:] * result.output


def _forward_modes() -> int:
    """Number of nested torch.func.jvp transforms."""
    stack = torch._C._functorch.get_interpreter_stack() or []
    return sum(interpreter.key() == torch._C._functorch.TransformType.Jvp for interpreter in stack)


def _gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sight: Sight,
    scoring: Scoring,
    dropout: Dropout | None,
    result: Statistics,
    gradients: Gradients,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of query, key, value and bias from those of the statistics."""
    needs_bias = needs_bias and sight.bias is not None
    grads = dispatch.backward(query, key, value, sight, scoring, dropout, result, gradients, needs_bias=needs_bias)
    if gradients.max_logit is not None:
        max_key = extreme_keys(query, key, sight, scoring, only_largest=True)[0]
        blocked.add_gradient_of_highest(grads, query, key, scoring, max_key, gradients.max_logit)
    return grads


class _AttendInReverse(torch.autograd.Function):
    """_Attend in eager reverse mode, as in training, with the mean logit where the kernel computes it.

    It has no rules for transforms: torch's checks of such rules take longer than a kernel on few tokens.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor | None, ...]:
        *tensors, ctx.scoring, ctx.probability, statistics = inputs
        q, k, v, sight, dropout = _read(tensors, ctx.probability)
        result = dispatch.forward(q, k, v, sight, ctx.scoring, dropout, statistics=statistics)
        ctx.save_for_backward(*tensors, *result)
        ctx.set_materialize_grads(False)
        return _with_mean(result)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        needs_bias = ctx.needs_input_grad[3]
        grads = pull_back(ctx.saved_tensors, gradients, ctx.scoring, ctx.probability, needs_bias=needs_bias)
        return *grads, *[None] * 6


def pull_back(
    saved: tuple[Any, ...],
    gradients: tuple[Tensor | None, ...],
    scoring: Scoring,
    probability: float,
    *,
    needs_bias: bool,
) -> tuple[Tensor | None, ...]:
    """Gradients of query, key, value and bias, from the seven tensors, the five statistics, and six cotangents."""
    *first, grad_mean = gradients
    if grad_mean is not None:  # the mean is the log normaliser less the entropy
        first[1] = grad_mean if first[1] is None else first[1] + grad_mean
        first[2] = -grad_mean if first[2] is None else first[2] - grad_mean
    batched = any(g is not None and torch._C._functorch.is_legacy_batchedtensor(g) for g in first)
    if torch.is_grad_enabled() or batched:  # a second derivative, or one for each of several cotangents
        *grads, bias = _AttendBackward.apply(*saved, *first, scoring, probability, needs_bias)
    else:
        q, k, v, sight, dropout = _read(saved[:7], probability)
        result, cotangents = Statistics(*saved[7:]), Gradients(*first)
        *grads, bias = _gradients(q, k, v, sight, scoring, dropout, result, cotangents, needs_bias)
    return *grads, bias if needs_bias else None


def _kernel_without_masks(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, backward: bool) -> Any:
    return dispatch.compiled_kernel(query, key, value, _EVERYTHING, scoring, None, backward=backward)


_IN_PYTHON = cpp_calls.InPython(pull_back, _kernel_without_masks)


class _Attend(torch.autograd.Function):
    """Eager operation of the tensors (query, key, value, bias, mask, segments, seed) and of its options."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        *tensors, scoring, probability, statistics = inputs
        q, k, v, sight, dropout = _read(tensors, probability)
        return tuple(dispatch.forward(q, k, v, sight, scoring, dropout, statistics=statistics))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.scoring, ctx.probability, _ = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        needs_bias = ctx.needs_input_grad[3]
        *grads, bias = _AttendBackward.apply(*ctx.saved_tensors, *gradients, ctx.scoring, ctx.probability, needs_bias)
        return *grads, bias if needs_bias else None, *[None] * 6

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, ...]:
        operands, sight, dropout = _operands(ctx.saved_tensors, ctx.probability)
        return tuple(derivatives.tangents(operands, _or_zeros(tangents, operands), sight, ctx.scoring, dropout))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        folded = _folded(info.batch_size, in_dims[:7], inputs[:7])
        result = _Attend.apply(*folded, *inputs[7:])
        return tuple(t.unflatten(0, (info.batch_size, -1)) for t in result), (0,) * 5


class _AttendBackward(torch.autograd.Function):
    """Differentiable backward of _Attend: seven tensors, five statistics and their five gradients."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        *tensors, scoring, probability, needs_bias = inputs
        if any(t is not None and torch._C._functorch.is_legacy_batchedtensor(t) for t in tensors[12:]):
            # torch.autograd.grad(is_grads_batched=True) has its own vmap, which supports only operators.
            return _operator_backward(*tensors, *scoring, probability, needs_bias)
        q, k, v, sight, dropout = _read(tensors[:7], probability)
        result, gradients = Statistics(*tensors[7:12]), Gradients(*tensors[12:])
        *grads, bias = _gradients(q, k, v, sight, scoring, dropout, result, gradients, needs_bias)
        return *grads, q.new_zeros(()) if bias is None else bias

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:  # noqa: ARG004
        *tensors, ctx.scoring, ctx.probability, ctx.needs_bias = inputs
        independent = (*tensors[:7], *tensors[12:])  # the statistics are functions of the rest
        ctx.save_for_backward(*independent)
        ctx.save_for_forward(*independent)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        operands, sight, dropout = _operands(ctx.saved_tensors[:7], ctx.probability)
        gradients = _gradients_or_zeros(ctx.saved_tensors[7:], operands)
        available = cotangents if ctx.needs_bias else cotangents[:3]
        grads, rows = derivatives.second(
            operands, gradients, _or_zeros(available, operands), sight, ctx.scoring, dropout
        )
        row_grads = (row if g is not None else None for row, g in zip(rows, ctx.saved_tensors[7:], strict=True))
        return *grads, *[None] * (12 - len(grads)), *row_grads, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, ...]:
        operands, sight, dropout = _operands(ctx.saved_tensors[:7], ctx.probability)
        gradients = _gradients_or_zeros(ctx.saved_tensors[7:], operands)
        gradient_tangents = Gradients(*_or_zeros(tangents[12:17], tuple(gradients)))
        tangents_out = derivatives.second_tangents(
            operands, gradients, _or_zeros(tangents[:4], operands), gradient_tangents, sight, ctx.scoring, dropout
        )
        return *tangents_out[:3], tangents_out[3] if ctx.needs_bias else operands[0].new_zeros(())

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        needs_bias = inputs[-1]
        folded = _folded(info.batch_size, in_dims[:17], inputs[:17], expand_bias=needs_bias)
        *grads, bias = _AttendBackward.apply(*folded, *inputs[17:])
        grads = [t.unflatten(0, (info.batch_size, -1)) for t in grads]
        if not needs_bias:
            return (*grads, bias.repeat(info.batch_size)), (0,) * 4
        bias = bias.unflatten(0, (info.batch_size, -1))
        before = inputs[3].unsqueeze(0) if in_dims[3] is None else inputs[3].movedim(in_dims[3], 0)
        return (*grads, bias.sum(1, keepdim=True) if before.shape[1] == 1 else bias), (0,) * 4


def _read(tensors: Any, probability: float) -> tuple[Tensor, Tensor, Tensor, Sight, Dropout | None]:
    """Split the seven tensors into query, key, value, bias with masks, and dropout."""
    query, key, value, bias, mask, segments, seed = tensors
    return query, key, value, Sight(bias, mask, segments), None if seed is None else Dropout(probability, seed)


def _operands(tensors: Any, probability: float) -> tuple[tuple[Tensor, ...], Sight, Dropout | None]:
    """Split the seven tensors into a tuple of differentiable operands, bias with masks, and dropout."""
    query, key, value, sight, dropout = _read(tensors, probability)
    return (query, key, value) if sight.bias is None else (query, key, value, sight.bias), sight, dropout


def _or_zeros(tensors: Any, like: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Replace missing tangents or cotangents of `like` by zeros."""
    tensors = (*tensors, *[None] * len(like))
    return tuple(torch.zeros_like(t) if g is None else g for g, t in zip(tensors, like, strict=False))


def _gradients_or_zeros(gradients: Any, operands: tuple[Tensor, ...]) -> Gradients:
    query, _, value = operands[:3]
    number = query.new_zeros(query.shape[:-1], dtype=torch.promote_types(query.dtype, torch.float32))
    output = query.new_zeros(*query.shape[:-1], value.shape[-1])
    return Gradients(*_or_zeros(gradients, (output, number, number, number, number)))


def _folded(
    size: int, in_dims: tuple[Any, ...], tensors: tuple[Any, ...], *, expand_bias: bool = False
) -> list[Tensor | None]:
    """Make the dimension of vmap part of the batch; tensors shared by all batches stay shared."""
    query, bias, seed = tensors[0], tensors[3], tensors[6]
    if seed is not None:
        problem = "dropout_p must be 0 under torch.func.vmap, but it is positive"
        remedy = "Make the vmapped dimension a batch dimension of query, key and value instead."
        raise InputNotImplementedError("attend", "dropout_p", problem, remedy)
    batch = query.shape[0] if in_dims[0] is None else query.movedim(in_dims[0], 0).shape[1]
    folded: list[Tensor | None] = []
    for tensor, dim in zip(tensors, in_dims, strict=True):
        if tensor is None or (
            dim is None and tensor.shape[0] == 1 and batch > 1 and not (expand_bias and tensor is bias)
        ):
            folded.append(tensor)
            continue
        stacked = tensor.unsqueeze(0).expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        folded.append(stacked.expand(size, batch, *stacked.shape[2:]).flatten(0, 1))
    return folded


# For torch.compile, which supports operators but not Functions with forward mode. ------------------------------------


Reader = Callable[[Tensor, Tensor, Tensor, Sight, Scoring, Statistics | None], None]


class _Readers(threading.local):
    """Readers of the operator's calls in this thread."""

    installed: tuple[Reader, ...] = ()


_readers = _Readers()


@contextmanager
def operator_read_by(reader: Reader) -> Iterator[None]:
    """Context in which a function gets the operands and statistics of every call of the operator, None without them.

    The operator runs inside compiled graphs: the monitor reads their statistics here, without changing a graph.
    """
    before = _readers.installed
    _readers.installed = (*before, reader)
    try:
        yield
    finally:
        _readers.installed = before


@torch.library.custom_op("gradlogz::attention", mutates_args=())
def _operator(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    segments: Tensor | None,
    seed: Tensor | None,
    scale: float,
    softcap: float | None,
    left: int | None,
    right: int | None,
    probability: float,
    statistics: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, k, v, sight, dropout = _read((query, key, value, bias, mask, segments, seed), probability)
    scoring = Scoring(scale, softcap, left, right)
    result = dispatch.forward(q, k, v, sight, scoring, dropout, statistics=statistics, separate=True)
    for reader in _readers.installed:
        reader(q, k, v, sight, scoring, result if statistics else None)
    return _as_declared(result.output, query), *map(_in_own_storage, result[1:5])  # type: ignore[return-value]


@torch.library.custom_op("gradlogz::attention_backward", mutates_args=())
def _operator_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    segments: Tensor | None,
    seed: Tensor | None,
    output: Tensor,
    log_normalizer: Tensor,
    entropy: Tensor,
    logit_variance: Tensor,
    max_logit: Tensor,
    grad_output: Tensor | None,
    grad_log_normalizer: Tensor | None,
    grad_entropy: Tensor | None,
    grad_logit_variance: Tensor | None,
    grad_max_logit: Tensor | None,
    scale: float,
    softcap: float | None,
    left: int | None,
    right: int | None,
    probability: float,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v, sight, dropout = _read((query, key, value, bias, mask, segments, seed), probability)
    result = Statistics(output, log_normalizer, entropy, logit_variance, max_logit)
    gradients = Gradients(grad_output, grad_log_normalizer, grad_entropy, grad_logit_variance, grad_max_logit)
    scoring = Scoring(scale, softcap, left, right)
    *grads, grad_bias = _gradients(q, k, v, sight, scoring, dropout, result, gradients, needs_bias)
    declared = map(_as_declared, grads, (query, key, value))
    return *declared, query.new_zeros(()) if grad_bias is None else _in_own_storage(grad_bias)  # type: ignore[return-value]


def _declared(like: Tensor, size: int) -> Tensor:
    """Empty [..., size]: in the order of `like` in memory on a GPU, where kernels store it so; else contiguous."""
    same = like.is_cuda and like.shape[-1] == size
    return torch.empty_like(like) if same else like.new_empty(*like.shape[:-1], size)


def _as_declared(tensor: Tensor, like: Tensor) -> Tensor:
    """Result of an operator with the strides of the fake result, in its own storage; copied if they differ."""
    alone = tensor.untyped_storage().nbytes() == tensor.nbytes
    if alone and tensor.stride() == like.stride():  # the usual case, in which nothing is to be done
        return tensor
    declared = _declared(like, tensor.shape[-1])
    return tensor if alone and tensor.stride() == declared.stride() else declared.copy_(tensor)


def _in_own_storage(tensor: Tensor) -> Tensor:
    """Make a tensor contiguous in its own storage, as torch requires of operators."""
    alone = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if alone else tensor.clone(memory_format=torch.contiguous_format)


@_operator.register_fake
def _(query: Tensor, _key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, ...]:
    number = torch.promote_types(query.dtype, torch.float32)
    rows = (query.new_empty(query.shape[:-1], dtype=number) for _ in range(4))
    return _declared(query, value.shape[-1]), *rows


@_operator_backward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    grad_bias = bias.new_empty(bias.shape) if rest[-1] and bias is not None else query.new_empty(())
    return *(_declared(t, t.shape[-1]) for t in (query, key, value)), grad_bias


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:7], *output)
    ctx.static = inputs[7:12]
    ctx.set_materialize_grads(False)


def _pull_back(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    needs_bias = ctx.needs_input_grad[3]
    *grads, bias = _operator_backward(*ctx.saved_tensors, *gradients, *ctx.static, needs_bias)
    return *grads, bias if needs_bias else None, *[None] * 9


_operator.register_autograd(_pull_back, setup_context=_save)


# Multiplications and additions for torch.utils.flop_counter, as torch counts those of SDPA: hidden keys are counted.


def _pair_flops(query_shape: torch.Size, size: int, keys: int) -> int:
    """Count the operations of one product of `size` numbers for every pair of a query and a key."""
    b, h, m, _ = query_shape
    return 2 * b * h * m * keys * size


@register_flop_formula(torch.ops.gradlogz.attention)
def _forward_flops(query_shape: Any, _key_shape: Any, value_shape: Any, *_: Any, **__: Any) -> int:
    """Logits and outputs."""
    d, (n, v) = query_shape[-1], value_shape[-2:]
    return _pair_flops(query_shape, d + v, n)


@register_flop_formula(torch.ops.gradlogz.attention_backward)
def _backward_flops(query_shape: Any, _key_shape: Any, value_shape: Any, *_: Any, **__: Any) -> int:
    """Logits again, and gradients of weights, values, queries and keys."""
    d, (n, v) = query_shape[-1], value_shape[-2:]
    return _pair_flops(query_shape, 3 * d + 2 * v, n)
