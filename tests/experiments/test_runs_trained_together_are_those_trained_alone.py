"""An ensemble computes what its models compute, and trains them as `train` does."""

from dataclasses import fields, replace
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file

from experiments.ascent import experiment as ascent
from experiments.ascent.ensembles import TextEnsemble
from experiments.ascent.experiment import EXTENDED, cells, model_of
from experiments.contraction import experiment as contraction
from experiments.exporting import load_checkpoint
from experiments.parts import ContractionKind
from experiments.run_folders import RunFolder
from experiments.specific_heat.ensembles import PairEnsemble
from experiments.specific_heat.experiment import DELAYED, REDUCED, judge, member, place, train_share, trained
from experiments.text import TokenisedText
from experiments.text_settings import TextSettings
from experiments.training import train
from experiments.transformer import Transformer
from gradlogz._errors import InputValueError

CPU = torch.device("cpu")
SIZES = {
    "reduced": replace(REDUCED, primes=(7,), seeds=2, steps=25, record_every=5),
    "delayed": replace(DELAYED, primes=(7,), seeds=2, null_seeds=1, steps=25, record_every=5, width=16),
}


@pytest.mark.parametrize("settings", SIZES.values(), ids=SIZES)
def test_an_ensemble_has_the_logits_of_its_models(settings, tmp_path):
    models = [member(7, "no decay", seed, settings, tmp_path).model.double() for seed in (1, 2)]
    for model in models:  # biases that are not 0
        for p in model.parameters():
            p.data += 0.1 * torch.randn_like(p)
    tokens = torch.cat((torch.randint(7, (2, 5, 2)), torch.full((2, 5, 1), 7)), -1)
    expected = torch.stack([model(each)[:, -1].detach() for model, each in zip(models, tokens, strict=True)])
    torch.testing.assert_close(
        PairEnsemble(models, CPU).logits(tokens), expected, rtol=0, atol=1e-12 * float(expected.abs().max())
    )


@pytest.mark.parametrize("settings", SIZES.values(), ids=SIZES)
def test_runs_trained_together_are_those_trained_alone(settings, tmp_path):
    for share in settings.shares:
        assert train_share(7, share, settings, tmp_path / "together")
    for kind in settings.kinds:
        for seed in settings.seeds_of(kind):
            trained(7, kind, seed, settings, place(tmp_path / "alone", 7, kind, seed))
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
    for row, expected in zip(
        *(judge(settings, tmp_path / name)["runs"] for name in ("together", "alone")), strict=True
    ):
        assert row == pytest.approx(expected, abs=0.01)


TEXT = replace(
    EXTENDED,
    model=replace(EXTENDED.model, vocabulary=30, context=8, width=12, heads=3, hidden=20),
    training=replace(EXTENDED.training, steps=12, warm_up=3, record_every=4, clip=0.5),
    batch_size=4,
    seeds=2,
)


def random_text():
    ids = torch.randint(2, 30, (2, 500), generator=torch.Generator().manual_seed(5), dtype=torch.int32)
    return TokenisedText(ids[0], ids[1], None, 30)


@pytest.mark.parametrize("cell", list(cells()), ids=str)
def test_text_models_trained_together_are_those_trained_alone(cell, tmp_path):
    text = random_text()
    batches = ascent.batches_of(cell.objective, TEXT, text, CPU)
    assert ascent.train_cell(cell, TEXT, text, tmp_path / "together", batches)
    for seed in TEXT.every_seed:
        each = ascent.member(cell, seed, TEXT, text, tmp_path)
        alone = train(each.model, each.task, each.training, seed=seed, folder=tmp_path / str(seed), device="cpu")
        run = RunFolder(ascent.place(tmp_path / "together", cell, seed))
        assert run.config == alone.config
        for row, expected in zip(run.curves, alone.curves, strict=True):
            assert row == pytest.approx(expected, rel=1e-4)
        models = [load_checkpoint(each.checkpoints()[12], model_of(cell, TEXT.model)) for each in (run, alone)]
        tokens = text.train[:32].long().reshape(4, 8)
        torch.testing.assert_close(models[0](tokens), models[1](tokens), rtol=1e-3, atol=1e-3)


BATCHED = {
    **{str(cell): model_of(cell, TEXT.model) for cell in cells()},
    **{
        f"{kind}, {placement}": replace(TEXT.model, contraction=kind, placement=placement, embedding_scale=35.0)
        for kind in get_args(ContractionKind)
        if kind != "whitening"
        for placement in ("pre", "post")
    },
}


@pytest.mark.parametrize("settings", BATCHED.values(), ids=BATCHED)
def test_an_ensemble_has_the_logits_of_its_text_models(settings):
    models = [Transformer(settings, seed=seed).double() for seed in (1, 2)]
    for model in models:  # gains and biases that are not 1 and 0
        for p in model.parameters():
            p.data += 0.1 * torch.randn_like(p)
    tokens = torch.randint(30, (2, 3, 8))
    expected = torch.stack([model(each).detach() for model, each in zip(models, tokens, strict=True)])
    actual = TextEnsemble(models, CPU).logits(tokens)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12 * float(expected.abs().max()))


@pytest.mark.parametrize("kind", ["layer_norm", "dyt", "sphere"])
def test_contractions_trained_together_are_those_trained_alone(kind, tmp_path):
    sizes = {field.name: getattr(TEXT, field.name) for field in fields(TextSettings)} | {"first_seed": 3, "little": 0.5}
    text, settings = random_text(), replace(contraction.EXTENDED, **sizes)
    together, alone = (
        [contraction.member(kind, "little text", s, settings, text, tmp_path / f"{name}{s}") for s in (3, 4)]
        for name in ("together", "alone")
    )
    contraction.together(together)
    for each, other in zip(together, alone, strict=True):
        train(other.model, other.task, other.training, seed=other.seed, folder=other.folder, device="cpu")
        runs = RunFolder(each.folder), RunFolder(other.folder)
        assert runs[0].config == runs[1].config
        for row, expected in zip(runs[0].curves, runs[1].curves, strict=True):
            assert row == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("change", [{"attention": "cosine"}, {"contraction": "whitening"}, {"placement": "peri"}])
def test_what_cannot_be_trained_together_is_refused(change):
    with pytest.raises(InputValueError, match="not batched"):
        TextEnsemble([Transformer(replace(TEXT.model, **change), seed=0)], CPU)


def test_training_is_given_up_when_its_time_is_over(tmp_path):
    settings = SIZES["reduced"]
    assert not train_share(7, 0.6, settings, tmp_path, seconds=0.0)
    assert judge(settings, tmp_path)["runs"] == []
    for share in settings.shares:
        assert train_share(7, share, settings, tmp_path)
    assert len(judge(settings, tmp_path)["runs"]) == 6
