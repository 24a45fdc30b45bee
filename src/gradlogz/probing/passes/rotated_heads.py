"""Matched baseline: attention layers that read their inputs in random rotations.

    z = gain * n + bias                     input of a layer; n: tokens, normalised by the norm whose output it reads
    queries of gain * (n H_q) + bias        H_q, H_k: independent, uniformly distributed rotations       [mezzadri07]
    keys    of gain * (n H_k) + bias        of the stream; the mean over features, if the norm subtracts it, stays 0

With B = diag(gain) W_q W_kᵀ diag(gain), the QK matrix on normalised tokens, the logits become those of H_q B H_kᵀ: the
singular values of every head are kept, its singular vectors are random. Norms of queries and keys, their biases, rotary
embeddings and shared keys are those of the layer, which is run as it is. The rotations act on the side of the stream:
no change of basis of queries and keys, and no gain moved between a norm and its matrices, has an effect. Rotations of
Gaussian matrices are Gaussian: given its inputs, an untrained layer is itself a draw of this null.

Random queries of equal logit variance, the second null of statistics of selectivity:

    c q'            q': query of gain * (n H_q) + bias, among the keys k of the layer itself
    c² Var <q', k> = Var <q, k>      for every row, over its visible keys, before a soft cap

The keys, and the variance of the logits of every row, are those of the model; the queries point elsewhere. Layers with
learned sinks have no such null, because the weight of a sink depends on the mean of the logits as well.

Cross-attention has no matched baseline. Each draw is evaluated at once and leaves no statistics.

Read next: matched_draws.py (the windows of a draw), ../hypothesis_tests.py (the band of the draws),
../inside/reprojection.py (layers run again).
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import nn

from ..._typing import Float, Tensor
from ...attention.in_models.intercepted_calls import WIDTH, Call
from ..batch_pass import BatchPass
from ..corpus.batching import Batch
from ..inside.architecture import Architecture, Norm, Sublayer
from ..inside.events import Attended, Event, LayerCall
from ..inside.following import arguments_of, follow
from ..inside.hooks import evaluation_mode, without_cache
from ..inside.reprojection import call_on
from ..prediction import Prediction, Probed
from ..predictions.observables.product_variance import product_variance
from ..runs.judgement import Measured
from ..statistics import merge, stream_seed
from .matched_draws import Draw
from .placement import placed


class Rotations:
    """The rotations of one draw, for inputs of every width: independent ones of queries and of keys."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._known: dict[tuple[Any, ...], Tensor] = {}

    def rotated(self, z: Float[Tensor, "b n D"], norm: Norm | None, side: int) -> Float[Tensor, "b n D"]:
        """Return inputs of a layer whose normalised tokens are rotated; side: 0 for queries, 1 for keys."""
        wide = z.to(torch.promote_types(z.dtype, torch.float32))  # the norm of a token survives in half precision
        H = self._matrix(wide, side, centres=norm is not None and norm.centres)
        if norm is None:
            return (wide @ H).to(z.dtype)
        gain, bias = norm.beside(wide)
        n = torch.where(gain == 0, 0.0, (wide - bias) / gain)
        return (gain * (n @ H) + bias).to(z.dtype)

    def _matrix(self, z: Float[Tensor, "b n D"], side: int, *, centres: bool) -> Float[Tensor, "D D"]:
        key = (z.shape[-1], side, centres, z.device, z.dtype)
        if key not in self._known:
            generator = torch.Generator().manual_seed(2 * self._seed + side)  # on the CPU: equal on every device
            self._known[key] = rotation(z.shape[-1], generator, centres=centres).to(z)
        return self._known[key]


def rotation(width: int, generator: torch.Generator, *, centres: bool = False) -> Float[Tensor, "D D"]:
    """Return a uniformly distributed orthogonal matrix; with `centres` uniform among those that fix (1, ..., 1).

    The signs make the factor of the QR decomposition unique, and thereby uniform  [mezzadri07].
    """
    free = width - 1 if centres else width
    Q, R = torch.linalg.qr(torch.randn(free, free, generator=generator, dtype=torch.float64))
    Q = Q * R.diagonal().sign()
    if not centres:
        return Q
    H = torch.block_diag(torch.ones(1, 1, dtype=Q.dtype), Q)
    v = torch.full((width,), width**-0.5, dtype=Q.dtype)
    v[0] -= 1.0  # the reflection along v exchanges the first axis and (1, ..., 1) / sqrt(D)
    v = v / v.norm().clamp(min=torch.finfo(v.dtype).tiny)
    H = H - 2 * torch.outer(v, v @ H)
    return H - 2 * torch.outer(H @ v, v)


class _Layer(NamedTuple):
    """An attention layer with its inputs."""

    name: str
    sublayer: Sublayer | None
    crosses: bool
    layer_call: LayerCall
    output_projection: nn.Module | None

    @property
    def norm(self) -> Norm | None:
        """The norm whose output the layer reads."""
        return None if self.sublayer is None else self.sublayer.reads or self.sublayer.norm_of_stream


class DrawStates(NamedTuple):
    """{prediction: its state} of one draw, for the predictions that ask for it.

    rotated: with rotated queries and keys. rescaled: with random queries of equal logit variance. model: of the model
    itself, in the layers that have `rescaled`.
    """

    rotated: dict[str, Any]
    rescaled: dict[str, Any]
    model: dict[str, Any]


class _Reference(NamedTuple):
    """The attention call of a layer itself, and the variance of the logits of its rows."""

    call: Call
    variance: Float[Tensor, "b h m"]


class _Complete(Exception):  # noqa: N818 - control flow: every attention layer has been called
    pass


def drawn(
    model: nn.Module, batches: list[Batch], numbers: Sequence[int], predictions: Sequence[Prediction], probed: Probed
) -> Iterator[Draw]:
    """Yield the values of predictions in the draws of these numbers, which read these batches."""
    matched = Probed(f"{probed.name}, matched", probed.architecture, {}, probed.seed)
    seeds = [stream_seed("draw", probed.seed, number) for number in numbers]
    rescaling = [p for p in predictions if p.rescaled]
    several = _states(model, batches, predictions, probed, seeds)
    of_model = {p.name: _values(p, several[0].model[p.name], matched) for p in rescaling}  # the same for all draws
    for states in several:
        yield Draw(
            {p.name: _values(p, states.rotated[p.name], matched) for p in predictions},
            {p.name: _differences(_values(p, states.rescaled[p.name], matched), of_model[p.name]) for p in rescaling},
        )


def rotated_statistics(
    model: nn.Module, architecture: Architecture, batch: Batch, predictions: Sequence[Prediction], seeds: Sequence[int]
) -> Iterator[DrawStates]:
    """Yield the states of a batch for each draw: the statistics of its rotated attention calls.

    The model reads the batch once, up to its last attention layer. Layers that compute their own logits, or whose
    inputs are not among their arguments, have no matched baseline.
    """
    layers = [layer for layer in _layers(model, architecture, batch) if not layer.crosses]
    batch_pass = BatchPass(batch)
    rescaling = [p for p in predictions if p.rescaled]
    references: list[_Reference | None] = [None] * len(layers)
    of_model = _empty(rescaling)
    if rescaling:
        with torch.no_grad(), evaluation_mode(model):
            references = [_reference(layer) for layer in layers]
            for layer, reference in zip(layers, references, strict=True):
                if reference is not None:
                    _add(of_model, rescaling, _event(layer, reference.call, "scalar"), batch_pass)
    for seed in seeds:
        rotations = Rotations(seed)
        states = DrawStates(_empty(predictions), _empty(rescaling), of_model)
        with torch.no_grad(), evaluation_mode(model):
            for layer, reference in zip(layers, references, strict=True):
                rotated = _rotated(layer, rotations)
                if rotated is None:
                    continue
                _add(states.rotated, predictions, _event(layer, rotated), batch_pass)
                if reference is not None:
                    turned = _rescaled(rotated, reference)
                    _add(states.rescaled, rescaling, _event(layer, turned, "scalar"), batch_pass)
        yield states


def _empty(predictions: Sequence[Prediction]) -> dict[str, Any]:
    return {p.name: p.empty() for p in predictions}


def _add(state: dict[str, Any], predictions: Sequence[Prediction], event: Attended, batch_pass: BatchPass) -> None:
    """Add the statistics of an attention call to the states of predictions."""
    batch_pass.begin_event()
    for p in predictions:
        added = p.statistics(event, batch_pass)
        if added is not None:
            state[p.name] = merge(state[p.name], added)


def _layers(model: nn.Module, architecture: Architecture, batch: Batch) -> list[_Layer]:
    """Return the attention layers of a pass with their inputs."""
    layers: list[_Layer] = []
    calls = 0

    def store(event: Event) -> None:
        nonlocal calls
        if not isinstance(event, Attended):
            return
        calls += 1
        if event.layer_call is not None:
            about = event.layer, event.sublayer, event.crosses
            layers.append(_Layer(*about, event.layer_call, event.output_projection))
        if calls == len(architecture.attention):
            raise _Complete

    with suppress(_Complete), follow(model, architecture, store, statistics="none"), torch.no_grad():
        model(**batch.inputs, **without_cache(model))
    return layers


def _rotated(layer: _Layer, rotations: Rotations) -> Call | None:
    """Return the attention call of a layer under the rotations of a draw; None if it has no matched baseline."""
    known = layer.layer_call
    of_queries = call_on(known, rotations.rotated(known.tokens, layer.norm, 0))
    of_keys = call_on(known, rotations.rotated(known.tokens, layer.norm, 1))
    return None if of_queries is None or of_keys is None else of_queries._replace(key=of_keys.key)


def _reference(layer: _Layer) -> _Reference | None:
    """Return the call of a layer itself with its logit variance; None if random queries cannot be compared with it."""
    call = call_on(layer.layer_call, layer.layer_call.tokens)
    if call is None or call.options.get("sinks") is not None:
        return None
    return _Reference(call, product_variance(arguments_of(call)))


def _rescaled(rotated: Call, reference: _Reference) -> Call:
    """Return rotated queries among the keys of the layer itself, with the logit variance of every one of its rows."""
    turned = rotated._replace(key=reference.call.key)
    variance = product_variance(arguments_of(turned))
    factor = torch.where(variance > 0, reference.variance / variance, 0.0).sqrt().unsqueeze(-1)
    return turned._replace(query=(turned.query.to(factor.dtype) * factor).to(turned.query.dtype))


def _event(layer: _Layer, call: Call, statistics: str = "moments") -> Attended:
    """Return an attention call as the event that predictions read; "scalar" leaves out attended means of keys."""
    call = call._replace(value=call.value[..., :WIDTH])  # outputs are not needed
    about = layer.name, layer.sublayer, arguments_of(call), call.attend(statistics), layer.crosses
    return Attended(*about, output_projection=layer.output_projection)


def _states(
    model: nn.Module, batches: list[Batch], predictions: Sequence[Prediction], probed: Probed, seeds: Sequence[int]
) -> list[DrawStates]:
    """Return the states of each draw over the batches that it reads."""
    states = [DrawStates({}, {}, {}) for _ in seeds]
    for batch in batches:
        added = rotated_statistics(model, probed.architecture, placed(batch, model), predictions, seeds)
        states = [merge(state, each) for state, each in zip(states, added, strict=True)]
    return states


def _values(prediction: Prediction, state: Any, probed: Probed) -> list[Measured]:
    """Return the values of one draw, without replicates; none if their evaluation raises, which `evaluate` reports."""
    with suppress(Exception):
        return [m._replace(replicates=None) for m in prediction.evaluate(state, probed)]
    return []


def _differences(values: list[Measured], others: list[Measured]) -> list[Measured]:
    """Return the differences of values to others of the same layers, heads and quantities."""
    known = {(m.layer, m.head, m.quantity): m.value for m in others}
    return [
        Measured(m.layer, m.head, m.quantity, m.value - known.get((m.layer, m.head, m.quantity), math.nan))
        for m in values
    ]
