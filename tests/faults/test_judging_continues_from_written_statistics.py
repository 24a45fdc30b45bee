"""A probe that is killed while it judges has its statistics on the disk: the same command judges them, reading no text.

The killed process is a real one, and the findings are those of a run that was not disturbed.
"""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from test_a_run_is_written_whole_or_not_at_all import run_of
from typer.testing import CliRunner

from gradlogz import cli
from gradlogz.engine.state_file import FORMAT, NotStorableError, read_state
from gradlogz.probing import run_probe
from gradlogz.probing.corpus.readers import corpus_of
from gradlogz.probing.inside.loading import load
from gradlogz.probing.measurement_file import STATISTICS, read_measurement, write_measurement
from gradlogz.probing.prediction_files import selected
from gradlogz.probing.runs.records import Token
from gradlogz.probing.runs.run_folder import read_run, write_run
from support.engine_work import kill_when_it_writes
from support.saved_models import gpt2, save, save_text

KILLED = """
import os, signal, sys
import torch
from gradlogz import cli
from gradlogz.probing import run_probe

torch.set_num_threads(1)  # as in the process that it is compared with: sums depend on it in their last digits
judged = run_probe._judged


def killed(measured, prediction):
    if prediction.name == "tie":
        os.kill(os.getpid(), signal.SIGKILL)
    return judged(measured, prediction)


run_probe._judged = killed
sys.exit(cli.application()(sys.argv[1:]))
"""
WORDS = ["probe", "model", "--text", "text.jsonl", "--only", "entropy,tie,expansion", "--draws", "2"]
OWN = """
from typing import NamedTuple

from gradlogz.probing.inside.events import Attended
from gradlogz.probing.prediction import Prediction
from gradlogz.probing.predictions import entropy
from gradlogz.probing.statistics import Sums, sums_of


class Lengths(NamedTuple):
    queries: Sums

    def merge(self, other):
        return Lengths(self.queries.merge(other.queries))


def statistics(event, batch_pass):
    if not isinstance(event, Attended):
        return None
    rows = event.attention.entropy.mean(1).unsqueeze(-1)
    return {event.layer: Lengths(sums_of(rows, batch_pass.documents))}


def evaluate(state, model):
    from gradlogz.probing.runs.judgement import Measured

    return [Measured(layer, None, "rows", float(each.queries.totals[0].sum())) for layer, each in state.items()]


PREDICTION = Prediction(
    __name__, entropy.DECLARATION, statistics, evaluate, lambda *_: [], lambda rows: entropy.verdict([])
)
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A folder with a model, a text, and what a process left that was killed while it judged."""
    place = tmp_path_factory.mktemp("killed")
    save(gpt2(3), place / "model")
    save_text(place / "text.jsonl")
    process = subprocess.run([sys.executable, "-c", KILLED, *WORDS], cwd=place, env=os.environ, check=False)
    assert process.returncode == -signal.SIGKILL
    assert [path.name for path in (place / "runs" / "model").iterdir()] == [STATISTICS]
    return place


@pytest.fixture
def folder(killed, tmp_path, monkeypatch):
    """A copy of the folder, as the working directory."""
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def probed(*words):
    result = CliRunner().invoke(cli.application(), [*WORDS, *words])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_command_judges_what_a_killed_one_measured(folder, monkeypatch):
    run = folder / "runs" / "model"
    probed("--out", "undisturbed")
    with monkeypatch.context() as patch:
        patch.delattr(run_probe, "measure")
        assert "The statistics that an earlier command left" in probed()
    assert not (run / STATISTICS).exists()
    one, other = read_run(run), read_run("undisturbed")
    assert one.findings.csv() == other.findings.csv()
    assert repr(one.findings.claims) == repr(other.findings.claims)
    assert (one.model, one.text, one.counts) == (other.model, other.text, other.counts)
    assert (run / "replicates.safetensors").read_bytes() == (folder / "undisturbed/replicates.safetensors").read_bytes()


@pytest.mark.parametrize("change", ["text", "seed", "damage", "cut"])
def test_other_or_damaged_statistics_are_not_used(folder, change):
    file = folder / "runs" / "model" / STATISTICS
    if change == "text":
        text = folder / "text.jsonl"
        text.write_text(text.read_text().replace("7", "8"))
    if change == "damage":
        file.write_bytes(file.read_bytes().replace(b"LayerState", b"LayerStat3"))
    if change == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    assert "The statistics that an earlier command left" not in probed(*(["--seed", "3"] if change == "seed" else []))


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A measurement of all predictions, one of a user's file among them, and the predictions."""
    place = tmp_path_factory.mktemp("measured")
    save(gpt2(3), place / "model")
    save_text(place / "text.jsonl")
    (place / "own_lengths.py").write_text(OWN)
    predictions = selected(None, [str(place / "own_lengths.py")])
    loaded = load(place / "model", device="cpu")
    corpus = corpus_of(loaded.tokenizer, str(place / "text.jsonl"))
    return run_probe.measure(loaded.model, loaded.tokenizer, corpus, predictions=predictions, draws=2), predictions


def test_what_is_read_is_judged_as_what_was_written(measured, tmp_path):
    written, predictions = measured
    assert write_measurement(tmp_path, written, {"a": "b"}) == ""
    read = read_measurement(tmp_path, {"a": "b"}, predictions)
    assert read_measurement(tmp_path, {"a": "c"}, predictions) is None
    assert list(tmp_path.iterdir()) == [tmp_path / STATISTICS]
    one, other = (run_probe.evaluate(each, predictions=predictions) for each in (written, read))
    assert not [claim.text for claim in one.claims if claim.verdict == "failed"]
    assert repr(one.rows) == repr(other.rows)  # NaN among them
    assert repr(one.claims) == repr(other.claims)
    assert one.replicates.keys() == other.replicates.keys()
    assert all(torch.equal(one.replicates[k].values, other.replicates[k].values) for k in one.replicates)


@pytest.mark.parametrize("field", Token._fields)
def test_tokens_with_fields_of_other_types_are_damage(measured, tmp_path, field):
    written, predictions = measured
    token = Token("model", "logit", "0.attention", 0, None, 1.0, "a.txt:1", 3, "word")
    for tokens, readable in (([token], True), ([token._replace(**{field: ["crafted"]})], False)):
        assert write_measurement(tmp_path, written._replace(tokens=tokens), {}) == ""
        assert (read_measurement(tmp_path, {}, predictions) is not None) is readable


def tensors_in(state, path=()):
    """Yield the tensors of a nested state, with their paths."""
    if isinstance(state, torch.Tensor):
        yield path, state
    parts = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, tuple) else ()
    for name, part in parts:
        yield from tensors_in(part, (*path, name))


def test_a_tensor_that_predictions_share_is_written_once(measured, tmp_path):
    written, predictions = measured
    write_measurement(tmp_path, written, {})
    read = read_measurement(tmp_path, {}, predictions)
    one, other = (dict(tensors_in(each.state)) for each in (written, read))
    assert one.keys() == other.keys()
    first = {id(tensor): path for path, tensor in reversed(list(one.items()))}
    shared = [(path, first[id(tensor)]) for path, tensor in one.items() if first[id(tensor)] != path]
    assert shared
    assert all(other[path] is other[same] for path, same in shared)


@pytest.mark.parametrize("name", ["os:system", "gradlogz.probing.inside.loading:load", "builtins:eval"])
def test_a_file_names_records_only(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    content = {"record": [0, "touch broken"]}

    def written(name):
        described = {"format": FORMAT, "facts": {}, "classes": [name], "content": content}
        save_file({"0": torch.zeros(1)}, tmp_path / STATISTICS, {"gradlogz": json.dumps(described)})
        return tmp_path / STATISTICS

    with pytest.raises(NotStorableError):
        read_state(written(name))
    assert not (tmp_path / "broken").exists()
    assert read_measurement(tmp_path, {}, run_probe.chosen(None)) is None
    assert read_state(written("gradlogz.probing.statistics:Sums")).totals == "touch broken"


def test_a_state_of_other_objects_is_a_reason(measured, tmp_path):
    written = measured[0]._replace(state={"own": {"layer": object()}})
    assert "not statistics" in write_measurement(tmp_path, written, {})
    assert not list(tmp_path.iterdir())


def test_a_kill_while_statistics_are_written_leaves_nothing_in_the_next_run(measured, tmp_path):
    place = tmp_path / "run"
    write_run(place, run_of(1))
    child = os.fork()
    if child == 0:
        kill_when_it_writes(place)
        large = measured[0]._replace(state={"own": {"layer": torch.zeros(2**25)}})
        write_measurement(place, large, {})
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert [path for path in place.iterdir() if path.name.startswith(".")]
    write_run(place, run_of(2))
    assert not [path for path in place.iterdir() if path.name.startswith(".")]


def test_a_link_in_the_place_of_statistics_is_replaced(measured, tmp_path):
    (tmp_path / "other").write_text("mine")
    (tmp_path / STATISTICS).symlink_to(tmp_path / "other")
    assert write_measurement(tmp_path, measured[0], {"a": "b"}) == ""
    assert (tmp_path / "other").read_text() == "mine"
    assert not (tmp_path / STATISTICS).is_symlink()


def test_a_full_disk_is_a_reason(measured, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10}))
    assert "the disk has less than twice" in write_measurement(tmp_path, measured[0], {})
    assert not list(tmp_path.iterdir())
