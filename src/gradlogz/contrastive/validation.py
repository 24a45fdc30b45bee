"""Checks of the arguments of the losses.

Shapes, dtypes and devices are always checked; values only where reading them does not synchronise a device.
"""

import math

import torch

from .._errors import InputTypeError, InputValueError, has_values, present, shape_of
from .._typing import Float, Int, Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FLOAT32 = {torch.float32}
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
Ids = Int[Tensor, " m"] | tuple[Int[Tensor, " m"], Int[Tensor, " n"]]
REDUCTIONS = ("mean", "sum", "none")


def check_vectors(call: str, *, may_be_empty: str | None = None, **tensors: Tensor | None) -> None:
    """Check that all tensors are floating [m, d] with the same d, on one device; all but one with at least one row."""
    vectors = present(**tensors)
    width = device = None
    for t in vectors.values():
        if not (isinstance(t, Tensor) and t.ndim == 2 and t.dtype in FLOATS and t.shape[0]):
            break
        if width is None:
            width, device = t.shape[1], t.device
        elif t.shape[1] != width or t.device != device:
            break
    else:
        return
    for name, t in vectors.items():
        if not isinstance(t, Tensor):
            remedy = "Wrap it in torch.as_tensor."
            raise InputTypeError(call, name, f"{name} must be a tensor, got {type(t).__name__}", remedy)
        if t.dtype not in FLOATS:
            remedy = f"Convert it with {name}.float()."
            raise InputTypeError(call, name, f"{name} must have a floating dtype, got {t.dtype}", remedy)
        if t.ndim != 2:
            remedy = "Flatten the leading dimensions."
            raise InputValueError(call, name, f"{name} must be [m, d], got shape {shape_of(t)}", remedy)
        if t.shape[0] == 0 and name != may_be_empty:
            remedy = "Skip the batch, or pass at least one vector."
            raise InputValueError(call, name, f"{name} must hold at least one vector, got shape {shape_of(t)}", remedy)
    check_device(call, **vectors)
    if len({t.shape[1] for t in vectors.values()}) > 1:
        fact = ", ".join(f"{name} {shape_of(t)}" for name, t in vectors.items())
        remedy = "Project one side to the dimension of the other."
        raise InputValueError(call, None, f"tensors must have the same last dimension, got {fact}", remedy)


def check_device(call: str, **tensors: Tensor) -> None:
    """Check that all tensors are on one device."""
    if len({t.device for t in tensors.values()}) > 1:
        fact = ", ".join(f"{name} on {t.device}" for name, t in tensors.items())
        raise InputValueError(
            call, None, f"tensors must be on one device, got {fact}", "Move one of them with .to(device)."
        )


def check_rows(call: str, name: str, tensor: Tensor, rows: int, other: str) -> None:
    """Check that a tensor has as many rows as another one."""
    if tensor.shape[0] != rows:
        remedy = f"Pass one row for each row of {other}."
        problem = f"{name} must have {rows} rows like {other}, got shape {shape_of(tensor)}"
        raise InputValueError(call, name, problem, remedy)


def check_integers(call: str, name: str, tensor: Tensor, shape: tuple[int, ...], vectors: Tensor) -> None:
    """Check that labels or indices are integers of this shape, on the device of the vectors."""
    if not isinstance(tensor, Tensor) or tensor.dtype not in INTEGERS:
        fact = f"{tensor.dtype}" if isinstance(tensor, Tensor) else type(tensor).__name__
        remedy = "Convert it with .long()." if isinstance(tensor, Tensor) else "Wrap it in torch.as_tensor."
        raise InputTypeError(call, name, f"{name} must be a tensor of integers, got {fact}", remedy)
    if tuple(tensor.shape) != shape:
        remedy = "Pass one integer for each vector."
        raise InputValueError(call, name, f"{name} must have shape {shape}, got shape {shape_of(tensor)}", remedy)
    if tensor.device != vectors.device:
        fact = f"{tensor.device} and {vectors.device}"
        remedy = "Move it with .to(device)."
        raise InputValueError(call, name, f"{name} must be on the device of the vectors, got {fact}", remedy)


def check_numbers(
    call: str, name: str, tensor: Tensor, shape: tuple[int, ...], remedy: str, **vectors: Float[Tensor, "n d"]
) -> None:
    """Check that numbers have a floating dtype and this shape, on the device of the vectors."""
    if not isinstance(tensor, Tensor) or tuple(tensor.shape) != shape or not tensor.is_floating_point():
        known = isinstance(tensor, Tensor)
        fact = f"{tensor.dtype} of shape {shape_of(tensor)}" if known else type(tensor).__name__
        raise InputValueError(call, name, f"{name} must be floating and have shape {shape}, got {fact}", remedy)
    check_device(call, **vectors, **{name: tensor})


def check_log_weights(call: str, log_weights: Tensor, **candidates: Float[Tensor, "n d"]) -> None:
    """Check that there is a log weight for each candidate."""
    (vectors,) = candidates.values()
    remedy = "Pass one log weight for each candidate."
    check_numbers(call, "log_weights", log_weights, (vectors.shape[0],), remedy, **candidates)


def check_indices(call: str, name: str, tensor: Int[Tensor, "..."], count: int, nouns: str = "candidates") -> None:
    """Check that every index is one of `count` candidates."""
    if readable(tensor) and tensor.numel() and not bool(((tensor >= 0) & (tensor < count)).all()):
        fact = f"indices from {int(tensor.min())} to {int(tensor.max())}"
        remedy = f"Use indices from 0 to {count - 1}."
        raise InputValueError(call, name, f"{name} must be indices of the {count} {nouns}, got {fact}", remedy)


def check_temperature(call: str, temperature: float | Float[Tensor, ""], vectors: Tensor) -> None:
    """Check that the temperature is one positive finite number."""
    if isinstance(temperature, Tensor):
        if temperature.numel() != 1:
            fact = f"shape {shape_of(temperature)}"
            remedy = "For one temperature per anchor, divide the anchors by their temperatures."
            raise InputValueError(call, "temperature", f"temperature must be one number, got {fact}", remedy)
        if temperature.device != vectors.device and temperature.device.type != "cpu":
            fact = f"{temperature.device} and {vectors.device}"
            remedy = "Move it with .to(device)."
            raise InputValueError(
                call, "temperature", f"temperature must be on the device of the vectors, got {fact}", remedy
            )
        if not readable(temperature):
            return
        temperature = temperature.item()
    if not 0 < temperature < float("inf"):
        remedy = "Pass a positive number; small values sharpen the distribution."
        raise InputValueError(
            call, "temperature", f"temperature must be positive and finite, got {temperature}", remedy
        )


def in_dtype_of(vectors: Tensor, temperature: float | Float[Tensor, ""]) -> float | Float[Tensor, ""]:
    """The temperature, if it is a tensor, without dimensions and in the dtype of the vectors.

    float64 losses of a float32 parameter are otherwise rounded where the temperature enters more than once.
    """
    return temperature.reshape(()).to(vectors.dtype) if isinstance(temperature, Tensor) else temperature


def check_positive(call: str, **numbers: float) -> None:
    """Check that numbers are positive and finite."""
    for name, number in numbers.items():
        if not 0 < number < float("inf"):
            problem = f"{name} must be positive and finite, got {number}"
            raise InputValueError(call, name, problem, "Pass a positive number.")


def check_precision(call: str, precision: torch.dtype | None) -> None:
    """Check that the precision is None or a half precision."""
    if precision not in (None, torch.bfloat16, torch.float16):
        remedy = "Drop it to use the dtype of the vectors."
        raise InputValueError(
            call, "precision", f"precision must be torch.bfloat16 or torch.float16, got {precision}", remedy
        )


def check_choice(call: str, name: str, choice: str, choices: tuple[str, ...]) -> None:
    """Check that a string is one of the choices."""
    if choice not in choices:
        remedy = "Pass one of these names."
        raise InputValueError(call, name, f"{name} must be one of {', '.join(choices)}, got {choice!r}", remedy)


def readable(*tensors: Tensor) -> bool:
    """True if the values can be read without synchronising a device."""
    return all(t.device.type == "cpu" for t in tensors) and has_values(*tensors)


def reduced(call: str, losses: Float[Tensor, " m"], reduction: str) -> Tensor:
    """The mean of the losses, their sum, or the losses themselves."""
    check_choice(call, "reduction", reduction, REDUCTIONS)
    return losses.mean() if reduction == "mean" else losses.sum() if reduction == "sum" else losses


def wide(tensor: Tensor) -> Tensor:
    """Convert half precision to float32, since logits of size 1 / temperature need more digits."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def promoted(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in one dtype, the widest of theirs and at least float32."""
    dtypes = {t.dtype for t in tensors}
    if dtypes == FLOAT32:
        return tensors
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    return tuple(t if t.dtype == dtype else t.to(dtype) for t in tensors)


def unit(vectors: Float[Tensor, "m d"]) -> Float[Tensor, "m d"]:
    """x / |x| without overflow or underflow; the zero vector stays, with zero gradient.

    The preliminary scaling by a constant changes neither the direction nor its derivative.
    """
    largest = torch.linalg.vector_norm(vectors.detach(), math.inf, -1, keepdim=True)
    x = vectors / largest.masked_fill_(largest == 0, math.inf)
    return x * x.square().sum(-1, keepdim=True).clamp_min(0.5).rsqrt()  # at least 1, or 0 for the zero vector
