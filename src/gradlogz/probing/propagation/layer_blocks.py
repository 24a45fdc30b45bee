"""The layers of a model: an attention sublayer, its feed-forward sublayer, and the module that computes both.

    block     the smallest module that contains both residual sums: encoder.layer.3 of a BERT, model.layers.3 of a Llama
    entry     tokens of the first block replaced by others, so that a sampled distribution passes through the layers

Read next: feed_forward_block.py (the feed-forward sublayer alone), layer_dynamics.py (a layer as a step of the
simulator), run_propagation.py (a distribution through all layers).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from ..._errors import InputValueError
from ..._typing import Float, Tensor
from ..inside.architecture import Architecture, Sublayer


class LayerBlock(NamedTuple):
    """A layer: its two sublayers, the name of the module that computes them, and the number of that module's call."""

    attention: Sublayer
    feed_forward: Sublayer | None
    module: str
    call: int

    @property
    def name(self) -> str:
        """Name of the attention layer."""
        return self.attention.name


def blocks_of(architecture: Architecture) -> list[LayerBlock]:
    """Return the layers of a model in the order of computation, each with its first feed-forward sublayer."""
    pairs: list[tuple[Sublayer, Sublayer | None]] = []
    for sublayer in architecture.sublayers:
        if sublayer.kind == "attention":
            pairs.append((sublayer, None))
        elif pairs and pairs[-1][1] is None:
            pairs[-1] = (pairs[-1][0], sublayer)
    return [
        LayerBlock(attention, feed_forward, _common(attention, feed_forward), (feed_forward or attention).sum.call)
        for attention, feed_forward in pairs
    ]


def block_of(architecture: Architecture, layer: int | str, *, call: str = "layer_dynamics") -> LayerBlock:
    """Return the layer of this number (negative: from the end), or with an attention layer of this name."""
    blocks = blocks_of(architecture)
    names = [block.name for block in blocks]
    if isinstance(layer, str) and layer in names:
        return blocks[names.index(layer)]
    if isinstance(layer, int) and not isinstance(layer, bool) and -len(blocks) <= layer < len(blocks):
        return blocks[layer]
    problem = f"layer must be a number below {len(blocks)} or the name of an attention layer, got {layer!r}"
    raise InputValueError(call, "layer", problem, f"The names are {', '.join(names[:2])}, ...")


def _common(attention: Sublayer, feed_forward: Sublayer | None) -> str:
    """Return the name of the smallest module that contains the sums of both sublayers."""
    paths = [s.sum.module.split(".") for s in (attention, feed_forward) if s is not None]
    shared = []
    for words in zip(*paths, strict=False):
        if len(set(words)) > 1:
            break
        shared.append(words[0])
    return ".".join(shared)


class BlockCall(NamedTuple):
    """The arguments of one call of a block, and the tokens among them."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    tokens: Float[Tensor, "b n D"]


def tokens_of(args: tuple[Any, ...], kwargs: Mapping[str, Any], width: int) -> Tensor | None:
    """Return the first argument of a block that is a batch of tokens of the stream's width."""
    values = [*args, *kwargs.values()]
    return next((t for t in values if isinstance(t, Tensor) and t.ndim == 3 and t.shape[-1] == width), None)


@contextmanager
def entry(model: nn.Module, block: LayerBlock, width: int, start: Float[Tensor, "b n D"]) -> Iterator[None]:
    """Context in which the first block of a model reads `start` in place of the embeddings."""
    calls = 0

    def replace(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ARG001
        nonlocal calls
        calls += 1
        if calls != block.call:
            return None
        tokens = tokens_of(args, kwargs, width)
        if tokens is None or tokens.shape != start.shape:
            problem = f"the tokens that {block.module or 'the model'} reads are not among its arguments"
            raise InputValueError("propagate", "model", problem, "Pass start='text', which replaces nothing.")
        new = start.to(tokens)
        return tuple(new if a is tokens else a for a in args), {k: new if v is tokens else v for k, v in kwargs.items()}

    handle = model.get_submodule(block.module).register_forward_pre_hook(replace, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def block_call(model: nn.Module, block: LayerBlock, inputs: Mapping[str, Any], width: int) -> BlockCall | None:
    """Run the model and return the arguments of a block's call; None if its tokens are not among them."""
    module = model.get_submodule(block.module)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def store(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG001
        calls.append((args, kwargs))

    handle = module.register_forward_pre_hook(store, with_kwargs=True)
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        handle.remove()
    args, kwargs = calls[block.call - 1]
    tokens = tokens_of(args, kwargs, width)
    return None if tokens is None else BlockCall(module, args, kwargs, tokens)
