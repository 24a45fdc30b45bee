"""What all statistics share where they meet tensors and each other: float64, and equal shapes."""

from typing import Any

from ..._errors import sentence
from ..._typing import Tensor


def double(tensor: Tensor) -> Tensor:
    """In float64, where the tensor is; on the CPU if its device has no float64."""
    return tensor.cpu().double() if tensor.device.type == "mps" else tensor.double()


def check_alike(call: str, one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    """Statistics of one kind have the same shapes: tensors of other shapes could be broadcast, silently wrong."""
    shapes = [tuple(None if t is None else tuple(t.shape) for t in fields) for fields in (one, other)]
    if shapes[0] != shapes[1]:
        fact = " and ".join(", ".join(map(str, each)) for each in shapes)
        remedy = "Merge statistics of the same quantity of the same layer."
        raise ValueError(sentence(call, "both must have the same shapes", fact, remedy))
