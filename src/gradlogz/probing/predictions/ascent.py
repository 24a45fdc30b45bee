"""Attention plus residual climbs the log normaliser of the layer's own keys.

    G(x)   = sum_h (1/beta) log sum_j exp(beta <q_h(x), k_hj>)        x: the stream, through the norm; keys frozen
    gain   = sum [G(x + D) - G(x)] / sum [G(x + |D| g/|g|) - G(x)]    D: the update, g = grad G(x); sums over tokens

The sublayer is a step of ascent if its weights are tied (theory E7); a trained layer need not be one. A gain of 1 is as
good as the gradient of the same length. G is convex in the query, so that its rising for most tokens says nothing; what
counts is the gain beyond that of the update of another token of the same text (permuted). The reversed update and a
random direction are told beside it. The log normaliser of rows that see one key is linear; they are kept.

Measured on one row in four, chosen by hash. A layer supports the claim if its gain lies above 0.05 and
above that of permuted updates; it refutes it if it lies below 0 or below those.

Read next: tie.py (the weights that would make it exact), ../asking.py (how moved tokens are read).
"""

from collections.abc import Mapping
from typing import Any

import torch

from ..._typing import Float, Tensor
from ...attention.calls import Call
from ...attention.functional import attend
from ..asking import Ask
from ..capturing import Attended, Event, Passed
from ..findings import Finding
from ..prediction import Finished, Judgement, Measured, Probed, Twin, real
from ..rulings import Bounds, count, judge, measured
from ..statistics import bootstrap, sums_of, token_hashes
from ..texts import Batch

claim = "An attention sublayer moves tokens up the log normaliser of its keys."
formula = "gain = [G(x + D) - G(x)] / [G(x + |D| g/|g|) - G(x)],  G(x) = sum_h (1/beta) log sum_j exp(beta q_h(x).k_hj)"
refutes = "A gain that is not above that of the update of another token, or is negative."

PART = 4  # one row in so many
LEAST = 0.05  # of the best gain: what is worth calling an ascent
CONTROLS = ("permuted", "reversed", "random")
COLUMNS = ("tokens", "best", "own", *CONTROLS, "rises")


def statistics(event: Event | Finished, batch: Batch, memory: dict[str, Any]) -> dict[str, Any] | None:
    """Changes of G, summed over the tokens of each row."""
    if "" not in memory:
        memory[""] = _chosen(batch)
    rows = memory[""]
    if isinstance(event, Attended) and rows:
        if event.ask is not None and isinstance(event.call, Call) and not event.crosses:
            memory[event.layer] = (event.ask.rows(rows), _rows(event.call, rows), real(batch, event)[rows])
    elif isinstance(event, Passed) and event.sublayer.name in memory:
        memory[event.sublayer.name] += (event.stream[rows], event.update[rows])
    elif isinstance(event, Finished):
        whole = {layer: kept for layer, kept in memory.items() if layer and len(kept) == 5}
        return {layer: sums_of(_changes(*kept), batch.keys[rows]) for layer, kept in whole.items()}
    return None


def _chosen(batch: Batch) -> list[int]:
    """One row in four, by the hash of its document and its place in it: the same in whatever batch it comes."""
    hashes = token_hashes(batch.keys.cpu(), batch.starts.cpu().unsqueeze(-1)).squeeze(-1)
    return (hashes % PART == 0).nonzero().squeeze(-1).tolist()


def _rows(call: Call, rows: list[int]) -> Call:
    """The call of a few sequences, without what it shares with the others."""
    b = len(call.query)
    cut = {k: v[rows] if isinstance(v, Tensor) and v.ndim > 1 and len(v) == b else v for k, v in call.options.items()}
    cut["dropout_p"] = 0.0
    return Call(call.query[rows].clone(), call.key[rows].clone(), call.value[rows].clone(), cut)


def _changes(ask: Ask, call: Call, seen: Tensor, x: Tensor, D: Tensor) -> Float[Tensor, "b k"]:
    """The columns, summed over the real tokens of each row."""
    scale = float(call.options.get("scale") or call.query.shape[-1] ** -0.5)

    def G(ask: Ask, call: Call, stream: Tensor) -> Tensor:
        asked = ask.of_stream(stream)
        q = call.query if asked is None else asked.query
        found = attend(q, call.key, call.value, statistics="none", **call.options).log_normalizer  # type: ignore[arg-type]
        return torch.where(torch.isfinite(found), found, 0.0).sum(1) / scale

    with torch.enable_grad():
        moved = x.detach().requires_grad_()
        (g,) = torch.autograd.grad(G(ask, call, moved).sum(), moved)
    with torch.no_grad():
        length = D.norm(dim=-1, keepdim=True)
        generator = torch.Generator(device="cpu").manual_seed(0)
        random = torch.randn(x.shape, generator=generator).to(x)
        steps = {
            "": torch.zeros_like(D),
            "best": g * (length / g.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)),
            "own": D,
            "permuted": _others(D, seen),
            "reversed": -D,
            "random": random * (length / random.norm(dim=-1, keepdim=True)),
        }
        # All steps are asked for at once, as rows of one batch.
        rows = list(range(len(x))) * len(steps)
        found = G(ask.rows(rows), _rows(call, rows), torch.cat([x + step for step in steps.values()])).double()
        at = dict(zip(steps, found.chunk(len(steps)), strict=True))
        change = {name: at[name] - at[""] for name in steps}
        change["rises"] = (change["own"] > 0).double()
        change["tokens"] = torch.ones_like(change["own"])
        return torch.stack([torch.where(seen, change[name], 0.0).sum(1) for name in COLUMNS], -1)


def _others(D: Tensor, seen: Tensor) -> Tensor:
    """The update of another token of the same row, half of the row away."""
    n = seen.sum(1, keepdim=True).clamp(min=1)
    at = torch.arange(D.shape[1], device=D.device)
    first = seen.int().argmax(1, keepdim=True)  # of rows that are padded on the left
    other = first + (at - first + (n // 2).clamp(min=1)) % n
    return D.gather(1, other.unsqueeze(-1).expand_as(D).clamp(max=D.shape[1] - 1))


def evaluate(state: Mapping[str, Any], model: Probed) -> list[Measured]:  # noqa: ARG001
    """The gain of every layer, its controls, and the share of tokens for which G rises."""
    return [
        row
        for layer, sums in state.items()
        for quantity, of in QUANTITIES.items()
        for row in measured(layer, quantity, bootstrap(of, sums), sums.totals[0, 0])
    ]


def _over(name: str, whole: str) -> Any:
    return lambda totals: totals[..., COLUMNS.index(name)] / totals[..., COLUMNS.index(whole)]


QUANTITIES: dict[str, Any] = {
    "gain": _over("own", "best"),
    **{f"gain, {name}": _over(name, "best") for name in CONTROLS},
    "share of tokens that rise": _over("rises", "tokens"),
}


def null(state: Mapping[str, Any], model: Probed, twin: Twin | None) -> list[Measured]:  # noqa: ARG001
    """The gain of permuted updates; the share of tokens that rise in the random twin."""
    rises = "share of tokens that rise"
    found = [
        row
        for layer, sums in state.items()
        for row in measured(layer, "gain", bootstrap(QUANTITIES["gain, permuted"], sums), 0)
    ]
    others = {} if twin is None else twin.state
    return found + [
        row for layer, sums in others.items() for row in measured(layer, rises, bootstrap(QUANTITIES[rises], sums), 0)
    ]


def verdict(findings: list[Finding]) -> Judgement:
    """Layer by layer, and the model by the majority of its layers."""
    judged = judge(findings, "gain", lambda f: Bounds(max(LEAST, f.null_high), max(0.0, f.null_low)))
    c = count(judged, "gain")
    words = "Nothing was measured: no layer lets its queries be asked for, or the text is too short."
    if c.judged:
        words = (
            f"The update of the middle layer gains {c.value:.2f} of the best step of its length, that of another token "
            f"{c.null:.2f}; {c.supported} of {c.judged} layers climb, {c.refuted} do not."
        )
    return Judgement(judged, c.verdict, words, c.value, null=c.null, quantity="gain", note=c.note)
