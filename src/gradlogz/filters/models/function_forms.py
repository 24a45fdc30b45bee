"""Models as the compiled filters of built-in functions take them (../../kernels/filters/functions.py).

    with_form             mark a function with its form
    packed_functions      forms of all modes as arrays; None if a function has none
    linear_functions      the same for k linear functions

Read next: ../../kernels/filters/forms.py (the forms), nonlinear_model.py.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..._typing import Bool, Float, Tensor
from ...kernels.filters.forms import LINEAR, OWN, TURN, FunctionForm
from ...kernels.optional import kernel_module
from .discretization import discretize_steps

PLACES, NUMBERS = 9, 4  # code, number of places and up to 7 places (OWN: code and address); step and origin


def with_form(function: Callable[..., Tensor], form: FunctionForm) -> Callable[..., Tensor]:
    """Mark a function with its form and return it."""
    function.form = form  # type: ignore[attr-defined]
    return function


class PackedFunctions(NamedTuple):
    """Forms of the functions of all modes.

    Attributes:
        matrices: F, H, b and d of linear functions, with a first dimension of size 1; 0 for other functions.
        move, observe: code, number of places and places of the function of each mode; of OWN code and address.
        numbers: step of turns and origin of sensors, of each mode, with a first dimension of size 1 or of targets.
        angles: mask of the components of an observation that are angles.
        is_flow: whether motions are flows, which take the duration of the step.
        is_turn: mask of the modes whose motion is a turn.
    """

    matrices: dict[str, Tensor]
    move: Any
    observe: Any
    numbers: Any
    angles: Any
    is_flow: bool
    is_turn: Bool[Tensor, "k 1 1"]

    def over(
        self, dt: Float[Tensor, "n"], Q: Float[Tensor, "1 k s s"]
    ) -> "tuple[PackedFunctions, Float[Tensor, 'n k s s'], Float[Tensor, 'n k s s']]":
        """Functions of steps of length dt, with matrices and noise of linear flows.

        Turns keep the spectral density, since their noise turns with the state.
        """
        F, noise = discretize_steps(self.matrices["F"][0], Q[0], dt)
        numbers = self.numbers.repeat(len(dt), 0)
        numbers[:, :, 0] = dt.detach().numpy()[:, None]
        return self._replace(numbers=numbers), F, torch.where(self.is_turn, Q, noise)


def packed_functions(
    move: Sequence[Callable[..., Tensor]],
    observe: Sequence[Callable[..., Tensor]],
    residual: Callable[[Tensor, Tensor], Tensor] | None,
    like: Float[Tensor, "*#t k s s"],
    observation_size: int,
) -> PackedFunctions | None:
    """Forms of the functions of all modes; None if one has no form, or one that needs derivatives."""
    forms: list[list[Any]] = [[getattr(f, "form", None) for f in functions] for functions in (move, observe)]
    has_angles = residual is None or hasattr(residual, "angles")
    if not has_angles or any(form is None for form in (*forms[0], *forms[1])):
        return None
    flows = {form.is_flow for form in forms[0]}
    if len(flows) > 1:
        return None
    if any(isinstance(n, Tensor) and n.requires_grad for kind in forms for form in kind for n in form.numbers):
        return None
    s, o = like.shape[-1], observation_size
    if not all(form.fits(size, s) for kind, size in zip(forms, (s, o), strict=True) for form in kind):
        return None
    matrices: list[Any] = []
    offsets: list[Any] = []
    codes: list[Any] = []
    numbers = torch.zeros(len(move), NUMBERS, dtype=torch.float64, device="cpu")
    for kind, size, start in zip(forms, (s, o), (0, 1), strict=True):
        matrices.append(torch.stack([like.new_zeros(size, s) if f.matrix is None else f.matrix for f in kind])[None])
        offsets.append(torch.stack([like.new_zeros(size) if f.offset is None else f.offset for f in kind])[None])
        table = torch.zeros(len(kind), PLACES, dtype=torch.int64, device="cpu")
        for j, form in enumerate(kind):
            row = (form.code, len(form.places), *form.places)
            if form.code == OWN:
                kernel = kernel_module("gradlogz.kernels.filters.own_functions", "numba")
                compiled = kernel and kernel.as_c_function(
                    form.function, form.places, s, size, is_motion=kind is forms[0]
                )
                if compiled is None:
                    return None
                row = (OWN, compiled.address)
            table[j, : len(row)] = torch.tensor(row, device="cpu")
            for i, number in enumerate(form.numbers):
                numbers[j, start + i] = float(number)
        codes.append(table.numpy())
    angles = torch.zeros(o, dtype=torch.bool, device="cpu")
    angles[list(getattr(residual, "angles", ()))] = True
    tensors = dict(zip("FHbd", (*matrices, *offsets), strict=True))
    move_codes, observe_codes = codes
    is_turn = torch.from_numpy(move_codes[:, 0] == TURN)[:, None, None]
    return PackedFunctions(
        tensors, move_codes, observe_codes, numbers.numpy()[None], angles.numpy(), flows.pop(), is_turn
    )


@functools.lru_cache(maxsize=64)
def linear_functions(k: int, o: int) -> PackedFunctions:
    """k linear functions without their matrices, for observations of size o without angles."""
    codes = torch.full((k, PLACES), LINEAR, dtype=torch.int64, device="cpu").numpy()
    numbers = torch.zeros(1, k, NUMBERS, dtype=torch.float64, device="cpu").numpy()
    angles, is_turn = (torch.zeros(size, dtype=torch.bool, device="cpu") for size in ((o,), (k, 1, 1)))
    return PackedFunctions({}, codes, codes, numbers, angles.numpy(), False, is_turn)
