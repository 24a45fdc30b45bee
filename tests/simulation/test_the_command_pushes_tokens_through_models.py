"""`gradlogz simulate --model` prints, writes and reproduces; its tables fit the terminal."""

import json
import math

import pytest
from typer.testing import CliRunner

from gradlogz import cli
from gradlogz.probing.propagation.records import SeedMean
from gradlogz.reporting.propagation_wording import interval_text
from support.saved_models import gpt2, save, save_text

SMALL = ["--tokens", "40", "--length", "12", "--seeds", "2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    place = tmp_path_factory.mktemp("model")
    save_text(place / "texts.jsonl")
    return save(gpt2(), place / "tiny")


def run(model, out, *arguments):
    text = ["--text", model.parent / "texts.jsonl"]
    words = ["simulate", "--model", model, *text, *SMALL, "--out", out / "page.html", "--json", out / "data.json"]
    result = CliRunner().invoke(cli.application(), [*map(str, words), *map(str, arguments)])
    return result, json.loads((out / "data.json").read_text()) if result.exit_code == 0 else None


def test_it_prints_a_table_and_writes_a_page_and_its_data(model, tmp_path):
    result, data = run(model, tmp_path)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert all(len(line) <= 80 for line in lines if not line.startswith(("page", "results")))
    assert lines[0].split() == ["after", "the", "last", "layer", "text", "Gaussian", "untrained", "redrawn"]
    assert "effective rank" in result.output
    assert set(data["observed"]) == {"text", "sampled", "untrained", "redrawn"}
    values = data["observed"]["sampled"]["radius"]
    assert (len(values), len(values[0])) == (2, 3)  # seeds, depths
    assert data["observed"]["text"]["entropy"][0][-1] is None
    assert data["settings"]["start"] == "gaussian"
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    again = run(model, tmp_path)[1]
    assert again == data
    other = run(model, tmp_path, "--seed", 3)[1]
    assert other["observed"]["sampled"] != data["observed"]["sampled"]


@pytest.mark.parametrize("start", ["standard", "sphere", "text"])
def test_other_starts_are_chosen(model, tmp_path, start):
    result, data = run(model, tmp_path, "--start", start, "--details")
    assert result.exit_code == 0, result.output
    assert all(len(line) <= 80 for line in result.output.splitlines() if not line.startswith(("page", "results")))
    assert ("sampled" in data["observed"]) == (start != "text")
    assert data["settings"]["start"] == start


def test_one_layer_is_repeated(model, tmp_path):
    result, data = run(model, tmp_path, "--layer", 1, "--steps", 7, "--details")
    assert result.exit_code == 0, result.output
    assert data["times"] == list(range(8))
    assert set(data["observed"]) == {"text", "sampled"}
    assert "log_pair_energy" in data["observed"]["text"]
    assert data["facts"]["difference"] < 1e-5
    assert "repeated 7 times" in " ".join(result.output.split())  # lines wrap where the path of the model ends
    assert all(len(line) <= 80 for line in result.output.splitlines() if not line.startswith(("page", "results")))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--layer", 9], "below 2"), (["--start", "nope"], "gaussian"), (["--contraction", "zca"], "--contraction")],
)
def test_what_cannot_be_run_is_one_line(model, tmp_path, arguments, words):
    result, _ = run(model, tmp_path, *arguments)
    assert result.exit_code == 2
    assert words in result.output
    assert len(result.output.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("value", "half", "text"),
    [(92.13, 1.26, "92±1"), (0.1463, 0.0043, "0.146±0.004"), (12.8858, 0.00513, "12.89±0.01"), (600.0, 0.0, "600"),
     (-0.53, 0.2, "−0.5±0.2"), (0.0, 0.0, "0"), (3.456, math.nan, "3.456"), (math.nan, math.nan, "")],
)  # fmt: skip
def test_means_have_the_digits_of_their_interval(value, half, text):
    assert interval_text(SeedMean(value, value - half, value + half)) == text
