"""The examples of QK-clip and of losses run, and their committed numbers are what the page says of them."""

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = " ".join((ROOT / "docs" / "training.md").read_text().split())


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module


def numbers(name):
    return json.loads((ROOT / "docs" / "pictures" / f"{name}.json").read_text())


def mean(losses):
    return sum(losses[-20:]) / 20


def test_the_committed_run_diverges_without_qk_clip_and_learns_with_it(example):
    results = numbers("qk_clip")
    without, clipped = (results[name] for name in ("without QK-clip", "with QK-clip from the alert on"))
    assert without["losses"].index(None) == results["NaN"]
    assert example("entropy_collapse").noticed(without["losses"][: results["NaN"]]) == results["loss up 5 %"]
    assert f"at step {results['alert']}, {results['loss up 5 %'] - results['alert']} steps before" in PAGE
    assert f"at step {results['NaN']} the loss is NaN" in PAGE
    assert mean(clipped["losses"]) < mean(clipped["losses"][: results["alert"]]) - 0.3
    assert max(clipped["logits"][results["alert"] + 5 :]) < 60 < 1e6 < max(filter(None, without["logits"]))


def test_the_example_of_qk_clip_runs(example):
    qk_clip = example("qk_clip")
    qk_clip.ALERT, qk_clip.TAU, qk_clip.GROWTH = 2.0, 2.0, 1.2
    try:
        runs = [qk_clip.trained(clip=clip, steps=8, fault=2) for clip in (False, True)]
    finally:
        importlib.reload(qk_clip)
    (_, logits, alerts), (losses, clipped, same) = runs
    assert alerts[0].step == same[0].step < 7
    assert clipped[-1] < 0.7 * logits[-1]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("name", "better"),
    [
        ("z_loss", lambda a, b: a < b / 10),
        ("entropy_loss", lambda a, b: a > b),
        ("logit_variance_loss", lambda a, b: a < b / 2),
    ],
)
def test_the_committed_losses_bound_their_statistic(name, better):
    results = numbers("attention_losses")
    assert better(results[name][name][-1], results["none"][name][-1])
    assert mean(results[name]["loss"]) < mean(results["none"]["loss"])


def test_the_example_of_losses_runs(example):
    losses = example("attention_losses")
    for name in (None, *losses.PENALTIES):
        curves = losses.trained(name, 5)
        assert len(curves["loss"]) == 5
        assert all(len(curves[each]) == 2 for each in losses.PENALTIES)
