"""A model of transformers that is exported computes what the trained one does; `gradlogz probe` reads it."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments.exporting import export, export_run, load_checkpoint
from experiments.run_folders import RunFolder
from experiments.tasks import TextTask
from experiments.text import corpus
from experiments.training import TrainSettings, train
from experiments.transformer import ModelSettings, Transformer
from gradlogz._errors import InputValueError
from gradlogz.probing.inside.loading import load

ROOT = Path(__file__).parents[2]
MODEL = ModelSettings(vocabulary=30, context=12, width=16, heads=2, layers=2, hidden=24)
VARIANTS = [
    replace(MODEL, attention=attention, placement=placement, objective=objective, shared=shared)
    for attention in ("softmax", "tied")
    for placement in ("pre", "post")
    for objective in ("causal", "masked")
    for shared in (False, True)
] + [
    replace(MODEL, separate=True),
    *(replace(MODEL, activation="relu", placement=p) for p in ("pre", "post")),
    *(
        replace(MODEL, embedding_scale=3.0, placement=p, objective=o)
        for p in ("pre", "post")
        for o in ("causal", "masked")
    ),
]


def perturbed(settings):
    """A model whose biases and gains are not those of the start."""
    model = Transformer(settings, seed=0).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=generator))
    return model


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_the_probe_loads_a_model_that_computes_the_same(settings, tmp_path):
    model = perturbed(settings)
    export(model, tmp_path)
    loaded = load(tmp_path).model
    tokens = torch.randint(2, 30, (3, 12), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        output = loaded(tokens)
        if settings.placement == "pre" and settings.objective == "causal":
            expected, actual = model(tokens), output.logits
        else:
            expected, actual = model.stream(tokens), output.last_hidden_state
    assert torch.allclose(expected, actual, atol=1e-5 * float(expected.abs().max()))


def test_a_checkpoint_is_read_again(tmp_path):
    model = perturbed(MODEL)
    folder = RunFolder(tmp_path).checkpoint(4, model.state_dict(), MODEL.as_dict())
    tokens = torch.zeros(1, 5, dtype=torch.long)
    assert torch.equal(load_checkpoint(folder, MODEL)(tokens), model(tokens))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two steps on text of this machine."""
    folder = tmp_path_factory.mktemp("run")
    text = corpus(folder / "text", megabytes=0.3, vocabulary=300)
    task = TextTask(text.train, text.held_out, 12, 2)
    model = Transformer(replace(MODEL, vocabulary=300), seed=0)
    return train(model, task, TrainSettings(steps=2, warm_up=1), seed=0, folder=folder / "seed-0")


def test_all_checkpoints_of_a_run_are_exported_with_its_tokenizer(run, tmp_path):
    folders = export_run(run.path, tmp_path)
    assert [folder.name for folder in folders] == ["checkpoint-0", "checkpoint-1", "checkpoint-2"]
    tokens = torch.arange(2, 14).unsqueeze(0)
    for folder, place in zip(folders, run.checkpoints().values(), strict=True):
        loaded = load(folder)
        expected = load_checkpoint(place, replace(MODEL, vocabulary=300))(tokens)
        torch.testing.assert_close(loaded.model(tokens).logits, expected, rtol=0, atol=1e-5)
        assert loaded.tokenizer.decode(loaded.tokenizer("def f():")["input_ids"]) == "def f():"


def test_a_run_is_exported_probed_and_compared_by_commands(run, tmp_path):
    def command(*arguments):
        done = subprocess.run([sys.executable, "-m", *map(str, arguments)], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        return done.stdout

    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog.\n\n" * 200)
    command("experiments.exporting", run.path, tmp_path / "models")
    options = ("--text", text, "--tokens", 512, "--only", "tie", "--baseline", 0, "--draws", 0)
    printed = command("gradlogz", "probe", tmp_path / "models", *options, "--out", tmp_path / "runs")
    assert "3 of 3 checkpoints" in printed
    assert (tmp_path / "runs" / "trajectory.html").exists()
    ends = [tmp_path / "runs" / f"checkpoint-{step}" for step in (0, 2)]
    assert "2 runs compared" in command("gradlogz", "compare", *ends, "--out", tmp_path / "compare.html")


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(InputValueError, match=r"config\.json"):
        export_run(tmp_path, tmp_path / "models")


@pytest.mark.parametrize(
    "change", [{"attention": "linear"}, {"contraction": "dyt"}, {"placement": "peri"}, {"feed_forward": "tied"}]
)
def test_parts_that_transformers_lacks_are_refused(change, tmp_path):
    with pytest.raises(InputValueError, match="model"):
        export(Transformer(replace(MODEL, **change), seed=0), tmp_path)
