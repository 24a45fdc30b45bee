"""Forms of the functions that the compiled filters of functions.py know.

    LINEAR                      matrix x + offset; for a flow exp(matrix dt) x
    TURN                        places: x, x', y, y', then z, z' in space, then the rate; numbers: dt, none for a flow
    RANGE_BEARING               places: x, y; numbers: the origin
    RANGE_BEARING_ELEVATION     places: x, y, z; numbers: the origin
    OWN                         a function that its user compiled with numba, of the components at `places`

A built-in function carries its form as an attribute `form`; a difference of observations with angles carries the places
of its angles as `angles`. Functions without a form are evaluated by torch.

Read next: functions.py (the filters), ../../filters/models/nonlinear_motion.py (the functions).
"""

from typing import Any, NamedTuple

from ..._typing import Float, Tensor

LINEAR, TURN, RANGE_BEARING, RANGE_BEARING_ELEVATION, OWN = range(5)

# Gauss-Legendre nodes and weights on [0, 1]: exact to degree 15, and to 1e-10 for a turn by six radians.
NODES = (
    0.0198550717512319,
    0.1016667612931866,
    0.2372337950418355,
    0.4082826787521751,
    0.5917173212478249,
    0.7627662049581645,
    0.8983332387068134,
    0.9801449282487681,
)
WEIGHTS = (
    0.0506142681451882,
    0.1111905172266872,
    0.1568533229389437,
    0.1813418916891810,
    0.1813418916891810,
    0.1568533229389437,
    0.1111905172266872,
    0.0506142681451882,
)


class FunctionForm(NamedTuple):
    """Code of a function of a state, and its parameters."""

    code: int
    matrix: Float[Tensor, "o s"] | None = None
    offset: Float[Tensor, "o"] | None = None
    places: tuple[int, ...] = ()
    numbers: tuple[float | Tensor, ...] = ()
    is_flow: bool = False  # takes the duration of the step; the matrix is a drift
    state_size: int | None = None  # of states for which the form holds; None for all
    function: Any = None  # compiled by numba

    def fits(self, size: int, state_size: int) -> bool:
        """Return True if the form holds for states of this size and results of the given size."""
        if self.matrix is not None:
            return self.matrix.shape == (size, state_size)
        return self.state_size in (None, state_size)

    def embedded(self, indices: list[int], E: Float[Tensor, "n s"], *, is_motion: bool) -> "FunctionForm":
        """Form of the same function for a mode whose components are at `indices` of the full state, E its embedding."""
        if self.matrix is not None:
            matrix = self.matrix @ E.mT
            if not is_motion:
                return self._replace(matrix=matrix)
            return self._replace(matrix=E @ matrix, offset=None if self.offset is None else E @ self.offset)
        size = None if self.state_size is None else E.shape[0]
        return self._replace(places=tuple(indices[place] for place in self.places), state_size=size)
