"""Sampled rows of an attention layer with some of the keys that they see, in the frame of the query.

    row       a query q, its attended mean m and log normaliser G, and 8 keys drawn from its visible keys
    mu        mean of the visible keys of the row; keys and attended mean are relative to it, and G to log n + <mu, q>,
              because the same vector added to all keys of a row does not change its attention weights
    frame     rotary embeddings rotate a query by its position i and a key by its position j. All vectors of a row are
              rotated back by i: the query is then x W_q, its own key x W_k, and another key k R(j - i)

Rows with the smallest hashes form a sample of fixed size, so that results do not depend on batches. If logits have
additive biases b_j, keys are drawn with probabilities proportional to exp(b_j), and n is their effective number.

Read next: ../mixture.py and ../link.py, which use them; attention_rows.py (the rows).
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ...._typing import Bool, Float, Int, Tensor
from ...batch_pass import BatchPass
from ...inside.events import Attended
from ...inside.head_weights import HeadWeights, Turning
from ...runs.judgement import Measured
from ...statistics import Sample, chosen, sample_of, token_hashes
from .attention_rows import Rows, applies, at, rows_of

ROWS, DRAWN = 512, 8  # rows of a sample, and keys drawn from each
FEWEST = 8  # visible keys of a row
_BELOW = 1 - 1e-6  # largest uniform number, so that rounding never selects a hidden key


class VisibleKeys(NamedTuple):
    """Rows of a layer; vectors are relative to the mean of the visible keys, and heads may share keys.

    own_key: key of the query's own token, None in cross-attention. log_normalizer: G - log n - <mu, q>.
    information: log n minus the entropy of the attention weights. document, group: key and group of the document.
    singular: heads whose keys lie in a subspace, as those of a head without weights; they have the vectors of another
        head, and `without_singular` removes their values.
    """

    query: Float[Tensor, "h t d"]
    moved: Float[Tensor, "h t d"]
    visible: Float[Tensor, "hk t s d"]
    own_key: Float[Tensor, "hk t d"] | None
    log_normalizer: Float[Tensor, "h t"]
    size: Float[Tensor, "h t"]
    information: Float[Tensor, "h t"]
    document: Int[Tensor, " t"]
    group: Int[Tensor, " t"]
    singular: Bool[Tensor, " h"]

    def without_singular(self, measurements: list[Measured]) -> list[Measured]:
        """Measurements of heads, NaN for singular heads."""
        return [
            m._replace(value=math.nan, low=math.nan, high=math.nan, replicates=None)
            if m.head is not None and bool(self.singular[m.head])
            else m
            for m in measurements
        ]


class _Taken(NamedTuple):
    """Rows of a batch that can enter the sample: their hashes, on the CPU, and their numbers, on the device.

    facts: position in the window, key and group of the document, on the CPU.
    """

    hashes: Int[Tensor, " t"]
    rows: Int[Tensor, " t"]
    facts: dict[str, Int[Tensor, " t"]]


@dataclass
class _Shared:
    """Choice of rows, which layers share within a batch."""

    taken: dict[tuple[int, ...], _Taken] = field(default_factory=dict)


class LayerRows(NamedTuple):
    """Sampled rows of a layer, the state of a prediction; None if its logits are no inner products."""

    rows: Sample | None = None


def layer_rows(event: Attended, batch_pass: BatchPass) -> dict[str, LayerRows]:
    """Sampled rows with their own keys and some of their visible keys, by the name of the layer."""
    if not applies(event, batch_pass) or event.arguments.softcap is not None:
        return {event.layer: LayerRows()}
    return {event.layer: LayerRows(sample_of_rows(event, batch_pass))}


def sample_of_rows(event: Attended, batch_pass: BatchPass) -> Sample | None:
    """Sample of the rows of a call that satisfies `applies`; None without rows. Cached for all predictions."""

    def compute() -> Sample | None:
        rows = rows_of(event, batch_pass)
        if rows is None:
            return None
        taken = _taken(rows, batch_pass)
        vectors = {name: t.flatten(0, 1)[taken.rows] for name, t in _vectors(event, rows, batch_pass).items()}
        return sample_of(vectors | taken.facts, taken.hashes, size=ROWS)

    return batch_pass.once(event.query, "visible keys", compute)


def visible_keys(sample: Sample | None, weights: HeadWeights | str | None) -> VisibleKeys | None:
    """Rows with enough visible keys, in the frames of their queries; None without rows, or with unknown rotations."""
    if sample is None:
        return None
    vectors = {name: t.cpu() for name, t in sample.vectors.items()}
    frames = None
    if isinstance(weights, HeadWeights) and weights.rotary:
        if not isinstance(weights.turning, Turning):
            return None
        phase = vectors["position"].double().unsqueeze(-1) * weights.turning.angle.double()
        frames = weights.turning.matrix(phase.cos(), -phase.sin()).to(vectors["query"].dtype)  # [t, d, d]
    enough = (vectors["size"] >= FEWEST).all(-1)
    if not bool(enough.any()):
        return None

    def turned(name: str) -> Tensor:
        t = vectors[name]
        t = t if frames is None else torch.einsum("t...d,tde->t...e", t, frames)
        return t[enough].movedim(1, 0)

    query, visible = turned("query"), turned("visible")
    singular = _in_subspace(visible)
    if bool(singular.all()):
        return None
    other = int(singular.int().argmin())  # the first head with keys in all directions
    source = torch.where(singular, other, torch.arange(len(singular)))
    each = len(query) // len(visible)
    of_head = (each * source.unsqueeze(-1) + torch.arange(each)).flatten()
    return VisibleKeys(
        query[of_head], turned("moved")[of_head], visible[source],
        turned("own_key")[source] if "own_key" in vectors else None,
        vectors["log_normalizer"][enough].mT[of_head], vectors["size"][enough].mT[of_head],
        vectors["information"][enough].mT[of_head], vectors["document"][enough], vectors["group"][enough],
        singular.repeat_interleave(each),
    )  # fmt: skip


def _in_subspace(visible: Float[Tensor, "hk t s d"]) -> Bool[Tensor, " hk"]:
    """Heads whose keys have a singular covariance, up to rounding."""
    keys = visible.flatten(1, 2).double()
    away = keys - keys.mean(1, keepdim=True)
    scale = away.square().mean(1, keepdim=True).sqrt()
    away = away / torch.where(scale > 0, scale, 1.0)
    smallest = torch.linalg.eigvalsh(away.mT @ away / max(away.shape[1], 1))[:, 0]
    return (smallest < 1e-9) | (scale == 0).any(-1).squeeze(-1)


def _taken(rows: Rows, batch_pass: BatchPass) -> _Taken:
    """Rows that can enter the sample, chosen on the CPU once for all layers."""
    held, batch = batch_pass.memory(_Shared).taken, batch_pass.batch
    b, r = rows.places.shape
    if (key := (b, r, rows.products.shape[-1])) not in held:
        places, documents = rows.places.cpu(), batch.keys.cpu()
        hashes = token_hashes(documents, batch.starts.cpu().unsqueeze(-1) + places).flatten()
        index = chosen(hashes, valid=rows.valid.cpu().flatten(), size=ROWS)
        about = (places.flatten()[index], documents.repeat_interleave(r)[index], torch.full_like(index, batch.group))
        facts = dict(zip(("position", "document", "group"), about, strict=True))
        held[key] = _Taken(hashes[index], index.to(rows.places.device, non_blocking=True), facts)
    return held[key]


def _vectors(event: Attended, rows: Rows, batch_pass: BatchPass) -> dict[str, Float[Tensor, "b r ..."]]:
    """Vectors and numbers of all sampled rows of a batch, before rotation into their frames."""
    u, w = rows.products, rows.log_weights
    h, hk = u.shape[1], rows.key.shape[1]
    mass = w.logsumexp(-1)
    base = (w - mass.unsqueeze(-1)).exp()  # [b, #h, r, n]
    shared = base if base.shape[1] == 1 else base.unflatten(1, (hk, -1)).mean(2)  # of the heads that share keys
    s = u + w
    G = s.logsumexp(-1)
    p = (s - G.unsqueeze(-1)).exp()
    key = rows.key - rows.key.mean(2, keepdim=True)  # an offset would lose digits
    mean = rows.averaged(shared.expand(-1, hk, -1, -1), key)  # [b, hk, r, d]
    of_head = mean.repeat_interleave(h // hk, 1)
    offset = (rows.query * (of_head + rows.key.mean(2).repeat_interleave(h // hk, 1).unsqueeze(2))).sum(-1)
    visible = _drawn(shared, key, rows, batch_pass) - mean.unsqueeze(-2)
    size = shared.square().sum(-1).reciprocal().expand(-1, hk, -1).repeat_interleave(h // hk, 1)
    entropy = G - (p * s.masked_fill(w == -torch.inf, 0.0)).sum(-1)
    vectors = {
        "query": rows.query,
        "moved": rows.averaged(p, key) - of_head,
        "visible": visible,
        "log_normalizer": G - mass - offset,
        "size": size,
        "information": size.log() - entropy,
    }
    if not event.crosses and rows.key.shape[2] == event.query.shape[2]:
        vectors["own_key"] = at(key, rows.places) - mean
    return {name: t.transpose(1, 2) for name, t in vectors.items()}


def _drawn(
    base: Float[Tensor, "b #hk r n"], key: Float[Tensor, "b hk n d"], rows: Rows, batch_pass: BatchPass
) -> Float[Tensor, "b hk r s d"]:
    """Keys drawn from the visible ones of each row, by hashes of the row's token."""
    batch = batch_pass.batch
    starts = batch.starts.to(base.device, non_blocking=True).unsqueeze(-1)
    # Beyond the numbers of tokens, so that a token's own hash is not used again.
    places = ((starts + rows.places).unsqueeze(-1) + 1 << 32) + torch.arange(DRAWN, device=base.device)
    hashes = token_hashes(batch.keys.to(base.device, non_blocking=True), places.flatten(1)).reshape(places.shape)
    distribution = base.cumsum(-1).contiguous()
    uniform = (hashes.to(base.dtype) * (_BELOW / 2.0**63)).unsqueeze(1) * distribution[..., -1:]
    index = torch.searchsorted(distribution, uniform.expand(*distribution.shape[:3], -1).contiguous(), right=True)
    b, hk, n, d = key.shape
    index = index.expand(-1, hk, -1, -1).clamp(max=n - 1).reshape(b, hk, -1, 1)
    return key.gather(2, index.expand(-1, -1, -1, d)).reshape(b, hk, -1, DRAWN, d)
