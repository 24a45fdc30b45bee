"""Symmetry and directionality of QK matrices, as published.

    M               = W_q W_kᵀ, of all heads together: sum_h W_q^h W_k^hᵀ                                   [saponati25]
    symmetry        = (|M_s|² - |M_a|²) / |M|² = tr M² / tr M Mᵀ           1 symmetric, -1 antisymmetric, 0 for random M
    directionality  = (r - c) / (r + c)       negative: columns of M have more outlying norms than rows

Read next: qk_geometry.py (the same matrices with the scale parameters of normalisation layers).
"""

import math
from typing import NamedTuple

import torch

from ..._typing import Float, Tensor
from ..batch_pass import BatchPass
from ..hypothesis_tests import NOTHING_MEASURED, absent, band, describe, measured, median_detail
from ..inside.events import Attended, Event, ForwardOutput
from ..inside.head_weights import HeadWeights, Turning, still_share
from ..prediction import Baseline, Prediction, Probed
from ..runs.judgement import Judgement, Measured
from ..runs.records import DESCRIPTIVE, Declaration, Finding, Label, Quantity, Remark
from ..statistics import GROUPS, Sums, jackknifed
from .observables.attention_distance import (
    OVER,
    OVER_DETAILS,
    OVER_METHOD,
    OVER_REMARKS,
    STILL,
    by_group,
    distances,
    mean_rotations,
    over_distances,
)

SYMMETRY, DIRECTIONALITY = "symmetry", "directionality"
OF_HEAD = "symmetry of the head"
DEVIATIONS = 2.0  # standard deviations above the mean that define a large row or column
DRAWS = 200

FORMULAS = f"""\
    M               = W_q W_kᵀ, of all heads together: sum_h W_q^h W_k^hᵀ                                   [saponati25]
    symmetry        = (|M_s|² - |M_a|²) / |M|² = tr M² / tr M Mᵀ           1 symmetric, -1 antisymmetric, 0 for random M
    directionality  = (r - c) / (r + c)       negative: columns of M have more outlying norms than rows
    r               = sum of the excesses of row norms of M over their mean + {DEVIATIONS:g} standard deviations
    c               = the same for columns"""

_SCORES = {
    SYMMETRY: Quantity("1", "tr M² / tr M Mᵀ,  M = W_q W_kᵀ"),
    DIRECTIONALITY: Quantity("1", "(r − c) / (r + c),  rows and columns of M"),
    OF_HEAD: Quantity("1", "tr M² / tr M Mᵀ,  M = W_q W_kᵀ"),
}

DECLARATION = Declaration(
    title="Symmetric QK matrices",
    kind=DESCRIPTIVE,
    claim="The sum of the QK matrices W_q W_k^T of all heads of an attention layer is symmetric.",
    formula=(
        "symmetry score = tr(M M) / tr(M M^T), M = sum_h W_q W_k^T over the heads of a layer: 1 if M is symmetric, "
        "-1 if it is antisymmetric, near 0 if it is random. Random-rotation null: M R in place of M; the "
        "random rotation R acts on the inputs of the keys, not on those of the queries"
    ),
    refutes="",
    method=(
        FORMULAS,
        "As in the published tables, the matrices are those of the checkpoint, without the scale parameters of "
        "normalisation layers; a checkpoint in which these are absorbed has another score, although it computes the "
        "same. The symmetric share of `qk_geometry` includes them. Shared key heads are counted with each of their "
        "query heads.",
        "A symmetric M is no evidence for a Fisher information: the training objective explains it as well. In "
        "bidirectional training each pair of tokens predicts in both directions, so that the expected updates of M are "
        "symmetric, while autoregressive training adds to one direction and makes columns of M large [saponati25]. The "
        "score is therefore described and not tested.",
        OVER_METHOD,
        "Published medians over layers: symmetry .77 bert-tiny, .51 bert-base, .44 bert-large, .49 roberta-base, .72 "
        "albert-base-v2, .18 ModernBERT-base, .15 gpt2, .17 gpt2-medium, .12 gpt2-xl, .19 distilgpt2, .12 llama2-7b, "
        ".00 llama3-8b, .00 mistral-7b; directionality -.08 bert-base, -.58 gpt2. Encoders are reported to be "
        "symmetric, decoders directional.",
        "Nulls: for symmetry, random rotations of the residual stream between queries and keys, with mean 1 / D and "
        "standard deviation sqrt(2) / D; for directionality, random exchanges of the row norm and the column norm of "
        "each coordinate.",
    ),
    decision_rule=(
        "The conjecture that M is a Fisher information makes it symmetric [theory E13]. At a score of 0.5, three "
        "quarters of |M|² are in the symmetric part of M. The value of the model is the median over its attention "
        "layers."
    ),
    quantities={
        **_SCORES,
        **{name + OVER: quantity for name, quantity in _SCORES.items()},
        STILL: Quantity("1", "|M_s|² / (|M_s|² + |M_t|²),  unrotated and rotated coordinates"),
    },
    references=("saponati25",),
    statistic="median symmetry score",
    null_reason=("200 rotations keep the spectrum of the matrix and destroy the relation of its sides."),
    null="random-rotation null",
    unit="attention layer",
    correction="",
    details={
        DIRECTIONALITY: Label(
            "median directionality (negative: columns have more outlying norms than rows)",
            null="row-column exchange null",
        ),
        **OVER_DETAILS,
    },
    remarks={
        NOTHING_MEASURED: "No attention layer has query and key matrices of equal input width.",
        "published": "Published medians: symmetry .51 and directionality -.08 for bert-base, .15 and -.58 for gpt2.",
        **OVER_REMARKS,
    },
    labels={
        "symmetry": "symmetry score",
        "symmetry of the head": "symmetry score of one head",
        "share without rotation": "share of the squared norm without rotation",
    },
)


class LayerState(NamedTuple):
    """Attention distances of the heads of a layer, by group."""

    distances: dict[int, Sums] | None = None


def statistics(event: Event | ForwardOutput, batch_pass: BatchPass) -> dict[str, LayerState] | None:
    """Attention distances, for the average over rotations; all else depends on the weights alone."""
    if not isinstance(event, Attended):
        return None
    return {event.layer: LayerState(distances(event, batch_pass))}


def evaluate(state: dict[str, LayerState], model: Probed) -> list[Measured]:
    """Scores of each layer and of each head."""
    rows = []
    for layer in model.architecture.attention:
        weights = model.weights.get(layer)
        if not isinstance(weights, HeadWeights) or weights.query.shape[1] != weights.key.shape[1]:
            rows.append(absent(layer, SYMMETRY))
            continue
        U, V = _sides(weights)
        s, d = float(symmetry(U, V)), float(directionality(*_norms(U, V)))
        rows += [Measured(layer, None, SYMMETRY, s, s, s), Measured(layer, None, DIRECTIONALITY, d, d, d)]
        each = symmetry(weights.query, weights.key).tolist()
        rows += [Measured(layer, h, OF_HEAD, v, v, v) for h, v in enumerate(each)]
        rows += _over_distances(layer, state.get(layer, LayerState()), weights) if weights.rotary else []
    return rows


def null(
    state: dict[str, LayerState],
    model: Probed,
    baseline: Baseline[dict[str, LayerState]] | None,
) -> list[Measured]:
    """Values under random rotations, and under random exchanges of row and column norms."""
    rows = []
    for number, layer in enumerate(model.architecture.attention):
        weights = model.weights.get(layer)
        if not isinstance(weights, HeadWeights) or weights.query.shape[1] != weights.key.shape[1]:
            continue
        D = weights.query.shape[1]
        rotated = band(1 / D, math.sqrt(2) / D)
        rows.append(Measured(layer, None, SYMMETRY, *rotated))
        rows += [Measured(layer, h, OF_HEAD, *rotated) for h in range(len(weights.query))]
        generator = torch.Generator().manual_seed(model.seed + number)
        swap = torch.rand(DRAWS, D, generator=generator) < 0.5
        row, column = _norms(*_sides(weights))
        draws = directionality(torch.where(swap, row, column), torch.where(swap, column, row))
        ends = torch.quantile(draws, torch.tensor([0.025, 0.975], dtype=draws.dtype)).tolist()
        rows.append(Measured(layer, None, DIRECTIONALITY, 0.0, *ends))
        if weights.rotary:  # rotations of the stream commute with those of queries
            rows.append(Measured(layer, None, SYMMETRY + OVER, *rotated))
            rows += [Measured(layer, h, OF_HEAD + OVER, *rotated) for h in range(len(weights.query))]
    return rows


def verdict(findings: list[Finding]) -> Judgement:
    """Describe the symmetry of the layers."""
    direction = median_detail(DIRECTIONALITY, findings, DIRECTIONALITY)
    details, remarks = over_distances(findings, SYMMETRY + OVER)
    return describe(findings, SYMMETRY, details=(direction, *details), remarks=(Remark("published"), *remarks))


def symmetry(U: Float[Tensor, "*b D d"], V: Float[Tensor, "*b D d"]) -> Float[Tensor, "*b"]:
    """tr M² / tr M Mᵀ of M = U Vᵀ, from Gram matrices of its factors."""
    return _scored(V.mT @ U, U.mT @ U, V.mT @ V)


def _scored(across: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """tr M² / tr M Mᵀ from VᵀU, UᵀU and VᵀV."""
    return (across * across.mT).sum((-2, -1)) / (query * key).sum((-2, -1))


def _turned_symmetry(U: Float[Tensor, "D hd"], V: Float[Tensor, "D hd"], R: Float[Tensor, "v h d d"]) -> Tensor:
    """Symmetry of all heads together, with the rotation R of each head between its queries and keys."""
    h, d = R.shape[1:3]

    def turn(products: Tensor) -> Tensor:
        """Gram matrix [*, hd, hd] times the block-diagonal rotations of the heads."""
        return (products.unflatten(-1, (h, d)).transpose(-3, -2) @ R).transpose(-3, -2).flatten(-2)

    return _scored(turn(V.mT @ U), turn(turn(U.mT @ U).mT), V.mT @ V)


def directionality(rows: Float[Tensor, "*b D"], columns: Float[Tensor, "*b D"]) -> Float[Tensor, "*b"]:
    """(r - c) / (r + c), from the norms of rows and columns; 0 if none is large."""
    r, c = (_excess(norms) for norms in (rows, columns))
    return torch.where(r + c > 0, (r - c) / (r + c), 0.0)


def _excess(norms: Tensor) -> Tensor:
    edge = norms.mean(-1, keepdim=True) + DEVIATIONS * norms.std(-1, keepdim=True)
    return (norms - edge).clamp(min=0.0).sum(-1)


def _norms(U: Tensor, V: Tensor) -> tuple[Tensor, Tensor]:
    """Norms of the rows and of the columns of U Vᵀ."""
    return ((U @ (V.mT @ V)) * U).sum(-1).sqrt(), ((V @ (U.mT @ U)) * V).sum(-1).sqrt()


def _over_distances(layer: str, layer_state: LayerState, weights: HeadWeights) -> list[Measured]:
    """Scores with the average rotation between queries and keys."""
    weight_sums = by_group(layer_state.distances)
    rows_of_groups = torch.zeros(GROUPS) if weight_sums is None else weight_sums[:, 0, 0]
    groups = rows_of_groups.nonzero().squeeze(-1).tolist()
    R = mean_rotations(layer_state.distances, weights, groups)
    if R is None or not isinstance(weights.turning, Turning):
        return [absent(layer, SYMMETRY + OVER)]
    left = rows_of_groups[groups if len(groups) > 1 else []]
    U, V = weights.query, weights.key
    rows = []
    heads = _scored((V.mT @ U) @ R, R.mT @ (U.mT @ U) @ R, V.mT @ V)
    for quantity, values in ((SYMMETRY, _turned_symmetry(_side(U), _side(V), R)), (OF_HEAD, heads)):
        rows += measured(layer, quantity + OVER, jackknifed(values[0], values[1:], left), rows_of_groups.sum())
    direction = float(directionality(*_norms(_side(U @ R[0]), _side(V))))
    rows.append(Measured(layer, None, DIRECTIONALITY + OVER, direction, tokens=int(rows_of_groups.sum())))
    share = still_share(weights.turning, weights.query, weights.key)
    if share is not None:
        rows += [Measured(layer, h, STILL, v, v, v) for h, v in enumerate(share.tolist())]
    return rows


def _sides(weights: HeadWeights) -> tuple[Tensor, Tensor]:
    """W_q and W_k of all heads, concatenated, [D, h d]."""
    return _side(weights.query), _side(weights.key)


def _side(W: Float[Tensor, "*v h D d"]) -> Float[Tensor, "*v D hd"]:
    return W.transpose(-3, -2).flatten(-2)


PREDICTION = Prediction(__name__, DECLARATION, statistics, evaluate, null, verdict, order=50)
