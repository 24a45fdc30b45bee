"""`gradlogz simulate` prints, writes and refuses."""

import importlib.util
import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from gradlogz import cli
from gradlogz.simulation.presets import PRESETS

SMALL = ["--tokens", "40", "--dim", "2", "--steps", "5", "--seeds", "2"]


def run(*arguments):
    return CliRunner().invoke(cli.application(), ["simulate", *map(str, arguments)])


def test_it_prints_a_verdict_and_writes_a_page_and_its_data(tmp_path):
    page, data = tmp_path / "page.html", tmp_path / "data.json"
    result = run(*SMALL, "--out", page, "--json", data)
    assert result.exit_code == 0, result.output
    assert "5 steps" in result.output
    assert str(page) in result.output.replace("\n", "")
    found = json.loads(data.read_text())
    assert found["settings"]["tokens"] == 40
    assert len(found["verdicts"]) == 2
    assert len(found["observed"]["radius"]) == len(found["times"]) == 6
    assert page.read_text().startswith("<!doctype html>")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data.json", "page.html"]


def test_json_on_standard_output_is_json_alone(tmp_path):
    command = [sys.executable, "-m", "gradlogz", "simulate", *SMALL, "--out", str(tmp_path / "p.html"), "--json", "-"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(result.stdout)["preset"] is None


def test_theorem_1_runs_with_any_moments_and_matrices(tmp_path):
    keys = ["--key-measure", "gaussian", "--key-mean", "0.5,2", "--key-covariance", "1,0.4/0.4,3"]
    matrices = ["--qk-matrix", "1,0.5/0,1", "--contraction", "recoloring", "--initial", "laplace"]
    result = run(*SMALL, *keys, *matrices, "--out", tmp_path / "p.html", "--json", tmp_path / "p.json")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "p.json").read_text())
    assert max(map(abs, found["observed"]["displacement"][-1])) < 1e-9
    assert found["settings"]["key_covariance"] == "1,0.4/0.4,3"


def test_presets_are_listed_with_what_is_expected():
    result = run("--list")
    assert result.exit_code == 0
    for word in ("whitening", "circle-20", "hopfield", "theory 10.4"):
        assert word in result.output


def test_every_preset_is_one_line_on_a_narrow_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    lines = run("--list").output.splitlines()
    assert [line.split()[0] for line in lines] == ["preset", *PRESETS]


def test_no_number_is_cut_on_a_narrow_terminal(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    result = run("--tokens", "40", "--steps", "0", "--seeds", "2", "--out", tmp_path / "p.html")
    assert result.exit_code == 0, result.output
    assert "sliced W₂ to Gaussian" in result.output
    assert "…" not in result.output
    assert all(len(line) <= 60 for line in result.output.splitlines() if not line.startswith("page"))


def test_a_sweep_makes_a_phase_diagram(tmp_path):
    result = run(*SMALL, "--sweep", "beta=0.2:0.8:2", "--out", tmp_path / "p.html", "--json", tmp_path / "p.json")
    assert result.exit_code == 0, result.output
    assert "2 of 2 points" in result.output
    assert [p["beta"] for p in json.loads((tmp_path / "p.json").read_text())["places"]] == [0.2, 0.8]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nope"], "simulate: there is no preset"),
        (["whitenin"], "whitening"),
        (["--dim", "0"], "simulate: dim"),
        (["--heads", "3"], "simulate: heads"),
        (["--contraction", "batchnorm"], "no contraction"),
        (["--initial", "cauchy"], "no initial distribution"),
        (["--tokens", "5"], "simulate: tokens"),
        (["--beta", "nan"], "simulate: beta"),
        (["--key-measure", "cauchy"], "no measure of keys"),
        (["--key-measure", "sphere", "--dim", "1"], "simulate: dim"),
        (["--key-measure", "gaussian", "--keys", "5"], "simulate: a measure of keys"),
        (["--key-mean", "1,2"], "simulate: key_mean"),
        (["--key-covariance", "1,2/3,4", "--dim", "2"], "simulate: key_covariance"),
        (["--key-covariance=-1"], "simulate: key_covariance"),
        (["--key-covariance", "2"], "belong to Gaussian keys"),
        (["--contraction", "inverse_step"], "needs Gaussian keys"),
        (["--qk-matrix", "1/2"], "simulate: qk_matrix"),
        (["--ov-matrix", "x"], "simulate: ov_matrix"),
        (["--ov-matrix", "2", "--heads", "2"], "simulate: heads"),
        (["--natural", "--draws", "1"], "simulate: a natural-gradient step"),
        (["--draws=-1"], "simulate: draws"),
        (["--sweep", "gamma=1:2:3"], "sweep: "),
        (["--sweep", "beta=1:2"], "from:to:count"),
        (["--out", "no/such/folder/p.html"], "simulate: --out "),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence_and_exits_with_2(arguments, says, capsys):
    result = run(*arguments)
    assert result.exit_code == 2
    assert says in result.stderr, result.output
    assert "Traceback" not in result.output


def test_without_its_extra_it_says_how_to_install_it(monkeypatch, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "plotly" else find(name))
    result = run(*SMALL, "--out", tmp_path / "p.html")
    assert result.exit_code == 2
    assert "pip install 'gradlogz[report]'" in result.output.replace("\n", " ")
    assert list(tmp_path.iterdir()) == []
