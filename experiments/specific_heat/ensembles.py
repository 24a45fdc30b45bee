"""Models of one layer on modular addition, trained together.

    tokens    [s, b, 3]       pairs (a, b, =); every model reads those of its own seed
    table     [s, 2p+1, d]    all embedded tokens: a = 0 ... p-1 in the first place, b = 0 ... p-1 in the second, "="

Only the row of "=" is predicted, and its query is the same for all pairs: queries, keys and values are computed for the
2p+1 rows of the table in place of three for each pair. Losses are float64, since those of float32 vanish once the pairs
are memorised [nanda23].

Read next: ../ensembles.py (training), experiment.py.
"""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, gelu, relu

from ..ensembles import Ensemble
from ..tasks import Batch

LAYER = "blocks.0.attention.layer"


class PairEnsemble(Ensemble):
    """Models of one layer without contraction."""

    def losses(self, batch: Batch) -> Tensor:
        """Mean cross-entropy of every model [s]."""
        logits, targets = self.logits(batch.tokens), batch.targets[:, :, -1]
        each = cross_entropy(logits.double().flatten(0, 1), targets.flatten(), reduction="none")
        return each.unflatten(0, targets.shape).mean(1)

    def logits(self, tokens: Tensor) -> Tensor:
        """Logits [s, b, vocabulary] of the last row of tokens [s, b, 3]."""
        table, size = self.table(), self.settings.vocabulary - 1
        values = self._heads(self._projected(2, table))
        firsts, seconds = tokens[:, :, 0], tokens[:, :, 1] + size
        logits = self.attention_logits(table)
        each = [rows_of(logits, firsts), rows_of(logits, seconds), logits[:, -1:].expand(-1, tokens.shape[1], -1)]
        weights = torch.stack(each, -1).softmax(-1).unsqueeze(-2)  # [s, b, h, 1, 3]
        means = weights[..., 0] * rows_of(values, firsts) + weights[..., 1] * rows_of(values, seconds)
        means = means + weights[..., 2] * values[:, -1:]
        last = table[:, -1:] + self._linear(f"{LAYER}.out_proj", means.flatten(2))
        hidden = (gelu if self.settings.activation == "gelu" else relu)(self._linear("blocks.0.feed_forward.0", last))
        last = last + self._linear("blocks.0.feed_forward.2", hidden)
        return torch.bmm(last, self.weights["unembedding.weight"].mT)

    def table(self) -> Tensor:
        """All embedded tokens [s, 2p+1, d]."""
        embedding, positions = self.weights["embedding.weight"], self.weights["positions"]
        numbers = [embedding[:, :-1] + positions[:, place : place + 1] for place in (0, 1)]
        return torch.cat((*numbers, embedding[:, -1:] + positions[:, 2:3]), 1)

    def attention_logits(self, table: Tensor) -> Tensor:
        """Logits [s, 2p+1, h] of the row of "=" for all tokens as keys."""
        q, k = self._heads(self._projected(0, table[:, -1:])), self._heads(self._projected(1, table))
        return (q * k).sum(-1) * q.shape[-1] ** -0.5

    def _projected(self, part: int, x: Tensor) -> Tensor:
        weight, bias = (self.weights[f"{LAYER}.in_proj_{name}"].chunk(3, 1)[part] for name in ("weight", "bias"))
        return torch.baddbmm(bias.unsqueeze(1), x, weight.mT)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return torch.baddbmm(self.weights[f"{name}.bias"].unsqueeze(1), x, self.weights[f"{name}.weight"].mT)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.settings.heads, -1))


def rows_of(table: Tensor, rows: Tensor) -> Tensor:
    """Rows [s, b, ...] of tables [s, n, ...], by their numbers [s, b]."""
    offsets = table.shape[1] * torch.arange(len(table), device=table.device).unsqueeze(1)
    return table.flatten(0, 1).index_select(0, (rows + offsets).flatten()).unflatten(0, rows.shape)
