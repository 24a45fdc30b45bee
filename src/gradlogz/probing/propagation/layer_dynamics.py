"""A trained layer as a step of the simulator: its heads, norms and feed-forward map.

    x -> N_a(x + A(x)) -> N_f(y + F(y))            "post"         A: heads with QK and OV matrices, biases, rotations
    x -> x + A(N_a(x)) -> y + F(N_f(y))            "pre"          F: feed-forward sublayer
    x -> x + N'(A(N(x))) -> y + F(N_f(y))          "peri"         the outer norm of F is a part of F

    dynamics = layer_dynamics(model, inputs, 3)
    dynamics.evolve(cloud, steps=100, observe=["effective_rank"])

The structure is discovered and the matrices are measured (../inside); one step is then compared with the layer itself
on the tokens of `inputs`. A layer that computes anything else is refused. The function is here and not in `dynamics`,
which knows no models: imports point downward.

Read next: ../../dynamics/trained_heads.py and ../../dynamics/layer_norms.py (the form), feed_forward_block.py,
layer_blocks.py.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from ..._errors import InputValueError
from ..._typing import Float, Tensor
from ...attention.in_models.hidden_keys import hidden, visible_by_masks
from ...attention.in_models.interception import LAYERS
from ...dynamics.contraction import LayerNorm
from ...dynamics.evolution import Ascent, Placement
from ...dynamics.layer_norms import LayerNorms
from ...dynamics.trained_heads import Rotation, TrainedHeads
from ..inside.architecture import Architecture, Norm
from ..inside.discovery import cut, discover
from ..inside.events import Attended, AttentionArguments, Event, LayerCall, Normed, Passed
from ..inside.following import follow
from ..inside.head_weights import HeadWeights, Turning
from ..inside.hooks import evaluation_mode, without_cache
from ..inside.norms import parameters_of
from ..inside.reprojection import call_on
from ..inside.weights import weights_of
from .feed_forward_block import FeedForwardBlock
from .layer_blocks import LayerBlock, block_call, block_of
from .layer_step import LayerDynamics
from .text_windows import longest_row

ROUNDING, UNITS = 1e-4, 8.0  # relative tolerance of the comparison; its minimum in units of eps
DRAWS = 4  # random tokens with which rotations are measured
PLACEMENTS: dict[str, Placement] = {"post": "post", "none": "post", "pre": "pre", "sandwich": "peri", "inner": "peri"}
UNKNOWN = "its weight matrices are unknown"
REMEDY = "Choose another layer, or use propagate, which runs the layers of the model themselves."


def layer_dynamics(
    model: nn.Module,
    inputs: Mapping[str, Any],
    layer: int | str = 0,
    *,
    architecture: Architecture | None = None,
    layers: str = LAYERS,
) -> LayerDynamics:
    """Return a layer of a model as a step of the simulator, which equals the layer on the tokens of `inputs`.

    Args:
        inputs: keyword arguments of the model. The longest sequence determines the number of positions of rotary
            embeddings, and the mask.
        layer: number of the layer, counted from 0 (negative: from the end), or the name of its attention layer.
        architecture: result of `discover`; computed if None.
        layers: pattern for the class names of attention layers.

    Law: tests/laws/test_trained_layers_are_steps_of_the_simulator.py.

    >>> import torch
    >>> block = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True).double()
    >>> x = torch.randn(2, 10, 16, dtype=torch.float64)
    >>> step = layer_dynamics(block, {"src": x}).evolve(x, steps=1)
    >>> bool((step.cloud - block.eval()(x)).abs().max() < 1e-12)
    True
    """
    architecture = discover(model, inputs, layers=layers) if architecture is None else architecture
    block = block_of(architecture, layer)
    _check(block, _placement_problem(block))
    events = _events(model, architecture, block, longest_row(inputs), layers)
    weights = weights_of(model, architecture, inputs, layers=layers, only=block.name).get(block.name, UNKNOWN)
    attended = events.attended
    _check(block, _attention_problem(attended, weights))
    assert attended is not None  # checked, as is the next
    assert isinstance(weights, HeadWeights)
    call = None
    with evaluation_mode(model):
        if block.feed_forward is not None:
            call = block_call(model, block, {**cut(inputs), **without_cache(model)}, architecture.width)
            _check(block, None if call is not None else f"the tokens of {block.module} are not among its arguments")
        norms = _norms(model, block, events.before)
        ascent = Ascent(
            beta=attended.arguments.scale,
            causal=_mask(attended.arguments) == "causal",
            heads=_heads(attended, weights, layers),
            feed_forward=None if call is None else FeedForwardBlock(model, block, call),
        )
    placement = PLACEMENTS[block.attention.placement]
    dynamics = LayerDynamics(block.name, ascent, norms, placement, events.before.shape[1], 0.0)
    error = _difference(dynamics, events)
    rounding = max(ROUNDING, UNITS * torch.finfo(events.after.dtype).eps)
    _check(block, None if error <= rounding else f"a step of this form differs from it by {error:.2g}")
    return dynamics._replace(error=error)


class _Events(NamedTuple):
    """The call of attention of a layer, its tokens before the layer and after it."""

    attended: Attended | None
    before: Float[Tensor, "b n D"]
    after: Float[Tensor, "b n D"]


def _events(
    model: nn.Module, architecture: Architecture, block: LayerBlock, row: Mapping[str, Any], layers: str
) -> _Events:
    attended: list[Attended] = []
    passed: dict[str, Passed] = {}
    normed: dict[tuple[str, int], Tensor] = {}

    def store(event: Event) -> None:
        if isinstance(event, Attended):
            attended.extend([event] if event.layer == block.name else [])
        elif isinstance(event, Passed):
            passed[event.sublayer.name] = event
        else:
            assert isinstance(event, Normed)
            normed[event.norm.name, event.norm.call] = event.result

    with follow(model, architecture, store, statistics="none", layers=layers):
        model(**row, **without_cache(model))
    last = block.feed_forward or block.attention
    after = passed[last.name].after if last.follows is None else normed[last.follows.name, last.follows.call]
    return _Events(next(iter(attended), None), passed[block.name].stream, after)


# The form ------------------------------------------------------------------------------------------------------------


def _norms(model: nn.Module, block: LayerBlock, like: Tensor) -> LayerNorms:
    def norm(norm: Norm | None) -> LayerNorm | str:
        if norm is None:
            return "none"
        gain, bias, eps = parameters_of(model.get_submodule(norm.name), centres=norm.centres, like=like)
        return LayerNorm(gain, bias, eps, norm.centres)

    attention, feed_forward = block.attention, block.feed_forward
    after = attention.closes if attention.closes is not None else attention.follows
    return LayerNorms(
        norm(attention.reads),
        norm(after),
        norm(None if feed_forward is None else feed_forward.reads),
        norm(None if feed_forward is None else feed_forward.follows),
    )


def _rotation(layer_call: LayerCall, turning: Turning, layers: str) -> Rotation:
    """Return the rotations at every position of the window, relative to the first one.

    Angles proportional to the distance would not suffice: many models compute cosines and sines in float32.
    """
    width = layer_call.tokens.shape[-1]
    tokens = torch.randn(DRAWS, width, generator=torch.Generator().manual_seed(0)).to(layer_call.tokens)
    vectors = []
    for token in tokens:
        call = call_on(layer_call, token.expand_as(layer_call.tokens).contiguous(), layers=layers)
        assert call is not None  # its weights were measured by the same calls
        vectors += [t[0].double().cpu() for t in (call.query, call.key)]
    v = torch.cat(vectors)  # [t, n, d]
    a, b, x, y = v[:, :1, turning.first], v[:, :1, turning.second], v[..., turning.first], v[..., turning.second]
    size = (a.square() + b.square()).sum(0)
    return Rotation(turning.first, turning.second, (a * x + b * y).sum(0) / size, (a * y - b * x).sum(0) / size)


def _heads(attended: Attended, weights: HeadWeights, layers: str) -> TrainedHeads:
    rotation = None
    if isinstance(weights.turning, Turning) and attended.layer_call is not None:
        with torch.no_grad():
            rotation = _rotation(attended.layer_call, weights.turning, layers)
    assert weights.output is not None  # checked; both are measured together
    assert weights.output_bias is not None
    return TrainedHeads(*weights[:6], weights.output, weights.output_bias, rotation)


def _difference(dynamics: LayerDynamics, events: _Events) -> float:
    """Return the largest difference of one step from the layer, relative to the largest coordinate."""
    with torch.no_grad():
        step = dynamics.evolve(events.before.double().cpu(), steps=1).cloud
    expected = events.after.double().cpu()
    return float((step - expected).abs().max() / expected.abs().max())


# Checks --------------------------------------------------------------------------------------------------------------


def _check(block: LayerBlock, problem: str | None) -> None:
    """Raise if there is a reason why the layer is not a step of the simulator."""
    if problem is not None:
        raise InputValueError("layer_dynamics", "layer", f"{block.name} is no step of the simulator: {problem}", REMEDY)


def _placement_problem(block: LayerBlock) -> str | None:
    attention, feed_forward = block.attention, block.feed_forward
    if feed_forward is None:
        return None
    if feed_forward.sum == attention.sum or any(s.update[0] != s.sum for s in (attention, feed_forward)):
        return "attention and the feed-forward map act in parallel"
    if PLACEMENTS[attention.placement] != PLACEMENTS[feed_forward.placement]:
        return f"its norms have different placements, {attention.placement} and {feed_forward.placement}"
    return None


def _attention_problem(attended: Attended | None, weights: HeadWeights | str) -> str | None:
    """Return why the attention of a layer does not have the form of `TrainedHeads`; None if it does."""
    if attended is None or not isinstance(attended.call, AttentionArguments) or isinstance(weights, str):
        return weights if isinstance(weights, str) else "it computes its own logits"
    call, mask = attended.call, _mask(attended.call)
    problems = {
        "it is cross-attention: its keys are not its tokens": attended.crosses,
        "it has attention sinks": call.sinks is not None,
        "it has a soft cap of logits": call.softcap is not None,
        "it adds position biases to its logits": mask == "biased",
        "its mask is neither full nor causal": mask == "other",
        "it normalises queries and keys": weights.normalized,
        f"{weights.turning}": isinstance(weights.turning, str),
        "its output projection was not found": weights.output is None,
    }
    return next((problem for problem, holds in problems.items() if holds), None)


def _mask(call: AttentionArguments) -> Literal["full", "causal", "biased", "other"]:
    """Return the kind of a call's mask."""
    for mask in (call.attn_mask, call.bias):
        if mask is not None and mask.is_floating_point() and bool((mask.masked_fill(hidden(mask), 0.0) != 0).any()):
            return "biased"
    m, n = call.query.shape[-2], call.key.shape[-2]
    masked = visible_by_masks((call.attn_mask, call.bias), call.query, call.key)
    visible = torch.ones(1, m, n, dtype=torch.bool) if masked is None else masked.cpu().expand(-1, m, n)
    visible = visible.tril() if call.is_causal else visible
    windowed = call.window is not None and any(side is not None and side < n - 1 for side in call.window)
    if windowed or call.segments is not None:
        return "other"
    if bool(visible.all()):
        return "full"
    return "causal" if bool((visible == torch.ones(m, n, dtype=torch.bool).tril()).all()) else "other"
