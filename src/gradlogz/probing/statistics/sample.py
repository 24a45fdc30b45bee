"""A fixed number of tokens of a corpus, drawn by the hash of document and position.

    S = the 4096 tokens of least hash                  S(A ∪ B) = S(S(A) ∪ S(B)): the same however A and B are cut

The hash knows nothing of what the model computes, so that S is a sample without replacement of all tokens. Hashes are
known before the model runs, on the CPU: a batch is chosen from once, and only the chosen rows are taken of each layer.

    hashes = token_hashes(keys, positions).flatten()
    rows   = chosen(hashes, valid=mask.flatten(), below=sample.threshold)
    sample = sample.merge(sample_of({"x": x.flatten(0, 1)[rows]}, hashes[rows]))

Read next: hashing.py.
"""

from typing import NamedTuple

import torch

from ..._errors import InputValueError, shape_of
from ..._typing import Bool, Int, Tensor

SAMPLE = 4096
_GREATEST = 2**63 - 1


class Sample(NamedTuple):
    """The tokens of least hash, ascending, with the vectors taken of each."""

    hashes: Int[Tensor, " m"]
    vectors: dict[str, Tensor]
    size: int = SAMPLE

    @property
    def threshold(self) -> int:
        """The least hash that no longer enters."""
        return int(self.hashes[-1]) if len(self.hashes) == self.size else _GREATEST

    def merge(self, other: "Sample") -> "Sample":
        """The sample of both; a token met twice is kept once, as it was first met."""
        one, two = ({name: t.shape[1:] for name, t in each.vectors.items()} for each in (self, other))
        if self.size != other.size or one != two:
            facts = [f"{each.size} tokens of {', '.join(each.vectors)}" for each in (self, other)]
            remedy = "Take the same vectors of every batch."
            condition = "both must have one size and vectors of the same names and shapes"
            raise InputValueError("Sample.merge", "both", f"{condition}" + ", got " + (" and ".join(facts)), remedy)
        if not len(other.hashes):
            return self
        both = {name: torch.cat((t, other.vectors[name].to(t.device))) for name, t in self.vectors.items()}
        return sample_of(both, torch.cat((self.hashes, other.hashes)), size=self.size)


def chosen(
    hashes: Int[Tensor, " t"], *, valid: Bool[Tensor, " t"] | None = None, below: int = _GREATEST, size: int = SAMPLE
) -> Int[Tensor, " m"]:
    """Which tokens of a batch can enter a sample: the valid ones with a hash under `below`, at most `size`."""
    enters = hashes < below
    rows = (enters if valid is None else enters & valid.to(hashes.device)).nonzero().squeeze(-1)
    return rows if len(rows) <= size else rows[hashes[rows].topk(size, largest=False, sorted=False).indices]


def sample_of(vectors: dict[str, Tensor], hashes: Int[Tensor, " t"], *, size: int = SAMPLE) -> Sample:
    """The sample of these tokens: vectors [t, ...] of each name, on any device, and the hashes, on the CPU."""
    wrong = {name: shape_of(t) for name, t in vectors.items() if shape_of(t)[:1] != shape_of(hashes)}
    if wrong or hashes.ndim != 1:
        fact = f"shapes {', '.join(map(str, wrong.values())) or 'none'} and {shape_of(hashes)}"
        condition = "vectors must be [t, ...] beside hashes [t]"
        raise InputValueError(
            "sample_of", "vectors", f"{condition}, got {fact}", "Flatten batch and position into one dimension t."
        )
    ordered, order = hashes.cpu().sort(stable=True)
    new = torch.ones_like(ordered, dtype=torch.bool)
    new[1:] = ordered[1:] != ordered[:-1]
    order = order[new][:size]
    taken = {name: t.detach()[order.to(t.device, non_blocking=True)] for name, t in vectors.items()}
    return Sample(ordered[new][:size], taken, size)
