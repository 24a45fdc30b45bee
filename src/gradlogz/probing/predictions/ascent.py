"""Ascent: an attention update increases the log normaliser of the layer's keys.

    G(x)   = sum_h (1/beta) log sum_j exp(beta <q_h(x), k_hj>)        x: residual stream, normed; keys fixed
    gain   = sum [G(x + D) - G(x)] / sum [G(x + |D| g/|g|) - G(x)]    D: the update, g = grad G(x); sums over tokens

Read next: tie.py (the weights that make it exact), ../inside/reprojection.py (queries of moved tokens).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch

from ..._typing import Bool, Float, Int, Tensor
from ...attention.functional import attend
from ...attention.in_models.intercepted_calls import WIDTH
from ..batch_pass import BatchPass
from ..hypothesis_tests import NOTHING_MEASURED, Bounds, conclude, judge, measured
from ..inside.events import Attended, Event, ForwardOutput, LayerCall, Passed
from ..inside.reprojection import at_tokens, queries_of
from ..prediction import Baseline, Prediction, Probed
from ..runs.judgement import Judgement, Measured
from ..runs.records import PREDICTED, Declaration, Finding, Quantity
from ..statistics import Sums, bootstrap, sums_of
from .observables.attention_rows import applies, at, chosen, log_weights_of

PART = 16  # one token in PART is sampled
LEAST = 0.05  # smallest gain that counts as ascent
CONTROLS = ("permuted", "reversed", "random")
COLUMNS = ("tokens", "best", "own", *CONTROLS, "rises")

GAIN, RISES = "gain", "share of tokens that rise"

FORMULAS = """\
    G(x)   = sum_h (1/beta) log sum_j exp(beta <q_h(x), k_hj>)        x: residual stream, normed; keys fixed
    gain   = sum [G(x + D) - G(x)] / sum [G(x + |D| g/|g|) - G(x)]    D: the update, g = grad G(x); sums over tokens"""

DECLARATION = Declaration(
    title="Ascent of log normaliser",
    kind=PREDICTED,
    claim="The update of an attention sublayer increases the log normaliser of its keys.",
    formula=(
        "gain = sum [G(x + D) - G(x)] / sum [G(x + |D| g/|g|) - G(x)], sums over tokens x: increase of G under the "
        "update D, divided by its increase under the steepest-ascent step of equal norm; g = grad G(x). G(x) = sum_h "
        "(1/beta) log sum_j exp(beta <q_h(x), k_hj>): log normalisers of the heads h of a layer; beta: scale of the "
        "logits"
    ),
    supports=f"The gain is above {LEAST:g} and above the null, the gain of updates permuted between tokens.",
    refutes="The gain is below 0 or below that null.",
    method=(
        FORMULAS,
        "With tied weights the attention update is an ascent step of G (theory E7); trained layers need not be tied. A "
        "gain of 1 is that of the steepest-ascent step of equal norm. G is convex in the query, so that it rises under "
        "most updates; the gain is therefore compared with the permuted-token null, in which each token receives the "
        "update of another token of the same text. Reversed updates and random directions are "
        "reported for comparison. For a token with a single visible key, G is linear in the query, so that convexity "
        "does not raise its gain; such tokens are included.",
        f"The sample is one token in {PART}, the same tokens in every layer, without padding.",
    ),
    decision_rule="The verdict on the model is that of more than half of its layers.",
    quantities={
        GAIN: Quantity("1", "ΔG(D) / ΔG(|D| ∇G/|∇G|)"),
        "gain, permuted": Quantity("1", "ΔG(D of another token) / ΔG(|D| ∇G/|∇G|)"),
        "gain, reversed": Quantity("1", "ΔG(−D) / ΔG(|D| ∇G/|∇G|)"),
        "gain, random": Quantity("1", "ΔG(random, |D| long) / ΔG(|D| ∇G/|∇G|)"),
        RISES: Quantity("share of tokens", "P(ΔG(D) > 0)"),
    },
    statistic="median gain relative to the steepest-ascent step of equal norm",
    null="permuted-token null",
    unit="attention layer",
    remarks={
        NOTHING_MEASURED: "No attention layer allows queries to be computed for moved tokens, or the text is too short."
    },
    labels={
        "gain, permuted": "gain of permuted updates",
        "gain, reversed": "gain of reversed updates",
        "gain, random": "gain of random directions",
        "share of tokens that rise": "share of tokens whose log normaliser increases",
    },
)


class _Layer(NamedTuple):
    """An attention call at the sampled tokens: keys, masks and statistics that their queries need.

    attn_mask: bias and mask of the sampled tokens.
    """

    layer_call: LayerCall
    places: Int[Tensor, "b r"]
    valid: Bool[Tensor, "b r"]
    real: Bool[Tensor, "b n"]
    key: Float[Tensor, "b hk n d"]
    scale: float
    softcap: float | None
    sinks: Tensor | None
    enable_gqa: bool
    attn_mask: Tensor | None
    log_normalizer: Float[Tensor, "b h r"]
    key_mean: Float[Tensor, "b h r d"] | None


class _Moved(NamedTuple):
    """Residual stream and update of the sampled tokens, and the updates of other tokens."""

    stream: Float[Tensor, "b r D"]
    update: Float[Tensor, "b r D"]
    other: Float[Tensor, "b r D"]


@dataclass
class _Memory:
    layers: dict[str, _Layer] = field(default_factory=dict)
    moved: dict[str, _Moved] = field(default_factory=dict)


def statistics(event: Event | ForwardOutput, batch_pass: BatchPass) -> dict[str, Sums] | None:
    """Changes of G, summed over the sampled tokens of each row."""
    memory = batch_pass.memory(_Memory)
    if isinstance(event, Attended):
        if event.layer_call is not None and applies(event, batch_pass) and not event.crosses:
            memory.layers[event.layer] = _layer(event, event.layer_call, batch_pass)
    elif isinstance(event, Passed) and event.sublayer.name in memory.layers:
        layer = memory.layers[event.sublayer.name]
        if event.stream.shape[:2] == layer.real.shape:
            others = _others(layer.places, layer.real)
            pairs = ((event.stream, layer.places), (event.update, layer.places), (event.update, others))
            memory.moved[event.sublayer.name] = _Moved(*(_taken(t, places) for t, places in pairs))
    elif isinstance(event, ForwardOutput):
        changes = {name: _changes(memory.layers[name], *each) for name, each in memory.moved.items()}
        return {
            name: sums_of(columns, batch_pass.documents) for name, columns in changes.items() if columns is not None
        }
    return None


def _layer(event: Attended, layer_call: LayerCall, batch_pass: BatchPass) -> _Layer:
    call, a = event.arguments, event.attention
    places, valid = chosen(event, batch_pass, 1 / PART)
    mean = None if call.softcap is not None or a.key_mean is None else at(a.key_mean, places)
    G = at(a.log_normalizer.unsqueeze(-1), places).squeeze(-1)
    return _Layer(
        at_tokens(layer_call, places), places, valid, batch_pass.real(event), call.key, call.scale, call.softcap,
        call.sinks, call.enable_gqa, log_weights_of(event, places), G, mean,
    )  # fmt: skip


def _changes(layer: _Layer, x: Tensor, D: Tensor, other: Tensor) -> Float[Tensor, "b k"] | None:
    """Columns summed over the sampled tokens of each row, [b, k]; None if the layer computes its own logits."""
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
        # All steps are computed at once, as additional tokens at the same positions.
        q = queries_of(layer.layer_call, x + torch.stack(list(steps.values())))
        G = layer.log_normalizer.masked_fill(layer.log_normalizer == -torch.inf, 0.0).sum(1) / layer.scale
        change = dict(zip(steps, (_log_normalizers(layer, q, len(steps)) - G).double(), strict=True))  # type: ignore[arg-type]
        change["rises"] = (change["own"] > 0).double()
        change["tokens"] = torch.ones_like(change["own"])
        return torch.stack([torch.where(layer.valid, change[name], 0.0).sum(1) for name in COLUMNS], -1)


def _gradient(layer: _Layer, x: Float[Tensor, "b r D"]) -> Float[Tensor, "b r D"] | None:
    """Gradient of G in the residual stream; in a query it is the attended mean of keys, but for soft caps."""
    with torch.enable_grad():
        moved = x.detach().requires_grad_()
        q = queries_of(layer.layer_call, moved.unsqueeze(0))
        if q is None:
            return None
        if layer.key_mean is None:
            (g,) = torch.autograd.grad(_log_normalizers(layer, q, 1).sum(), moved)
        else:
            (g,) = torch.autograd.grad(q, moved, layer.key_mean.to(q.dtype))
    return g


@lru_cache(maxsize=1)
def _random(shape: torch.Size, device: torch.device) -> Tensor:
    """Random directions, the same in every layer because drawing them is slow."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, non_blocking=True)


def _log_normalizers(layer: _Layer, query: Float[Tensor, "b h kr d"], versions: int) -> Float[Tensor, "k b r"]:
    """sum_h G_h / beta for every version of the sampled tokens, [k, b, r]."""
    mask = layer.attn_mask
    G = attend(
        query,
        layer.key,
        layer.key[..., :WIDTH],  # only the log normaliser is needed
        attn_mask=None if mask is None else mask.repeat(1, 1, versions, 1),
        scale=layer.scale,
        softcap=layer.softcap,
        sinks=layer.sinks,
        enable_gqa=layer.enable_gqa,
        statistics="none",
    ).log_normalizer
    G = G.masked_fill(G == -torch.inf, 0.0).sum(1) / layer.scale
    return G.unflatten(1, (versions, -1)).transpose(0, 1)


def _taken(t: Float[Tensor, "b n D"], places: Int[Tensor, "b r"]) -> Float[Tensor, "b r D"]:
    return at(t.unsqueeze(1), places).squeeze(1)


def _others(places: Int[Tensor, "b r"], known: Bool[Tensor, "b n"]) -> Int[Tensor, "b r"]:
    """Position of another token of the same row for each token, half a row away."""
    n = known.sum(1, keepdim=True).clamp(min=1)
    first = known.int().argmax(1, keepdim=True)  # rows may be padded on the left
    return (first + (places - first + (n // 2).clamp(min=1)) % n).clamp(max=known.shape[1] - 1)


def evaluate(state: dict[str, Sums], model: Probed) -> list[Measured]:
    """Gain of every layer, its controls, and the share of tokens for which G rises."""
    return [
        row
        for layer, sums in state.items()
        for quantity, function in RATIOS.items()
        for row in measured(layer, quantity, bootstrap(function, sums), sums.totals[0, 0])
    ]


def _over(name: str, divisor: str) -> Callable[[Tensor], Tensor]:
    return lambda totals: totals[..., COLUMNS.index(name)] / totals[..., COLUMNS.index(divisor)]


RATIOS = {
    GAIN: _over("own", "best"),
    **{f"gain, {name}": _over(name, "best") for name in CONTROLS},
    RISES: _over("rises", "tokens"),
}


def null(state: dict[str, Sums], model: Probed, baseline: Baseline[dict[str, Sums]] | None) -> list[Measured]:
    """Gain of permuted updates; share of rising tokens in the random-weights baseline."""
    rows = [
        row
        for layer, sums in state.items()
        for row in measured(layer, GAIN, bootstrap(RATIOS["gain, permuted"], sums), 0)
    ]
    others = {} if baseline is None else baseline.state
    return rows + [
        row for layer, sums in others.items() for row in measured(layer, RISES, bootstrap(RATIOS[RISES], sums), 0)
    ]


def verdict(findings: list[Finding]) -> Judgement:
    """Judge every layer by its gain."""
    judged = judge(findings, GAIN, lambda f: Bounds(max(LEAST, f.null_high), max(0.0, f.null_low)))
    return conclude(judged, GAIN)


PREDICTION = Prediction(__name__, DECLARATION, statistics, evaluate, null, verdict, order=20)
