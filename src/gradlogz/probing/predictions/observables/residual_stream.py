"""The stream of a model depth by depth: before every sublayer, and at the end.

    x_0 -> sublayer -> x_1 -> sublayer -> ... -> x_end        of post-norm models behind their norms

A stack is a run of sublayers whose streams have the same tokens: a decoder is another one than its encoder. The end is
that of the last stack, and of a pre-norm model before its last norm.

Read next: ../../inside/capturing.py (the events), ../gaussianity.py and ../pair_energy.py.
"""

import re
from typing import Any, NamedTuple

import torch

from ...._typing import Bool, Float, Tensor
from ...corpus.text import Batch
from ...inside.capturing import Event, Normed, Passed
from ...prediction import Finished, real

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


def depth_of(event: Event | Finished, batch: Batch, memory: dict[str, Any]) -> Depth | None:
    """The depth at which the model has arrived with this event, if it is one; `memory` lasts for one batch.

    A feed-forward map beside an attention sublayer reads the same stream and is no depth of its own.
    """
    here: dict[str, Any] = memory.setdefault("depths", {})
    if isinstance(event, Passed):
        before, here["before"] = here.get("before"), event.stream
        here["follows"], here[END] = event.sublayer.follows, event.after
        attention, shape = event.sublayer.kind == "attention", event.stream.shape
        if attention and len(shape) == 3 and shape[0] == len(batch.keys):
            stack = f"{stack_of(event.sublayer.name)} {shape[2]}"
            if (stack, shape) != (here.get("stack"), here.get("shape")):
                here.update(stack=stack, shape=shape, mask=real(batch, event))
        stream = _shaped(event.stream, here.get("shape"))
        if stream is None or before is event.stream:
            return None
        return Depth(event.sublayer.name, attention, here["stack"], stream, here["mask"])
    if isinstance(event, Normed):
        follows = here.get("follows")
        if follows is not None and (follows.name, follows.call) == (event.norm.name, event.norm.call):
            here[END] = event.result
    elif isinstance(event, Finished) and END in here:
        stream = _shaped(here[END], here.get("shape"))
        return None if stream is None else Depth(END, False, here["stack"], stream, here["mask"])
    return None


def stack_of(layer: str) -> str:
    """What the names of the sublayers of one stack have in common: all before the first number."""
    return re.split(r"[.]?[0-9]", layer)[0]


def _shaped(stream: Tensor, shape: torch.Size | None) -> Tensor | None:
    """The stream as [b, n, D], which some models flatten to [b n, D]; None if it is of other tokens."""
    if shape is None or stream.shape not in (shape, (shape[0] * shape[1], shape[2])):
        return None
    return stream.reshape(shape)
