"""An ensemble computes what its models compute, and trains them as `train` does."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from experiments.run_folders import RunFolder
from experiments.specific_heat.ensembles import Ensemble
from experiments.specific_heat.experiment import KINDS, REDUCED, member, place, train_prime, trained

SETTINGS = replace(REDUCED, primes=(7,), seeds=2, steps=25, record_every=5)


def test_an_ensemble_has_the_logits_of_its_models(tmp_path):
    models = [member(7, "no decay", seed, SETTINGS, tmp_path).model.double() for seed in (1, 2)]
    for model in models:  # biases that are not 0
        for p in model.parameters():
            p.data += 0.1 * torch.randn_like(p)
    tokens = torch.randint(8, (2, 5, 3))
    expected = torch.stack([model(each)[:, -1].detach() for model, each in zip(models, tokens, strict=True)])
    torch.testing.assert_close(
        Ensemble(models).logits(tokens), expected, rtol=0, atol=1e-12 * float(expected.abs().max())
    )


def test_runs_trained_together_are_those_trained_alone(tmp_path):
    train_prime(7, SETTINGS, tmp_path / "together")
    for kind in KINDS:
        for seed in (200, 201):
            trained(7, kind, seed, SETTINGS, place(tmp_path / "alone", 7, kind, seed))
            run, alone = (RunFolder(place(tmp_path / name, 7, kind, seed)) for name in ("together", "alone"))
            assert run.config == alone.config
            assert run.complete is not None
            assert len(run.curves) == len(alone.curves)
            for row, expected in zip(run.curves, alone.curves, strict=True):
                assert row == pytest.approx(expected, rel=2e-3, abs=1e-4)
            assert list(run.checkpoints()) == list(alone.checkpoints())
            weights, expected = (load_file(f.checkpoints()[25] / "model.safetensors") for f in (run, alone))
            assert weights.keys() == expected.keys()
            for name in weights.keys() - {"blocks.0.attention.layer.in_proj_bias"}:  # the loss ignores biases of keys
                torch.testing.assert_close(weights[name], expected[name], rtol=1e-3, atol=1e-4)
