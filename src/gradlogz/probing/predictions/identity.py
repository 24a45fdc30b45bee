"""Identity: attention is the gradient of its log normaliser; a self-check of the capture.

    G(omega) = log sum_j exp(s_j + <v_j, omega>)         the joint family of keys and values            [theory 3.9]
    output   = ∇G(0)                                     exactly, for any weights

Read next: gaussian_measure.py (the same rows), observables/attention_rows.py (their sampling).
"""

from typing import NamedTuple

import torch

from ..._typing import Tensor
from ..batch_pass import BatchPass
from ..hypothesis_tests import NOTHING_MEASURED, absent, counted
from ..inside.events import Attended, Event, ForwardOutput
from ..prediction import Baseline, Prediction, Probed
from ..runs.judgement import Judgement, Measured
from ..runs.records import SELF_CHECK, Declaration, Finding, Quantity, Remark
from ..statistics import Histogram, histogram_of
from .observables.attention_rows import applies, rows_of

PART = 1 / 4  # share of the sampled rows: a wrong layer is wrong in most rows
LIMIT = 64.0  # rounding errors of sums of a few thousand terms
ERROR = "error"
EDGES = torch.tensor([2.0**power for power in range(-8, 33)], dtype=torch.float64)

FORMULAS = """\
    G(omega) = log sum_j exp(s_j + <v_j, omega>)         the joint family of keys and values            [theory 3.9]
    output   = ∇G(0)                                     exactly, for any weights
    error    = max |output - ∇G(0)| / (eps (1 + max |s|) max |v|)               in rounding units"""

DECLARATION = Declaration(
    title="Attention is a gradient",
    kind=SELF_CHECK,
    claim="The output of attention is the gradient of its log normaliser.",
    formula=(
        "error = max |output - ∇G(0)| over the sampled rows of a head, in rounding units eps (1 + max |s|) max |v|. "
        "G(omega) = log sum_j exp(s_j + <v_j, omega>) is the log normaliser of a row; s_j: logit and v_j: value of "
        "its visible key j, omega: a vector of the dimension of the values"
    ),
    supports=f"The error of every head is at most {LIMIT:g} rounding units; the check is then passed.",
    refutes=(
        f"The error of a head is above {LIMIT:g} rounding units; the check then fails. The identity holds for any "
        "weights, so such an error means that the layer was not captured correctly and that its other results are "
        "invalid."
    ),
    method=(
        FORMULAS,
        "The gradient is computed by automatic differentiation from explicit logits, for a random sample of rows; the "
        "output is the tensor that the model itself passes on. This is a self-check of the measurement, not an "
        "empirical claim.",
    ),
    decision_rule=f"A head is exact if its error is at most {LIMIT:g}. One head that is not exact refutes the claim.",
    bounds={
        f"{LIMIT:g}": (
            f"Rounding errors of a sum of n terms of random sign are about sqrt(n) units: {LIMIT:g} for "
            f"{LIMIT**2:,.0f} keys. A layer that is captured wrongly has errors of 1/eps units, millions."
        )
    },
    null_reason=("The identity holds for any weights: there is nothing to compare with."),
    quantities={ERROR: Quantity("rounding units", "|y − ∇G| / (ε (1 + max|s|) max|v|)")},
    statistic="largest error",
    number="{:.3g} rounding units",
    outcomes=("are exact", "are not"),
    correction="",
    remarks={
        NOTHING_MEASURED: "No attention layer exposes its queries, keys and values.",
        "not_exact": "Other results for heads that are not exact are invalid (in {layers}).",
    },
    labels={
        "error": "largest error",
    },
)


class LayerState(NamedTuple):
    """Errors of each head, [h]; None for a layer that exposes no queries, or that uses dropout."""

    errors: Histogram | None


def statistics(event: Event | ForwardOutput, batch_pass: BatchPass) -> dict[str, LayerState] | None:
    """Histogram of the errors of the sampled rows, with powers of 2 as edges."""
    if not isinstance(event, Attended):
        return None
    if not applies(event, batch_pass) or event.arguments.dropout_p:
        return {event.layer: LayerState(None)}
    rows = rows_of(event, batch_pass, part=PART)
    if rows is None:
        return None
    wide = rows.query.dtype
    v = event.value.to(wide)
    gradient = _gradient(rows.logits, v, event.arguments.sinks)
    b, h, r, width = gradient.shape
    output = event.attention.output.gather(2, rows.places[:, None, :, None].expand(b, h, r, width)).to(wide)
    size = 1 + rows.logits.masked_fill(rows.log_weights == -torch.inf, 0.0).abs().amax(-1)
    largest = torch.linalg.vecdot(v, v).amax(-1).sqrt().repeat_interleave(h // v.shape[1], 1).unsqueeze(-1)
    unit = torch.finfo(event.attention.output.dtype).eps * size * largest
    error = (output - gradient).norm(dim=-1) / unit.clamp(min=torch.finfo(wide).tiny)
    valid = rows.valid.unsqueeze(1).expand_as(error)
    errors = error.transpose(0, 1).flatten(1)
    return {event.layer: LayerState(histogram_of(errors, EDGES, valid=valid.transpose(0, 1).flatten(1)))}


def evaluate(state: dict[str, LayerState], model: Probed) -> list[Measured]:
    """Largest error of each head, rounded up to a power of 2; infinite if an error is NaN."""
    rows = []
    for layer, layer_state in state.items():
        if layer_state.errors is None:
            rows.append(absent(layer, ERROR))
            continue
        counts = layer_state.errors.counts.cpu()
        ends = torch.cat((EDGES, EDGES.new_tensor([torch.inf, torch.inf])))
        for head, bins in enumerate(counts):
            last = int(bins.nonzero().max()) if int(bins.sum()) else 0
            rows.append(Measured(layer, head, ERROR, float(ends[last]), tokens=int(bins.sum())))
    return rows


def null(
    state: dict[str, LayerState],
    model: Probed,
    baseline: Baseline[dict[str, LayerState]] | None,
) -> list[Measured]:
    """Return no null values: the identity holds for every model."""
    return []


def verdict(findings: list[Finding]) -> Judgement:
    """Judge every head by its largest error; one inexact head refutes the claim."""
    ruled = [
        f._replace(verdict="not applicable" if not f.tokens else "supported" if f.value <= LIMIT else "refuted")
        for f in findings
    ]
    judgement = counted(ruled, ERROR)
    if not judgement.judged:
        return judgement
    largest = max(f.value for f in ruled if f.tokens)
    layers = tuple(dict.fromkeys(f.layer for f in ruled if f.verdict == "refuted"))
    return judgement._replace(
        verdict="refuted" if layers else "supported",
        value=largest,
        remarks=(Remark("not_exact", layers=layers),) if layers else (),
    )


def _gradient(s: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
    """∇_omega log sum_j exp(s_j + <v_j, omega>) at 0, [b, h, r, v]; a sink is a key with value 0."""
    b, h, r, n = s.shape
    with torch.enable_grad():
        omega = torch.zeros(b, h, r, v.shape[-1], dtype=s.dtype, device=s.device, requires_grad=True)
        grouped = omega.reshape(b, v.shape[1], -1, v.shape[-1])
        tilted = s + (grouped @ v.mT).reshape(b, h, r, n)
        if sinks is not None:
            sink = sinks.to(s.dtype).expand(b, h)[:, :, None, None].expand(b, h, r, 1)
            tilted = torch.cat((tilted, sink), -1)
        alive = tilted.detach().amax(-1, keepdim=True) > -torch.inf
        G = torch.where(alive, tilted, 0.0).logsumexp(-1)
        (gradient,) = torch.autograd.grad(G.sum(), omega)
    return gradient


PREDICTION = Prediction(__name__, DECLARATION, statistics, evaluate, null, verdict, order=10)
