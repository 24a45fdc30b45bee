"""Every layer's attention while a model runs: log normaliser, entropy, variance and highest logit of every row.

    with observe(model) as seen:
        model(**batch)
    seen["encoder.layer.3.attention.self"].entropy      [b, h, m]

The model computes with `attend` in place of its own attention, so that nothing is computed twice and every statistic
has a gradient.

Read next: interception.py (how layers are found), monitoring.py (training, where the model's own attention must
compute).
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import nn

from ..._errors import InputRuntimeError, InputTypeError, InputValueError
from ..._typing import Tensor
from ..result import Attention
from .interception import LAYERS, InterceptedCall, Interception, Receiver, names_of, numbered


class Observation(Mapping[str, Attention], Receiver):
    """The attention of every layer in the last pass through a model, by the layer's name, in the order of computation.

    A layer that is called several times in one pass, as ALBERT's is, has the names "layer", "layer#2", "layer#3".
    `passes` holds the passes before too, as generation makes them; `clear` forgets them all.

    The statistics are those of `attend`, [b, h, m]. Where a layer multiplies its own weights with its own values,
    having only asked torch for a softmax, the output is None.
    """

    def __init__(self, statistics: str, strict: bool) -> None:
        self.passes: list[dict[str, Attention]] = []
        self._statistics, self._strict = statistics, strict

    def __getitem__(self, layer: str) -> Attention:
        return self._last[layer]

    def __iter__(self) -> Iterator[str]:
        return iter(self._last)

    def __len__(self) -> int:
        return len(self._last)

    def __repr__(self) -> str:
        return f"Observation({len(self)} layers, {len(self.passes)} passes)"

    @property
    def _last(self) -> dict[str, Attention]:
        return self.passes[-1] if self.passes else {}

    def stack(self, statistic: str) -> Tensor:
        """[l, b, h, m]: one statistic of all layers of the last pass, which must have one shape.

        Layers of other heads or lengths, as in an encoder and a decoder, are refused: take them from the mapping.
        """
        if statistic not in Attention._fields:
            remedy = f"It is one of {', '.join(Attention._fields)}."
            raise InputValueError(
                "Observation.stack", "statistic", f"statistic must be one of Attention, got {statistic!r}", remedy
            )
        found = [getattr(attention, statistic) for attention in self.values()]
        shapes = {None if t is None else tuple(t.shape) for t in found}
        if len(shapes) != 1 or None in shapes:
            fact = f"{len(shapes)} shapes" if None not in shapes else f"layers without {statistic}"
            remedy = "Take the layers one by one: seen[name]."
            raise InputValueError(
                "Observation.stack", "statistic", f"all layers must have {statistic} of one shape, got {fact}", remedy
            )
        return torch.stack(found)

    def clear(self) -> None:
        """Forget all passes, and free what they hold."""
        self.passes.clear()

    # What the watch calls --------------------------------------------------------------------------------------------

    def begin(self) -> bool:
        """A pass begins."""
        self.passes.append({})
        return True

    def receive(self, layer: str, met: InterceptedCall, *, again: bool) -> Attention:
        """Compute the call with `attend`."""
        found = met.call.attend(self._statistics)
        if not again:
            self._last[numbered(layer, self._last)] = found
        return found

    def finish(self, missed: tuple[str, ...]) -> None:
        """A pass has ended."""
        if missed and self._strict:
            condition = "every attention layer must make a call that can be seen"
            remedy = "Pass layers= with a pattern that leaves them out, or strict=False to go on without them."
            raise InputRuntimeError("observe", "model", f"{condition}, got none from {names_of(missed)}", remedy)


@contextmanager
def observe(
    model: nn.Module,
    *,
    statistics: Literal["none", "scalar", "moments"] = "scalar",
    layers: str = LAYERS,
    strict: bool = True,
) -> Iterator[Observation]:
    """Within this context every attention layer of the model computes with `attend`, and what it finds is kept.

    Works with Hugging Face models whatever their implementation of attention, with modules that call torch's
    scaled_dot_product_attention, torch.nn.MultiheadAttention or `attend`, and with layers that write out their softmax
    (of those the statistics alone are computed, from the logits). The outputs are the model's, to rounding; gradients
    flow through outputs and statistics. Nothing of the model is changed after the context is left, also by an error.

    Args:
        layers: a regular expression for the class names of attention layers, in which a softmax is one of attention.
        strict: raise if an attention layer ran without being seen, or none did.

    Law: tests/agreement/test_hugging_face_models_compute_the_same.py.

    >>> import torch, gradlogz
    >>> block = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True)
    >>> with gradlogz.observe(block) as seen:
    ...     output = block(torch.randn(2, 10, 16))
    >>> list(seen), seen["self_attn"].entropy.shape
    (['self_attn'], torch.Size([2, 4, 10]))
    """
    if not isinstance(model, nn.Module):
        remedy = "Pass the model itself."
        raise InputTypeError("observe", "model", f"model must be a torch.nn.Module, got {type(model).__name__}", remedy)
    if id(model) in _observed:
        condition, fact = "a model must be observed once at a time", "one that is observed already"
        raise InputRuntimeError(
            "observe", "model", f"{condition}, got {fact}", "Leave the first context before the second."
        )
    seen = Observation(statistics, strict)
    _observed.add(id(model))
    try:
        with _uncompiled(), Interception(model, seen, layers=layers):
            yield seen
    finally:
        _observed.discard(id(model))
    if strict and seen.passes and not any(seen.passes):
        condition, fact = "the model must compute attention", f"{len(seen.passes)} passes without any"
        remedy = "If its classes are named otherwise, pass their pattern as layers=."
        raise InputRuntimeError("observe", "model", f"{condition}, got {fact}", remedy)


_observed: set[int] = set()


def _uncompiled() -> AbstractContextManager[Any]:
    """What is compiled cannot be seen, so that it runs as it is written; without the compiler nothing is compiled."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
