"""What it costs that heads do not gate each other.

    h = sum_k h_k / H        heads as a mixture: the gradient of its log normaliser gates head k by r_k = softmax_k(G_k)
    cost                     KL(uniform‖r) = log sum_k exp(G_k) - log H - mean_k G_k,  in nats            [theory 6.2]

Read next: entropy.py, ../../measures/mixture.py (the bound and its gap).
"""

import math
from typing import NamedTuple

import torch

from ..._typing import Float, Tensor
from ..batch_pass import BatchPass
from ..hypothesis_tests import (
    ALSO_BASELINE,
    NOTHING_MEASURED,
    Bounds,
    absent,
    bootstrapped,
    conclude,
    judge,
    measured,
    median_detail,
    shared_with_baseline,
)
from ..inside.events import Attended, Event, ForwardOutput
from ..prediction import Baseline, Prediction, Probed
from ..runs.judgement import Judgement, Measured
from ..runs.records import Declaration, Finding, Label, Quantity
from ..statistics import Estimate, Sums, ratio, sums_of
from .observables.attention_rows import applies, rows_of

COST, SHIFTED, RAW = "cost", "cost, other tokens", "raw cost"
COHERENT, INCOHERENT = 0.1, 0.5
COLUMNS = {COST: (1, 0), SHIFTED: (2, 0), RAW: (4, 3)}  # name: column of the sum, column of what it is divided by

FORMULAS = """\
    h = sum_k h_k / H        heads as a mixture: the gradient of its log normaliser gates head k by r_k = softmax_k(G_k)
    multi-head attention     gates them all alike: the gradient of a lower bound of that log normaliser
    cost                     KL(uniform‖r) = log sum_k exp(G_k) - log H - mean_k G_k,  in nats           [theory 6.2]"""

DECLARATION = Declaration(
    title="Coherent heads",
    claim="Heads are coherent: multi-head attention is nearly the gradient of the mixture of its heads.",
    formula="KL(uniform‖softmax_k(G_k - <mu_k, q_k>)) over the heads of a layer, in nats",
    refutes=f"A cost above {INCOHERENT:g} nats: gates by the log normalisers would be far from uniform.",
    method=(
        FORMULAS,
        "A log normaliser is defined up to <q, c> for an offset c of the keys, which leaves the attention weights "
        f'unchanged; for "{COST}" the keys of each row are therefore centred, G_k - mean_j u_j, in a random sample of '
        f'rows. "{RAW}" uses the log normalisers without centring, in all rows. Log normalisers are not comparable '
        "between heads with different visible keys or biases, nor in layers that compute their own logits.",
        f'"{SHIFTED}" takes the log normaliser of each head from another row of the same text (minus log n): the cost '
        "of independent heads.",
        "Null: the random-weights baseline. Its cost is almost zero because its logits are small, so that a small "
        "cost alone is not an effect of training.",
    ),
    decision_rule=(
        f"A layer supports the claim if its cost is below {COHERENT:g} nats, and refutes it above {INCOHERENT:g} nats. "
        "The model follows the majority of its layers."
    ),
    quantities={
        COST: Quantity("nats", "KL(uniform‖softmax_k(G_k − ⟨μ_k, q_k⟩))"),
        SHIFTED: Quantity("nats", "KL(uniform‖softmax_k(G_k − ⟨μ_k, q_k⟩))"),
        RAW: Quantity("nats", "KL(uniform‖softmax_k(G_k))"),
    },
    statistic="median cost of uniform gates",
    null="random-weights baseline",
    unit="attention layer",
    number="{:.3f} nats",
    outcomes=(f"are below {COHERENT:g} nats", f"above {INCOHERENT:g} nats"),
    details={SHIFTED: Label("median cost with log normalisers of other tokens", "{:.3f} nats", "baseline")},
    remarks={
        NOTHING_MEASURED: "No attention layer has heads with comparable log normalisers.",
        ALSO_BASELINE: (
            "{shared:.0f} of the {supported:.0f} supporting layers also pass with random weights, so for these the "
            "result is not an effect of training."
        ),
    },
)


class LayerState(NamedTuple):
    """Costs summed over rows; None of a layer whose heads cannot be compared."""

    costs: Sums | None


def statistics(event: Event | ForwardOutput, batch_pass: BatchPass) -> dict[str, LayerState] | None:
    """Costs summed over rows: of the chosen ones with centred keys, and of all."""
    if not isinstance(event, Attended):
        return None
    if not applies(event, batch_pass) or not _comparable(event):
        return {event.layer: LayerState(None)}
    valid = batch_pass.real(event) & event.attention.seen[:, 0]
    every = _sum(cost(event.attention.log_normalizer), valid)
    found = every.new_zeros(len(every), 3)
    if (rows := rows_of(event, batch_pass)) is not None:
        seen = rows.log_weights > -torch.inf
        n = rows.seen
        G = rows.logits.logsumexp(-1) - n.log() - (rows.products * seen).sum(-1) / n
        # Head k takes the row k places further: rows of one text in the order of their hashes.
        kept = rows.valid & (n[:, 0] > 1)
        mixed = _shifted(G, rows.valid)
        found = torch.cat((_sum(cost(G), kept), _sum(cost(mixed), kept)[:, 1:]), -1)
    return {event.layer: LayerState(sums_of(torch.cat((found, every), -1).unsqueeze(1), batch_pass.documents))}


def cost(G: Float[Tensor, "b h m"]) -> Float[Tensor, "b m"]:
    """KL(uniform‖softmax_h(G))."""
    return G.logsumexp(1) - math.log(G.shape[1]) - G.mean(1)


def evaluate(state: dict[str, LayerState], model: Probed) -> list[Measured]:
    """Mean costs of every layer."""
    found = [absent(layer, COST) for layer, kept in state.items() if kept.costs is None]
    for name, (above, below) in COLUMNS.items():
        found += _rows(state, name, above, below)
    return found


def null(
    state: dict[str, LayerState],
    model: Probed,
    baseline: Baseline[dict[str, LayerState]] | None,
) -> list[Measured]:
    """The same of random weights."""
    return [] if baseline is None else [m for m in evaluate(baseline.state, baseline.model) if m.tokens]


def verdict(findings: list[Finding]) -> Judgement:
    """Judge every layer by its cost."""
    ruled = judge(findings, COST, lambda f: Bounds(COHERENT, INCOHERENT), small=True)
    return conclude(
        ruled,
        COST,
        details=[median_detail(SHIFTED, ruled, SHIFTED)],
        remarks=shared_with_baseline(ruled, COST, COHERENT, small=True),
    )


def _comparable(event: Attended) -> bool:
    """Whether all heads, two or more, see the same keys with the same weights."""
    call = event.arguments
    shared = all(t is None or t.ndim < 3 or t.shape[-3] == 1 for t in (call.attn_mask, call.bias, call.segments))
    return shared and call.sinks is None and call.softcap is None and call.query.shape[1] > 1


def _sum(values: Float[Tensor, "b m"], valid: Tensor) -> Float[Tensor, "b 2"]:
    """Count and sum of each row of the batch."""
    kept = values.masked_fill(~valid, 0.0)
    return torch.stack((valid.double().sum(-1), kept.double().sum(-1)), -1)


def _shifted(G: Float[Tensor, "b h r"], valid: Tensor) -> Float[Tensor, "b h r"]:
    """The log normalisers of head k at the row k places further, around the valid rows of each sequence."""
    b, h, r = G.shape
    many = valid.sum(-1).clamp(min=1)[:, None, None]
    places = torch.arange(r, device=G.device) + torch.arange(h, device=G.device)[:, None]
    return G.gather(2, (places % many).expand(b, h, r))


def _rows(state: dict[str, LayerState], name: str, above: int, below: int) -> list[Measured]:
    sums = {layer: kept.costs for layer, kept in state.items() if kept.costs is not None}
    found = []
    for layer, estimate in bootstrapped(sums, lambda t: ratio(t, above, below)).items():
        one = Estimate(*(t.squeeze(0) for t in estimate))
        found += measured(layer, name, one, sums[layer].totals[0, 0, below])
    return found


PREDICTION = Prediction(__name__, DECLARATION, statistics, evaluate, null, verdict, order=130)
