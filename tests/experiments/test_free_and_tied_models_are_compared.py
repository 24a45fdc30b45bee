"""The experiment on tied value maps in its smallest form: text of this machine, training, export, probe, decisions."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer

from experiments import text
from experiments.ascent import experiment
from experiments.ascent.experiment import EXTENDED, GPU, REPLICATION, Cell, cells, decisions, model_of
from experiments.costs import cost
from gradlogz._errors import InputValueError
from gradlogz.probing.runs.run_folder import read_run

TINY = replace(
    experiment.REDUCED,
    model=replace(experiment.REDUCED.model, vocabulary=300, context=16, width=16, heads=2, hidden=32),
    training=replace(experiment.REDUCED.training, steps=2),
    batch_size=4,
    megabytes=0.3,
    probe_tokens=512,
)


@pytest.fixture(scope="module")
def tokenised(tmp_path_factory):
    return text.corpus(tmp_path_factory.mktemp("text"), megabytes=0.3, vocabulary=300)


def test_text_is_tokenised_without_loss_and_recorded(tokenised):
    manifest = json.loads((tokenised.folder / "manifest.json").read_text())
    assert manifest["bytes"] >= 300_000
    assert manifest["tokens"] == len(tokenised.train) + len(tokenised.held_out)
    assert all(len(each["sha256"]) == 64 for each in manifest["files"])
    tokenizer = Tokenizer.from_file(str(tokenised.folder / "tokenizer.json"))
    assert tokenizer.token_to_id("[PAD]") == 0
    assert tokenizer.token_to_id("[MASK]") == text.MASK_ID
    assert tokenizer.decode(tokenizer.encode("def f(x):  # ∇G\n").ids) == "def f(x):  # ∇G\n"
    assert int(torch.cat((tokenised.train, tokenised.held_out)).min()) > text.MASK_ID
    documents = [d for d, _ in zip(text.documents(), range(len(manifest["files"])), strict=False)]
    decoded = tokenizer.decode(tokenised.train.tolist())
    assert decoded == "".join(d.text for d in documents if not text._is_held_out(d))


def test_a_corpus_is_read_again_and_a_larger_one_is_refused(tokenised, monkeypatch):
    again = text.corpus(tokenised.folder, megabytes=0.3, vocabulary=300)
    assert torch.equal(again.train, tokenised.train)
    few = list(zip(text.documents(), range(3), strict=False))
    monkeypatch.setattr(text, "documents", lambda: (d for d, _ in few))
    with pytest.raises(InputValueError, match="megabytes"):
        text.corpus(tokenised.folder, megabytes=50, vocabulary=300)


@pytest.mark.parametrize("cell", list(cells()), ids=str)
def test_models_have_equal_cost_and_are_probed(cell, tokenised, tmp_path):
    model, free = model_of(cell, TINY.model), model_of(cell._replace(value_map="free"), TINY.model)
    unit = 2 * (2 * TINY.model.width + 1)
    if "parameters" in cell.value_map:
        assert abs(cost(model).parameters - cost(free).parameters) <= unit
    elif "compute" in cell.value_map:
        assert abs(cost(model).multiplications - cost(free).multiplications) <= unit
    row = experiment.trained_and_probed(cell, 0, TINY, tokenised, tmp_path)
    assert set(row["probe"]) == {0, 2}
    for step in (0, 2):
        assert row["probe"][step]["ascent"]["value"] is not None
        if cell.value_map != "free":
            assert row["probe"][step]["tie"]["value"] == pytest.approx(1.0, abs=1e-3)


def command(*arguments):
    completed = subprocess.run([sys.executable, "-m", "gradlogz", *map(str, arguments)], capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr


def test_the_commands_read_the_exported_checkpoints_of_a_run(tokenised, tmp_path):
    cell = Cell("causal", "pre", "tied, equal parameters")
    experiment.trained_and_probed(cell, 0, TINY, tokenised, tmp_path)
    runs = tmp_path / "runs"
    for step in (0, 2):
        folder = tmp_path / "exported" / f"step-{step}"
        command("probe", folder, "--tokens", 300, "--only", "tie", "--out", runs / f"step-{step}")
    claims = {claim.prediction: claim.value for claim in read_run(runs / "step-2").findings.claims}
    assert claims["tie"] == pytest.approx(1.0, abs=1e-3)
    command("compare", runs / "step-0", runs / "step-2", "--out", tmp_path / "compared.html")
    assert "tie" in (tmp_path / "compared.html").read_text()


def row(cell, seed, loss, ascent):
    return {**cell._asdict(), "seed": seed, "held-out loss": loss, "probe": {0: {}, 8: {"ascent": {"value": ascent}}}}


def test_decisions_follow_the_plan():
    rows = []
    for cell in cells():
        for seed in range(5):
            noise = 0.001 * seed
            loss = 3.0 + (0.1 + noise if cell.value_map == "tied, equal compute" else noise / 10)
            rows.append(row(cell, seed, loss, (0.1 if cell.objective == "masked" else 0.0) + noise))
    answer = decisions(rows)
    assert answer["status"] == "final"
    assert answer["tied, equal compute: causal, pre"]["verdict"] == "costs"
    assert answer["tied, equal parameters: masked, post"]["verdict"] == "no cost of interest"
    assert answer["ascent: objective (masked - causal)"]["verdict"] == "effect"
    assert answer["ascent: objective (masked - causal)"]["difference"]["mean"] == pytest.approx(0.1)
    assert answer["ascent: placement (post - pre)"]["verdict"] == "inconclusive"
    assert decisions([r for r in rows if r["seed"] < 2])["status"].startswith("preliminary")


def test_cells_are_all_combinations():
    assert len(set(cells())) == 12
    assert Cell("masked", "post", "tied, equal compute") in set(cells())


def test_the_replication_of_equal_compute_trains_the_kind_that_is_missing_first():
    replication = list(cells(REPLICATION.value_maps, REPLICATION.kinds))
    assert replication[:2] == [Cell("masked", "post", "free"), Cell("masked", "post", "tied, equal compute")]
    assert len(set(replication)) == 8
    assert not {*REPLICATION.every_seed} & {*EXTENDED.every_seed, *GPU.every_seed}
