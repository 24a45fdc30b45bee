"""Passes of initial tokens through the layers of a model, with the tokens between them recorded.

    recorded = passed(model, architecture, batch)                   the text of the batch itself
    recorded = passed(model, architecture, batch, start)            other tokens where the layers begin

Masks and positions are those of the batch. Padded tokens are left out.

Read next: layer_blocks.py (where the tokens enter), layer_observables.py (what is computed of them).
"""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import nn

from ..._errors import InputValueError
from ..._typing import Bool, Float, Tensor
from ..corpus.batching import Batch
from ..inside.architecture import Architecture
from ..inside.events import Attended, AttentionArguments, Event, Normed, Passed
from ..inside.following import follow
from ..inside.hooks import without_cache
from .layer_blocks import LayerBlock, blocks_of, entry
from .layer_observables import LayerTokens


def layers_of(architecture: Architecture) -> list[LayerBlock]:
    """Return the layers that a distribution passes through; raise if the model has none."""
    blocks = blocks_of(architecture)
    if not blocks:
        problem = "no layer with a residual connection was found in the model"
        raise InputValueError("propagate", "model", problem, "Pass a transformer with residual connections.")
    return blocks


def passed(
    model: nn.Module, architecture: Architecture, batch: Batch, start: Float[Tensor, "b n D"] | None = None
) -> tuple[list[LayerTokens], tuple[int, ...]]:
    """Return the tokens at every depth, padding left out, and the shape [b, n, D] in which they enter the layers."""
    blocks = layers_of(architecture)
    pass_ = _Pass(blocks, batch)
    entering = nullcontext() if start is None else entry(model, blocks[0], architecture.width, start)
    with entering, follow(model, architecture, pass_.handle, statistics="scalar"):
        model(**batch.inputs, **without_cache(model))
    return pass_.depths(), pass_.shape


def joined(parts: Sequence[list[LayerTokens]], tokens: int) -> list[LayerTokens]:
    """Return the first `tokens` tokens of several batches at every depth."""

    def together(values: tuple[Tensor | None, ...]) -> Tensor | None:
        present = [t for t in values if t is not None]
        return torch.cat(present)[:tokens] if len(present) == len(values) else None

    return [LayerTokens(*map(together, zip(*depth, strict=True))) for depth in zip(*parts, strict=True)]  # type: ignore[arg-type]


class _Pass:
    """Handler of the events of one batch."""

    def __init__(self, blocks: list[LayerBlock], batch: Batch) -> None:
        self._numbers = {block.name: number for number, block in enumerate(blocks)}
        self._last = blocks[-1].feed_forward or blocks[-1].attention
        self._batch = batch
        self._depths: dict[int, LayerTokens] = {}
        self._attention: dict[int, tuple[Tensor | None, Tensor | None]] = {}
        self._end: Tensor | None = None
        self.shape: tuple[int, ...] = ()

    def handle(self, event: Event) -> None:
        """Record what an event tells of the tokens between layers."""
        if isinstance(event, Attended) and event.layer in self._numbers:
            if event.crosses:
                problem = f"{event.layer} is cross-attention: the layers are not one chain from input to output"
                raise InputValueError("propagate", "model", problem, "Pass the encoder or the decoder of the model.")
            self._attention[self._numbers[event.layer]] = self._statistics(event)
        elif isinstance(event, Passed) and event.sublayer.name in self._numbers:
            number = self._numbers[event.sublayer.name]
            self.shape = self.shape or tuple(event.stream.shape)
            streams = (self._tokens(event.stream), self._tokens(event.after))
            self._depths[number] = LayerTokens(*streams, *self._attention.get(number, (None, None)))
        if isinstance(event, Passed) and event.sublayer is self._last:
            self._end = self._tokens(event.after)
        elif isinstance(event, Normed) and event.norm is self._last.follows:
            self._end = self._tokens(event.result)

    def depths(self) -> list[LayerTokens]:
        """Return the tokens where each layer begins, and where the last one ends."""
        assert self._end is not None  # the last sublayer was passed
        return [*(self._depths[number] for number in sorted(self._depths)), LayerTokens(self._end)]

    def _tokens(self, stream: Float[Tensor, "b n D"]) -> Float[Tensor, "t D"]:
        return _precise(stream[self._real(stream)])

    def _real(self, stream: Float[Tensor, "b n ..."]) -> Bool[Tensor, "b n"]:
        mask = self._batch.inputs.get("attention_mask")
        if mask is None or mask.shape != stream.shape[:2]:
            return torch.ones(stream.shape[:2], dtype=torch.bool, device=stream.device)
        return mask.bool()

    def _statistics(self, event: Attended) -> tuple[Tensor | None, Tensor | None]:
        """Return entropy and self-weight of every token, means over heads."""
        G, H = event.attention.log_normalizer, event.attention.entropy
        real = self._real(G.transpose(1, 2))
        entropy = None if H is None else _precise(H.mean(1)[real])
        call = event.call
        if not isinstance(call, AttentionArguments) or call.bias is not None or call.softcap is not None:
            return entropy, None
        key = call.key.repeat_interleave(call.query.shape[1] // call.key.shape[1], 1)
        logit = call.scale * (call.query * key).sum(-1)
        return entropy, _precise((logit - G).clamp(max=0.0).exp().mean(1)[real])


def _precise(t: Tensor) -> Tensor:
    """Return a tensor on the CPU, in float32 at least."""
    return t.to("cpu", torch.promote_types(t.dtype, torch.float32))
