"""Tie: alignment of OV matrices with transposed QK matrices.

    ∇G(x)     = sum_j a_j x_j W_k W_qᵀ                                                                       [theory E7]
    update    = sum_j a_j x_j W_v W_o                               a step up G iff W_v W_o = tau W_k W_qᵀ, tau > 0
    weighted  = E<update, ∇G> / sqrt(E|update|² E|∇G|²)             over queries: moments of sum_j a_j x_j (W_v, W_k)

No D x D matrix is formed: inner products come from d x d products of the factors.

Read next: qk_geometry.py (QK matrices), ascent.py (the same claim for tokens).
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ..._typing import Bool, Float, Tensor
from ..batch_pass import BatchPass
from ..hypothesis_tests import (
    NOTHING_MEASURED,
    TEST_DETAILS,
    absent,
    band,
    beyond_the_null,
    conclude,
    is_majority,
    judge,
    measured,
    outside,
    practically_null,
)
from ..inside.events import Attended, Event, ForwardOutput, LayerCall
from ..inside.head_weights import HeadWeights, Turning, still_share
from ..inside.reprojection import at_tokens, call_on
from ..planted_power import planted_power
from ..prediction import Baseline, Prediction, Probed
from ..runs.judgement import Judgement, Measured
from ..runs.records import PREDICTED, Declaration, Detail, Finding, Label, Quantity, Remark
from ..statistics import Comoments, GroupMoments, Sums, comoments_of, jackknifed
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
from .observables.attention_rows import applies, rows_of
from .observables.batch_moments import on_cpu
from .observables.head_factors import Factors, Moments, cosine, factors_of, folded, of_unit_tokens, products
from .observables.moved_tokens import DERIVATION, INTERESTING, LEAST

COSINE, WEIGHTED, LAYER = "cosine", "weighted cosine", "cosine of the layer"

FORMULAS = """\
    G(x)      = (1/beta) log sum_j exp(beta (x W_q)·(x_j W_k))          x: a token of the residual stream, keys fixed
    ∇G(x)     = sum_j a_j x_j W_k W_qᵀ                                                                       [theory E7]
    update    = sum_j a_j x_j W_v W_o                               a step up G iff W_v W_o = tau W_k W_qᵀ, tau > 0
    cosine    = <W_v W_o, W_k W_qᵀ> / |W_v W_o| |W_k W_qᵀ|                       of matrices; 1 if they are tied
    weighted  = the same with <A, B> = tr(Aᵀ C B)            C = E[x̄ᵀ x̄], x̄ = sum_j a_j x_j: attended mean of a query
    together  = sum_h <A_h, B_h> / sqrt(sum_h |A_h|² sum_h |B_h|²)          A_h = W_v W_o, B_h = W_k W_qᵀ of head h"""

_COSINES = {
    COSINE: Quantity("1", "cos(W_v W_o, W_k W_qᵀ)"),
    WEIGHTED: Quantity("1", "cos(W_v W_o, W_k W_qᵀ), weighted by E[x̄ᵀ x̄]"),
}

DECLARATION = Declaration(
    title="Tied QK and OV matrices",
    kind=PREDICTED,
    claim="The OV matrix W_v W_o of each head is aligned with its transposed QK matrix W_k W_q^T.",
    formula=(
        "weighted cosine = tr(A^T C B) / sqrt(tr(A^T C A) tr(B^T C B)) between the OV matrix A = W_v W_o of a head and "
        "its transposed QK matrix B = W_k W_q^T; C: second moment of the attended means of the head, its inputs "
        "averaged with the attention weights of a query. To first order it is the gain of the head's updates: 1 if "
        "they are steepest-ascent steps of the log normaliser, -1 if they are descent steps"
    ),
    supports=(
        f"Aligned: the weighted cosine is above {LEAST:g} and above the null, the cosine of B with randomly rotated A: "
        "in the stream, and inside the head."
    ),
    refutes=f"Opposed: the weighted cosine is below {-LEAST:g} and below that null.",
    method=(
        FORMULAS,
        "The QK matrix is W_q W_k^T, the OV matrix W_v W_o. If W_v W_o = tau W_k W_q^T with tau > 0, the attention "
        "update is an ascent step of the log normaliser, with tau < 0 a descent step. The scale parameters of the "
        "normalisation layer before the attention layer are part of W_q, W_k and W_v; those of a normalisation layer "
        "after the sublayer are part of W_o. A direction that normalisation removes, as LayerNorm removes the mean "
        "over coordinates, is projected out on both sides [theory E13].",
        "Updates are made of attended means, not of tokens: a head that attends to one token has one direction. Their "
        "moments are those of a sample of queries, of which the layer computes keys and values without rotation.",
        OVER_METHOD,
        "Null: the wider of two bands, both of mean 0. Random rotations R of the updates preserve the spectra of both "
        "matrices: the cosine of A R has the variance |Aᵀ C B|² / (D |A|² |B|²), norms weighted by C; D is the "
        "dimension of the updates. They also move the axes of the stream that the weights of a model share. Random "
        "rotations O between what a head reads and what it writes, P S O S Qᵀ in place of A = P S Qᵀ (singular value "
        "decomposition in the metric C), keep all axes of the head, as in the null of `qk_geometry`: the variance is "
        "|A Bᵀ C A|² / (|A|⁴ |B|²). Where the updates of a head have one axis, only their sign is left, which random "
        "matrices share in half of the cases: a head that is exactly tied is then inconclusive. For the cosine of all "
        "heads together, each head has a rotation of the stream of its own. Also reported: the cosine with C = I.",
    ),
    decision_rule=(
        f"A head is unrelated if the 95 % confidence interval of its weighted cosine lies within ±{LEAST:g} of the "
        "null, the bound of the gain in `ascent`. The verdict on the model is that of more than half of its heads, "
        "aligned or opposed; unrelated heads are neither."
    ),
    bounds={f"{LEAST:g}": DERIVATION},
    interesting=f"A cosine of {INTERESTING:g}: a tenth of the update, by length, is along the gradient.",
    power=planted_power("tie"),
    quantities={
        **_COSINES,
        LAYER: Quantity("1", "Σ_h ⟨A_h, B_h⟩ / √(Σ_h |A_h|² Σ_h |B_h|²)"),
        **{name + OVER: quantity for name, quantity in _COSINES.items()},
        STILL: Quantity("1", "|M_s|² / (|M_s|² + |M_t|²),  unrotated and rotated coordinates"),
    },
    statistic="median weighted cosine of OV and transposed QK matrices",
    null_reason=(
        "Rotations of the updates keep the spectra of both matrices and destroy their relation. Rotations inside the "
        "heads also keep the axes that the weights of a model share; the wider band counts. Mean and variance over all "
        "rotations are known, so that nothing is drawn; a cosine does not depend on the scale of the weights."
    ),
    null="random-rotation null",
    outcomes=("are aligned", "are opposed"),
    details={
        "unrelated": Label("unrelated heads"),
        "above_rotations": Label("heads whose unweighted cosine is above its random-rotation null"),
        "below_rotations": Label("below"),
        **OVER_DETAILS,
        **TEST_DETAILS,
    },
    remarks={
        NOTHING_MEASURED: "No self-attention layer has matrices that act on its input.",
        "unrelated": "Most heads are neither aligned nor opposed.",
        **OVER_REMARKS,
    },
    labels={
        LAYER: "cosine of all heads together",
        "share without rotation": "share of the squared norm without rotation",
    },
)


class LayerState(NamedTuple):
    """Moments of values and keys of the attended means of a self-attention layer, and its attention distances by group.

    attended: of (value, key) of every head, [h, v + d].
    """

    attended: Comoments | None = None
    distances: dict[int, Sums] | None = None


class _Means(NamedTuple):
    """Attended means of the sampled queries of all heads, as tokens of a layer at its first position."""

    layer_call: LayerCall
    means: Float[Tensor, "b h r D"]
    valid: Bool[Tensor, "b r"]


@dataclass
class _Memory:
    means: dict[str, _Means] = field(default_factory=dict)


def statistics(event: Event | ForwardOutput, batch_pass: BatchPass) -> dict[str, LayerState] | None:
    """Moments of attended means, and attention distances, of every head of a self-attention layer."""
    held = batch_pass.memory(_Memory).means
    if isinstance(event, ForwardOutput):  # layers run again only after the pass, which observes their modules
        moments = {layer: _attended(each, batch_pass.batch.group) for layer, each in held.items()}
        return {layer: LayerState(each) for layer, each in moments.items() if each is not None}
    if not isinstance(event, Attended) or event.crosses:
        return None
    means = _means(event, batch_pass)
    if means is not None:
        held[event.layer] = means
    return {event.layer: LayerState(distances=distances(event, batch_pass))}


def _means(event: Attended, batch_pass: BatchPass) -> _Means | None:
    """Inputs of the layer, averaged with the attention weights of each head; None if it has no such inputs."""
    layer_call = event.layer_call
    if layer_call is None or not layer_call.parted or not applies(event, batch_pass):
        return None
    rows = rows_of(event, batch_pass)
    if rows is None or rows.key.shape[2] != layer_call.tokens.shape[1]:
        return None
    a = (rows.logits - rows.of(event.attention.log_normalizer).unsqueeze(-1)).exp()
    means = rows.averaged(a, layer_call.tokens.to(a.dtype).unsqueeze(1)).to(layer_call.tokens.dtype)
    first = torch.zeros(len(a), a.shape[1] * a.shape[2], dtype=torch.int64, device=a.device)
    return _Means(at_tokens(layer_call, first), means, rows.valid)


def _attended(each: _Means, group: int) -> Comoments | None:
    """Moments of values and keys of the attended means, as the layer computes them at its first position.

    There rotary embeddings do not rotate. None if the layer computes its own logits.
    """
    h, r = each.means.shape[1:3]
    call = call_on(each.layer_call, each.means.flatten(1, 2))
    if call is None:
        return None
    vectors = torch.cat([_of_own_head(t, h, r) for t in (call.value, call.key)], -1)
    return comoments_of(vectors.flatten(1, 2), group=group, weights=each.valid.flatten())


def _of_own_head(t: Float[Tensor, "b k hr d"], h: int, r: int) -> Float[Tensor, "h b r d"]:
    """Vectors of each head at its own attended means, [h, b, r, d]; groups of heads may share them."""
    each = t.repeat_interleave(h // t.shape[1], 1).unflatten(2, (h, r))
    return each.diagonal(dim1=1, dim2=2).movedim(-1, 0)


def evaluate(state: dict[str, LayerState], model: Probed) -> list[Measured]:
    """Cosines of each head, and of all heads of a layer together."""
    rows = []
    for layer in model.architecture.attention:
        factors, layer_state = factors_of(model, layer), state.get(layer, LayerState())
        attended = on_cpu(layer_state.attended)
        if factors is None or attended is None:
            rows.append(absent(layer, WEIGHTED))
            continue
        unit = folded(factors, model, layer)
        of_units = products(unit)
        # Matrices have no sampling error: their intervals have width 0.
        rows += [Measured(layer, h, COSINE, c, c, c) for h, c in enumerate(cosine(*of_units).tolist())]
        of_layer = float(_layer_cosine(*of_units))
        rows.append(Measured(layer, None, LAYER, of_layer, of_layer, of_layer))
        weights, groups = model.weights[layer], attended.present()
        R = mean_rotations(layer_state.distances, weights, groups)  # type: ignore[arg-type]
        moments = _moments(attended.versions(), _biases(model, layer))
        values = {WEIGHTED: cosine(*products(factors, moments))}
        if R is not None:
            values[COSINE + OVER] = cosine(*products(unit, turned=R))
            values[WEIGHTED + OVER] = cosine(*products(factors, moments, turned=R))
        left = attended.tokens[groups if len(groups) > 1 else []]
        for quantity, versions in values.items():
            rows += measured(layer, quantity, jackknifed(versions[0], versions[1:], left), attended.tokens.sum())
        rows += _of_parts(layer, weights, unit, R)  # type: ignore[arg-type]
    return rows


def null(
    state: dict[str, LayerState], model: Probed, baseline: Baseline[dict[str, LayerState]] | None
) -> list[Measured]:
    """Values under random rotations."""
    rows = []
    for layer in model.architecture.attention:
        factors, layer_state = factors_of(model, layer), state.get(layer, LayerState())
        attended = on_cpu(layer_state.attended)
        if factors is None or attended is None:
            continue
        unit, weights = folded(factors, model, layer), model.weights[layer]
        moments = _moments(attended.total(), _biases(model, layer))
        R = mean_rotations(layer_state.distances, weights)  # type: ignore[arg-type]
        wider = torch.maximum(_rotated(factors, moments), _with_rotated_sides(factors, moments))
        spreads = {COSINE: _rotated(unit), WEIGHTED: wider}
        if R is not None:
            spreads |= {COSINE + OVER: _rotated(unit, turned=R[0])}
            spreads |= {WEIGHTED + OVER: _rotated(factors, moments, turned=R[0])}
        for quantity, spread in spreads.items():
            rows += [Measured(layer, h, quantity, *band(0.0, s)) for h, s in enumerate(spread.tolist())]
        of_units = products(unit)
        sizes = spreads[COSINE].square() * of_units[1] * of_units[2]
        spread = (sizes.sum() / (of_units[1].sum() * of_units[2].sum())).sqrt()
        rows.append(Measured(layer, None, LAYER, *band(0.0, float(spread))))
    return rows


def verdict(findings: list[Finding]) -> Judgement:
    """Judge every head as aligned, opposed or neither; count unrelated heads and those outside the rotation null."""
    judged = judge(findings, WEIGHTED, lambda f: beyond_the_null(f, LEAST))
    unrelated = practically_null("unrelated", judged.findings, WEIGHTED, LEAST)
    plain = [f for f in findings if f.quantity == COSINE]
    significant = [f for f, stands in zip(plain, outside(plain), strict=True) if stands]
    above = sum(f.value > 0 for f in significant)
    counts = (
        unrelated,
        Detail("above_rotations", count=above, total=len(plain)),
        Detail("below_rotations", count=len(significant) - above, total=len(plain)),
    )
    details, remarks = over_distances(findings, WEIGHTED + OVER)
    if is_majority(unrelated):
        remarks = (Remark("unrelated"), *remarks)
    return conclude(judged, WEIGHTED, details=(*counts, *details), remarks=remarks)


# Matrices ------------------------------------------------------------------------------------------------------------


def _of_parts(layer: str, weights: HeadWeights, f: Factors, R: Tensor | None) -> list[Measured]:
    """Share of the unrotated coordinates with partial rotary embeddings; an absent row if angles are unknown."""
    if R is None or not isinstance(weights.turning, Turning):
        return [absent(layer, WEIGHTED + OVER)] if weights.rotary else []
    share = still_share(weights.turning, f.query, f.key)
    return [] if share is None else [Measured(layer, h, STILL, v, v, v) for h, v in enumerate(share.tolist())]


def _biases(model: Probed, layer: str) -> HeadWeights:
    """Weights with the biases of the layer; of a pre-norm layer with that of the norm, which may be moved into them."""
    weights, sublayer = model.weights[layer], model.architecture.branch_of(layer)
    assert isinstance(weights, HeadWeights)
    return weights.folded if sublayer is not None and sublayer.reads is not None else weights


def _moments(attended: GroupMoments, weights: HeadWeights) -> Moments:
    """Second moments of the attended means, from those of their values and keys without biases."""
    v = weights.value.shape[-1]
    mean = attended.mean_x - torch.cat((weights.value_bias, weights.key_bias), -1)
    C = attended.covariance + mean.unsqueeze(-1) * mean.unsqueeze(-2)
    return Moments(C[..., :v, v:], C[..., :v, :v], C[..., v:, v:])


def _layer_cosine(inner: Tensor, square_a: Tensor, square_b: Tensor) -> Tensor:
    """Cosine of the concatenated matrices of all heads, each with its own attention."""
    return cosine(inner.sum(-1), square_a.sum(-1), square_b.sum(-1))


def _rotated(f: Factors, moments: Moments | None = None, *, turned: Tensor | None = None) -> Tensor:
    """Standard deviation of the cosine under random rotations R of the updates: <AR, B> = <R, Aᵀ C B>."""
    moments = of_unit_tokens(f) if moments is None else moments
    _, square_a, gradient = products(f, moments, turned=turned)
    M, square = moments.across, f.query.mT @ f.query
    square = square if turned is None else turned.mT @ square @ turned
    squared = (M * (f.output @ f.output.mT @ M @ square)).sum((-2, -1))
    return (squared / (f.width * square_a * gradient)).sqrt()


def _with_rotated_sides(f: Factors, moments: Moments) -> Tensor:
    """Standard deviation under random rotations O between what a head reads and what it writes, |A| as it is.

    A = P S Qᵀ becomes P S O S Qᵀ √d / |A|, and <P S O S Qᵀ, B> = <O, S Pᵀ C B Q S>, of the norm of A Bᵀ C A.
    """
    _, square_a, square_b = products(f, moments)
    M = f.output @ f.query @ moments.across.mT
    squared = ((moments.value @ M) * (M @ (f.output @ f.output.mT))).sum((-2, -1))
    return squared.clamp(min=0.0).sqrt() / (square_a * square_b.sqrt())


PREDICTION = Prediction(
    __name__,
    DECLARATION,
    statistics,
    evaluate,
    null,
    verdict,
    order=30,
)
