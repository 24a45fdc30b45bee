"""Arguments of the losses, checked once: one sentence each.

Shapes, dtypes and devices are always looked at; values only where they can be read without waiting for a device.
"""

import torch

from .._errors import InputTypeError, InputValueError, has_values, present, shape_of
from .._typing import Float, Int, Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
REDUCTIONS = ("mean", "sum", "none")


def check_vectors(call: str, **given: Tensor | None) -> None:
    """All are [m, d] with one d, of one floating dtype, on one device."""
    vectors = present(**given)
    for name, t in vectors.items():
        if not isinstance(t, Tensor):
            remedy = "Wrap it in torch.as_tensor."
            raise InputTypeError(call, name, f"{name} must be a tensor, got {type(t).__name__}", remedy)
        if t.dtype not in FLOATS:
            remedy = f"Convert it with {name}.float()."
            raise InputTypeError(call, name, f"{name} must be of a floating dtype, got {t.dtype}", remedy)
        if t.ndim != 2:
            remedy = "Flatten what comes before the last dimension."
            raise InputValueError(call, name, f"{name} must be [m, d], got shape {shape_of(t)}", remedy)
        if t.shape[0] == 0:
            remedy = "Skip the batch, or pass at least one vector."
            raise InputValueError(call, name, f"{name} must hold at least one vector, got shape {shape_of(t)}", remedy)
    check_alike(call, **vectors)
    if len({t.shape[1] for t in vectors.values()}) > 1:
        fact = ", ".join(f"{name} {shape_of(t)}" for name, t in vectors.items())
        remedy = "Project one side to the dimension of the other."
        raise InputValueError(call, "vectors", f"vectors must have one dimension d, got {fact}", remedy)


def check_alike(call: str, **given: Tensor) -> None:
    """All on one device, and all that are floating of one dtype."""
    if len({t.device for t in given.values()}) > 1:
        fact = ", ".join(f"{name} on {t.device}" for name, t in given.items())
        raise InputValueError(
            call, None, f"tensors must be on one device, got {fact}", "Move one of them with .to(device)."
        )
    if len({t.dtype for t in given.values() if t.is_floating_point()}) > 1:
        fact = ", ".join(f"{name} {t.dtype}" for name, t in given.items())
        raise InputTypeError(
            call, None, f"tensors must share one dtype, got {fact}", "Convert one of them with .to(dtype)."
        )


def check_rows(call: str, name: str, given: Tensor, rows: int, of: str) -> None:
    """Something has one row for each of others."""
    if given.shape[0] != rows:
        remedy = f"Pass one row for each of {of}."
        raise InputValueError(call, name, f"{name} must have {rows} rows, as {of}, got shape {shape_of(given)}", remedy)


def check_integers(call: str, name: str, given: Tensor, shape: tuple[int, ...], beside: Tensor) -> None:
    """Labels or indices: integers of this shape, on the device of what they belong to."""
    if not isinstance(given, Tensor) or given.dtype not in INTEGERS:
        fact = f"{given.dtype}" if isinstance(given, Tensor) else type(given).__name__
        raise InputTypeError(call, name, f"{name} must be a tensor of integers, got {fact}", "Convert it with .long().")
    if tuple(given.shape) != shape:
        remedy = "Pass one for each vector."
        raise InputValueError(call, name, f"{name} must have shape {shape}, got shape {shape_of(given)}", remedy)
    if given.device != beside.device:
        fact = f"{given.device} and {beside.device}"
        remedy = "Move it with .to(device)."
        raise InputValueError(call, name, f"{name} must be on the device of the vectors, got {fact}", remedy)


def check_indices(call: str, name: str, given: Int[Tensor, "..."], count: int) -> None:
    """Every index is one of `count` candidates."""
    if readable(given) and given.numel() and not bool(((given >= 0) & (given < count)).all()):
        fact = f"indices from {int(given.min())} to {int(given.max())}"
        remedy = "Count candidates from 0."
        raise InputValueError(call, name, f"{name} must be indices of the {count} candidates, got {fact}", remedy)


def check_temperature(call: str, temperature: float | Float[Tensor, ""], beside: Tensor) -> None:
    """One number above zero."""
    if isinstance(temperature, Tensor):
        if temperature.numel() != 1:
            fact = f"shape {shape_of(temperature)}"
            remedy = "Divide the anchors by their own temperatures instead."
            raise InputValueError(call, "temperature", f"temperature must be one number, got {fact}", remedy)
        if temperature.device != beside.device and temperature.device.type != "cpu":
            fact = f"{temperature.device} and {beside.device}"
            remedy = "Move it with .to(device)."
            raise InputValueError(
                call, "temperature", f"temperature must be on the device of the vectors, got {fact}", remedy
            )
        if not readable(temperature):
            return
        temperature = temperature.item()
    if not 0 < temperature < float("inf"):
        remedy = "Pass a positive number; small ones sharpen."
        raise InputValueError(call, "temperature", f"temperature must be above 0 and finite, got {temperature}", remedy)


def check_precision(call: str, precision: torch.dtype | None) -> None:
    """None, or a half precision."""
    if precision not in (None, torch.bfloat16, torch.float16):
        remedy = "Leave it out: the vectors then meet in their own."
        raise InputValueError(
            call, "precision", f"precision must be torch.bfloat16 or torch.float16, got {precision}", remedy
        )


def check_choice(call: str, name: str, given: str, choices: tuple[str, ...]) -> None:
    """One of a few words."""
    if given not in choices:
        remedy = "Pass one of those words."
        raise InputValueError(call, name, f"{name} must be one of {', '.join(choices)}, got {given!r}", remedy)


def readable(*tensors: Tensor) -> bool:
    """Whether values can be looked at without waiting for a device."""
    return all(t.device.type == "cpu" for t in tensors) and has_values(*tensors)


def reduced(call: str, losses: Float[Tensor, " m"], reduction: str) -> Tensor:
    """The mean, the sum, or all of them."""
    check_choice(call, "reduction", reduction, REDUCTIONS)
    return losses.mean() if reduction == "mean" else losses.sum() if reduction == "sum" else losses


def wide(tensor: Tensor) -> Tensor:
    """Half precision as float32: logits of size 1 / temperature do not fit into fewer digits."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def unit(vectors: Float[Tensor, "m d"]) -> Float[Tensor, "m d"]:
    """x / |x|, of any length from the smallest to the largest number; the zero vector stays, without gradient.

    A constant factor in front changes neither the direction nor its derivative.
    """
    largest = vectors.detach().abs().amax(-1, keepdim=True)
    x = vectors / largest.where(largest > 0, 1.0)
    square = x.square().sum(-1, keepdim=True)
    return x * torch.where(square > 0, square.where(square > 0, 1.0).rsqrt(), 0.0)
