"""How sharply a head chooses, and the other numbers of its rows.

    entropy           H / log n                  of a row that sees n keys, 2 or more; 1 if its weights are uniform
    logit variance    sum_j p_j (s_j - E)²       the energy variance
    max logit         max_j s_j
    log normalizer    G
    sink              the weight on the first key that is no padding                                  [xiao24] [gu25]
    learned sink      that on a logit of its own, where a model has one
    logit rank        tr(A)² / tr(A²),  A = E[q qᵀ] Cov(k)       of the field of logits <q, k - mean k>, over all texts:
                      the participation ratio of its squared singular values, from 1 to d; of a part of the tokens
    high logits       share of rows with a logit above the bound of the monitor's alert

The theory: steps up the log normaliser make weights sharper [theory 5.2], so that training should leave heads less
even than random weights do. Every number is beside that of a random twin: the mean over the heads of its layer, and
the band in which another head with random weights would lie.

Verdict: a head supports the claim if the interval of its entropy lies below that band by LEAST of log n, and refutes it
if above the band by as much. Alerts are those of the monitor, on averages over the text.

Read next: gaussian_measure.py (what entropy allows), ../../attention/in_models/head_summaries.py (the alerts in
training).
"""

from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from ...attention.in_models.head_summaries import Thresholds
from ..corpus.text import Batch
from ..findings import Finding
from ..inside.capturing import Attended, Event
from ..prediction import Finished, Judgement, Measured, Probed, Twin, real
from ..statistics import Comoments, Estimate, Sums, jackknifed, ratio, sums_of
from ..testing import Bounds, bootstrapped, count, judge, measured, random_band
from .observables.attention_rows import applies, keys_seen, moments_of_keys, moments_of_queries, weight_of_first

claim = "Training makes heads choose: their weights are sharper than those of random weights."
formula = "H / log n of every row, n the keys it sees"
refutes = "Entropies above those of the same architecture with random weights."

LEAST = 0.02  # of log n: less is no choice
COLLAPSE, LOGIT, SINK = (float(bound or 0.0) for bound in Thresholds())
# name: column of the sum, column of what it is divided by
COLUMNS = {
    "entropy": (2, 1),
    "logit variance": (3, 0),
    "max logit": (4, 0),
    "log normalizer": (5, 0),
    "sink": (6, 0),
    "learned sink": (7, 0),
    "high logits": (8, 0),
}


def statistics(event: Event | Finished, batch: Batch, memory: dict[str, Any]) -> dict[str, Any] | None:
    """Sums over the rows of each document, and the second moments of queries and keys."""
    if not isinstance(event, Attended) or len(event.attention.log_normalizer) != len(batch.keys):
        return None
    a = event.attention
    G = a.log_normalizer
    H, V, top = (t for t in (a.entropy, a.logit_variance, a.max_logit) if t is not None)
    sinks = event._call().options.get("sinks") if applies(event, batch) else None
    n = keys_seen(event, memory) + (0 if sinks is None else 1)
    learned = torch.zeros_like(G) if sinks is None else (sinks.to(G).expand(G.shape[:2]).unsqueeze(-1) - G).exp()
    several = (n >= 2).to(G.dtype).expand_as(G)
    even = H / n.clamp(min=2).log() * several
    high = (top > LOGIT).to(G.dtype)
    rows = [torch.ones_like(G), several, even, V, top, G, weight_of_first(event), learned, high]
    valid = (real(batch, event).unsqueeze(1) & a.seen).unsqueeze(-1)
    values = torch.stack(rows, -1).masked_fill(~valid, 0.0).sum(2, dtype=torch.float64)
    found: dict[str, Any] = {"rows": sums_of(values, batch.keys), "learned": int(sinks is not None)}
    if applies(event, batch):
        found["queries"] = moments_of_queries(event, batch, memory)
        found["keys"] = moments_of_keys(event, batch, memory)
    return {event.layer: found}


def evaluate(state: Mapping[str, Any], model: Probed) -> list[Measured]:  # noqa: ARG001
    """Means over rows, with the bootstrap; ranks, with the jackknife; what alerts look at, of whole layers."""
    sums = {layer: kept["rows"] for layer, kept in state.items()}
    whole = {layer: Sums(each.totals.sum(1, keepdim=True)) for layer, each in sums.items()}
    found = []
    for name, (above, below) in COLUMNS.items():
        for layer, estimate in bootstrapped(sums, partial(ratio, above=above, below=below)).items():
            if name != "learned sink" or state[layer]["learned"]:
                found += measured(layer, name, estimate, sums[layer].totals[0, :, below])
    for layer, estimate in bootstrapped(whole, lambda t: ratio(t, 2, 1)).items():
        one = Estimate(*(t.squeeze(0) for t in estimate))
        found += measured(layer, "entropy of the layer", one, whole[layer].totals[0, 0, 1])
        share = (ratio(sums[layer].totals[0], 6, 0) > SINK).double().mean()
        found.append(Measured(layer, None, "heads with a sink", float(share), tokens=int(whole[layer].totals[0, 0, 0])))
        if "queries" in state[layer]:
            found += _rank(layer, state[layer]["queries"], state[layer]["keys"])
    return found


def null(state: Mapping[str, Any], model: Probed, twin: Twin | None) -> list[Measured]:  # noqa: ARG001
    """The same of a head with random weights."""
    if twin is None:
        return []
    by: dict[tuple[str, str], list[Measured]] = defaultdict(list)
    found = []
    for m in evaluate(twin.state, twin.model):
        if m.head is None:
            found.append(m)
        else:
            by[m.layer, m.quantity].append(m)
    for (layer, quantity), rows in by.items():
        found += random_band(layer, quantity, torch.tensor([m.value for m in rows]))
    return found


def verdict(findings: list[Finding]) -> Judgement:
    """As the module says."""
    ruled = judge(findings, "entropy", lambda f: Bounds(f.null_low - LEAST, f.null_high + LEAST), small=True)
    c = count(ruled, "entropy")
    if not c.judged:
        return Judgement(ruled, "not applicable", "No head has a row that sees two keys.")
    words = (
        f"{c.supported} of {c.judged} heads are sharper than random weights and {c.refuted} more even; the middle head "
        f"has {c.value:z.2f} of the uniform entropy, a random one {c.null:z.2f}."
    )
    alerts = _alerts(findings)
    words += f" Alerts: {'; '.join(alerts)}." if alerts else ""
    return Judgement(ruled, c.verdict, words, c.value, null=c.null, quantity="entropy", note=c.note)


def _rank(layer: str, queries: Comoments, keys: Comoments) -> list[Measured]:
    q, k = queries.versions(), keys.versions()
    if len(q.tokens) != len(k.tokens):
        return []  # a group whose keys are all hidden
    A = q.covariance + q.mean_x.unsqueeze(-1) * q.mean_x.unsqueeze(-2)
    C = k.covariance.repeat_interleave(A.shape[1] // k.xx.shape[1], 1)
    A = A @ C
    rank = A.diagonal(dim1=-2, dim2=-1).sum(-1).square() / (A * A.mT).sum((-2, -1))
    return measured(layer, "logit rank", jackknifed(rank[0], rank[1:], q.tokens[0] - q.tokens[1:]), q.tokens[0])


def _alerts(findings: list[Finding]) -> list[str]:
    """What the monitor would say of these averages."""
    rules = (
        ("entropy collapse", "entropy of the layer", lambda f: f.value < COLLAPSE),
        ("attention sink", "heads with a sink", lambda f: f.value > 0.5),
        ("logit explosion", "high logits", lambda f: f.value > 0),
    )
    told = []
    for name, quantity, raised in rules:
        layers = list(dict.fromkeys((f.layer, f.call) for f in findings if f.quantity == quantity and raised(f)))
        if layers:
            more = f" and {len(layers) - 1} more layers" if len(layers) > 1 else ""
            told.append(f"{name} in {layers[0][0]}{more}")
    return told
