"""An ensemble computes what its models compute, and trains them as `train` does."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from experiments.ensembles import Ensemble, Member, held_out_loss, train_together
from experiments.run_folders import RunFolder
from experiments.specific_heat import experiment as specific_heat
from experiments.tasks import ModularAddition, TextTask
from experiments.training import TrainSettings, train
from experiments.transformer import ModelSettings, Transformer
from gradlogz._errors import InputValueError

SMALL = ModelSettings(vocabulary=30, context=8, width=12, heads=3, layers=2, hidden=20)
CPU = torch.device("cpu")
VARIANTS = [
    replace(SMALL, attention=attention, placement=placement, objective=objective)
    for attention in ("softmax", "tied")
    for placement in ("pre", "post")
    for objective in ("causal", "masked")
] + [replace(SMALL, contraction="none", separate=True)]
TRAINING = TrainSettings(steps=12, learning_rate=0.01, warm_up=3, record_every=4, clip=0.5)


def text_task(mask=None):
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(2, 30, (2, 500), generator=generator, dtype=torch.int32)
    return TextTask(ids[0], ids[1], SMALL.context, 4, mask=mask, evaluation_batches=2)


def name_of(settings):
    return f"{settings.attention}-{settings.placement}-{settings.objective}-{settings.contraction}"


@pytest.mark.parametrize("settings", VARIANTS, ids=name_of)
def test_an_ensemble_has_the_logits_of_its_models(settings):
    models = [Transformer(settings, seed=seed).double() for seed in (1, 2)]
    for model in models:  # gains and biases that are not 1 and 0
        for p in model.parameters():
            p.data += 0.1 * torch.randn_like(p)
    tokens = torch.randint(30, (2, 3, 8))
    expected = torch.stack([model(each).detach() for model, each in zip(models, tokens, strict=True)])
    actual = Ensemble(models, CPU).logits(tokens, torch.float64)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12 * float(expected.abs().max()))
    if settings.objective == "masked":
        last = Ensemble(models, CPU, slice(-1, None)).logits(tokens, torch.float64)
        torch.testing.assert_close(last, expected[:, :, -1:], rtol=0, atol=1e-12 * float(expected.abs().max()))


@pytest.mark.parametrize("settings", VARIANTS[::3], ids=name_of)
def test_text_models_trained_together_are_those_trained_alone(settings, tmp_path):
    task = text_task(mask=1 if settings.objective == "masked" else None)
    members = [Member(Transformer(settings, seed=s), task, TRAINING, s, tmp_path / f"together-{s}") for s in (3, 4)]
    together = train_together(members, observe=held_out_loss(task), device="cpu")
    for seed, run in zip((3, 4), together, strict=True):
        model = Transformer(settings, seed=seed)
        alone = train(model, task, TRAINING, seed=seed, folder=tmp_path / f"alone-{seed}", device="cpu")
        assert_equal_runs(run, alone)


def assert_equal_runs(run, alone):
    assert run.config == alone.config
    assert run.complete is not None
    assert list(run.checkpoints()) == list(alone.checkpoints())
    assert len(run.curves) == len(alone.curves)
    for row, expected in zip(run.curves, alone.curves, strict=True):
        assert row == pytest.approx(expected, rel=2e-3, abs=1e-4)
    for step, folder in alone.checkpoints().items():
        expected, actual = (load_file(f / "model.safetensors") for f in (folder, run.checkpoints()[step]))
        assert expected.keys() == actual.keys()
        for name, weight in expected.items():
            values, wanted = actual[name], weight
            if name.endswith("in_proj_bias"):  # the loss does not depend on the biases of keys: rounding moves them
                values, wanted = (torch.cat((t.chunk(3)[0], t.chunk(3)[2])) for t in (values, wanted))
            torch.testing.assert_close(values, wanted, rtol=1e-3, atol=1e-4)


def test_runs_on_modular_addition_are_those_trained_alone(tmp_path):
    settings = replace(specific_heat.REDUCED, primes=(7,), seeds=2, steps=25, record_every=5)
    specific_heat.train_prime(7, settings, tmp_path / "together", device="cpu")
    for kind in specific_heat.KINDS:
        for seed in (200, 201):
            specific_heat.trained(7, kind, seed, settings, specific_heat.place(tmp_path / "alone", 7, kind, seed))
            assert_equal_runs(
                *(RunFolder(specific_heat.place(tmp_path / name, 7, kind, seed)) for name in ("together", "alone"))
            )


def test_what_cannot_be_trained_together_is_refused(tmp_path):
    models = [Transformer(replace(SMALL, attention="cosine"), seed=0)]
    with pytest.raises(InputValueError, match="models"):
        Ensemble(models, CPU)
    with pytest.raises(InputValueError, match="models"):
        Ensemble([Transformer(SMALL, seed=0)], CPU, slice(-1, None))
    task = ModularAddition(5, 0.5, 0)
    members = [
        Member(Transformer(SMALL, seed=s), task, replace(TRAINING, steps=s), s, tmp_path / str(s)) for s in (1, 2)
    ]
    with pytest.raises(InputValueError, match="weight decay only"):
        train_together(members, observe=lambda ensemble: {}, device="cpu")
