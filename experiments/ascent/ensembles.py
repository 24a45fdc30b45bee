"""Transformers with free or tied value maps, trained together.

Softmax and tied attention, every contraction but whitening, pre- or post-norm, free feed-forward layers.

Read next: ../ensembles.py (training), ../transformer.py (one model).
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.func import functional_call, vmap
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from gradlogz._errors import InputValueError

from ..ensembles import Ensemble
from ..parts import contraction
from ..tasks import Batch
from ..transformer import Transformer


class TextEnsemble(Ensemble):
    """Models of text."""

    def __init__(self, models: Sequence[Transformer], device: torch.device) -> None:
        s = models[0].settings
        parts = (s.attention in ("softmax", "tied"), s.contraction != "whitening", s.placement != "peri")
        others = s.shared or s.separate or s.numbers or s.identity or s.frozen
        if not all(parts) or others or (s.feed_forward, s.activation) != ("free", "gelu"):
            remedy = "Train them one by one, with experiments.training.train."
            raise InputValueError("TextEnsemble", "models", "models have a part that is not batched", remedy)
        super().__init__(models, device)
        self.contraction = contraction(s.contraction, s.width).to(device)
        self.places = ("before", "last") if s.placement == "pre" else ("first", "after")

    def losses(self, batch: Batch) -> Tensor:
        """Mean cross-entropy of every model [s] over its predicted tokens."""
        targets = batch.targets.flatten(1)
        each = cross_entropy(
            self.logits(batch.tokens).flatten(0, 2), targets.flatten(), ignore_index=-100, reduction="none"
        )
        return each.unflatten(0, targets.shape).sum(1) / (targets != -100).sum(1)

    def logits(self, tokens: Tensor) -> Tensor:
        """Logits [s, b, n, vocabulary] of tokens [s, b, n]."""
        x = self._embedded(tokens)
        for i in range(self.settings.layers):
            block = f"blocks.{i}"
            x = x + self._attention(f"{block}.attention.layer", self._contracted(f"{block}.before.0", x))
            x = self._contracted(f"{block}.after.0", x)
            hidden = gelu(self._linear(f"{block}.feed_forward.0", self._contracted(f"{block}.before.1", x)))
            x = self._contracted(f"{block}.after.1", x + self._linear(f"{block}.feed_forward.2", hidden))
        return _product(self._contracted("last", x), self.weights["embedding.weight"].mT)

    def _embedded(self, tokens: Tensor) -> Tensor:
        offsets = self.settings.vocabulary * torch.arange(len(tokens), device=tokens.device)
        table = self.weights["embedding.weight"].flatten(0, 1)
        x = table.index_select(0, (tokens + offsets[:, None, None]).flatten()).unflatten(0, tokens.shape)
        x = self.settings.embedding_scale * (x + self.weights["positions"][:, None, : tokens.shape[2]])
        return self._contracted("first", x)

    def _attention(self, layer: str, x: Tensor) -> Tensor:
        if self.settings.attention == "tied":
            q, k = (self._heads(self._linear(f"{layer}.{name}", x)) for name in ("q_proj", "k_proj"))
            steps = self.weights[f"{layer}.log_step"].exp()[:, None, :, None, None]
            return _product(_joined(steps * self._attended(q, k, k)), self.weights[f"{layer}.q_proj.weight"])
        weights, biases = (self.weights[f"{layer}.in_proj_{name}"].chunk(3, 1) for name in ("weight", "bias"))
        q, k, v = (self._heads(_affine(x, w, b)) for w, b in zip(weights, biases, strict=True))
        return self._linear(f"{layer}.out_proj", _joined(self._attended(q, k, v)))

    def _attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        causal = self.settings.objective == "causal"
        output = scaled_dot_product_attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), is_causal=causal)
        return output.unflatten(0, q.shape[:2])

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.settings.heads, -1)).transpose(2, 3)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return _affine(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def _contracted(self, name: str, x: Tensor) -> Tensor:
        """Contraction by name, where the placement has one."""
        if not any(place in name.split(".") for place in self.places):
            return x
        weights = {key: self.weights[f"{name}.{key}"] for key, _ in self.contraction.named_parameters()}
        return vmap(lambda parameters, tokens: functional_call(self.contraction, parameters, (tokens,)))(weights, x)


def _joined(x: Tensor) -> Tensor:
    return x.transpose(2, 3).flatten(3)


def _affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.baddbmm(bias.unsqueeze(1), x.flatten(1, 2), weight.mT).unflatten(1, x.shape[1:3])


def _product(x: Tensor, matrix: Tensor) -> Tensor:
    return torch.bmm(x.flatten(1, 2), matrix).unflatten(1, x.shape[1:3])
