"""Time of one step of a cloud under attention, relative to one call of torch's attention on the same cloud."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from gradlogz import Ascent, evolve
from timing import compare

CLOUDS = ((2048, 64), (8192, 64), (8192, 32), (50_000, 64))
CONTRACTIONS = ("rms_norm", "zca")
OBSERVED = ("log_pair_energy", "self_weight", "entropy")


def rows() -> list[dict[str, object]]:
    torch.set_num_threads(2)
    table: list[dict[str, object]] = []
    for n, d in CLOUDS:
        x = torch.randn(n, d)
        y = x[None, None]
        ascent = Ascent(tau=0.5, beta=d**-0.5)
        alternatives = {"sdpa": lambda y=y: scaled_dot_product_attention(y, y, y)}
        for contraction in CONTRACTIONS:
            alternatives[contraction] = lambda c=contraction, x=x, a=ascent: evolve(x, a, contraction=c, steps=1)
        alternatives["rms_norm, observed"] = lambda x=x, a=ascent: evolve(
            x, a, contraction="rms_norm", steps=4, observe=OBSERVED, every=4
        )
        seconds = compare(alternatives, rounds=3 if n > 10_000 else 9)
        seconds["rms_norm, observed"] /= 5  # four steps, and one recording at the end
        ratios = {name: round(t / seconds["sdpa"], 3) for name, t in seconds.items() if name != "sdpa"}
        table.append({"tokens": n, "dimension": d, "sdpa ms": round(1e3 * seconds["sdpa"], 2), **ratios})
    return table
