"""Smoke test of an installed gradlogz: what works where only PyTorch and jaxtyping are installed.

python smoke_test.py VERSION     in the environment to test, outside of the repository
"""

import subprocess
import sys
from importlib.metadata import version

import torch
from torch.nn.functional import scaled_dot_product_attention

import gradlogz


def check_attention() -> None:
    """`attend` agrees with PyTorch, its statistics with their definitions, and gradients flow."""
    query, key, value = (torch.randn(2, 4, 32, 16, requires_grad=True) for _ in range(3))
    a = gradlogz.attend(query, key, value)
    torch.testing.assert_close(a.output, scaled_dot_product_attention(query, key, value))
    logits = query @ key.mT / 16**0.5
    torch.testing.assert_close(a.log_normalizer, logits.logsumexp(-1))
    torch.testing.assert_close(a.entropy, torch.distributions.Categorical(logits=logits).entropy())
    (a.output.sum() + a.entropy.sum()).backward()
    assert query.grad.isfinite().all()


def check_chapters() -> None:
    """One call of each other chapter that needs no extra."""
    keys = torch.randn(5, 3, dtype=torch.float64)
    eta = torch.randn(3, dtype=torch.float64)
    torch.testing.assert_close(gradlogz.Empirical(keys).mean(eta), torch.softmax(keys @ eta, 0) @ keys)
    model = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True)
    with gradlogz.observe(model) as layers:
        model(torch.randn(1, 6, 16))
    assert layers["self_attn"].entropy.shape == (1, 2, 6)
    one = torch.eye(1, dtype=torch.float64)
    walk = gradlogz.KalmanModel(one, one, one, one)
    switching = gradlogz.SwitchingModel.of([walk, walk], transition=torch.full((2, 2), 0.5, dtype=torch.float64))
    prior = gradlogz.Prior(torch.zeros(1, dtype=torch.float64), one)
    assert gradlogz.imm(switching, torch.zeros(4, 1, dtype=torch.float64), prior).mean.shape == (4, 1)
    cloud = gradlogz.evolve(keys, gradlogz.Ascent(tau=0.1, beta=1.0), contraction="rms_norm", steps=3).cloud
    assert cloud.shape == keys.shape
    pair = torch.randn(2, 8, 4)
    loss = torch.nn.functional.cross_entropy(pair[0] @ pair[1].mT, torch.arange(8))
    torch.testing.assert_close(gradlogz.info_nce(pair[0], pair[1]), loss)


def check_command_line() -> None:
    """Without its extra, the command prints how to install it and exits with status 2."""
    done = subprocess.run([sys.executable, "-I", "-m", "gradlogz"], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done
    assert "gradlogz[cli]" in done.stderr, done


if __name__ == "__main__":
    assert gradlogz.__version__ == version("gradlogz") == sys.argv[1]
    assert "site-packages" in gradlogz.__file__
    assert all(getattr(gradlogz, name) is not None for name in gradlogz.__all__)
    for check in (check_attention, check_chapters, check_command_line):
        check()
    print(f"gradlogz {sys.argv[1]}, torch {torch.__version__}, Python {sys.version.split()[0]}: smoke test passed")
