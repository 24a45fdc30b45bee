"""Runs of one model over different texts, merged, are the run over all of them; others are refused."""

import shutil

import pytest
import torch
from typer.testing import CliRunner

from gradlogz import cli
from gradlogz.probing.measurement_file import kept_measurement
from gradlogz.probing.run_probe import chosen
from gradlogz.probing.runs.run_folder import STATISTICS, read_run
from support.saved_models import gpt2, save

WORDS = 60
OPTIONS = ["--tokens", "0", "--keep-statistics", "--dtype", "float64", "--device", "cpu", "--baseline", "0.3"]
OPTIONS += ["--draws", "3"]


def lines(first, last):
    """Documents of different lengths, so that batches are packed differently when texts are joined."""
    texts = [" ".join(str((7 * i + 3 * j * j) % WORDS) for j in range(6 + (5 * i) % 23)) for i in range(first, last)]
    return "".join(f'{{"text": "{text}"}}\n' for text in texts)


def run(*words):
    return CliRunner().invoke(cli.application(), [*map(str, words)])


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


def numbers_in(state, path=()):
    """Yield the tensors and numbers of a nested state, with their paths."""
    if isinstance(state, torch.Tensor | float | int):
        yield path, torch.as_tensor(state, dtype=torch.float64)
    parts = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, tuple | list) else ()
    for name, part in parts:
        yield from numbers_in(part, (*path, name))


@pytest.mark.parametrize("field", ["state", "matched", "rescaled", "baseline"])
def test_merged_statistics_are_those_of_one_pass(runs, field):
    one, merged = (getattr(kept_measurement(runs / name, chosen(None)), field) for name in ("one", "merged"))
    if field == "baseline":
        one, merged = one.state, merged.state
    expected, found = dict(numbers_in(one)), dict(numbers_in(merged))
    assert expected.keys() == found.keys()
    assert len(expected) > 100
    for path, value in expected.items():
        if path[0] == "identity" and value.ndim > 1:  # counts of rounding errors, which depend on the batches
            assert found[path].sum() == value.sum()
            continue
        scale = max(1.0, float(value.nan_to_num().abs().amax())) if value.numel() else 1.0
        torch.testing.assert_close(found[path], value, rtol=0.0, atol=1e-12 * scale, equal_nan=True)


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


def test_another_model_in_place_of_that_of_the_runs_is_refused(runs, tmp_path):
    save(gpt2(4), tmp_path / "model")
    words = ["merge", runs / "a", runs / "b", "--out", tmp_path / "out", "--model", tmp_path / "model"]
    assert "has other weights" in refused(*words)
