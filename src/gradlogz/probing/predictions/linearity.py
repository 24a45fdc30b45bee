"""Linearity: held-out R² of affine fits to feed-forward sublayers.

    u         = f(z)                           z: input of the sublayer, u: its update of the residual stream x
    held out  = 1 - |u - best affine map of z|² / |u - mean|²          on each group of documents, fitted on the others

Read next: ../statistics/regression.py (the fits), expansion.py (growth of the variance).
"""

from typing import NamedTuple

import torch

from ..._typing import Tensor
from ..batch_pass import BatchPass
from ..hypothesis_tests import NOTHING_MEASURED, absent, describe, measured, median_detail
from ..inside.architecture import Architecture
from ..inside.events import Event, ForwardOutput, Passed
from ..prediction import Baseline, Prediction, Probed
from ..runs.judgement import Judgement, Measured
from ..runs.records import DESCRIPTIVE, Declaration, Finding, Label, Quantity, Remark
from ..statistics import (
    Comoments,
    Estimate,
    Fit,
    GroupMoments,
    affine_fit,
    affine_fits,
    jackknife,
)
from .observables.batch_moments import bytes_of_moments, token_moments

HELD_OUT, IN_SAMPLE, COORDINATES = "held-out R²", "in-sample R²", "median in-sample R² of coordinates"
WITH_RESIDUAL, SCORE, IDENTITY = "held-out R² with residual", "linearity score", "R² of the identity"
DISTANCE, ANISOTROPY, FEW = "distance to the identity", "anisotropy", "few_tokens"
MANY = 10  # tokens for each input coordinate, from which the held-out R² is nearly that of unlimited text

FORMULAS = """\
    u         = f(z)                           z: input of the sublayer, u: its update, x' = x + u the residual stream
    held out  = 1 - |u - best affine map of z|² / |u - mean|²          on each group of documents, fitted on the others
    score     = 1 - min_A |X̃A - X̃'|²          X̃, X̃': x and x' centred, of norm 1; all tokens at once     [razzhigaev24]
    distance  = |B - I|_C / |I|_C              B: the best affine map from x to x';  |A|²_C = tr Aᵀ C A, C = Cov(x)
    identity  = 1 - tr Cov(u) / tr Cov(x')     score of the identity map, without the sublayer"""

DECLARATION = Declaration(
    title="Affine feed-forward maps",
    kind=DESCRIPTIVE,
    claim="Share of the variance of each feed-forward update that an affine map of the input explains.",
    formula=(
        "held-out R² (shown as the result) and in-sample R² of the least-squares affine map from the input of a "
        "feed-forward sublayer to its update. Held-out: the map is fitted on other documents than it is evaluated on; "
        "in-sample: on the same documents"
    ),
    refutes="",
    method=(
        FORMULAS,
        "The published linearity score is in sample and includes the residual. Both inflate it: p coordinates explain "
        "p / n of the variance of any n tokens, and the residual stream explains itself. A score near 1 may also be "
        "due to a single principal component, whose share of the variance (anisotropy) is reported, or to a few large "
        "coordinates; the median over coordinates is reported as well.",
        "Null of the in-sample R² without residual: shuffled tokens, p / (n - 1); the others have none. Untrained "
        "activation functions receive small inputs, where they are almost linear, so that R² near 1 is not an effect "
        "of training. The theory asks how linear these maps are and makes no claim.",
        "A fit on n tokens has an error of its own, which lowers the held-out R² by about p / n of the unexplained "
        "variance and more for few tokens. It is therefore extrapolated to unlimited text from fits on all other and "
        "on half of the other documents. Without three groups of documents, or with fewer than two tokens for each "
        f"coordinate in half of them, it is not; with fewer than {MANY} tokens for each of the p coordinates the "
        "result has a remark.",
    ),
    decision_rule="The value of the model is the median over its feed-forward sublayers.",
    quantities={
        HELD_OUT: Quantity("1", "1 − |u − Az − b|² / |u − ū|²,  held out"),
        WITH_RESIDUAL: Quantity("1", "1 − |x′ − Ax − b|² / |x′ − x̄′|²,  held out"),
        IDENTITY: Quantity("1", "1 − tr Cov(u) / tr Cov(x + u)"),
        IN_SAMPLE: Quantity("1", "1 − |u − Az − b|² / |u − ū|²"),
        SCORE: Quantity("1", "1 − min_A |X̃A − X̃′|²"),
        COORDINATES: Quantity("1", "1 − |uᵢ − (Az + b)ᵢ|² / |uᵢ − ūᵢ|²"),
        DISTANCE: Quantity("1", "|B − I|_C / |I|_C"),
        ANISOTROPY: Quantity("1", "λ₁ / Σ λ,  λ of Cov(x)"),
    },
    references=("razzhigaev24",),
    statistic="median held-out R² of an affine fit",
    null_reason=(
        "None for held-out values: 0 is that of an update unrelated to the input. Untrained maps of small "
        "weights are nearly affine, so that no value is evidence of training."
    ),
    unit="feed-forward sublayer",
    details={
        SCORE: Label("median linearity score with residual"),
        ANISOTROPY: Label("median share of the first principal component"),
    },
    remarks={
        NOTHING_MEASURED: "No feed-forward sublayer was recognised.",
        FEW: "Only {ratio:.1f} tokens for each input coordinate: the held-out R² may be too low; read more text.",
    },
)


class LayerState(NamedTuple):
    """Moments of the input of a sublayer with its update, and of the residual stream if it differs from the input."""

    inputs: Comoments
    stream: Comoments | None = None


def matrices(architecture: Architecture) -> dict[str, int]:
    """Sizes of the products of inputs, and of the residual stream if it differs, with updates."""
    D, sizes = architecture.width, {}
    for sublayer in architecture.sublayers:
        if sublayer.kind == "feed_forward":
            for tokens in ("input",) if sublayer.reads is None else ("input", "stream"):
                sizes[f"{tokens} and update of {sublayer.name}"] = bytes_of_moments(D, D)
    return sizes


def statistics(event: Event | ForwardOutput, batch_pass: BatchPass) -> dict[str, LayerState] | None:
    """Moments of the input of each feed-forward sublayer, and of the residual stream, with its update."""
    if not isinstance(event, Passed) or event.sublayer.kind != "feed_forward":
        return None
    mask = batch_pass.real(event)
    inputs = token_moments(event.input, event.update, batch_pass=batch_pass, mask=mask, yy="diagonal")
    if event.input is event.stream:
        return {event.sublayer.name: LayerState(inputs)}
    stream = token_moments(event.stream, event.update, batch_pass=batch_pass, mask=mask, yy="diagonal")
    return {event.sublayer.name: LayerState(inputs, stream)}


def evaluate(state: dict[str, LayerState], model: Probed) -> list[Measured]:
    """R² of affine maps, and related statistics of each feed-forward sublayer."""
    rows = []
    for sublayer in model.architecture.sublayers:
        if sublayer.kind != "feed_forward":
            continue
        layer_state = state.get(sublayer.name)
        rows += [absent(sublayer.name, HELD_OUT)] if layer_state is None else _measured(sublayer.name, layer_state)
    return rows


def null(
    state: dict[str, LayerState], model: Probed, baseline: Baseline[dict[str, LayerState]] | None
) -> list[Measured]:
    """In-sample R² of shuffled tokens."""
    rows = []
    for sublayer in model.architecture.sublayers:
        layer_state = state.get(sublayer.name)
        if sublayer.kind == "feed_forward" and layer_state is not None:
            n, p = float(layer_state.inputs.tokens.sum()), layer_state.inputs.total().mean_x.shape[-1]
            rows.append(Measured(sublayer.name, None, IN_SAMPLE, min(p / (n - 1), 1.0)))
    return rows


def verdict(findings: list[Finding]) -> Judgement:
    """Describe every feed-forward sublayer by its held-out R² without residual; remark on too few tokens."""
    tokens = [1 / f.null for f in findings if f.quantity == IN_SAMPLE and f.null > 0]  # for each input coordinate
    few = (Remark(FEW, {"ratio": min(tokens)}),) if tokens and min(tokens) < MANY else ()
    details = [median_detail(name, findings, name) for name in (SCORE, ANISOTROPY)]
    return describe(findings, HELD_OUT, details=details, remarks=few)


def _measured(name: str, layer_state: LayerState) -> list[Measured]:
    inputs = layer_state.inputs
    stream = inputs if layer_state.stream is None else layer_state.stream
    tokens = inputs.tokens.sum()
    fit_of_stream, residual_fit = affine_fits(stream)
    fit = fit_of_stream if stream is inputs else affine_fit(inputs)
    rows = measured(name, HELD_OUT, _held_out(fit), tokens)
    rows += measured(name, WITH_RESIDUAL, _held_out(residual_fit), tokens)
    rows += measured(name, IDENTITY, jackknife(_identity, stream), tokens)
    described = {
        IN_SAMPLE: fit.in_sample,
        SCORE: residual_fit.in_sample,
        COORDINATES: _median_over_coordinates(inputs.total(), fit.coefficients),
        DISTANCE: _distance(stream.total(), residual_fit.coefficients),
        ANISOTROPY: _anisotropy(stream.total()),
    }
    return rows + [Measured(name, None, quantity, float(v), tokens=int(tokens)) for quantity, v in described.items()]


def _held_out(fit: Fit) -> Estimate:
    """Held-out R² for unlimited text; that of the fit itself if there are too few tokens to extrapolate."""
    return fit.held_out if bool(fit.extrapolated.value.isnan()) else fit.extrapolated


def _diagonal(products: Tensor) -> Tensor:
    return products.diagonal(dim1=-2, dim2=-1)


def _median_over_coordinates(m: GroupMoments, B: Tensor) -> Tensor:
    """Median R² over the coordinates of the update that vary."""
    varies = m.yy > 0
    return torch.where(varies, (B * m.xy).sum(-2) / m.yy, torch.nan).nanmedian(-1).values


def _distance(m: GroupMoments, B: Tensor) -> Tensor:
    change = B - torch.eye(B.shape[-1], dtype=B.dtype, device=B.device)
    return ((change * (m.xx @ change)).sum((-2, -1)) / _diagonal(m.xx).sum(-1)).sqrt()


def _identity(m: GroupMoments) -> Tensor:
    return 1 - m.spread_y / m.spread_of_sum


def _anisotropy(m: GroupMoments) -> Tensor:
    """Share of the variance in the first principal component."""
    return torch.linalg.eigvalsh(m.xx)[..., -1] / _diagonal(m.xx).sum(-1)


PREDICTION = Prediction(__name__, DECLARATION, statistics, evaluate, null, verdict, order=90, matrices=matrices)
