"""Functions of a state that their users compile with numba: `@njit` functions from an array [s] to an array.

The compiled filters call them (../../kernels/filters/own_functions.py). Where these do not apply, as in smoothers, the
class of this file calls them for one state after the other. They have no derivatives.

Read next: nonlinear_model.py, function_forms.py.
"""

import dataclasses
import functools
import sys
from typing import Any

import numpy
import torch

from ..._errors import InputTypeError
from ..._typing import Float, Tensor
from ...kernels.filters.forms import OWN, FunctionForm


def is_compiled(function: Any) -> bool:
    """Return True if numba compiled the function."""
    if "numba" not in sys.modules:
        return False
    from numba.extending import is_jitted

    return bool(is_jitted(function))


@functools.lru_cache(maxsize=256)  # modes that share a function share the result
def for_torch(function: Any, state_size: int) -> Any:
    """Make a function of tensors from a function that numba compiled; others are returned as they are."""
    return OwnFunction(function, state_size) if is_compiled(function) else function


@dataclasses.dataclass(frozen=True)
class OwnFunction:
    """A function compiled by numba, of a state with state_size components, as a function of tensors."""

    function: Any
    state_size: int

    @property
    def form(self) -> FunctionForm:
        """Form for the compiled filters."""
        return FunctionForm(
            OWN, places=tuple(range(self.state_size)), state_size=self.state_size, function=self.function
        )

    @property
    def __name__(self) -> str:
        return str(self.function.__name__)

    def __call__(self, state: Float[Tensor, "*b s"], *more: Tensor) -> Tensor:
        result: Tensor = _Evaluation.apply(self.function, state, *more)
        return result


class _Evaluation(torch.autograd.Function):
    """Values of a function compiled by numba, one vector after the other."""

    @staticmethod
    def forward(function: Any, *arguments: Tensor) -> Tensor:
        first, lead = arguments[0], arguments[0].shape[:-1]
        arrays = [a.detach().to("cpu", torch.float64).reshape(-1, a.shape[-1]).numpy() for a in arguments]
        rows = [numpy.array(function(*(v.copy() for v in row)), dtype=float) for row in zip(*arrays, strict=True)]
        return first.new_tensor(numpy.stack(rows).reshape(*lead, *rows[0].shape))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def vmap(info: Any, in_dims: Any, function: Any, *arguments: Tensor) -> tuple[Tensor, int]:
        pairs = zip(arguments, in_dims[1:], strict=True)
        batched = [a.expand(info.batch_size, *a.shape) if at is None else a.movedim(at, 0) for a, at in pairs]
        return _Evaluation.apply(function, *batched), 0

    @staticmethod
    def backward(*_: Any) -> Any:
        raise _no_derivatives()

    @staticmethod
    def jvp(*_: Any) -> Any:
        raise _no_derivatives()


def _no_derivatives() -> InputTypeError:
    problem = "functions compiled by numba have no derivatives"
    return InputTypeError("NonlinearModel", "move", problem, "Write the functions in torch.")
