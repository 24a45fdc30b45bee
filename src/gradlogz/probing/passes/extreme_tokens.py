"""Tokens with extreme statistics, with the surrounding text.

    largest variance      tr Cov_a(v), the variance of the attended values, which attention discards        [theory 8.3]
    largest logit         the most concentrated attention of the head, or logits that diverge

The few largest values of each kind are stored for every layer.

Read next: ../runs/findings.py (the results), ../predictions/dropped_covariance.py.
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

EACH = 3  # tokens of each kind and layer
BEFORE, BEHIND = 6, 4  # tokens of context shown before and after each


class Candidates(NamedTuple):
    """The k largest values of one kind in one layer and batch, on the device of the batch."""

    kind: str
    layer: str
    values: Float[Tensor, " k"]
    places: Int[Tensor, " k"]
    heads: Int[Tensor, " k"]


class ExtremeToken(NamedTuple):
    """A token with an extreme value, its position in its document, and the token ids around it."""

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
        """Return the token as a finding, with its text in brackets inside its context; ids without a tokenizer."""
        layer, call = split(self.layer)
        parts = [_text(ids, tokenizer) for ids in (self.before, (self.here,), self.behind)]
        text = f"{parts[0]} [{parts[1]}] {parts[2]}".strip()
        return Token(model, self.kind, layer, call, self.head, self.value, self.document, self.position, text)


def _text(ids: tuple[int, ...], tokenizer: Any) -> str:
    return " ".join(map(str, ids)) if tokenizer is None else str(tokenizer.decode(list(ids))).strip()


def candidates(event: Attended, batch_pass: BatchPass) -> list[Candidates]:
    """Return the largest values of one attention call, without synchronising the GPU."""
    batch, rows = batch_pass.batch, batch_pass.real(event)
    if "input_ids" not in batch.inputs or tuple(batch.inputs["input_ids"].shape) != tuple(rows.shape):
        return []
    kinds: dict[str, Tensor] = {}
    if event.attention.value_variance is not None:
        kinds["largest variance"] = event.attention.value_variance.sum(-1)
    if event.attention.max_logit is not None:
        kinds["largest logit"] = event.attention.max_logit
    largest = []
    for kind, quantity in kinds.items():
        best, heads = quantity.masked_fill(~rows.unsqueeze(1), -torch.inf).max(1)  # each token once, maximum over heads
        values, places = best.flatten().topk(min(EACH, best.numel()))
        largest.append(Candidates(kind, event.layer, values, places, heads.flatten()[places]))
    return largest


def resolved(largest: list[Candidates], batch: Batch) -> list[ExtremeToken]:
    """Return the candidates of a batch as tokens of their documents."""
    if not largest:
        return []
    ids, starts = batch.inputs["input_ids"].cpu(), batch.starts.tolist()
    n = ids.shape[1]
    values = torch.cat([c.values.double() for c in largest]).tolist()
    places = torch.cat([c.places for c in largest]).tolist()
    heads = torch.cat([c.heads for c in largest]).tolist()
    origins = [c for c in largest for _ in range(len(c.values))]
    tokens = []
    for c, value, place, head in zip(origins, values, places, heads, strict=True):
        row, at = divmod(place, n)
        line = ids[row].tolist()
        tokens.append(
            ExtremeToken(
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
    return tokens


def greatest(tokens: Iterable[ExtremeToken]) -> list[ExtremeToken]:
    """Return the few tokens with the largest values of each kind and layer."""
    by_layer: dict[tuple[str, str], list[ExtremeToken]] = defaultdict(list)
    for token in tokens:
        by_layer[token.kind, token.layer].append(token)
    return [token for group in by_layer.values() for token in sorted(group, key=lambda t: -t.value)[:EACH]]
