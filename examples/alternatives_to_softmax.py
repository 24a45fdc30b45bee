"""Retrieval by attention without a softmax: accuracy against the number of stored pairs.

A sequence holds n pairs of a random key in 16 dimensions and one of 8 values; a last token shows one key, and the layer
is to give its value. Keys are new in every sequence, so that the layer can only compare them. One layer of one head,
trained for 400 steps, the same for all; chance is 0.125.

    python examples/alternatives_to_softmax.py      about two minutes on one core
"""

import argparse

import torch
from torch import Tensor, nn

from gradlogz.attention import CosineAttention, GatedHeads, LinearAttention, SigmoidAttention

KEY, VALUES, SIZE = 16, 8, 32


LAYERS = {
    "softmax": lambda: GatedHeads(SIZE, 1),  # the gate of a single head is 1
    "cosine": lambda: CosineAttention(SIZE, 1),
    "sigmoid": lambda: SigmoidAttention(SIZE, 1),
    "linear, elu": lambda: LinearAttention(SIZE, 1),
    "linear, identity": lambda: LinearAttention(SIZE, 1, feature_map="identity"),
}


class Retrieval(nn.Module):
    """Embedding of pairs, one layer of attention, and the logits of the values."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.embed, self.layer, self.read = nn.Linear(KEY + VALUES, SIZE), layer, nn.Linear(SIZE, VALUES)

    def forward(self, pairs: Tensor, query: Tensor) -> Tensor:
        return self.read(self.layer(self.embed(query), self.embed(pairs))).squeeze(-2)


def batch(n: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs [b, n, 24], a query [b, 1, 24] and the number of its value [b]."""
    keys = nn.functional.normalize(torch.randn(size, n, KEY, generator=generator), dim=-1) * KEY**0.5
    values = torch.randint(VALUES, (size, n), generator=generator)
    pairs = torch.cat((keys, nn.functional.one_hot(values, VALUES)), -1)
    query = torch.cat((keys[:, :1], torch.zeros(size, 1, VALUES)), -1)
    return pairs, query, values[:, 0]


def accuracy(name: str, n: int, seed: int, *, steps: int = 400) -> float:
    """Share of right values among 2000 new sequences after training."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Retrieval(LAYERS[name]())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        pairs, query, value = batch(n, 64, generator)
        loss = nn.functional.cross_entropy(model(pairs, query), value)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        pairs, query, value = batch(n, 2000, generator)
        return float((model(pairs, query).argmax(-1) == value).double().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    print(f"{'attention':<18}" + "".join(f"{f'{n} pairs':>20}" for n in options.pairs))
    for name in LAYERS:
        cells = []
        for n in options.pairs:
            values = [accuracy(name, n, seed) for seed in range(options.seeds)]
            cells.append(f"{sum(values) / len(values):.2f} ({min(values):.2f} to {max(values):.2f})")
        print(f"{name:<18}" + "".join(f"{cell:>20}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
