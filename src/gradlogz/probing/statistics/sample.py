"""Sample of a fixed number of tokens of a corpus, drawn by the hash of document and position.

    S = the 4096 tokens with the smallest hashes       S(A ∪ B) = S(S(A) ∪ S(B)): independent of the batches

The hash does not depend on the model, so that S is a sample of all tokens without replacement. Hashes are computed on
the CPU before the model runs: the rows of a batch are chosen once, and only these are copied from each layer.

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
    """The tokens with the smallest hashes, in ascending order, and named vectors of each."""

    hashes: Int[Tensor, " m"]
    vectors: dict[str, Tensor]
    size: int = SAMPLE

    @property
    def threshold(self) -> int:
        """Hash from which on tokens no longer enter the sample."""
        return int(self.hashes[-1]) if len(self.hashes) == self.size else _GREATEST

    def merge(self, other: "Sample") -> "Sample":
        """Return the sample of both; of a token in both samples the first occurrence is retained."""
        one, two = ({name: t.shape[1:] for name, t in each.vectors.items()} for each in (self, other))
        if self.size != other.size or one != two:
            facts = [f"size {each.size} with vectors {', '.join(each.vectors)}" for each in (self, other)]
            problem = f"both samples must have the same size, names and shapes of vectors, got {' and '.join(facts)}"
            raise InputValueError("Sample.merge", "other", problem, "Sample the same vectors in every batch.")
        if not len(other.hashes):
            return self
        both = {name: torch.cat((t, other.vectors[name].to(t.device))) for name, t in self.vectors.items()}
        return sample_of(both, torch.cat((self.hashes, other.hashes)), size=self.size)


def chosen(
    hashes: Int[Tensor, " t"], *, valid: Bool[Tensor, " t"] | None = None, below: int = _GREATEST, size: int = SAMPLE
) -> Int[Tensor, " m"]:
    """Return the indices of the tokens that can enter a sample: valid, hash under `below`, at most `size` of them."""
    enters = hashes < below
    rows = (enters if valid is None else enters & valid.to(hashes.device)).nonzero().squeeze(-1)
    return rows if len(rows) <= size else rows[hashes[rows].topk(size, largest=False, sorted=False).indices]


def sample_of(vectors: dict[str, Tensor], hashes: Int[Tensor, " t"], *, size: int = SAMPLE) -> Sample:
    """Return the sample of these tokens, from named vectors [t, ...] on any device and their hashes on the CPU."""
    wrong = {name: shape_of(t) for name, t in vectors.items() if shape_of(t)[:1] != shape_of(hashes)}
    if wrong or hashes.ndim != 1:
        shapes = ", ".join(map(str, wrong.values())) or "no vectors"
        problem = f"vectors must be [t, ...] for hashes [t], got {shapes} for hashes {shape_of(hashes)}"
        raise InputValueError("sample_of", "vectors", problem, "Flatten batch and position into one dimension t.")
    ordered, order = hashes.cpu().sort(stable=True)
    new = torch.ones_like(ordered, dtype=torch.bool)
    new[1:] = ordered[1:] != ordered[:-1]
    order = order[new][:size]
    taken = {name: t.detach()[order.to(t.device, non_blocking=True)] for name, t in vectors.items()}
    return Sample(ordered[new][:size], taken, size)
