"""The forms for a GPU on a CPU: what is complete is judged, and what fails or has no time leaves the others alone."""

import json
from dataclasses import replace

import pytest
import torch

from experiments import on_gpu
from experiments.ascent import experiment as ascent
from experiments.own_model import make
from experiments.specific_heat import experiment as heat
from experiments.specific_heat import page as heat_page
from experiments.text import corpus
from gradlogz.probing.inside.loading import load

DELAYED = replace(heat.DELAYED, primes=(5,), seeds=2, null_seeds=1, width=16, record_every=4)
FULL = replace(heat.FULL, primes=(5, 7), seeds=2, steps=8, record_every=4)
TEXT = replace(
    ascent.GPU,
    model=replace(ascent.GPU.model, vocabulary=300, context=16, width=16, heads=2, hidden=32),
    training=replace(ascent.GPU.training, steps=2, warm_up=1),
    batch_size=4,
    megabytes=0.3,
    seeds=2,
    probe_tokens=512,
    probed_tied=1,
    value_maps=("free", "tied, equal compute"),
)
FORMS = (DELAYED, TEXT, FULL)


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    monkeypatch.setattr(on_gpu, "STEPS", (8, 4))
    monkeypatch.setattr(on_gpu, "TIMED", 1)
    monkeypatch.setattr(on_gpu, "EXPERIMENTS", tmp_path)
    monkeypatch.setattr(heat_page, "FOLDER", tmp_path)
    (tmp_path / "ascent").mkdir()


def test_complete_runs_are_judged(tmp_path):
    runs = tmp_path / "runs"
    on_gpu.train_within(runs, 1e9, *FORMS)
    (heat.place(runs / "full", 7, "few pairs", 400) / "complete.json").unlink()
    (ascent.place(runs / "ascent", ascent.Cell("causal", "pre", "tied, equal compute"), 10) / "complete.json").unlink()
    on_gpu.judge(runs, *FORMS)
    delayed, full = (json.loads((tmp_path / name).read_text()) for name in ("delayed.json", "results.json"))
    assert delayed["settings"]["steps"] == 8
    assert "published onset" in delayed["answer"]
    assert [row["kind"] for row in delayed["runs"]] == ["generalising"] * 2 + ["no decay", "few pairs"]
    assert full["settings"]["primes"] == [5]
    assert {row["p"] for row in full["runs"]} == {5}
    curves = json.loads((tmp_path / "curves.json").read_text())
    assert {run["p"] for run in curves} == {5}
    compute = json.loads((tmp_path / "ascent" / "compute.json").read_text())
    assert {name for name in compute["answer"] if ":" in name} == {
        "tied, equal compute: causal, post",
        "tied, equal compute: masked, pre",
        "tied, equal compute: masked, post",
        "ascent: objective (masked - causal)",
        "ascent: placement (post - pre)",
    }
    assert len(compute["models"]) == 7 * 2
    for row in compute["models"]:
        assert set(row["probe"]) == ({"0", "2"} if row["value_map"] == "free" or row["seed"] == 10 else set())


def test_without_time_nothing_is_complete(tmp_path, capsys):
    on_gpu.train_within(tmp_path / "runs", 0.0, *FORMS)
    assert capsys.readouterr().out.count("not complete when the time was over") == 3
    assert not list((tmp_path / "runs").rglob("complete.json"))
    on_gpu.judge(tmp_path / "runs", *FORMS)
    assert not (tmp_path / "results.json").exists()


def test_a_form_that_fails_leaves_the_others_their_time(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(ascent, "train_cell", lambda *arguments: 1 / 0)
    on_gpu.train_within(tmp_path / "runs", 1e9, *FORMS)
    assert "ZeroDivisionError" in capsys.readouterr().err
    places = [heat.place(tmp_path / "runs" / "full", p, "few pairs", 400) for p in (5, 7)]
    assert all((place / "complete.json").exists() for place in places)


def test_the_steps_of_the_delayed_form_are_those_there_is_time_for(tmp_path, monkeypatch):
    monkeypatch.setattr(on_gpu, "seconds_per_step", lambda *arguments: 1.0)  # for each of two shares
    for seconds, steps in ((100.0, 8), (20.0, 4), (1.0, 4)):
        assert on_gpu.delayed_of_speed(DELAYED, tmp_path, lambda seconds=seconds: seconds).steps == steps
    on_gpu.train_heat(replace(DELAYED, steps=4), tmp_path, lambda: 1e9)
    assert on_gpu.delayed_of_speed(DELAYED, tmp_path, lambda: 1e9).steps == 4  # those of the runs in the folder


def test_the_own_model_has_checkpoints_of_its_run(tmp_path):
    folder = make(tmp_path, TEXT)
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint-0", "checkpoint-1", "checkpoint-2"]
    text = corpus(tmp_path / "text", megabytes=0.3, vocabulary=300)
    model = ascent.load_checkpoint(tmp_path / "run" / "checkpoints" / "step-2", TEXT.model)
    tokens = text.held_out[:16].long().unsqueeze(0)
    with torch.no_grad():
        actual = load(folder / "checkpoint-2").model(tokens).logits
        torch.testing.assert_close(actual, model(tokens), rtol=0, atol=1e-5)
    assert (tmp_path / "held_out.txt").read_text()
