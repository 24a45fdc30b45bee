"""The stream of a model depth by depth: before every sublayer, and at the end.

    x_0 -> sublayer -> x_1 -> sublayer -> ... -> x_end        of post-norm models behind their norms

A stack is a run of sublayers whose streams have the same tokens: a decoder is another one than its encoder. The end is
that of the last stack, and of a pre-norm model before its last norm.

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
    """The stream at one place, and which of its tokens are no padding.

    layer: the sublayer that comes next, or "end"; attention: whether that is one of attention.
    """

    layer: str
    attention: bool
    stack: str
    stream: Float[Tensor, "b n D"]
    mask: Bool[Tensor, "b n"]


@dataclass
class _Progress:
    """How far the model has come with a batch: the last stream, what follows it, and the stack that it belongs to."""

    before: Tensor | None = None
    follows: Norm | None = None
    end: Tensor | None = None
    stack: str | None = None
    shape: torch.Size | None = None
    mask: Tensor | None = None


def depth_of(event: Event | ForwardOutput, batch_pass: BatchPass) -> Depth | None:
    """The depth at which the model has arrived with this event, if it is one.

    A feed-forward map beside an attention sublayer reads the same stream and is no depth of its own.
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
    """The stream as [b, n, D], which some models flatten to [b n, D]; None if it is of other tokens."""
    shape = here.shape
    if here.stack is None or here.mask is None or shape is None:
        return None
    if stream.shape not in (shape, (shape[0] * shape[1], shape[2])):
        return None
    return Depth(layer, attention, here.stack, stream.reshape(shape), here.mask)


def stack_of(layer: str) -> str:
    """What the names of the sublayers of one stack have in common: all before the first number."""
    return re.split(r"[.]?[0-9]", layer)[0]
