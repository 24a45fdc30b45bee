"""Keys with the largest and the smallest logit, and the first visible key: each kernel against all logits of a row."""

import pytest
import torch

from gradlogz.kernels.attention.extreme_keys import extreme_keys
from gradlogz.kernels.attention.scoring import Block, Scoring, Sight, logits, visible

pytestmark = pytest.mark.usefixtures("bounds_of_loops")

SIGHTS = {
    "all keys": lambda: Sight(),
    "bias": lambda: Sight(bias=torch.randn(1, 4, 90, 150).masked_fill(torch.rand(1, 4, 90, 150) < 0.3, -torch.inf)),
    "mask": lambda: Sight(mask=torch.rand(2, 1, 90, 150) < 0.05),
    "segments": lambda: Sight(segments=torch.arange(150).unsqueeze(0) // 40),
}


@pytest.mark.parametrize("band", [(None, None), (None, 0), (20, 3)], ids=["full", "causal", "window"])
@pytest.mark.parametrize("sight", SIGHTS.values(), ids=SIGHTS)
@pytest.mark.parametrize("kernel", ["torch", "triton"])
def test_each_kernel_finds_the_keys_of_the_definition(kernel, sight, band):
    """By the logits of the keys, since in float32 the rounding of a product may change their order."""
    if kernel == "triton":
        pytest.importorskip("triton")
        from gradlogz.kernels.attention.extreme_keys_gpu import extreme_keys as found_by
    else:
        found_by = extreme_keys
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k = torch.randn(2, 4, 90, 16, device=device), torch.randn(2, 2, 150, 16, device=device)
    sight, scoring = Sight(*(None if t is None else t.to(device) for t in sight())), Scoring(0.3, 5.0, *band)
    numbers = found_by(q, k, sight, scoring)
    keys = visible(sight, scoring, Block(0, 90, 0, 150), 90, 150, q.device)
    s = logits(q.double(), k.double(), None if sight.bias is None else sight.bias.double(), keys, scoring)
    empty = (s == -torch.inf).all(-1)
    for index in numbers:
        assert torch.equal(index < 0, empty)
    largest, smallest, first = (s.gather(-1, t.clamp(min=0).unsqueeze(-1)).squeeze(-1)[~empty] for t in numbers)
    torch.testing.assert_close(largest, s.amax(-1)[~empty], rtol=0, atol=1e-5)
    torch.testing.assert_close(smallest, s.masked_fill(s == -torch.inf, torch.inf).amin(-1)[~empty], rtol=0, atol=1e-5)
    assert first.isfinite().all()
    assert torch.equal(numbers[2][~empty], (s > -torch.inf).int().argmax(-1)[~empty])
