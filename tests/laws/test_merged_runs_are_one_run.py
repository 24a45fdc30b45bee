"""Runs of one model over different texts, merged, are the run over all of them; others are refused."""

import errno
import json
import os
import shutil

import pytest
import torch
from typer.testing import CliRunner

from gradlogz import cli
from gradlogz.probing import measurement_merge
from gradlogz.probing.measurement_file import kept_measurement
from gradlogz.probing.prediction_files import selected
from gradlogz.probing.runs.run_folder import STATISTICS, read_run
from support.divided_probes import UNTRAINED
from support.nested_states import alike
from support.saved_models import gpt2, save

WORDS = 60
OPTIONS = ["--tokens", "0", "--keep-statistics", "--dtype", "float64", "--device", "cpu", "--baseline", "0.3"]
OPTIONS += ["--draws", "3"]


def lines(first, last):
    """Documents of different lengths, so that batches are packed differently when texts are joined."""
    texts = [" ".join(str((7 * i + 3 * j * j) % WORDS) for j in range(6 + (5 * i) % 23)) for i in range(first, last)]
    return "".join(f'{{"text": "{text}"}}\n' for text in texts)


def run(*words):
    return CliRunner().invoke(cli.application(), [*map(str, words), "--prediction", UNTRAINED])


def kept(folder):
    return kept_measurement(folder, selected(None, [UNTRAINED]))


def probed(place, text, out, *words):
    result = run("probe", place / "model", "--text", place / text, "--out", place / out, *OPTIONS, *words)
    assert result.exit_code == 0, result.output


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs over two files, over a folder with both, and merged."""
    place = tmp_path_factory.mktemp("merged")
    save(gpt2(3), place / "model")
    (place / "both").mkdir()
    for name, span in (("a.jsonl", (0, 9)), ("b.jsonl", (9, 30))):
        (place / "both" / name).write_text(lines(*span))
        probed(place, f"both/{name}", name[0])
    probed(place, "both", "one")
    result = run("merge", place / "a", place / "b", "--out", place / "merged", "--device", "cpu")
    assert result.exit_code == 0, result.output
    return place


@pytest.mark.parametrize("field", ["state", "matched", "rescaled", "baseline"])
def test_merged_statistics_are_those_of_one_pass(runs, field):
    one, merged = (getattr(kept(runs / name), field) for name in ("one", "merged"))
    if field == "baseline":
        one, merged = one.state, merged.state
    alike(one, merged, least=100)


def test_merged_findings_are_those_of_one_pass(runs):
    one, merged = read_run(runs / "one"), read_run(runs / "merged")
    assert merged.counts | {"padded": 0} == one.counts | {"padded": 0}
    for name in ("tokens", "documents", "effective_documents", "groups", "fingerprint", "weights_sha256"):
        assert merged.model[name] == one.model[name], name
    verdicts = [[(*claim[:3], claim.verdict) for claim in each.findings.claims] for each in (one, merged)]
    assert verdicts[0] == verdicts[1]
    rows = list(zip(one.findings.rows, merged.findings.rows, strict=True))
    assert all(a[:6] == b[:6] and a.verdict == b.verdict for a, b in rows)
    values = torch.tensor([[a.value, b.value] for a, b in rows], dtype=torch.float64)
    torch.testing.assert_close(values[:, 0], values[:, 1], rtol=1e-7, atol=1e-9, equal_nan=True)
    for a, b in zip(one.findings.tokens, merged.findings.tokens, strict=True):
        assert (a._replace(value=0.0), a.value) == (b._replace(value=0.0), pytest.approx(b.value, rel=1e-9))


def test_merging_is_repeated_with_merged_runs(runs, tmp_path):
    (runs / "c.jsonl").write_text(lines(30, 34))
    probed(runs, "c.jsonl", "c")
    result = run("merge", runs / "merged", runs / "c", "--out", tmp_path / "out", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert read_run(tmp_path / "out").counts["documents"] == 34


def test_a_run_with_offloaded_weights_is_merged_and_the_missing_baseline_explained(runs, tmp_path):
    """The run with offloaded weights has no random-weights baseline; the draws are measured with offloaded weights."""
    parts = ["transformer.wte", "transformer.wpe", "transformer.h.0", "transformer.ln_f", "lm_head"]
    device_map = json.dumps({"transformer.h.1": "disk", **dict.fromkeys(parts, "cpu")})
    words = ["--tokens", "0", "--keep-statistics", "--dtype", "float64", "--baseline", "0.3", "--draws", "3"]
    place = ["--text", runs / "both/b.jsonl", "--out", tmp_path / "b", "--device-map", device_map]
    result = run("probe", runs / "model", *place, *words)
    assert result.exit_code == 0, result.output
    for order in ((runs / "a", tmp_path / "b"), (tmp_path / "b", runs / "a")):
        result = run("merge", *order, "--out", tmp_path / "out", "--device-map", device_map)
        assert result.exit_code == 0, result.output
        assert "offloaded" in read_run(tmp_path / "out").model["without_baseline"]
        merged, one = (kept(place) for place in (tmp_path / "out", runs / "one"))
        assert merged.baseline is None
        alike(one.matched, merged.matched)


def test_draws_that_one_run_lacks_are_measured(runs):
    first, second = (kept(runs / name) for name in "ab")
    first = first._replace(facts={**first.facts, "without_matched": "too little memory"}, matched={}, rescaled={})
    assert "without_matched" not in measurement_merge.merged("ab", [first, second]).facts


def test_a_run_is_not_replaced_by_a_merge_with_it(runs):
    before = (runs / "a" / STATISTICS).read_bytes()
    assert "one of the runs" in refused("merge", runs / "a", runs / "b", "--out", f"{runs}/both/../a")
    assert (runs / "a" / STATISTICS).read_bytes() == before


def test_kept_statistics_are_those_of_a_model_of_the_same_name(runs, tmp_path):
    shutil.copytree(runs / "model", tmp_path / "copy")
    shutil.copytree(runs / "a", tmp_path / "a")
    words = ["--text", runs / "both/a.jsonl", "--out", tmp_path / "a", *OPTIONS]
    result = run("probe", tmp_path / "copy", *words)
    assert result.exit_code == 0, result.output
    assert read_run(tmp_path / "a").model["name"] == "copy"
    assert "are judged" in run("probe", tmp_path / "copy", *words).output


def test_statistics_are_kept_on_file_systems_without_hard_links(runs, tmp_path, monkeypatch):
    def link(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    result = run("probe", runs / "model", "--text", runs / "both/a.jsonl", "--out", tmp_path / "a", *OPTIONS)
    assert result.exit_code == 0, result.output
    read_run(tmp_path / "a")
    assert kept(tmp_path / "a").complete


def refused(*words):
    result = run(*words)
    assert result.exit_code == 2, result.output
    return result.output


def test_the_same_text_is_refused(runs, tmp_path):
    assert "overlap: 9 documents" in refused("merge", runs / "a", runs / "one", "--out", tmp_path / "out")


def test_other_models_and_options_are_refused_and_named(runs, tmp_path):
    save(gpt2(4), tmp_path / "model")
    shutil.copy(runs / "both/b.jsonl", tmp_path)
    probed(tmp_path, "b.jsonl", "other", "--seed", "5")
    text = refused("merge", runs / "a", tmp_path / "other", "--out", tmp_path / "out")
    assert "seed is 0 and 5" in text
    assert "weights_sha256" in text


def test_samples_are_refused(runs, tmp_path):
    probed(runs, "both/b.jsonl", "sample", "--tokens", "60")
    assert "is a sample" in refused("merge", runs / "a", runs / "sample", "--out", tmp_path / "out")


def test_runs_without_statistics_or_with_damaged_ones_are_refused(runs, tmp_path):
    for name in ("none", "damaged"):
        shutil.copytree(runs / "b", tmp_path / name)
    (tmp_path / "none" / STATISTICS).unlink()
    file = tmp_path / "damaged" / STATISTICS
    file.write_bytes(file.read_bytes().replace(b"LayerState", b"LayerStat3"))
    for name in ("none", "damaged"):
        refused("merge", runs / "a", tmp_path / name, "--out", tmp_path / "out")
    assert "two or more" in refused("merge", runs / "a", "--out", tmp_path / "out")


def test_a_run_is_readable_while_another_probe_judges_in_its_folder(runs, tmp_path):
    """Killed there, it leaves the findings of one text with the statistics of another, which are not merged."""
    shutil.copytree(runs / "a", tmp_path / "a")
    shutil.copy(runs / "b" / STATISTICS, tmp_path / "a")
    assert read_run(tmp_path / "a").counts == read_run(runs / "a").counts
    assert "differs" in refused("merge", tmp_path / "a", runs / "a", "--out", tmp_path / "out")


def test_another_model_in_place_of_that_of_the_runs_is_refused(runs, tmp_path):
    save(gpt2(4), tmp_path / "model")
    words = ["merge", runs / "a", runs / "b", "--out", tmp_path / "out", "--model", tmp_path / "model"]
    assert "has other weights" in refused(*words)
