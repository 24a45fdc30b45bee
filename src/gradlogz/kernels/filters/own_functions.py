"""Functions of users, compiled by numba, as C functions that the compiled filters of functions.py call by address.

Read next: functions.py (the filters), ../../filters/models/own_functions.py (the same functions on the torch path).
"""

import math
from functools import cache
from typing import Any

import numpy
from numba import carray, cfunc, types
from numba.core.errors import NumbaError

POINTER = types.CPointer(types.float64)


@cache  # never dropped: models hold the addresses
def as_c_function(function: Any, places: tuple[int, ...], state_size: int, size: int, *, is_motion: bool) -> Any:
    """Make a C function (state, result) that calls a function of the components at `places`; None if it has no types.

    A motion writes these components, and 0 elsewhere. After an exception of the function the result is NaN.
    """
    count = len(places)

    def through(state: Any, result: Any) -> None:
        x, out = carray(state, (state_size,)), carray(result, (size,))
        part = numpy.empty(count)  # a copy: the function may write to it
        for i in range(count):
            part[i] = x[places[i]]
        try:
            y = function(part)
            if is_motion:
                out[:] = 0.0
                for i in range(count):
                    out[places[i]] = y[i]
            else:
                for i in range(size):
                    out[i] = y[i]
        except Exception:  # the torch path raises it again
            out[:] = math.nan

    try:
        return cfunc(types.void(POINTER, POINTER))(through)
    except NumbaError:  # such as a tuple of several types
        return None
