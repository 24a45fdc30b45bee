"""Text forms of vectors and matrices, as settings and the command line have them.

    0.5              the same number in every coordinate of a vector; a multiple of the identity
    1,-0.5           a vector; a diagonal matrix
    2,0.6/0.6,0.5    a matrix, row by row

Read next: settings.py (which parameters have them), initial_clouds.py (which makes tensors of them).
"""

from collections.abc import Sequence
from typing import Any

import torch

from .._errors import InputTypeError
from .._typing import Float, Tensor

MatrixLike = str | float | Sequence[Any] | Tensor  # a text, a number, or numbers of a vector or of the rows of a matrix


def text_of(name: str, value: MatrixLike | None) -> str | None:
    """The text of a number, vector or square matrix; a text and None are returned as they are.

    >>> text_of("key_mean", 0.5), text_of("key_covariance", [[2, 0.6], [0.6, 0.5]])
    ('0.5', '2,0.6/0.6,0.5')
    """
    if value is None or isinstance(value, str):
        return value
    try:
        numbers = None if isinstance(value, bool) else torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):  # not numbers, or rows of unequal length
        numbers = None
    if numbers is None or numbers.ndim > 2 or (numbers.ndim == 2 and numbers.shape[0] != numbers.shape[1]):
        fact = type(value).__name__ if numbers is None else f"shape {tuple(numbers.shape)}"
        problem = f"{name} must be a text, a number, a vector or a square matrix, got {fact}"
        raise InputTypeError("simulate", name, problem, "Pass a number, a list of numbers, or one list for each row.")
    rows = numbers.reshape(1, -1) if numbers.ndim < 2 else numbers
    return "/".join(",".join(_shortest(number) for number in row) for row in rows.tolist())


def vector_of(text: str, dim: int) -> Float[Tensor, " d"] | None:
    """The vector of this text; None if it has another size or is not finite.

    >>> vector_of("1,-0.5", 2)
    tensor([ 1.0000, -0.5000], dtype=torch.float64)
    """
    rows = _numbers(text)
    if rows is None or len(rows) != 1 or len(rows[0]) not in (1, dim):
        return None
    return torch.tensor(rows[0], dtype=torch.float64).expand(dim).clone()


def matrix_of(text: str, dim: int) -> Float[Tensor, "d d"] | None:
    """The square matrix of this text; None if it has another size or is not finite.

    >>> matrix_of("2,0.6/0.6,0.5", 2)
    tensor([[2.0000, 0.6000],
            [0.6000, 0.5000]], dtype=torch.float64)
    """
    rows = _numbers(text)
    if rows is None:
        return None
    if len(rows) == 1 and len(rows[0]) in (1, dim):
        return torch.diag(torch.tensor(rows[0], dtype=torch.float64).expand(dim))
    if len(rows) != dim or any(len(row) != dim for row in rows):
        return None
    return torch.tensor(rows, dtype=torch.float64)


def _shortest(number: float) -> str:
    return f"{number:g}" if float(f"{number:g}") == number else repr(number)


def _numbers(text: str) -> list[list[float]] | None:
    try:
        rows = [[float(word) for word in row.split(",")] for row in text.split("/")]
    except ValueError:  # not a number
        return None
    finite = all(abs(value) < float("inf") for row in rows for value in row)
    return rows if finite else None
