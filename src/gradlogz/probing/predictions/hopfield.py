"""Attention as one update of a Hopfield network: how many patterns does a head retrieve together?

    held            k / n: the fewest keys that hold 90 % of the weight, over the keys that a row sees     [ramsauer20]

Read next: entropy.py, ../../dynamics/hopfield.py (networks that are iterated).
"""

import math
from collections import Counter, defaultdict
from functools import partial
from typing import NamedTuple

import torch

from ..._typing import Float, Tensor
from ..batch_pass import BatchPass
from ..hypothesis_tests import Bounds, absent, bootstrapped, count, judge, measured, random_band
from ..inside.events import Attended, Event, ForwardOutput
from ..prediction import Prediction, Probed, Twin
from ..runs.judgement import Judgement, Measured
from ..runs.records import Declaration, Finding, Quantity
from ..statistics import Histogram, Sums, histogram_of, ratio, sums_of
from .observables.attention_rows import Rows, applies, rows_of

HELD, MASS, FEWEST, HALF = "held", 0.9, 8, 0.5
COUNT, CLASS, RETRIEVAL, BROKEN = "keys held", "class", "retrieval", "rows against theorems"
CLASSES = {"I": 1 / 2, "II": 1 / 8, "III": 1 / 32, "IV": 0.0}
ROUNDING = 1e-3
EDGES = torch.tensor([-1.0, -ROUNDING, 0.0, 1.0], dtype=torch.float64)

FORMULAS = f"""\
    held            k / n: the fewest keys that hold {100 * MASS:g} % of the weight of a row that sees n    [ramsauer20]
    class           by the middle row: I k > n/2, an average of nearly all; II above n/8; III above n/32, a metastable
                    state of few; IV the rest, single patterns
    retrieval       share of rows whose bound |att - k_1| <= 2 M (n - 1) exp(-(s_1 - s_2)) is below |k_1|: k_1 has the
                    largest logit s_1, s_2 is the next, M the length of the longest key                    [theory 5.7]
    energy          E(q) - E(att) - |q - att|²/2 >= 0 with E(x) = |x|²/2 - log sum_j w_j exp(beta <k_j, x>) / beta: a
                    theorem [theory 5.6], and so is the bound; "{BROKEN}" counts those that break one by
                    more than rounding: a check, no finding"""

DECLARATION = Declaration(
    title="Hopfield retrieval",
    claim="Heads retrieve: nine tenths of their weight lie on less than half of the keys they see.",
    formula=f"k / n, k the fewest keys that hold {100 * MASS:g} % of the weight of a row that sees n",
    refutes="Nine tenths of the weight spread over more than half of the keys.",
    method=(
        FORMULAS,
        f"Of the rows with small hashes that see {FEWEST} keys or more. The state is the query, the patterns are the "
        "keys it sees, and att their average, whatever the values are; beta is the scale. A learned sink is one more "
        "pattern, at the origin: its logit does not know the query, and it adds nothing to the average.",
        "Null: a head with random weights, the band that of another one.",
    ),
    decision_rule=(
        f'A head supports the claim if the interval of "{HELD}" lies below {HALF:g} and below the null, and refutes it '
        f"if above {HALF:g}: then it averages over most of what it sees."
    ),
    quantities={
        HELD: Quantity("share of keys", f"k / n,  k keys hold {100 * MASS:g} %"),
        COUNT: Quantity("keys", f"k that hold {100 * MASS:g} %"),
        CLASS: Quantity("number", "1: k > n/2,  2: > n/8,  3: > n/32,  4: rest"),
        "class I": Quantity("share of rows", "P(k > n/2)"),
        "class II": Quantity("share of rows", "P(n/8 < k ≤ n/2)"),
        "class III": Quantity("share of rows", "P(n/32 < k ≤ n/8)"),
        "class IV": Quantity("share of rows", "P(k ≤ n/32)"),
        RETRIEVAL: Quantity("share of rows", "P(2M (n − 1) exp(s₂ − s₁) < |k₁|)"),
        BROKEN: Quantity("rows", "count of rows"),
    },
    references=("ramsauer20",),
)


class LayerState(NamedTuple):
    """Of a layer: counts of its rows, and the slack of both theorems; None where its logits are no products."""

    rows: Sums | None = None
    slack: Histogram | None = None


def statistics(event: Event | ForwardOutput, batch_pass: BatchPass) -> dict[str, LayerState] | None:
    """Counts of the chosen rows, and the least slack of both theorems."""
    if not isinstance(event, Attended):
        return None
    if not applies(event, batch_pass) or event.arguments.softcap is not None:
        return {event.layer: LayerState()}
    rows = rows_of(event, batch_pass)
    if rows is None:
        return None
    if event.arguments.sinks is not None:
        rows = _with_sink(rows, event.arguments.sinks)
    values, slack, kept = _columns(rows, event.arguments.scale)
    slack = slack.movedim(0, -1).transpose(0, 1).flatten(1)
    valid = kept.unsqueeze(-1).expand(*kept.shape, 2).transpose(0, 1).flatten(1)
    counts = sums_of(values, batch_pass.documents)
    return {event.layer: LayerState(counts, histogram_of(slack, EDGES, valid=valid))}


def evaluate(state: dict[str, LayerState], model: Probed) -> list[Measured]:  # noqa: ARG001
    """Shares over rows with the bootstrap; the number of the class; how many rows break a theorem."""
    found = [absent(layer, HELD) for layer, kept in state.items() if kept.rows is None]
    sums = {layer: kept.rows for layer, kept in state.items() if kept.rows is not None}
    names = [HELD, COUNT, *(f"class {name}" for name in CLASSES), RETRIEVAL]
    for column, name in enumerate(names, start=1):
        for layer, estimate in bootstrapped(sums, partial(ratio, above=column, below=0)).items():
            found += measured(layer, name, estimate, sums[layer].totals[0, :, 0])
    for layer, each in sums.items():
        shares = each.totals[0, :, 3:7].cpu()
        middle = 1 + (shares.cumsum(-1) * 2 < shares.sum(-1, keepdim=True)).sum(-1)
        slack = state[layer].slack
        broken = torch.zeros(len(shares)) if slack is None else slack.counts[:, [0, 1, -1]].sum(-1).cpu()
        for head, (number, wrong) in enumerate(zip(middle.tolist(), broken.tolist(), strict=True)):
            rows = int(each.totals[0, head, 0])
            found.append(Measured(layer, head, CLASS, float(number) if rows else math.nan, tokens=rows))
            found.append(Measured(layer, head, BROKEN, float(wrong), tokens=rows))
    return found


def null(state: dict[str, LayerState], model: Probed, twin: Twin[dict[str, LayerState]] | None) -> list[Measured]:  # noqa: ARG001
    """The same of a head with random weights."""
    by: dict[tuple[str, str], list[float]] = defaultdict(list)
    for m in [] if twin is None else evaluate(twin.state, twin.model):
        if m.head is not None and m.quantity not in (CLASS, BROKEN):
            by[m.layer, m.quantity].append(m.value)
    return [m for (layer, name), values in by.items() for m in random_band(layer, name, torch.tensor(values))]


def verdict(findings: list[Finding]) -> Judgement:
    """By the decision rule."""

    def bounds(f: Finding) -> Bounds:
        return Bounds(HALF if math.isnan(f.null_low) else min(HALF, f.null_low), HALF)

    ruled = judge(findings, HELD, bounds, small=True)
    c = count(ruled, HELD)
    if not c.judged:
        return Judgement(ruled, "not applicable", "No layer hands on queries and keys whose products are its logits.")
    of = Counter(int(f.value) for f in findings if f.quantity == CLASS and not math.isnan(f.value))
    classes = ", ".join(f"{of[i]} of class {name}" for i, name in enumerate(CLASSES, start=1))
    words = (
        f"{c.supported} of {c.judged} heads put nine tenths of their weight on less than half of the keys, {c.refuted} "
        f"on more; the middle head on {c.value:.0%}. Heads: {classes}."
    )
    broken = sum(int(f.value) for f in findings if f.quantity == BROKEN)
    words += (
        f" {broken} rows break the energy or the bound, which cannot be: the capture is at fault." if broken else ""
    )
    return Judgement(ruled, c.verdict, words, c.value, null=c.null, quantity=HELD, note=c.note)


def _columns(rows: Rows, beta: float) -> tuple[Float[Tensor, "b h k"], Float[Tensor, "2 b h r"], Tensor]:
    """(rows, held, k, classes, retrievals) of each sequence; the slack of energy and bound of each row; which count."""
    s, n = rows.logits, rows.seen
    G = s.logsumexp(-1)
    p = (s - G.unsqueeze(-1)).exp()
    heaviest = p.sort(-1, descending=True).values
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
    kept = (rows.valid.unsqueeze(1) & (n >= FEWEST)).expand_as(G)
    columns = [torch.ones_like(G), held, k, *(c.to(G.dtype) for c in classes), (bound < first.norm(dim=-1)).to(G.dtype)]
    return torch.stack(columns, -1).masked_fill(~kept.unsqueeze(-1), 0.0).double().sum(2), slack, kept


def _with_sink(rows: Rows, sinks: Float[Tensor, "*b h"]) -> Rows:
    """The rows with one more pattern, 0, whose log weight is the sink of the head."""
    b, h, r, _ = rows.products.shape
    log_weight = sinks.to(rows.products).expand(b, h)[:, :, None, None].expand(b, h, r, 1)
    return rows._replace(
        key=torch.nn.functional.pad(rows.key, (0, 0, 0, 1)),
        products=torch.nn.functional.pad(rows.products, (0, 1)),
        log_weights=torch.cat((rows.log_weights.expand(b, h, r, -1), log_weight), -1),
    )


def _rows_of_keys(key: Float[Tensor, "b hk n d"], index: Tensor) -> Float[Tensor, "b h r d"]:
    """The key of each row at an index [b, h, r]."""
    b, h, r = index.shape
    each = index.reshape(b, key.shape[1], -1, 1).expand(-1, -1, -1, key.shape[-1])
    return key.gather(2, each).reshape(b, h, r, key.shape[-1])


def _square(t: Tensor) -> Tensor:
    return t.square().sum(-1)


PREDICTION = Prediction(__name__, DECLARATION, statistics, evaluate, null, verdict, order=140)
