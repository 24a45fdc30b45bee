"""Tie: alignment of OV matrices with transposed QK matrices.

    ∇G(x)     = sum_j a_j x_j W_k W_qᵀ                                                                       [theory E7]
    update    = sum_j a_j x_j W_v W_o                               a step up G iff W_v W_o = tau W_k W_qᵀ, tau > 0

No D x D matrix is formed: inner products come from d x d products of the factors.

Read next: qk_geometry.py (QK matrices), ascent.py (the same claim for tokens).
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ..._typing import Float, Tensor
from ..batch_pass import BatchPass
from ..hypothesis_tests import NOTHING_MEASURED, Bounds, absent, band, conclude, judge, measured, outside
from ..inside.events import Attended, Event, ForwardOutput, Passed
from ..inside.head_weights import HeadWeights, Turning, centred, still_share
from ..prediction import Baseline, Prediction, Probed
from ..runs.judgement import Judgement, Measured
from ..runs.records import PREDICTED, Declaration, Detail, Finding, Label, Quantity
from ..statistics import Comoments, Sums, jackknifed
from .observables.attention_distance import (
    OVER,
    OVER_DETAILS,
    OVER_METHOD,
    OVER_REMARKS,
    STILL,
    distances,
    mean_rotations,
    over_distances,
)
from .observables.batch_moments import matrices_of_attention_inputs, on_cpu, token_moments

COSINE, WEIGHTED, LAYER = "cosine", "weighted cosine", "cosine of the layer"
BOUND = 0.5

FORMULAS = """\
    G(x)      = (1/beta) log sum_j exp(beta (x W_q)·(x_j W_k))          x: a token of the residual stream, keys fixed
    ∇G(x)     = sum_j a_j x_j W_k W_qᵀ                                                                       [theory E7]
    update    = sum_j a_j x_j W_v W_o                               a step up G iff W_v W_o = tau W_k W_qᵀ, tau > 0
    cosine    = <W_v W_o, W_k W_qᵀ> / |W_v W_o| |W_k W_qᵀ|                       of matrices; 1 if they are tied
    weighted  = the same with <A, B> = tr(Aᵀ C B)                           C: covariance of the layer's inputs
    together  = sum_h <A_h, B_h> / sqrt(sum_h |A_h|² sum_h |B_h|²)          A_h = W_v W_o, B_h = W_k W_qᵀ of head h"""

_COSINES = {
    COSINE: Quantity("1", "cos(W_v W_o, W_k W_qᵀ)"),
    WEIGHTED: Quantity("1", "cos(W_v W_o, W_k W_qᵀ), weighted by Cov(x)"),
}

DECLARATION = Declaration(
    title="Tied QK and OV matrices",
    kind=PREDICTED,
    claim="The OV matrix W_v W_o of each head is a positive multiple of its transposed QK matrix W_k W_q^T.",
    formula=(
        "weighted cosine = tr(A^T C B) / sqrt(tr(A^T C A) tr(B^T C B)) between the OV matrix A = W_v W_o of a head and "
        "its transposed QK matrix B = W_k W_q^T; C: covariance of the tokens that the layer receives. Also "
        "reported, but not judged: the unweighted cosine (C = I). Its null is the cosine of B with A R, for random "
        "rotations R"
    ),
    supports=(
        f"The weighted cosine is above {BOUND:g} and above the null, the cosines with the OV matrices of other heads."
    ),
    refutes=f"The weighted cosine is below {BOUND:g}.",
    method=(
        FORMULAS,
        "The QK matrix is W_q W_k^T, the OV matrix W_v W_o. If they are tied, the attention update is an ascent step "
        "of the log normaliser. The scale parameters of the normalisation layer before the attention layer are part of "
        "W_q, W_k and W_v; those of a normalisation layer after the sublayer are part of W_o. A direction that "
        "normalisation removes, as LayerNorm removes the mean over coordinates, is projected out on both sides [theory "
        "E13].",
        OVER_METHOD,
        "Null of the cosine: random rotations of the updates, under which it has mean 0 and variance |AᵀB|² / (D |A|² "
        "|B|²); A is the OV matrix, B the transposed QK matrix and D the dimension of the updates. Null of the "
        "weighted cosine: the OV matrices of the other heads. Null of the cosine of all heads together: the "
        "random-weights baseline.",
    ),
    decision_rule=(
        f"At a cosine of {BOUND:g}, {100 * BOUND**2:g} % of the squared norm of the OV matrix lies along the "
        "transposed QK matrix. The verdict on the model is that of more than half of its heads."
    ),
    quantities={
        **_COSINES,
        LAYER: Quantity("1", "Σ_h ⟨A_h, B_h⟩ / √(Σ_h |A_h|² Σ_h |B_h|²)"),
        **{name + OVER: quantity for name, quantity in _COSINES.items()},
        STILL: Quantity("1", "|M_s|² / (|M_s|² + |M_t|²),  unrotated and rotated coordinates"),
    },
    statistic="median weighted cosine of OV and transposed QK matrices",
    null="other-head null",
    details={
        "above_rotations": Label("heads whose unweighted cosine is above its random-rotation null"),
        "below_rotations": Label("below"),
        **OVER_DETAILS,
    },
    remarks={
        NOTHING_MEASURED: "No self-attention layer has matrices that act on its input.",
        **OVER_REMARKS,
    },
    labels={
        LAYER: "cosine of all heads together",
        "share without rotation": "share of the squared norm without rotation",
    },
)


class Factors(NamedTuple):
    """Factors of the OV matrix (value output) and of the transposed QK matrix (key queryᵀ) of every head.

    value, key: act on the inputs of the layer. width: dimension of the space of updates.
    """

    value: Float[Tensor, "h D v"]
    key: Float[Tensor, "h D d"]
    output: Float[Tensor, "h v D"]
    query: Float[Tensor, "h D d"]
    width: int


class LayerState(NamedTuple):
    """Moments of the inputs of a self-attention layer, and attention distances of its heads, by group."""

    read: Comoments | None = None
    distances: dict[int, Sums] | None = None


@dataclass
class _Memory:
    crosses: dict[str, bool] = field(default_factory=dict)


def statistics(event: Event | ForwardOutput, batch_pass: BatchPass) -> dict[str, LayerState] | None:
    """Covariance of the inputs of each self-attention layer, and attention distances of its heads."""
    crosses = batch_pass.memory(_Memory).crosses
    if isinstance(event, Attended):
        crosses[event.layer] = event.crosses
        return {event.layer: LayerState(distances=distances(event, batch_pass))}
    if not isinstance(event, Passed) or event.sublayer.kind != "attention" or crosses.get(event.sublayer.name):
        return None
    read = token_moments(event.input, batch_pass=batch_pass, mask=batch_pass.real(event))
    return {event.sublayer.name: LayerState(read=read)}


def evaluate(state: dict[str, LayerState], model: Probed) -> list[Measured]:
    """Cosines of each head, and of all heads of a layer together."""
    rows = []
    for layer in model.architecture.attention:
        factors, layer_state = _factors(model, layer), state.get(layer, LayerState())
        read = on_cpu(layer_state.read)
        if factors is None or read is None:
            rows.append(absent(layer, WEIGHTED))
            continue
        folded = _folded(factors, model, layer)
        products = _products(folded)
        # Matrices have no sampling error: their intervals have width 0.
        rows += [Measured(layer, h, COSINE, c, c, c) for h, c in enumerate(_cosine(*products).tolist())]
        of_layer = float(_layer_cosine(*products))
        rows.append(Measured(layer, None, LAYER, of_layer, of_layer, of_layer))
        weights, groups = model.weights[layer], read.present()
        R = mean_rotations(layer_state.distances, weights, groups)  # type: ignore[arg-type]
        on_tokens = _on_tokens(factors, read.versions().covariance)
        values = {WEIGHTED: _cosine(*_products(factors, on_tokens))}
        if R is not None:
            values[COSINE + OVER] = _cosine(*_products(folded, turned=R))
            values[WEIGHTED + OVER] = _cosine(*_products(factors, on_tokens, turned=R))
        left = read.tokens[groups if len(groups) > 1 else []]
        for quantity, versions in values.items():
            rows += measured(layer, quantity, jackknifed(versions[0], versions[1:], left), read.tokens.sum())
        rows += _of_parts(layer, weights, folded, R)  # type: ignore[arg-type]
    return rows


def null(
    state: dict[str, LayerState], model: Probed, baseline: Baseline[dict[str, LayerState]] | None
) -> list[Measured]:
    """Values under random rotations, with the OV matrices of other heads, and of the random-weights baseline."""
    rows = []
    for layer in model.architecture.attention:
        factors, layer_state = _factors(model, layer), state.get(layer, LayerState())
        read = on_cpu(layer_state.read)
        if factors is None or read is None:
            continue
        spread = _rotated(_folded(factors, model, layer))
        rows += [Measured(layer, h, COSINE, *band(0.0, s)) for h, s in enumerate(spread.tolist())]
        rows += [Measured(layer, h, WEIGHTED, *each) for h, each in enumerate(_permuted(factors, read))]
        R = mean_rotations(layer_state.distances, model.weights[layer])  # type: ignore[arg-type]
        if R is not None:
            spread = _rotated(_folded(factors, model, layer), R[0])
            rows += [Measured(layer, h, COSINE + OVER, *band(0.0, s)) for h, s in enumerate(spread.tolist())]
            each = _permuted(factors, read, R[0])
            rows += [Measured(layer, h, WEIGHTED + OVER, *ends) for h, ends in enumerate(each)]
        other = None if baseline is None else _factors(baseline.model, layer)
        if baseline is not None and other is not None:
            rows.append(
                Measured(layer, None, LAYER, float(_layer_cosine(*_products(_folded(other, baseline.model, layer)))))
            )
    return rows


def verdict(findings: list[Finding]) -> Judgement:
    """Judge every head by its weighted cosine; count the heads outside the random-rotation null."""
    findings = judge(findings, WEIGHTED, _bounds)
    plain = [f for f in findings if f.quantity == COSINE]
    significant = [f for f, stands in zip(plain, outside(plain), strict=True) if stands]
    above = sum(f.value > 0 for f in significant)
    rotated = (
        Detail("above_rotations", count=above, total=len(plain)),
        Detail("below_rotations", count=len(significant) - above, total=len(plain)),
    )
    details, remarks = over_distances(findings, WEIGHTED + OVER)
    return conclude(findings, WEIGHTED, details=(*rotated, *details), remarks=remarks)


def _bounds(finding: Finding) -> Bounds:
    others = -1.0 if math.isnan(finding.null_high) else finding.null_high
    return Bounds(supports=max(BOUND, others), refutes=BOUND)


# Matrices ------------------------------------------------------------------------------------------------------------


def _factors(model: Probed, layer: str) -> Factors | None:
    """Factors of both matrices of a layer on its inputs; None if it has none."""
    weights, sublayer = model.weights.get(layer), model.architecture.branch_of(layer)
    # With normalised queries and keys the gradient is no linear map of the tokens.
    if not isinstance(weights, HeadWeights) or weights.output is None or weights.normalized or sublayer is None:
        return None
    query, output = weights.query, weights.output
    if sublayer.reads is not None:
        query = sublayer.reads.gain.unsqueeze(-1) * query
    if sublayer.closes is not None:
        output = (centred(output, -1) if sublayer.closes.centres else output) * sublayer.closes.gain
    norm = sublayer.reads or sublayer.follows  # the norm that reads the update
    if norm is not None and norm.centres:
        query, output = centred(query, -2), centred(output, -1)
    width = model.architecture.width - (norm is not None and norm.centres)
    return Factors(weights.value, weights.key, output, query, width)


def _folded(factors: Factors, model: Probed, layer: str) -> Factors:
    """Factors on normalised tokens: with the gain of the norm before the layer."""
    norm = model.weights[layer].norm  # type: ignore[union-attr]
    if norm is None:
        return factors
    value, key = norm.gain.unsqueeze(-1) * factors.value, norm.gain.unsqueeze(-1) * factors.key
    if norm.centres:
        value, key = centred(value, -2), centred(key, -2)
    return factors._replace(value=value, key=key)


def _of_parts(layer: str, weights: HeadWeights, f: Factors, R: Tensor | None) -> list[Measured]:
    """Share of the unrotated coordinates with partial rotary embeddings; an absent row if angles are unknown."""
    if R is None or not isinstance(weights.turning, Turning):
        return [absent(layer, WEIGHTED + OVER)] if weights.rotary else []
    share = still_share(weights.turning, f.query, f.key)
    return [] if share is None else [Measured(layer, h, STILL, v, v, v) for h, v in enumerate(share.tolist())]


def _on_tokens(f: Factors, covariance: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """valueᵀ C key, valueᵀ C value, keyᵀ C key, [..., h, ...]; C = I if None."""
    value, key = f.value, f.key
    if covariance is not None:
        value, key = (covariance.unsqueeze(-3) @ W for W in (f.value, f.key))
    return f.value.mT @ key, f.value.mT @ value, f.key.mT @ key


def _products(
    f: Factors, on_tokens: tuple[Tensor, Tensor, Tensor] | None = None, *, turned: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """<A, B>, |A|², |B|² of A = value output and B = key queryᵀ, [..., h]; tokens of unit covariance if None.

    turned: right factor of the query, [..., h, d, d].
    """
    inner, value_gram, gradient = _on_tokens(f) if on_tokens is None else on_tokens
    across, square = f.output @ f.query, f.query.mT @ f.query
    if turned is not None:
        across, square = across @ turned, turned.mT @ square @ turned
    parts = (inner * across, value_gram * (f.output @ f.output.mT), gradient * square)
    return parts[0].sum((-2, -1)), parts[1].sum((-2, -1)), parts[2].sum((-2, -1))


def _cosine(inner: Tensor, square_a: Tensor, gradient: Tensor) -> Tensor:
    return inner / (square_a * gradient).sqrt()


def _layer_cosine(inner: Tensor, square_a: Tensor, gradient: Tensor) -> Tensor:
    """Cosine of the concatenated matrices of all heads, each with its own attention."""
    return _cosine(inner.sum(-1), square_a.sum(-1), gradient.sum(-1))


def _rotated(f: Factors, turned: Tensor | None = None) -> Tensor:
    """Standard deviation of the cosine under random rotations R of the updates: <AR, B> = <R, AᵀB>."""
    _, square_a, gradient = _products(f, turned=turned)
    M, square = f.value.mT @ f.key, f.query.mT @ f.query
    square = square if turned is None else turned.mT @ square @ turned
    squared = (M * (f.output @ f.output.mT @ M @ square)).sum((-2, -1))
    return (squared / (f.width * square_a * gradient)).sqrt()


def _permuted(f: Factors, read: Comoments, turned: Tensor | None = None) -> list[tuple[float, float, float]]:
    """Mean and 95 % band of the cosines of each head with the OV matrices of all other heads."""
    h = len(f.value)
    if h < 3:
        return []
    C = read.total().covariance
    _, square_a, gradient = _products(f, _on_tokens(f, C), turned=turned)
    across = torch.einsum("gvD,hDd->ghvd", f.output, f.query)
    across = across if turned is None else across @ turned
    M = torch.einsum("gDv,hDd->ghvd", f.value, C @ f.key) * across
    cosines = M.sum((-2, -1)) / (square_a.unsqueeze(1) * gradient).sqrt()
    others = cosines.mT[~torch.eye(h, dtype=torch.bool)].reshape(h, h - 1)
    return [band(*pair) for pair in zip(others.mean(1).tolist(), others.std(1).tolist(), strict=True)]


PREDICTION = Prediction(
    __name__,
    DECLARATION,
    statistics,
    evaluate,
    null,
    verdict,
    order=30,
    baseline="weights",
    matrices=matrices_of_attention_inputs,
)
