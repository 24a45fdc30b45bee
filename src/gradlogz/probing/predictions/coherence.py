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
from ..hypothesis_tests import Bounds, absent, also_random, bootstrapped, count, judge, measured, middle
from ..inside.events import Attended, Event, ForwardOutput
from ..prediction import Prediction, Probed, Twin
from ..runs.judgement import Judgement, Measured
from ..runs.records import Declaration, Finding, Quantity
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
    title="Coherence of heads",
    claim="Heads are coherent: attention without gates is nearly the gradient of the mixture of its heads.",
    formula="KL(uniform‖softmax_k(G_k - <mu_k, q_k>)) over the heads of a layer, in nats",
    refutes="A cost above half a nat: gates by the log normalisers would be far from uniform.",
    method=(
        FORMULAS,
        "A log normaliser is known only up to what an offset of the keys adds to it, <q, c>, which no weight sees; so "
        f'the keys of each row are centred first, G_k - mean_j u_j, in the rows with small hashes: "{COST}". "{RAW}" '
        "is that of the log normalisers as they are, of every row. Heads that see other keys than each other, or have "
        "biases of their own, have log normalisers that cannot be compared, and so have layers that compute their own "
        "logits.",
        f'"{SHIFTED}" takes each head\'s log normaliser from another row of the same text (log n taken off): the '
        "cost if heads knew nothing of each other.",
        "Null: the random twin. It costs next to nothing, since all its logits are small: a small cost is no work of "
        "training, and the sentence says so.",
    ),
    decision_rule=(
        f"A layer supports the claim if the interval of its cost lies below {COHERENT:g} nats, and refutes it if it "
        f"lies above {INCOHERENT:g}; the model by more than half of its layers."
    ),
    quantities={
        COST: Quantity("nats", "KL(uniform‖softmax_k(G_k − ⟨μ_k, q_k⟩))"),
        SHIFTED: Quantity("nats", "KL(uniform‖softmax_k(G_k − ⟨μ_k, q_k⟩))"),
        RAW: Quantity("nats", "KL(uniform‖softmax_k(G_k))"),
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


def evaluate(state: dict[str, LayerState], model: Probed) -> list[Measured]:  # noqa: ARG001
    """Mean costs of every layer."""
    found = [absent(layer, COST) for layer, kept in state.items() if kept.costs is None]
    for name, (above, below) in COLUMNS.items():
        found += _rows(state, name, above, below)
    return found


def null(state: dict[str, LayerState], model: Probed, twin: Twin[dict[str, LayerState]] | None) -> list[Measured]:  # noqa: ARG001
    """The same of random weights."""
    return [] if twin is None else [m for m in evaluate(twin.state, twin.model) if m.tokens]


def verdict(findings: list[Finding]) -> Judgement:
    """By the cost of each layer."""
    ruled = judge(findings, COST, lambda f: Bounds(COHERENT, INCOHERENT), small=True)
    c = count(ruled, COST)
    if not c.judged:
        return Judgement(ruled, "not applicable", "No layer has heads whose log normalisers can be compared.")
    words = (
        f"Of {c.judged} layers {c.supported} cost less than {COHERENT} nats and {c.refuted} more than {INCOHERENT}; "
        f"the middle one {c.value:.3f}, and {middle(f.value for f in ruled if f.quantity == SHIFTED):.3f} with log "
        "normalisers of other tokens."
    ) + also_random(ruled, COST, COHERENT, small=True)
    return Judgement(ruled, c.verdict, words, c.value, null=c.null, quantity=COST, note=c.note)


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
