"""Attention statistics of every layer while a model runs: log normaliser, entropy, logit variance, maximum logit.

    with observe(model) as observation:
        model(**batch)
    observation["encoder.layer.3.attention.self"].entropy      [b, h, m]

`attend` replaces the model's own attention, so that nothing is computed twice and every statistic has a gradient.

Read next: interception.py (how calls are intercepted), monitoring.py (statistics during training, without replacing
the model's own attention).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Literal

import torch
from torch import nn

from ..._errors import InputRuntimeError, InputTypeError, InputValueError
from ..._typing import Tensor
from ..result import Attention
from ..ring import ring_attend
from .block_numbers import block_numbers
from .checkpointed_results import refusing_gradients
from .hooks import refuse_vmap
from .interception import LAYERS, WRAPPERS, InterceptedCall, Interception, Receiver, names_of, numbered
from .ring_calls import call_from_ring
from .uncompiled import uncompiled


class Observation(Mapping[str, Attention], Receiver):
    """Attention results of the last pass through a model, by layer name, in the order of computation.

    A layer that is called several times in one pass, as in ALBERT, has the names "layer", "layer#2", "layer#3".
    `passes` is the list of all passes, for example one per generated token; `clear` empties it.

    The statistics are those of `attend`, [b, h, m]. The output is None for a layer that calls softmax and multiplies
    by the values itself.

    Layers of linear and sigmoid attention have no softmax, and no statistics here: `without_softmax` has the kind of
    each by name.
    """

    functions = MappingProxyType({ring_attend: call_from_ring})

    def __init__(self, statistics: str, strict: bool, trained: set[str]) -> None:
        self.passes: list[dict[str, Attention]] = []
        self.without_softmax: dict[str, str] = {}
        self._statistics, self._strict, self._trained = statistics, strict, trained
        self._differentiable = False
        self._crosses = False

    def __getitem__(self, layer: str) -> Attention:
        return self._last[layer]

    def __iter__(self) -> Iterator[str]:
        return iter(self._last)

    def __len__(self) -> int:
        return len(self._last)

    def __repr__(self) -> str:
        others = f", {len(self.without_softmax)} layers without softmax" if self.without_softmax else ""
        return f"Observation({len(self)} layers{others}, {len(self.passes)} passes)"

    @property
    def _last(self) -> dict[str, Attention]:
        return self.passes[-1] if self.passes else {}

    def stack(self, statistic: str) -> Tensor:
        """One statistic of all layers of the last pass, [l, b, h, m].

        Raises if the layers differ in heads or lengths, as in an encoder-decoder model: index the layers instead.
        """
        if statistic not in Attention._fields:
            remedy = f"Choose one of {', '.join(Attention._fields)}."
            raise InputValueError(
                "Observation.stack", "statistic", f"statistic must be a field of Attention, got {statistic!r}", remedy
            )
        tensors = [getattr(attention, statistic) for attention in self.values()]
        shapes = {None if t is None else tuple(t.shape) for t in tensors}
        if len(shapes) != 1 or None in shapes:
            fact = f"there are {len(shapes)} shapes" if None not in shapes else "some layers lack it"
            problem = f"{statistic} must have one shape in all layers, but {fact}"
            raise InputValueError(
                "Observation.stack", "statistic", problem, "Index the layers instead: observation[name]."
            )
        return torch.stack(tensors)

    def hooks(self) -> dict[str, Tensor]:
        """Tensors of the last pass under names of TransformerLens, for a model with one stack of layers.

        blocks.L.attn.hook_z is the output [b, m, h, v]; statistics keep their names, as in blocks.L.attn.entropy.
        `capture` has the queries, keys, values and the residual stream too.

        Law: tests/agreement/test_hook_names_are_those_of_transformerlens.py.
        """
        if self._crosses:
            problem = "the model has cross-attention, and names of the form blocks.L are those of one stack of layers"
            raise InputValueError("Observation.hooks", "model", problem, "Index the layers instead: observation[name].")
        tensors: dict[str, Tensor] = {}
        for block, attention in zip(block_numbers(list(self)), self.values(), strict=True):
            for field, tensor in attention._asdict().items():
                if tensor is not None:
                    output = field == "output"
                    name = f"blocks.{block}.attn.{'hook_z' if output else field}"
                    tensors[name] = tensor.transpose(1, 2) if output else tensor
        return tensors

    def clear(self) -> None:
        """Discard all passes and free their tensors."""
        self.passes.clear()
        self.without_softmax.clear()

    # The receiver of an Interception ---------------------------------------------------------------------------------

    def begin(self) -> bool:
        """Begin a pass."""
        self.passes.append({})
        self._differentiable = torch.is_grad_enabled()
        return True

    def receive(self, layer: str, intercepted: InterceptedCall, *, again: bool) -> Attention:
        """Compute the call by `attend`."""
        refuse_vmap("observe", layer)
        result = intercepted.call.attend(self._statistics)
        self._crosses |= intercepted.crosses
        if not again:
            lost = self._differentiable and not torch.is_grad_enabled() and layer in self._trained
            self._last[numbered(layer, self._last)] = refusing_gradients(result) if lost else result
        return result

    def accept_without_softmax(self, layer: str, kind: str) -> bool:
        """Record the kind of a layer."""
        self.without_softmax[layer] = kind
        return True

    def finish(self, missed: tuple[str, ...]) -> None:
        """End a pass; raise if an attention layer was missed."""
        if missed and self._strict:
            problem = f"model has attention layers whose calls cannot be intercepted: {names_of(missed)}"
            remedy = "Pass layers= with a pattern that excludes them, or strict=False to skip them."
            raise InputRuntimeError("observe", "model", problem, remedy)


@contextmanager
def observe(
    model: nn.Module,
    *,
    statistics: Literal["none", "scalar", "moments"] = "scalar",
    layers: str = LAYERS,
    strict: bool = True,
) -> Iterator[Observation]:
    """Context in which every attention layer of the model computes by `attend` and its statistics are recorded.

    Works with Hugging Face models under any attention implementation, with modules that call torch's
    scaled_dot_product_attention, torch.nn.MultiheadAttention or `attend`, and with layers that call softmax themselves
    (for those only the statistics are computed, from the logits). Outputs equal the model's to rounding; gradients flow
    through outputs and statistics. The model is unchanged after the context, also after an error. Layers of linear and
    sigmoid attention compute as usual, and are named in `Observation.without_softmax`.

    Args:
        statistics: as in `attend`.
        layers: regular expression for class names of attention layers; a softmax inside one belongs to attention.
        strict: raise if an attention layer ran without an intercepted call, or if no attention was computed.

    Law: tests/agreement/test_hugging_face_models_compute_the_same.py.

    >>> import torch, gradlogz
    >>> block = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True)
    >>> with gradlogz.observe(block) as observation:
    ...     output = block(torch.randn(2, 10, 16))
    >>> list(observation), observation["self_attn"].entropy.shape
    (['self_attn'], torch.Size([2, 4, 10]))
    """
    if not isinstance(model, nn.Module):
        remedy = "Pass the model itself."
        raise InputTypeError("observe", "model", f"model must be a torch.nn.Module, got {type(model).__name__}", remedy)
    if id(model) in _observed:
        remedy = "Leave the first context before entering a second."
        raise InputRuntimeError("observe", "model", "model is already observed", remedy)
    parameters = [name for name, p in model.named_parameters() if p.requires_grad]
    trained = {prefix for name in parameters for prefix in _prefixes(WRAPPERS.sub("", name).strip("."))}
    observation = Observation(statistics, strict, trained)
    _observed.add(id(model))
    try:
        with uncompiled(), Interception(model, observation, layers=layers):
            yield observation
    finally:
        _observed.discard(id(model))
    if strict and observation.passes and not any(observation.passes) and not observation.without_softmax:
        problem = f"model did not compute attention in {len(observation.passes)} passes"
        remedy = "Pass layers= with a pattern of its class names."
        raise InputRuntimeError("observe", "model", problem, remedy)


_observed: set[int] = set()


def _prefixes(name: str) -> list[str]:
    """Names of all modules that contain a parameter."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts))]
