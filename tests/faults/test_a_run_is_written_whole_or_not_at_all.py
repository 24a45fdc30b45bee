"""A process that is killed while it writes a run leaves the old run or the new one, and damage to a file is seen.

The killed processes are real ones. Each is killed at the n-th call that opens, makes, renames or removes something, for
every n, so that no moment of the writing is left out.
"""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gradlogz.probing.runs.findings import Findings
from gradlogz.probing.runs.records import Claim, Declaration, Detail, Finding, Label, Quantity, Remark, Token
from gradlogz.probing.runs.replicates import Replicates, place_of
from gradlogz.probing.runs.run_folder import Run, read_run, write_run

FIELDS = ("facts", "rows", "claims", "tokens", "declarations", "replicates")
KILLED = """
import os, shutil, signal, sys
from pathlib import Path

sys.path[:0] = sys.argv[1:2]
sys.modules["polars"] = None  # it has threads, and they do not outlive a fork
from test_a_run_is_written_whole_or_not_at_all import run_of
from gradlogz.probing.runs.run_folder import write_run

folder, old = Path(sys.argv[2]), Path(sys.argv[3])
run, last, calls = run_of(2), None, 0


def count(event, _):
    global calls
    if last is not None and event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"):
        calls += 1
        if calls == last:
            os.kill(os.getpid(), signal.SIGKILL)


sys.addaudithook(count)
for moment in range(1, 1000):
    place = folder / f"run {moment}"
    if old.exists():
        shutil.copytree(old, place)
    process = os.fork()
    if process == 0:
        last = moment
        write_run(place, run)
        os._exit(0)
    if os.waitpid(process, 0)[1] == 0:
        print(moment)
        break
"""


def run_of(seed):
    """A small run of everything that a run may hold, numbers that JSON has no words for among them."""
    row = Finding("tiny", "tie", "layer/0", 1, 0, "cosine", 0.5 * seed, -math.inf, math.inf, verdict="inconclusive")
    findings = Findings(
        {"tiny": {"parameters": 12}},
        [row, row._replace(head=None, quantity="mean"), row._replace(head=1, value=math.nan)],
        [
            Claim(
                "tiny",
                "tie",
                "ties",
                "cosine",
                0.5,
                0.4,
                0.6,
                0.0,
                "refuted",
                judged=3,
                supported=1,
                refuted=2,
                details=(Detail("mean", 0.25, null=math.nan, count=2, total=3, layer="layer/0"), Detail("share")),
                remarks=(Remark("shared", {"shared": 2, "part": 0.5}, ("layer/0",)), Remark("tied")),
            )
        ],
        [Token("tiny", "sink", "layer/0", 1, 0, 0.9, "a.txt", 3, "‹the› cat")],
        {
            "tie": Declaration(
                "Tie",
                "ties",
                "M = N",
                "",
                ("One.", "Two."),
                "By it.",
                {"cosine": Quantity("1", "cos")},
                details={"mean": Label("mean cosine", "{:.3f}")},
                remarks={"tied": "They are tied."},
            )
        },
        {place_of(row): Replicates(torch.tensor([0.5, math.nan] * 100), 6.5)},  # of the first of two heads
    )
    return Run({"name": "tiny"}, {"source": "a.txt"}, seed, "probe tiny", {"tokens": 15}, {"pass": 0.1}, findings)


def same(one, other):
    """Equality to the last bit, NaN equal to NaN."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one.nan_to_num(-7.0), other.nan_to_num(-7.0))
    if isinstance(one, Findings):
        return all(same(getattr(one, n), getattr(other, n)) for n in FIELDS)
    if isinstance(one, tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return one == other or (one != one and other != other)


def seed_of(place):
    """The seed of the run in a folder, which must be whole; None where there is no run."""
    try:
        run = read_run(place)
    except ValueError as error:
        if "there is no run folder" in str(error):
            return None
        raise
    assert same(run, run_of(run.seed))
    return run.seed


def test_a_run_is_read_as_it_was_written(tmp_path):
    run = run_of(1)
    place = write_run(tmp_path / "run", run)
    assert same(read_run(place), run)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]


def test_the_parquet_file_has_the_rows(tmp_path):
    polars = pytest.importorskip("polars")
    run = run_of(1)
    frame = polars.read_parquet(write_run(tmp_path / "run", run) / "findings.parquet")
    assert frame["quantity"].to_list() == [row.quantity for row in run.findings.rows]
    assert frame["head"].to_list() == [0, None, 1]


def test_a_new_run_replaces_the_old_one_and_keeps_what_others_put_there(tmp_path):
    place = write_run(tmp_path / "run", run_of(1))
    (place / "report.html").write_text("<p>")
    (place / "figures").mkdir()
    (place / "interventions.json").write_text("{}")  # effects on the model of the old run
    write_run(place, run_of(2))
    assert same(read_run(place), run_of(2))
    assert not (place / "interventions.json").exists()
    assert (place / "report.html").read_text() == "<p>"
    assert (place / "figures").is_dir()


@pytest.mark.parametrize("before", ["nothing", "an old run"])
def test_a_process_killed_at_any_moment_leaves_the_old_run_or_the_new(tmp_path, before):
    old, folder = tmp_path / "old", tmp_path / "runs"
    folder.mkdir()
    if before == "an old run":
        write_run(old, run_of(1))
    command = [sys.executable, "-c", KILLED, str(Path(__file__).parent), str(folder), str(old)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    moments = int(done.stdout)
    assert moments > 15
    left = []
    for moment in range(1, moments + 1):
        place = folder / f"run {moment}"
        left.append(seed_of(place))
        write_run(place, run_of(3))  # and nothing that was left stands in the way
        assert same(read_run(place), run_of(3))
    first = None if before == "nothing" else 1
    change = left.index(2)
    assert left == [first] * change + [2] * (moments - change)
    assert change > 0
    assert sorted(p.name for p in folder.iterdir()) == sorted(f"run {n}" for n in range(1, moments + 1))


def test_an_incomplete_run_is_read_only_by_a_lenient_reader(tmp_path):
    run = run_of(1)._replace(complete=False)
    place = write_run(tmp_path / "run", run)
    with pytest.raises(ValueError, match="stopped after 15 tokens"):
        read_run(place)
    lenient = read_run(place, strict=False)
    assert same(lenient._replace(notes=()), run)
    assert "after 15 tokens" in lenient.notes[0]


def test_a_run_of_the_first_format_is_read(tmp_path):
    """It had a file of statistics and no declarations; a new run in its place keeps neither."""
    place = write_run(tmp_path / "run", run_of(1))
    (place / "statistics.safetensors").write_bytes(b"numbers")
    said, findings = (json.loads((place / name).read_text()) for name in ("run.json", "findings.json"))
    del findings["declarations"]
    (place / "findings.json").write_text(json.dumps(findings))
    (place / "run.json").write_text(json.dumps({**said, "format": 1, "left_out": [], "files": {}}))
    old = read_run(place)
    assert same(old.findings.rows, run_of(1).findings.rows)
    assert old.findings.declarations == {}
    assert "without declarations" in read_run(place, strict=False).notes[0]
    write_run(place, run_of(2))
    assert not (place / "statistics.safetensors").exists()


@pytest.mark.parametrize("name", ["run.json", "findings.json", "findings.parquet", "replicates.safetensors"])
@pytest.mark.parametrize("damage", ["cut short", "one bit", "gone", "empty"])
def test_damage_is_seen_and_the_file_named(tmp_path, name, damage):
    place = write_run(tmp_path / "run", run_of(1))
    data = (place / name).read_bytes()
    changed = {"cut short": data[:-7], "one bit": bytes([data[0] ^ 1]) + data[1:], "empty": b""}
    if damage == "gone":
        (place / name).unlink()
    else:
        (place / name).write_bytes(changed[damage])
    with pytest.raises(ValueError, match=name):
        read_run(place)
    write_run(place, run_of(2))  # a damaged run is still a run, and may be made again
    assert same(read_run(place), run_of(2))


def test_a_run_without_replicates_or_with_damaged_ones_is_read(tmp_path):
    place = write_run(tmp_path / "run", run_of(1))
    said = json.loads((place / "run.json").read_text())
    del said["files"]["replicates.safetensors"]  # as runs of earlier versions are
    (place / "run.json").write_text(json.dumps(said))
    (place / "replicates.safetensors").write_bytes(b"numbers")
    with pytest.raises(ValueError, match=r"replicates\.safetensors"):
        read_run(place)
    assert any("replicates.safetensors" in note for note in read_run(place, strict=False).notes)
    (place / "replicates.safetensors").unlink()
    old = read_run(place)
    assert same(old.findings.rows, run_of(1).findings.rows)
    assert (old.findings.replicates, old.notes) == ({}, ())


def test_replicates_of_other_rows_are_refused(tmp_path):
    place = write_run(tmp_path / "run", run_of(1))
    findings = json.loads((place / "findings.json").read_text())
    del findings["rows"][2]
    (place / "findings.json").write_text(json.dumps(findings))
    (place / "run.json").write_text(json.dumps({**json.loads((place / "run.json").read_text()), "files": {}}))
    with pytest.raises(ValueError, match="other rows"):
        read_run(place)


def test_an_integer_beyond_all_floats_is_refused(tmp_path):
    place = write_run(tmp_path / "run", run_of(1))
    findings = json.loads((place / "findings.json").read_text())
    findings["rows"][0]["value"] = 10**400
    (place / "findings.json").write_text(json.dumps(findings))
    (place / "run.json").write_text(json.dumps({**json.loads((place / "run.json").read_text()), "files": {}}))
    with pytest.raises(ValueError, match="row"):
        read_run(place)


def test_a_folder_that_is_no_run_is_left_alone(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("x")
    (tmp_path / "thesis" / "run.json").write_text(json.dumps({"other": "program"}))
    with pytest.raises(ValueError, match="other files"):
        write_run(tmp_path / "thesis", run_of(1))
    assert sorted(p.name for p in (tmp_path / "thesis").iterdir()) == ["chapter.tex", "run.json"]
