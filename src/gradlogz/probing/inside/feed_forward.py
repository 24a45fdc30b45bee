"""Feed-forward maps: their matrices and activation function, recognised by behaviour.

    u = a W_2 + b_2      a = f(z W_1 + b_1)                                    z: input of the sublayer, u: its update
                         a = f(z W_g + b_g) * (z W_1 + b_1)                    gated

A module of a branch reads the input if its output determines the input of the last matrix, unit by unit. Fused
matrices, whose output is gate and reading side by side, are divided. There is no table of architectures.

Read next: architecture.py (the record), ../predictions/feed_forward_hopfield.py, which compares W_1 and W_2.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import permutations
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from ..._typing import Float, Tensor
from .architecture import FeedForward, OutputColumns
from .offloading import device_of, present

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda h: functional.gelu(h, approximate="tanh"),
    "silu": functional.silu,
    "quick_gelu": lambda h: h * torch.sigmoid(1.702 * h),
    "squared relu": lambda h: torch.relu(h).square(),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "elu": functional.elu,
    "leaky_relu": functional.leaky_relu,
    "linear": lambda h: h,
}
ROUNDING, UNITS = 1e-5, 4.0  # relative tolerance; its minimum in units of eps


class MatrixCall(NamedTuple):
    """A call of a module with a matrix: its name, its input and its output."""

    module: str
    input: Tensor
    output: Tensor


def feed_forward_of(calls: list[MatrixCall], inputs: list[Tensor]) -> FeedForward | None:
    """Return the form of a feed-forward branch with these matrices in order; None if it is not one of the two forms.

    inputs: tensors that may be the input of the branch.
    """
    if not 2 <= len(calls) <= 3:
        return None
    *readers, last = calls
    if not all(any(_same(r.input, t) for t in inputs) for r in readers):
        return None
    size = last.input.shape[-1]
    read = [
        (
            OutputColumns(r.module, start, start + size),
            r.output.reshape(-1, r.output.shape[-1])[:, start : start + size],
        )
        for r in readers
        for start in range(0, r.output.shape[-1] - size + 1, size)
    ]
    a = last.input.reshape(-1, size)
    if len(read) == 1 and len(readers) == 1:
        ((reading, h),) = read
        name, error = _nearest({name: f(h) for name, f in ACTIVATIONS.items()}, a)
        return FeedForward(reading, None, last.module, name) if error <= _rounding(a) else None
    if len(read) != 2:
        return None
    forms = {}
    for (gate, g), (reading, h) in permutations(read):
        name, error = _nearest({name: f(g) * h for name, f in ACTIVATIONS.items()}, a)
        forms[error] = FeedForward(reading, gate, last.module, name)
    return forms[min(forms)] if min(forms) <= _rounding(a) else None


def _same(a: Tensor, b: Tensor) -> bool:
    return a.numel() == b.numel() and a.dtype == b.dtype and torch.equal(a.flatten(), b.flatten())


def _nearest(candidates: Mapping[str, Tensor], a: Tensor) -> tuple[str, float]:
    """Return the name of the candidate nearest to a tensor, and its largest error relative to the largest entry."""
    size = float(a.abs().max())
    errors = {name: float((t - a).abs().max()) / max(size, torch.finfo(a.dtype).tiny) for name, t in candidates.items()}
    name = min(errors, key=lambda each: errors[each])
    return name, errors[name]


def _rounding(a: Tensor) -> float:
    return max(ROUNDING, UNITS * torch.finfo(a.dtype).eps)


class FeedForwardMap(NamedTuple):
    """The modules of a feed-forward map of a model.

    Modules are run by `forward`, so that no hook takes it for a part of the pass of the model.
    """

    form: FeedForward
    modules: Mapping[str, nn.Module]

    @property
    def activation(self) -> Callable[[Tensor], Tensor]:
        """The activation function."""
        return ACTIVATIONS[self.form.activation]

    def read(self, columns: OutputColumns, z: Float[Tensor, "... D"]) -> Float[Tensor, "... H"]:
        """Return the part z W + b of a reading matrix."""
        out: Tensor = self.modules[columns.module].forward(z)
        return out[..., columns.start : columns.stop]

    def matrix(self, columns: OutputColumns, width: int) -> Float[Tensor, "D H"]:
        """Return a reading matrix, for inputs of this width."""
        return _matrix(self.modules[columns.module], width)[:, columns.start : columns.stop]

    @property
    def output(self) -> Float[Tensor, "H D"]:
        """W_2, one row for each hidden unit."""
        return _matrix(self.modules[self.form.second], self.form.first.stop - self.form.first.start)


def _matrix(module: nn.Module, inputs: int) -> Float[Tensor, "i o"]:
    """Return the matrix of an affine module; that of unusual modules from the unit vectors."""
    if type(module) is nn.Linear:
        with present(module):
            return module.weight.detach().mT
    like = next(p for p in module.parameters() if p.ndim >= 2)
    dtype = like.dtype if like.is_floating_point() else torch.get_default_dtype()
    unit = torch.eye(inputs, dtype=dtype, device=device_of(module))
    W: Tensor = module.forward(unit) - module.forward(torch.zeros_like(unit[:1]))
    return W


def maps_of(model: nn.Module, forms: Mapping[str, FeedForward]) -> dict[str, FeedForwardMap]:
    """Return the modules of each recognised feed-forward sublayer."""
    return {
        name: FeedForwardMap(form, {n: model.get_submodule(n) for n in _names(form)}) for name, form in forms.items()
    }


def _names(form: FeedForward) -> Iterator[str]:
    yield form.first.module
    if form.gate is not None:
        yield form.gate.module
    yield form.second
