"""Attention plus residual climbs the log normaliser of the layer's own keys.

    G(x)   = sum_h (1/beta) log sum_j exp(beta <q_h(x), k_hj>)        x: the stream, through the norm; keys frozen
    gain   = sum [G(x + D) - G(x)] / sum [G(x + |D| g/|g|) - G(x)]    D: the update, g = grad G(x); sums over tokens

The sublayer is a step of ascent if its weights are tied (theory E7); a trained layer need not be one. A gain of 1 is as
good as the gradient of the same length. G is convex in the query, so that its rising for most tokens says nothing; what
counts is the gain beyond that of the update of another token of the same text (permuted). The reversed update and a
random direction are told beside it. The log normaliser of rows that see one key is linear; they are kept.

Measured on one token in sixteen, the same ones in every layer (observables/attention_rows.py), which see all their
keys. A layer supports the claim if its gain lies above 0.05 and above that of permuted updates; it refutes it if it
lies below 0 or below those.

Read next: tie.py (the weights that would make it exact), ../inside/reprojection.py (how moved tokens are read).
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..._typing import Bool, Float, Int, Tensor
from ...attention.functional import attend
from ...attention.in_models.intercepted_calls import WIDTH
from ..corpus.text import Batch
from ..findings import Finding
from ..inside.capturing import Attended, Event, Passed
from ..inside.reprojection import Ask
from ..prediction import Finished, Judgement, Measured, Probed, Twin, real
from ..statistics import bootstrap, sums_of
from ..testing import Bounds, count, judge, measured
from .observables.attention_rows import applies, at, chosen, log_weights_of

claim = "An attention sublayer moves tokens up the log normaliser of its keys."
formula = "gain = [G(x + D) - G(x)] / [G(x + |D| g/|g|) - G(x)],  G(x) = sum_h (1/beta) log sum_j exp(beta q_h(x).k_hj)"
refutes = "A gain that is not above that of the update of another token, or is negative."

PART = 16  # one token in so many
LEAST = 0.05  # of the best gain: what is worth calling an ascent
CONTROLS = ("permuted", "reversed", "random")
COLUMNS = ("tokens", "best", "own", *CONTROLS, "rises")


class _Layer(NamedTuple):
    """A layer, and what it told of the chosen tokens."""

    ask: Ask
    places: Int[Tensor, "b r"]
    valid: Bool[Tensor, "b r"]
    real: Bool[Tensor, "b n"]
    key: Float[Tensor, "b hk n d"]
    options: dict[str, Any]
    log_normalizer: Float[Tensor, "b h r"]
    key_mean: Float[Tensor, "b h r d"] | None


def statistics(event: Event | Finished, batch: Batch, memory: dict[str, Any]) -> dict[str, Any] | None:
    """Changes of G, summed over the chosen tokens of each row."""
    layers: dict[str, _Layer] = memory.setdefault("layers", {})
    moved: dict[str, list[Tensor]] = memory.setdefault("moved", {})
    if isinstance(event, Attended):
        if event.ask is not None and applies(event, batch) and not event.crosses:
            layers[event.layer] = _layer(event, event.ask, *chosen(event, batch, memory, 1 / PART), real(batch, event))
    elif isinstance(event, Passed) and event.sublayer.name in layers:
        layer = layers[event.sublayer.name]
        if event.stream.shape[:2] == layer.real.shape:
            others = _others(layer.places, layer.real)
            pairs = ((event.stream, layer.places), (event.update, layer.places), (event.update, others))
            moved[event.sublayer.name] = [_taken(t, places) for t, places in pairs]
    elif isinstance(event, Finished):
        found = {name: _changes(layers[name], *each) for name, each in moved.items()}
        return {name: sums_of(columns, batch.keys) for name, columns in found.items() if columns is not None}
    return None


def _layer(event: Attended, ask: Ask, places: Tensor, valid: Tensor, known: Tensor) -> _Layer:
    call, a = event._call(), event.attention
    options: dict[str, Any] = {
        name: call.options[name] for name in ("scale", "softcap", "sinks", "enable_gqa") if name in call.options
    }
    options["attn_mask"] = log_weights_of(event, places)
    mean = None if options.get("softcap") is not None or a.key_mean is None else at(a.key_mean, places)
    G = at(a.log_normalizer.unsqueeze(-1), places).squeeze(-1)
    return _Layer(ask.some(places), places, valid, known, call.key, options, G, mean)


def _changes(layer: _Layer, x: Tensor, D: Tensor, other: Tensor) -> Float[Tensor, "b k"] | None:
    """The columns, summed over the chosen tokens of each row; None if the layer cannot be asked."""
    g = _gradient(layer, x)
    if g is None:
        return None
    with torch.no_grad():
        length = D.norm(dim=-1, keepdim=True)
        random = _random(x.shape, x.device).to(x.dtype)
        steps = {
            "best": g * (length / g.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(g.dtype).tiny)),
            "own": D,
            "permuted": other,
            "reversed": -D,
            "random": random * (length / random.norm(dim=-1, keepdim=True)),
        }
        # All steps are asked for at once, as further tokens of the same places.
        q = layer.ask.queries(x + torch.stack(list(steps.values())))
        G = layer.log_normalizer.masked_fill(layer.log_normalizer == -torch.inf, 0.0).sum(1) / _scale(layer)
        change = dict(zip(steps, (_log_normalizers(layer, q, len(steps)) - G).double(), strict=True))  # type: ignore[arg-type]
        change["rises"] = (change["own"] > 0).double()
        change["tokens"] = torch.ones_like(change["own"])
        return torch.stack([torch.where(layer.valid, change[name], 0.0).sum(1) for name in COLUMNS], -1)


def _gradient(layer: _Layer, x: Float[Tensor, "b r D"]) -> Float[Tensor, "b r D"] | None:
    """Of G in the stream: that in a query is the attended mean of the keys, but for a soft cap."""
    with torch.enable_grad():
        moved = x.detach().requires_grad_()
        q = layer.ask.queries(moved.unsqueeze(0))
        if q is None:
            return None
        if layer.key_mean is None:
            (g,) = torch.autograd.grad(_log_normalizers(layer, q, 1).sum(), moved)
        else:
            (g,) = torch.autograd.grad(q, moved, layer.key_mean.to(q.dtype))
    return g


@lru_cache(maxsize=1)
def _random(shape: torch.Size, device: torch.device) -> Tensor:
    """Directions, the same ones in every layer, since drawing them is slow."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, non_blocking=True)


def _log_normalizers(layer: _Layer, query: Float[Tensor, "b h kr d"], versions: int) -> Float[Tensor, "k b r"]:
    """sum_h G_h / beta of every version of the chosen tokens."""
    options = dict(layer.options)
    mask = options["attn_mask"]
    options["attn_mask"] = None if mask is None else mask.repeat(1, 1, versions, 1)
    value = layer.key[..., :WIDTH]  # only the log normaliser is wanted
    G = attend(query, layer.key, value, statistics="none", **options).log_normalizer
    G = G.masked_fill(G == -torch.inf, 0.0).sum(1) / _scale(layer)
    return G.unflatten(1, (versions, -1)).transpose(0, 1)


def _scale(layer: _Layer) -> float:
    return float(layer.options.get("scale") or layer.key.shape[-1] ** -0.5)


def _taken(t: Float[Tensor, "b n D"], places: Int[Tensor, "b r"]) -> Float[Tensor, "b r D"]:
    return at(t.unsqueeze(1), places).squeeze(1)


def _others(places: Int[Tensor, "b r"], known: Bool[Tensor, "b n"]) -> Int[Tensor, "b r"]:
    """Another token of the same row for each, half of the row away."""
    n = known.sum(1, keepdim=True).clamp(min=1)
    first = known.int().argmax(1, keepdim=True)  # of rows that are padded on the left
    return (first + (places - first + (n // 2).clamp(min=1)) % n).clamp(max=known.shape[1] - 1)


def evaluate(state: Mapping[str, Any], model: Probed) -> list[Measured]:  # noqa: ARG001
    """The gain of every layer, its controls, and the share of tokens for which G rises."""
    return [
        row
        for layer, sums in state.items()
        for quantity, of in QUANTITIES.items()
        for row in measured(layer, quantity, bootstrap(of, sums), sums.totals[0, 0])
    ]


def _over(name: str, whole: str) -> Any:
    return lambda totals: totals[..., COLUMNS.index(name)] / totals[..., COLUMNS.index(whole)]


QUANTITIES: dict[str, Any] = {
    "gain": _over("own", "best"),
    **{f"gain, {name}": _over(name, "best") for name in CONTROLS},
    "share of tokens that rise": _over("rises", "tokens"),
}


def null(state: Mapping[str, Any], model: Probed, twin: Twin | None) -> list[Measured]:  # noqa: ARG001
    """The gain of permuted updates; the share of tokens that rise in the random twin."""
    rises = "share of tokens that rise"
    found = [
        row
        for layer, sums in state.items()
        for row in measured(layer, "gain", bootstrap(QUANTITIES["gain, permuted"], sums), 0)
    ]
    others = {} if twin is None else twin.state
    return found + [
        row for layer, sums in others.items() for row in measured(layer, rises, bootstrap(QUANTITIES[rises], sums), 0)
    ]


def verdict(findings: list[Finding]) -> Judgement:
    """Layer by layer, and the model by the majority of its layers."""
    judged = judge(findings, "gain", lambda f: Bounds(max(LEAST, f.null_high), max(0.0, f.null_low)))
    c = count(judged, "gain")
    words = "Nothing was measured: no layer lets its queries be asked for, or the text is too short."
    if c.judged:
        words = (
            f"The update of the middle layer gains {c.value:z.2f} of the best step of its length, that of another "
            f"token {c.null:z.2f}; {c.supported} of {c.judged} layers climb, {c.refuted} do not."
        )
    return Judgement(judged, c.verdict, words, c.value, null=c.null, quantity="gain", note=c.note)
