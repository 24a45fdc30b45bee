"""Are logit forms symmetric, and do rows or columns of them stand out?

    M               = W_q W_kᵀ, of all heads together: sum_h W_q^h W_k^hᵀ                                   [saponati25]
    symmetry        = (|M_s|² - |M_a|²) / |M|² = tr M² / tr M Mᵀ           1 symmetric, -1 antisymmetric, 0 by chance
    directionality  = (r - c) / (r + c)                                                    negative: columns stand out

Read next: qk_geometry.py (the same forms as tokens meet them).
"""

import math
from typing import NamedTuple

import torch

from ..._typing import Float, Tensor
from ..batch_pass import BatchPass
from ..hypothesis_tests import absent, band, count, measured, middle, outside
from ..inside.events import Attended, Event, ForwardOutput
from ..inside.head_weights import HeadWeights, Turning, still_share
from ..prediction import Prediction, Probed, Twin
from ..runs.judgement import Judgement, Measured
from ..runs.records import Declaration, Finding, Quantity
from ..statistics import GROUPS, Sums, jackknifed
from .observables.attention_distance import OVER, STILL, by_group, distances, mean_rotations, over_distances

SYMMETRY, DIRECTIONALITY = "symmetry", "directionality"
OF_HEAD = "symmetry of the head"
BOUND = 0.5
DEVIATIONS = 2.0  # above the mean, for a row to stand out
DRAWS = 200

FORMULAS = f"""\
    M               = W_q W_kᵀ, of all heads together: sum_h W_q^h W_k^hᵀ                                   [saponati25]
    symmetry        = (|M_s|² - |M_a|²) / |M|² = tr M² / tr M Mᵀ           1 symmetric, -1 antisymmetric, 0 by chance
    directionality  = (r - c) / (r + c)                                                    negative: columns stand out
    r               = sum over rows of how far their norm exceeds mean + {DEVIATIONS:g} standard deviations;
    c                 likewise of columns"""

_SCORES = {
    SYMMETRY: Quantity("1", "tr M² / tr M Mᵀ,  M = W_q W_kᵀ"),
    DIRECTIONALITY: Quantity("1", "(r − c) / (r + c),  rows and columns of M"),
    OF_HEAD: Quantity("1", "tr M² / tr M Mᵀ,  M = W_q W_kᵀ"),
}

DECLARATION = Declaration(
    title="Symmetry of QK matrices",
    claim="The logit form of each layer is symmetric: queries and keys play the same part.",
    formula="tr M² / tr M M^T of M = W_q W_k^T, and the excess of norms of its rows over that of its columns",
    refutes="A symmetry score below 1/2.",
    method=(
        FORMULAS,
        "As in the published tables the matrices are those of the checkpoint: without gains of norms and without "
        'rotations. "Over distances" they are W_q R̄ W_kᵀ, with the rotations of rotary embeddings averaged over the '
        "keys that each head attends to; where a part of the coordinates stays, its share of the squared norm is told. "
        "Shared heads are counted with each of their queries.",
        "Published medians over layers: symmetry .77 bert-tiny, .51 bert-base, .44 bert-large, .49 roberta-base, .72 "
        "albert-base-v2, .18 ModernBERT-base, .15 gpt2, .17 gpt2-medium, .12 gpt2-xl, .19 distilgpt2, .12 llama2-7b, "
        ".00 llama3-8b, .00 mistral-7b; directionality -.08 bert-base, -.58 gpt2. Encoders are found to be symmetric, "
        "decoders directional.",
        "Nulls: of symmetry, random rotations of the stream between queries and keys: mean 1 / D, deviation "
        "sqrt(2) / D; of directionality, the norms of a coordinate's row and column exchanged at random, as if queries "
        "and keys were alike.",
    ),
    decision_rule=(
        "The conjecture that M is a Fisher information makes it symmetric [theory E13]. A layer supports that above "
        f"{BOUND:g}, where three quarters of |M|² are symmetric, and above its null; it refutes it below {BOUND:g}. "
        "Matrices are known exactly."
    ),
    quantities={
        **_SCORES,
        **{name + OVER: quantity for name, quantity in _SCORES.items()},
        STILL: Quantity("1", "|M_s|² / (|M_s|² + |M_t|²),  coordinates that stay and turn"),
    },
    references=("saponati25",),
)


class LayerState(NamedTuple):
    """How far the heads of a layer look, by group."""

    distances: dict[int, Sums] | None = None


def statistics(event: Event | ForwardOutput, batch_pass: BatchPass) -> dict[str, LayerState] | None:
    """How far heads look, for the average over rotations; all else is of weights."""
    if not isinstance(event, Attended):
        return None
    return {event.layer: LayerState(distances(event, batch_pass))}


def evaluate(state: dict[str, LayerState], model: Probed) -> list[Measured]:
    """The scores of each layer, and of each head alone."""
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


def null(state: dict[str, LayerState], model: Probed, twin: Twin[dict[str, LayerState]] | None) -> list[Measured]:  # noqa: ARG001
    """Rotations, and exchanges of rows and columns."""
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
        if weights.rotary:  # rotations of the stream know nothing of those of queries
            rows.append(Measured(layer, None, SYMMETRY + OVER, *rotated))
            rows += [Measured(layer, h, OF_HEAD + OVER, *rotated) for h in range(len(weights.query))]
    return rows


def verdict(findings: list[Finding]) -> Judgement:
    """By the symmetry of each layer."""
    of = [f for f in findings if f.quantity == SYMMETRY and not math.isnan(f.value)]
    stands = {(f.layer, f.call): stands for f, stands in zip(of, outside(of), strict=True)}

    def ruled(f: Finding) -> Finding:
        if f.quantity != SYMMETRY:
            return f
        if math.isnan(f.value):
            return f._replace(verdict="not applicable")
        above = "supported" if stands[f.layer, f.call] else "undecided"
        return f._replace(verdict=above if f.value > BOUND else "refuted")

    findings = [ruled(f) for f in findings]
    found = count(findings, SYMMETRY)
    if not found.judged:
        return Judgement(findings, "not applicable", "No layer has matrices of queries and keys.", quantity=SYMMETRY)
    direction = middle(f.value for f in findings if f.quantity == DIRECTIONALITY)
    words = (
        f"The middle symmetry of {found.judged} layers is {found.value:z.2f}, directionality {direction:z.2f}; "
        "published are .51 and -.08 for bert-base, .15 and -.58 for gpt2."
    ) + over_distances(findings, SYMMETRY + OVER, "the middle symmetry")
    return Judgement(
        findings, found.verdict, words, found.value, null=found.null, quantity=SYMMETRY, note=found.note
    )  # fmt: skip


def symmetry(U: Float[Tensor, "*b D d"], V: Float[Tensor, "*b D d"]) -> Float[Tensor, "*b"]:
    """tr M² / tr M Mᵀ of M = U Vᵀ, from the products of the columns of its factors."""
    return _scored(V.mT @ U, U.mT @ U, V.mT @ V)


def _scored(across: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The same from VᵀU, UᵀU and VᵀV."""
    return (across * across.mT).sum((-2, -1)) / (query * key).sum((-2, -1))


def _turned_symmetry(U: Float[Tensor, "D hd"], V: Float[Tensor, "D hd"], R: Float[Tensor, "v h d d"]) -> Tensor:
    """The same of heads side by side, with R between queries and keys of each: from the products of the columns."""
    h, d = R.shape[1:3]

    def turn(products: Tensor) -> Tensor:
        """Products of columns, [*, hd, hd], times the rotations of the heads in their blocks."""
        return (products.unflatten(-1, (h, d)).transpose(-3, -2) @ R).transpose(-3, -2).flatten(-2)

    return _scored(turn(V.mT @ U), turn(turn(U.mT @ U).mT), V.mT @ V)


def directionality(rows: Float[Tensor, "*b D"], columns: Float[Tensor, "*b D"]) -> Float[Tensor, "*b"]:
    """(r - c) / (r + c), from the norms of rows and columns; 0 where none stands out."""
    r, c = (_excess(norms) for norms in (rows, columns))
    return torch.where(r + c > 0, (r - c) / (r + c), 0.0)


def _excess(norms: Tensor) -> Tensor:
    edge = norms.mean(-1, keepdim=True) + DEVIATIONS * norms.std(-1, keepdim=True)
    return (norms - edge).clamp(min=0.0).sum(-1)


def _norms(U: Tensor, V: Tensor) -> tuple[Tensor, Tensor]:
    """The norms of the rows and of the columns of U Vᵀ."""
    return ((U @ (V.mT @ V)) * U).sum(-1).sqrt(), ((V @ (U.mT @ U)) * V).sum(-1).sqrt()


def _over_distances(layer: str, kept: LayerState, weights: HeadWeights) -> list[Measured]:
    """The scores of forms with the average rotation between queries and keys."""
    found = by_group(kept.distances)
    rows_of_groups = torch.zeros(GROUPS) if found is None else found[:, 0, 0]
    groups = rows_of_groups.nonzero().squeeze(-1).tolist()
    R = mean_rotations(kept.distances, weights, groups)
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
    """W_q and W_k of all heads side by side, [D, h d]."""
    return _side(weights.query), _side(weights.key)


def _side(W: Float[Tensor, "*v h D d"]) -> Float[Tensor, "*v D hd"]:
    return W.transpose(-3, -2).flatten(-2)


PREDICTION = Prediction(__name__, DECLARATION, statistics, evaluate, null, verdict, order=50, baseline="weights")
