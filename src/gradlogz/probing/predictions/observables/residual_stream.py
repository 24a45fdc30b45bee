"""The residual stream at its sublayer boundaries: before every sublayer, and at the end.

    x_0 -> sublayer -> x_1 -> sublayer -> ... -> x_end        post-norm models: after their norms

A stack is a sequence of sublayers over the same tokens: encoder and decoder are two stacks. The end is that of the last
stack; in a pre-norm model it is before the final norm. On pages, a depth is a boundary before an attention sublayer, or
the end.

Read next: ../../inside/events.py, ../gaussianity.py and ../pair_energy.py.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...._typing import Bool, Float, Tensor
from ...batch_pass import BatchPass
from ...inside.architecture import Norm
from ...inside.events import Event, ForwardOutput, Normed, Passed

END = "end"


class Depth(NamedTuple):
    """The residual stream at one sublayer boundary, with the mask of its real tokens.

    layer: name of the next sublayer, or "end". attention: true if that is an attention sublayer.
    """

    layer: str
    attention: bool
    stack: str
    stream: Float[Tensor, "b n D"]
    mask: Bool[Tensor, "b n"]


@dataclass
class _Progress:
    """Progress of a batch through the model: the last stream, the norm after it, and its stack."""

    before: Tensor | None = None
    follows: Norm | None = None
    end: Tensor | None = None
    stack: str | None = None
    shape: torch.Size | None = None
    mask: Tensor | None = None


def depth_of(event: Event | ForwardOutput, batch_pass: BatchPass) -> Depth | None:
    """The sublayer boundary that an event reaches, or None.

    A feed-forward map parallel to an attention sublayer reads the same stream and has no boundary of its own.
    """
    return batch_pass.once(event, "depth", lambda: _depth(event, batch_pass))


def _depth(event: Event | ForwardOutput, batch_pass: BatchPass) -> Depth | None:
    here = batch_pass.memory(_Progress)
    if isinstance(event, Passed):
        before, here.before = here.before, event.stream
        here.follows, here.end = event.sublayer.follows, event.after
        attention, shape = event.sublayer.kind == "attention", event.stream.shape
        if attention and len(shape) == 3 and shape[0] == len(batch_pass.batch.keys):
            stack = f"{stack_of(event.sublayer.name)} {shape[2]}"
            if (stack, shape) != (here.stack, here.shape):
                here.stack, here.shape, here.mask = stack, shape, batch_pass.real(event)
        if before is event.stream:
            return None
        return _arrived(event.sublayer.name, attention, event.stream, here)
    if isinstance(event, Normed):
        follows = here.follows
        if follows is not None and (follows.name, follows.call) == (event.norm.name, event.norm.call):
            here.end = event.result
    elif isinstance(event, ForwardOutput) and here.end is not None:
        return _arrived(END, False, here.end, here)
    return None


def _arrived(layer: str, attention: bool, stream: Tensor, here: _Progress) -> Depth | None:
    """The boundary with its stream as [b, n, D], which some models flatten to [b n, D]; None for other tokens."""
    shape = here.shape
    if here.stack is None or here.mask is None or shape is None:
        return None
    if stream.shape not in (shape, (shape[0] * shape[1], shape[2])):
        return None
    return Depth(layer, attention, here.stack, stream.reshape(shape), here.mask)


def in_sequences(event: Passed, batch_pass: BatchPass) -> Passed | None:
    """The branch with tensors [b, n, D], which some models flatten to [b n, D]; None if it has other rows."""
    b, ids = len(batch_pass.batch.keys), batch_pass.batch.inputs.get("input_ids")
    if event.stream.ndim == 3 and len(event.stream) == b:
        return event
    if event.stream.ndim != 2 or ids is None or len(event.stream) != ids.numel():
        return None
    parts = {name: getattr(event, name).unflatten(0, ids.shape) for name in ("stream", "input", "update", "after")}
    return event._replace(**parts)


def stack_of(layer: str) -> str:
    """Common prefix of the names of the sublayers of a stack: the part before the first number."""
    return re.split(r"[.]?[0-9]", layer)[0]
