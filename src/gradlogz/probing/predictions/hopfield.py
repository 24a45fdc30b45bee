"""Hopfield retrieval: the number of patterns that a head retrieves in one update.

    held            k / n: smallest number of keys with 90 % of the weight, over n visible keys     [ramsauer20]

Read next: entropy.py, ../../dynamics/hopfield.py (iterated networks).
"""

import math
from collections import Counter
from functools import partial
from typing import NamedTuple

import torch

from ..._typing import Float, Tensor
from ..batch_pass import BatchPass
from ..hypothesis_tests import (
    NOTHING_MEASURED,
    absent,
    bootstrapped,
    describe,
    matched_null,
    measured,
)
from ..inside.events import Attended, Event, ForwardOutput
from ..prediction import Baseline, Prediction, Probed
from ..runs.judgement import Judgement, Measured
from ..runs.records import DESCRIPTIVE, Declaration, Detail, Finding, Label, Quantity, Remark
from ..statistics import Histogram, Sums, ascending, histogram_of, ratio, sums_of
from .observables.attention_rows import Rows, applies, rows_of

HELD, MASS, FEWEST = "held", 0.9, 8
COUNT, CLASS, RETRIEVAL, BROKEN = "keys held", "class", "retrieval", "rows against theorems"
CLASSES = {"I": 1 / 2, "II": 1 / 8, "III": 1 / 32, "IV": 0.0}
CLASS_NAMES = [f"class {name}" for name in CLASSES]
ROUNDING = 1e-3
EDGES = torch.tensor([-1.0, -ROUNDING, 0.0, 1.0], dtype=torch.float64)

FORMULAS = f"""\
    share of keys   k / n; k: smallest number of keys with {100 * MASS:g} % of the weight, n: visible keys  [ramsauer20]
    class           of the median row: I k > n/2, an average of most keys; II n/8 < k <= n/2; III n/32 < k <= n/8, a
                    metastable state of few keys; IV k <= n/32, single patterns
    retrieval       share of rows with b < M, where b = 2 M (n - 1) exp(-(s_1 - s_2)) >= |att - k_1|        [theory 5.7]
                    k_1: key of the largest logit s_1; s_2: second largest logit; M: largest norm of a key
    energy          E(x) = |x|²/2 - (1/beta) log sum_j w_j exp(beta <k_j, x>)       w_j = exp(bias of key j), 1 without
    theorem         E(q) - E(att) >= |q - att|²/2                                                           [theory 5.6]
    violations      rows that break b >= |att - k_1| or the theorem by more than rounding: a self-check"""

DECLARATION = Declaration(
    title="Hopfield retrieval",
    kind=DESCRIPTIVE,
    claim=f"Share of the keys that hold {100 * MASS:g} % of the attention weight, and the classes of heads by it.",
    formula=(
        f"share k / n of the n visible keys of a row, k the smallest number of keys that hold {100 * MASS:g} % of its "
        "attention weight; mean over the rows of a head"
    ),
    refutes="",
    method=(
        FORMULAS,
        f"The sample is a random subset of the rows with at least {FEWEST} visible keys. The state is the query, the "
        "patterns are the visible keys, and att is their attention-weighted mean, whatever the values are; beta is the "
        "scale. A learned sink is one more pattern, at the origin: its logit does not depend on the query, and it adds "
        "nothing to the mean.",
        "Null: the matched baseline, with the 95 % prediction band of one more draw.",
        "The share and the normalised entropy rank heads almost alike (rank correlation 0.97 over the heads of "
        "all-MiniLM-L6-v2). A test of the share would repeat that of the entropy with less power, because it needs all "
        "weights of a row and therefore reads a sample of the rows: the share is described and not tested. Half of the "
        "keys, or a given class, is no state that the theory predicts.",
    ),
    decision_rule="The value of the model is the median over its heads.",
    quantities={
        HELD: Quantity("share of keys", f"k / n,  k keys hold {100 * MASS:g} %"),
        COUNT: Quantity("keys", f"k that hold {100 * MASS:g} %"),
        CLASS: Quantity("number", "1: k > n/2,  2: > n/8,  3: > n/32,  4: rest"),
        "class I": Quantity("share of rows", "P(k > n/2)"),
        "class II": Quantity("share of rows", "P(n/8 < k ≤ n/2)"),
        "class III": Quantity("share of rows", "P(n/32 < k ≤ n/8)"),
        "class IV": Quantity("share of rows", "P(k ≤ n/32)"),
        RETRIEVAL: Quantity("share of rows", "P(2 (n − 1) exp(s₂ − s₁) < 1)"),
        BROKEN: Quantity("rows", "count of rows"),
    },
    references=("ramsauer20",),
    statistic=f"median share of keys that hold {100 * MASS:g} % of the weight",
    null_reason=(
        "The share follows the scale of the logits: the matched baseline (20 draws by default) keeps tokens "
        "and spectra."
    ),
    null="matched baseline",
    details={
        name: Label(f"{share} ({name})")
        for name, share in zip(
            CLASS_NAMES,
            (
                f"heads whose median row has {100 * MASS:g} % of its weight on more than 1/2 of the keys",
                "on 1/8 to 1/2",
                "on 1/32 to 1/8",
                "on at most 1/32",
            ),
            strict=True,
        )
    },
    remarks={
        NOTHING_MEASURED: "No attention layer exposes queries and keys whose products are its logits.",
        "theorem_violated": (
            "{rows:.0f} rows violate the energy or the retrieval bound, which is impossible: the capture is wrong."
        ),
    },
    labels={
        "held": "share of keys that hold 90 % of the weight",
        "keys held": "number of keys that hold 90 % of the weight",
        "class": "class of the head",
        "class I": "share of rows of class I",
        "class II": "share of rows of class II",
        "class III": "share of rows of class III",
        "class IV": "share of rows of class IV",
        "retrieval": "share of rows that retrieve one key",
        "rows against theorems": "rows that violate a bound or theorem",
    },
)


class LayerState(NamedTuple):
    """Counts of the rows of a layer, and the slack of both theorems; None if its logits are no inner products."""

    rows: Sums | None = None
    slack: Histogram | None = None


def statistics(event: Event | ForwardOutput, batch_pass: BatchPass) -> dict[str, LayerState] | None:
    """Counts of the sampled rows, and the slack of both theorems."""
    if not isinstance(event, Attended):
        return None
    if not applies(event, batch_pass) or event.arguments.softcap is not None:
        return {event.layer: LayerState()}
    rows = rows_of(event, batch_pass)
    if rows is None:
        return None
    if event.arguments.sinks is not None:
        rows = _with_sink(rows, event.arguments.sinks)
    values, slack, enough = _columns(rows, event.arguments.scale)
    slack = slack.movedim(0, -1).transpose(0, 1).flatten(1)
    valid = enough.unsqueeze(-1).expand(*enough.shape, 2).transpose(0, 1).flatten(1)
    counts = sums_of(values, batch_pass.documents)
    return {event.layer: LayerState(counts, histogram_of(slack, EDGES, valid=valid))}


def evaluate(state: dict[str, LayerState], model: Probed) -> list[Measured]:
    """Shares over rows (bootstrap), the class of each head, and the number of rows that violate a theorem."""
    measurements = [absent(layer, HELD) for layer, layer_state in state.items() if layer_state.rows is None]
    sums = {layer: layer_state.rows for layer, layer_state in state.items() if layer_state.rows is not None}
    names = [HELD, COUNT, *(f"class {name}" for name in CLASSES), RETRIEVAL]
    for column, name in enumerate(names, start=1):
        for layer, estimate in bootstrapped(sums, partial(ratio, above=column, below=0)).items():
            measurements += measured(layer, name, estimate, sums[layer].totals[0, :, 0])
    for layer, each in sums.items():
        shares = each.totals[0, :, 3:7].cpu()
        number_of_class = 1 + (shares.cumsum(-1) * 2 < shares.sum(-1, keepdim=True)).sum(-1)
        slack = state[layer].slack
        broken = torch.zeros(len(shares)) if slack is None else slack.counts[:, [0, 1, -1]].sum(-1).cpu()
        for head, (number, wrong) in enumerate(zip(number_of_class.tolist(), broken.tolist(), strict=True)):
            rows = int(each.totals[0, head, 0])
            measurements.append(Measured(layer, head, CLASS, float(number) if rows else math.nan, tokens=rows))
            measurements.append(Measured(layer, head, BROKEN, float(wrong), tokens=rows))
    return measurements


def null(
    state: dict[str, LayerState],
    model: Probed,
    baseline: Baseline[dict[str, LayerState]] | None,
) -> list[Measured]:
    """Bands of heads over the draws of the matched baseline."""
    return matched_null(baseline, {HELD, COUNT, *CLASS_NAMES, RETRIEVAL})


def verdict(findings: list[Finding]) -> Judgement:
    """Describe every head by its share of keys; count the heads of each class."""
    classes = Counter(int(f.value) for f in findings if f.quantity == CLASS and not math.isnan(f.value))
    details = [Detail(name, count=classes[i], total=classes.total()) for i, name in enumerate(CLASS_NAMES, start=1)]
    violations = sum(int(f.value) for f in findings if f.quantity == BROKEN)
    remarks = [Remark("theorem_violated", {"rows": violations})] if violations else []
    return describe(findings, HELD, details=details, remarks=remarks)


def _columns(rows: Rows, beta: float) -> tuple[Float[Tensor, "b h k"], Float[Tensor, "2 b h r"], Tensor]:
    """(rows, held, k, classes, retrievals) for each sequence; slack of bound and energy of each row; valid rows."""
    s, n = rows.logits, rows.visible
    G = s.logsumexp(-1)
    p = (s - G.unsqueeze(-1)).exp()
    heaviest = ascending(p).flip(-1)
    k = 1 + (heaviest.cumsum(-1) < MASS).sum(-1).to(p.dtype)
    k = torch.minimum(k, n)
    held = k / n
    bounds = [*CLASSES.values()]
    classes = [(held <= above) & (held > below) for above, below in zip([2.0, *bounds], bounds, strict=False)]
    # The bound ----------------------------------------------------------------------------------------------------
    att = rows.averaged(p, rows.key)
    two = s.topk(min(2, s.shape[-1]), -1)
    first = _rows_of_keys(rows.key, two.indices[..., 0])
    length = rows.key.norm(dim=-1).repeat_interleave(s.shape[1] // rows.key.shape[1], 1).unsqueeze(2)
    M = length.masked_fill(rows.log_weights == -torch.inf, 0.0).amax(-1)
    gap = two.values[..., 0] - two.values[..., -1]
    bound = 2 * M * (n - 1) * (-gap).exp()
    short = (bound - (att - first).norm(dim=-1)) / M.clamp(min=torch.finfo(p.dtype).tiny)
    # The energy ---------------------------------------------------------------------------------------------------
    q = rows.query / beta
    after = (rows.products_with(rows.key, att * beta) + rows.log_weights).logsumexp(-1)
    fall = (_square(q) - _square(att) - _square(q - att)) / 2 + (after - G) / beta
    size = _square(q) + _square(att) + (after.abs() + G.abs()) / beta
    slack = torch.stack((short, fall / size))
    enough = (rows.valid.unsqueeze(1) & (n >= FEWEST)).expand_as(G)
    columns = [torch.ones_like(G), held, k, *(c.to(G.dtype) for c in classes), (bound < M).to(G.dtype)]
    return torch.stack(columns, -1).masked_fill(~enough.unsqueeze(-1), 0.0).double().sum(2), slack, enough


def _with_sink(rows: Rows, sinks: Float[Tensor, "*b h"]) -> Rows:
    """Rows with one more pattern, 0, whose log weight is the sink of the head."""
    b, h, r, _ = rows.products.shape
    log_weight = sinks.to(rows.products).expand(b, h)[:, :, None, None].expand(b, h, r, 1)
    return rows._replace(
        key=torch.nn.functional.pad(rows.key, (0, 0, 0, 1)),
        products=torch.nn.functional.pad(rows.products, (0, 1)),
        log_weights=torch.cat((rows.log_weights.expand(b, h, r, -1), log_weight), -1),
    )


def _rows_of_keys(key: Float[Tensor, "b hk n d"], index: Tensor) -> Float[Tensor, "b h r d"]:
    """Key of each row at an index [b, h, r]."""
    b, h, r = index.shape
    each = index.reshape(b, key.shape[1], -1, 1).expand(-1, -1, -1, key.shape[-1])
    return key.gather(2, each).reshape(b, h, r, key.shape[-1])


def _square(t: Tensor) -> Tensor:
    return t.square().sum(-1)


PREDICTION = Prediction(__name__, DECLARATION, statistics, evaluate, null, verdict, order=140, baseline="matched")
