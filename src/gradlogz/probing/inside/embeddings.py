"""Word vectors of a model: rows of its embedding and of its unembedding, which may be one matrix.

    x = v_w + ...                input: the vector of word w is added to the residual stream
    logit_w = <c, v_w> + b_w     output: c = gain * n + bias, n a normalised vector of the residual stream

The gain of the norm before the unembedding can be moved into its rows; folded vectors gain * v_w, which act on n, do
not depend on this choice. Where norms subtract the mean over features, that of a word vector has no effect.

Read next: architecture.py, ../predictions/word_vectors.py.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import nn

from ..._typing import Float, Tensor
from .architecture import Architecture, Norm
from .offloading import present

ROWS = 8192  # rows that are converted at once


class WordVectors(NamedTuple):
    """Rows of an embedding matrix: the weights themselves, not a copy. norm: the norm that an unembedding reads.

    centres: whether the mean over features is removed from every row.
    """

    role: Literal["input", "output"]
    matrix: Float[Tensor, "n D"]
    norm: Norm | None
    centres: bool

    def blocks(self) -> Iterator[Float[Tensor, "_ D"]]:
        """Yield the folded vectors in float32 (or float64), some rows at a time."""
        wide = torch.promote_types(self.matrix.dtype, torch.float32)
        for rows in self.matrix.split(ROWS):
            v = rows.to(wide) if self.norm is None else rows.to(wide) * self.norm.gain.to(rows.device, wide)
            yield v - v.mean(-1, keepdim=True) if self.centres else v


def word_vectors_of(model: nn.Module, architecture: Architecture) -> dict[str, WordVectors]:
    """Return the word vectors of a model by the names of their modules; none if it embeds no words."""
    names = {module: name for name, module in model.named_modules()}
    norms = [n for s in architecture.sublayers for n in (s.reads, s.follows, s.norm_of_stream) if n is not None]
    vectors = {}
    embedding = _part(model, "get_input_embeddings")
    if type(embedding) is nn.Embedding and embedding in names:
        centres = any(n.centres for n in norms)
        with present(embedding):
            vectors[names[embedding]] = WordVectors("input", embedding.weight.detach(), None, centres)
    head = unembedding_of(model)
    if architecture.unembedding is not None and type(head) is nn.Linear:  # quantised layers have other rows
        name, norm = architecture.unembedding
        centres = norm is not None and norm.centres
        with present(head):
            vectors[name] = WordVectors("output", head.weight.detach(), norm, centres)
    return vectors


def unembedding_of(model: nn.Module) -> nn.Module | None:
    """Return the module that maps vectors to logits of words, None if the model has none."""
    return _part(model, "get_output_embeddings")


def _part(model: nn.Module, name: str) -> nn.Module | None:
    try:
        part = getattr(model, name, lambda: None)()
    except (NotImplementedError, AttributeError):  # models of images and sound
        return None
    return part if isinstance(part, nn.Module) else None
