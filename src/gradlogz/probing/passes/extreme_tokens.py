"""Tokens that stand out, with the text about them.

    largest covariance    sum over values of Var_a(v): what is lost when attention keeps the mean alone     [theory 8.3]
    largest logit         the head is surest there, or its logits explode

The few greatest of each kind are kept for every layer.

Read next: ../runs/findings.py (how they are told), ../predictions/dropped_covariance.py.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from ..._typing import Float, Int, Tensor
from ..batch_pass import BatchPass
from ..corpus.batching import Batch
from ..inside.events import Attended
from ..runs.judgement import split
from ..runs.records import Token

EACH = 3  # of every kind and layer
BEFORE, BEHIND = 6, 4  # tokens of the text about one that are shown


class Candidates(NamedTuple):
    """The greatest of one kind in one layer for one batch, where they were computed."""

    kind: str
    layer: str
    values: Float[Tensor, " k"]
    places: Int[Tensor, " k"]
    heads: Int[Tensor, " k"]


class Standing(NamedTuple):
    """A token that stands out, by its place in its document, and the token ids about it."""

    kind: str
    layer: str
    head: int
    value: float
    document: str
    position: int
    before: tuple[int, ...]
    here: int
    behind: tuple[int, ...]

    def token(self, model: str, tokenizer: Any) -> Token:
        """The same as a finding, its text in brackets among what is about it."""
        layer, call = split(self.layer)
        parts = [tokenizer.decode(list(ids)).strip() for ids in (self.before, (self.here,), self.behind)]
        text = f"{parts[0]} [{parts[1]}] {parts[2]}".strip()
        return Token(model, self.kind, layer, call, self.head, self.value, self.document, self.position, text)


def candidates(event: Attended, batch_pass: BatchPass) -> list[Candidates]:
    """The tokens of a call that may stand out; nothing waits for a GPU."""
    batch, rows = batch_pass.batch, batch_pass.real(event)
    if "input_ids" not in batch.inputs or tuple(batch.inputs["input_ids"].shape) != tuple(rows.shape):
        return []
    kinds: dict[str, Tensor] = {}
    if event.attention.value_variance is not None:
        kinds["largest covariance"] = event.attention.value_variance.sum(-1)
    if event.attention.max_logit is not None:
        kinds["largest logit"] = event.attention.max_logit
    found = []
    for kind, quantity in kinds.items():
        best, heads = quantity.masked_fill(~rows.unsqueeze(1), -torch.inf).max(1)  # a token once, for all heads
        values, places = best.flatten().topk(min(EACH, best.numel()))
        found.append(Candidates(kind, event.layer, values, places, heads.flatten()[places]))
    return found


def resolved(found: list[Candidates], batch: Batch) -> list[Standing]:
    """The candidates of a batch as tokens of their documents."""
    if not found:
        return []
    ids, starts = batch.inputs["input_ids"].cpu(), batch.starts.tolist()
    n = ids.shape[1]
    values = torch.cat([c.values.double() for c in found]).tolist()
    places = torch.cat([c.places for c in found]).tolist()
    heads = torch.cat([c.heads for c in found]).tolist()
    of = [c for c in found for _ in range(len(c.values))]
    standing = []
    for c, value, place, head in zip(of, values, places, heads, strict=True):
        row, at = divmod(place, n)
        line = ids[row].tolist()
        standing.append(
            Standing(
                c.kind,
                c.layer,
                head,
                value,
                batch.names[row],
                starts[row] + at,
                tuple(line[max(at - BEFORE, 0) : at]),
                line[at],
                tuple(line[at + 1 : at + 1 + BEHIND]),
            )
        )
    return standing


def greatest(found: Iterable[Standing]) -> list[Standing]:
    """The few greatest of each kind and layer."""
    by: dict[tuple[str, str], list[Standing]] = defaultdict(list)
    for each in found:
        by[each.kind, each.layer].append(each)
    return [each for group in by.values() for each in sorted(group, key=lambda s: -s.value)[:EACH]]
