"""A run that is incomplete, newer, damaged or lacks a prediction has a page of what is there; it says what is not."""

import base64
import json
import math
import zlib

import pytest

from gradlogz import report
from gradlogz.probing.runs.run_folder import Run, read_run, write_run
from gradlogz.reporting.findings_page import page_of_run
from gradlogz.reporting.run_contents import contents_of
from support.invented_findings import DECLARATIONS, findings

COMMAND = "gradlogz probe planted --seed 3"


@pytest.fixture
def folder(tmp_path):
    """A whole run; tests damage it."""
    found = findings()
    model = {"name": "planted", **found.facts["planted"]}
    text, counts = {"source": "a file", "length": 64}, {"tokens": 99, "documents": 2}
    return write_run(tmp_path / "run", Run(model, text, 3, COMMAND, counts, {"model": 1.0}, found))


def changed(folder, name, change):
    said = json.loads((folder / name).read_text())
    change(said)
    (folder / name).write_text(json.dumps(said))


def missing(folder):
    return contents_of(folder, "report").run.notes


def test_a_whole_run_lacks_nothing(folder):
    (folder / "findings.parquet").unlink()  # a page needs no table
    contents = contents_of(folder, "report")
    assert contents.run.notes == ()
    assert contents.findings.rows[0] == findings().rows[0]
    assert len(contents.findings.rows) == len(findings().rows)
    page = page_of_run(contents)
    assert page.reproduce["command"] == COMMAND
    assert page.reproduce["seed"] == "3"
    assert page.verdict.notes == ("Not measured in this run: identity of attention.",)
    assert COMMAND in report(folder)


def test_a_run_that_was_stopped(folder):
    changed(folder, "run.json", lambda run: run.update(complete=False))
    (note,) = missing(folder)
    assert "after 99 tokens" in note
    assert "The run stopped before its end" in report(folder)


def test_a_run_of_a_later_version(folder):
    changed(folder, "run.json", lambda run: run.update(format=7, version="9.9", files={}))

    def later(said):
        said["rows"][0]["colour"] = "blue"
        said["rows"][1]["verdict"] = "doubtful"
        del said["claims"][2]["quantity"]
        said["pictures"] = []

    changed(folder, "findings.json", later)
    contents = contents_of(folder, "report")
    assert contents.run.notes[0].startswith("The run is of format 7, written by gradlogz 9.9")
    rows = len(findings().rows)
    assert contents.run.notes[1:] == (
        f"1 of {rows} rows in findings.json cannot be read; they are left out.",
        "1 of 4 claims in findings.json cannot be read; they are left out.",
    )
    assert contents.findings.rows[0] == findings().rows[0]
    assert len(contents.findings.rows) == rows - 1
    assert page_of_run(contents).verdict.chips[0].label == "incomplete"


@pytest.mark.parametrize("damage", [None, "", "[1, 2]", '{"format": 1, "model'])
def test_a_run_whose_description_is_lost(folder, damage):
    (folder / "run.json").unlink()
    if damage is not None:
        (folder / "run.json").write_text(damage)
    (note,) = missing(folder)
    assert note.startswith("run.json cannot be read (")
    assert "command" not in page_of_run(contents_of(folder, "report")).reproduce


def test_findings_that_someone_changed(folder):
    changed(folder, "findings.json", lambda said: said["rows"][0].update(value=0.123))
    assert [note.partition(" ")[0] for note in missing(folder)] == ["findings.json"]


@pytest.mark.parametrize("damage", [None, "", "[" * 100_000, '{"facts": {"planted', "[]"])
def test_findings_that_are_lost_are_read_from_their_table(folder, damage):
    (folder / "findings.json").unlink()
    if damage is not None:
        (folder / "findings.json").write_text(damage)
    contents = contents_of(folder, "report")
    assert "rows are those of findings.parquet" in contents.run.notes[-1]
    rows = [row for row in contents.findings.rows if not math.isnan(row.value)]
    assert [row[:7] for row in rows] == [row[:7] for row in findings().rows if not math.isnan(row.value)]
    assert contents.facts["parameters"] == 12345678
    page = page_of_run(contents)
    names = {link.label: says for group in page.verdict.groups for link, says in group.entries}
    assert names["entropy"] == "", "what it claims is lost with the declarations"


def test_findings_that_are_lost_with_their_table(folder):
    (folder / "findings.json").unlink()
    (folder / "findings.parquet").write_bytes((folder / "findings.parquet").read_bytes()[:500])
    with pytest.raises(ValueError, match=r"findings\.json.*no such file"):
        contents_of(folder, "report")


def test_files_that_a_page_does_not_need(folder):
    with (folder / "findings.parquet").open("ab") as file:
        file.write(b"more")
    assert [note.partition(" ")[0] for note in missing(folder)] == ["findings.parquet"]


@pytest.mark.parametrize("head", [-1, 10**9, True])
def test_heads_that_no_layer_has(folder, head):
    changed(folder, "findings.json", lambda said: said["rows"][0].update(head=head))
    assert f"1 of {len(findings().rows)} rows in findings.json cannot be read" in missing(folder)[-1]


def test_findings_with_parts_of_the_wrong_kind(folder):
    def wrong(said):
        said["rows"][:6] = [None, {}, {**said["rows"][2], "value": "much"}, {**said["rows"][3], "head": "first"},
                            {**said["rows"][4], "layer": 5}, said["rows"][6]]  # fmt: skip
        said["facts"] = ["none"]
        del said["tokens"]

    changed(folder, "findings.json", wrong)
    contents = contents_of(folder, "report")
    assert contents.run.notes[1:] == (
        f"5 of {len(findings().rows)} rows in findings.json cannot be read; they are left out.",
        "There are no tokens in findings.json.",
        "The facts of models in findings.json cannot be read.",
    )
    assert len(contents.findings.rows) == len(findings().rows) - 6, "and one that was there twice is there once"
    assert page_of_run(contents).subtitle.endswith("No facts are known.")


def test_infinities_and_gaps_are_no_obstacle(folder):
    def odd(said):
        for i, value in enumerate(("infinity", "-infinity", None)):
            said["rows"][i]["value"] = value
        for row in said["rows"]:
            row.update(null=None, low=None)

    changed(folder, "findings.json", odd)
    contents = contents_of(folder, "report")
    assert [row.value for row in contents.findings.rows[:2]] == [math.inf, -math.inf]
    block = report(folder).partition('id="data">')[2].partition("</script>")[0]
    assert "NaN" not in zlib.decompress(base64.b64decode(block)).decode()


def test_rows_without_claims_and_claims_without_rows(folder):
    changed(folder, "findings.json", lambda said: said.update(claims=[]))
    assert "4 predictions" in page_of_run(contents_of(folder, "report")).verdict.sentence
    changed(folder, "findings.json", lambda said: said.update(rows=[], claims=findings_as_claims()))
    page = page_of_run(contents_of(folder, "report"))
    assert [section.name for section in page.sections] == ["claims", "entropy", "tokens", "model"]


def findings_as_claims():
    return [{k: None if v != v else v for k, v in findings().claims[0]._asdict().items()}]


def test_a_model_of_twelve_layers_and_heads_fits_into_eight_megabytes():
    whole = findings(layers=12, heads=12, more=60)
    assert len(whole.rows) > 9000
    assert len(report(whole).encode()) < 8e6


def parts_of(page, name):
    (section,) = (section for section in page.sections if section.name == name)
    return {part.kind: part for part in section.parts}


def test_texts_of_a_prediction_are_those_that_the_run_declares(folder):
    declared = DECLARATIONS["entropy"]._replace(title="Sharp heads", method=("Once [zhai23].", "Twice."))
    changed(folder, "findings.json", lambda said: said["declarations"]["entropy"].update(title="Sharp heads"))
    changed(folder, "findings.json", lambda said: said["declarations"]["entropy"].update(method=list(declared.method)))
    changed(folder, "findings.json", lambda said: [claim.update(claim="") for claim in said["claims"]])
    page = page_of_run(contents_of(folder, "report"))
    parts = parts_of(page, "entropy")
    shown = set(parts["facts"].rows.values())
    assert shown >= {"Sharp heads", declared.formula, declared.decision_rule, declared.refutes}
    assert parts["text"].paragraphs == declared.method
    entries = {link.to: (link.label, says) for group in page.verdict.groups for link, says in group.entries}
    assert entries["entropy"] == ("Sharp heads", declared.claim)
    assert {"zhai23", "shim22", "benjamini95"} <= {reference.key for reference in page.references}
    assert "ramsauer20" not in {reference.key for reference in page.references}


def test_a_run_without_declarations_shows_names(folder):
    changed(folder, "findings.json", lambda said: said.update(declarations={"entropy": {"title": "Sharp heads"}}))
    contents = contents_of(folder, "report")
    (note,) = contents.run.notes[1:]
    assert "declarations" in note
    page = page_of_run(contents)
    assert "entropy" in parts_of(page, "entropy")["facts"].rows.values()
    axis = parts_of(page, "entropy")["views"].views[0].parts[0].marks[0].name
    assert axis == "entropy [1]"


def older(folder, number):
    """Change a run into one of an older format: sentences in claims, older names of a verdict and of the baseline."""

    def claims(content):
        for claim in content["claims"]:
            words = claim.pop("text")
            for name in ("judged", "supported", "refuted", "null_low", "null_high", "details", "remarks"):
                del claim[name]
            claim |= {"words": words, "note": "With Benjamini and Hochberg."}
        for entry in (*content["rows"], *content["claims"]):
            entry["verdict"] = entry["verdict"].replace("inconclusive", "undecided")
        content["facts"]["planted"]["without_twin"] = "It cannot be made."
        for declared in content["declarations"].values():
            for name in ("statistic", "null", "unit", "number", "outcomes", "correction", "details", "remarks"):
                del declared[name]
        if number == 1:
            del content["declarations"]

    changed(folder, "findings.json", claims)
    changed(folder, "run.json", lambda run: run.update(format=number, files={}, times={"twin": 1.0}))


@pytest.mark.parametrize("number", [1, 2])
def test_a_run_of_an_older_format_is_read_and_its_sentences_are_shown(folder, number):
    older(folder, number)
    (folder / "findings.parquet").unlink(missing_ok=True)
    contents = contents_of(folder, "report")
    assert len(contents.run.notes) == (number == 1)
    before, after = findings().summary(), contents.findings.summary()
    assert [s.verdict for s in after] == [s.verdict for s in before]
    assert [(s.judged, s.supported, s.refuted) for s in after] == [(s.judged, s.supported, s.refuted) for s in before]
    (entropy,) = (s for s in after if s.prediction == "entropy")
    assert entropy.text == "They do. With Benjamini and Hochberg."
    assert contents.facts["without_baseline"] == "It cannot be made."
    assert contents.run.times == {"baseline": 1.0}
    assert read_run(folder).findings.rows[0].verdict == findings().rows[0].verdict  # the strict reader reads it too
    assert "They do. With Benjamini and Hochberg." in report(folder)


@pytest.mark.parametrize(
    "damage", [{"details": 3}, {"details": [{"value": 1.0}]}, {"details": [{"key": "a", "count": "b"}]},
               {"remarks": [{"key": "a", "numbers": {"b": "c"}}]}, {"remarks": [{"key": "a", "layers": [3]}]},
               {"judged": "many"}, {"judged": True}]
)  # fmt: skip
def test_a_claim_with_a_damaged_field_is_left_out(folder, damage):
    changed(folder, "findings.json", lambda content: content["claims"][0].update(damage))
    assert "1 of 4 claims in findings.json cannot be read; they are left out." in missing(folder)
