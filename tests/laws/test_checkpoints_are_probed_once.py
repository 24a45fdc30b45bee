"""Checkpoints of a training run: named by folders and revisions, told apart by their weights, each measured once."""

import hashlib
import json
import struct
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from gradlogz import cli
from gradlogz.probing import run_probe
from gradlogz.probing.corpus.source_hash import source_hash
from gradlogz.probing.inside.checkpoint_names import CheckpointName, checkpoints_of
from gradlogz.probing.inside.loading import load, locate
from gradlogz.probing.inside.training_step import step_in
from gradlogz.probing.inside.weights_hash import weights_hash
from gradlogz.probing.runs.findings_file import read_findings
from gradlogz.probing.runs.run_folder import read_run
from support.saved_models import gpt2, save, save_text, tokenizer

ONLY = ["--only", "entropy,tie", "--tokens", "0", "--baseline", "0"]


# Names ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("checkpoint-500", 500), ("step1000", 1000), ("pythia@step143000", 143000), ("global_step_64", 64),
        ("model", None), ("v2", None),
    ],
)  # fmt: skip
def test_steps_are_read_from_names(name, step):
    assert step_in(name) == step


def test_a_folder_of_checkpoints_is_all_of_them_in_the_order_of_steps(tmp_path):
    for name in ("step1000", "step20", "checkpoint-3", "notes"):
        save(gpt2(), tmp_path / "runs" / name, words=False)
    (tmp_path / "runs" / "step5").mkdir()  # without weights
    names = checkpoints_of([str(tmp_path / "runs")])
    assert [each.step for each in names] == [3, 20, 1000]
    assert [each.label for each in names] == ["runs@checkpoint-3", "runs@step20", "runs@step1000"]
    assert {each.series for each in names} == {"runs"}
    assert checkpoints_of([f"{tmp_path / 'runs'}@step20"]) == [names[1]]


def test_a_folder_with_weights_is_one_model(tmp_path):
    save(gpt2(), tmp_path / "out")
    save(gpt2(), tmp_path / "out" / "checkpoint-5")
    (one,) = checkpoints_of([str(tmp_path / "out")])
    assert (one.label, one.step, one.revision) == ("out", None, None)


def test_revisions_are_those_of_the_hub():
    (one,) = checkpoints_of(["EleutherAI/pythia-14m@step1000"])
    assert one == CheckpointName(
        "EleutherAI/pythia-14m", "step1000", "pythia-14m@step1000", "pythia-14m", "step1000", 1000
    )
    (one,) = checkpoints_of(["minilm"])
    assert one == CheckpointName("minilm", None, "minilm", "minilm", "minilm", None)


def test_the_revision_reaches_the_hub(tmp_path):
    folder = save(gpt2(), tmp_path / "cached")
    with mock.patch("huggingface_hub.snapshot_download", return_value=str(folder)) as download:
        loaded = load("EleutherAI/pythia-14m", revision="step1000", device="cpu")
    assert download.call_args.args == ("EleutherAI/pythia-14m",)
    assert download.call_args.kwargs["revision"] == "step1000"
    assert torch.equal(loaded.model.transformer.wte.weight, gpt2().transformer.wte.weight)


def test_the_tokenizer_may_lie_beside_the_checkpoints(tmp_path):
    tokenizer().save_pretrained(tmp_path)
    save(gpt2(), tmp_path / "checkpoint-7", words=False)
    save(gpt2(), tmp_path / "other", words=False)
    assert load(tmp_path / "checkpoint-7", device="cpu").tokenizer("5 6")["input_ids"] == [7, 8]
    assert load(tmp_path / "other", device="cpu").tokenizer is None


# Weights --------------------------------------------------------------------------------------------------------------


def definition(tensors):
    """The hash of float32 tensors, from their numbers."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        t = tensors[name]
        digest.update(json.dumps([name, "torch.float32", list(t.shape)]).encode())
        digest.update(struct.pack(f"<{t.numel()}f", *t.flatten().tolist()))
    return digest.hexdigest()


def test_the_hash_is_that_of_names_dtypes_shapes_and_bytes(tmp_path):
    folder = save(gpt2(), tmp_path / "one")
    assert weights_hash(locate(folder)) == definition(load_file(folder / "model.safetensors"))


def test_files_do_not_matter_to_the_hash(tmp_path):
    one, shards = save(gpt2(), tmp_path / "one"), save(gpt2(), tmp_path / "shards", max_shard_size="8KB")
    assert len(list(shards.glob("model-*.safetensors"))) > 2
    assert weights_hash(locate(one)) == weights_hash(locate(shards))
    pickled = tmp_path / "pickled"
    gpt2().config.save_pretrained(pickled)
    torch.save(load_file(one / "model.safetensors"), pickled / "pytorch_model.bin")
    assert weights_hash(locate(pickled, allow_pickle=True)) == weights_hash(locate(one))


def test_every_change_of_a_tensor_changes_the_hash(tmp_path):
    folder = save(gpt2(), tmp_path / "one")
    tensors = load_file(folder / "model.safetensors")
    name = "transformer.h.0.attn.c_attn.weight"
    bit = tensors[name].clone()
    bit.view(torch.int32)[0, 0] ^= 1
    changes = [
        {**tensors, name: bit},
        {**tensors, name: tensors[name].half()},
        {**tensors, name: tensors[name].T.contiguous()},
        {("renamed" if n == name else n): t for n, t in tensors.items()},
        {n: t for n, t in tensors.items() if n != name},
    ]
    hashes = {weights_hash(locate(folder))}
    for changed in changes:
        save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
        hashes.add(weights_hash(locate(folder)))
    assert len(hashes) == 1 + len(changes)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt", "author": "someone"})
    assert weights_hash(locate(folder)) in hashes


@pytest.mark.parametrize("model", ["smollm2", "rxnfp"])
def test_weights_of_packages_have_a_hash(model):
    assert len(weights_hash(locate(model))) == 64


def test_a_text_has_a_hash(tmp_path):
    text = save_text(tmp_path / "text.jsonl")
    before = source_hash(str(text)), source_hash(str(tmp_path))
    assert before == (source_hash(str(text)), source_hash(str(tmp_path)))
    text.write_text(text.read_text().replace("7", "8"))
    assert source_hash(str(text)) != before[0]
    assert source_hash(str(tmp_path)) != before[1]
    assert source_hash(None) == source_hash(None) != before[0]


# Runs -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def series(tmp_path, monkeypatch):
    """A folder with four checkpoints, the last of which repeats the second; and the command in it."""
    monkeypatch.chdir(tmp_path)
    tokenizer().save_pretrained("pico")
    for step, seed in ((0, 0), (10, 1), (1000, 2), (2000, 1)):
        save(gpt2(seed), Path("pico") / f"step{step}", words=False)
    save_text(Path("text.jsonl"))
    measured = []
    original = run_probe.measure

    def measure(*args, **options):
        measured.append(options["name"])
        return original(*args, **options)

    monkeypatch.setattr(run_probe, "measure", measure)

    def run(*words):
        measured.clear()
        result = CliRunner().invoke(cli.application(), ["probe", *words, "--text", "text.jsonl", *ONLY])
        return result, list(measured)

    return run


def test_a_training_run_is_one_page_and_a_checkpoint_is_measured_once(series, tmp_path):
    result, measured = series("pico", "--json", "all.json", "--csv", "all.csv")
    assert result.exit_code == 0, result.output
    assert measured == ["pico@step0", "pico@step10", "pico@step1000"]
    assert "pico@step2000: same weights as pico@step10" in result.stdout
    assert "Same weights: pico@step10, pico@step2000." in result.stdout
    root = tmp_path / "runs" / "pico"
    page = (root / "trajectory.html").read_text()
    assert "Same weights: pico@step10, pico@step2000." in page
    one, again = read_run(root / "step10"), read_run(root / "step2000")
    assert one.model["weights_sha256"] == again.model["weights_sha256"] == weights_hash(locate("pico/step10"))
    assert (one.model["step"], again.model["step"]) == (10, 2000)
    assert list(again.findings.facts) == ["pico@step2000"]
    every = read_findings(tmp_path / "all.json")
    assert list(every.facts) == ["pico@step0", "pico@step10", "pico@step1000", "pico@step2000"]
    assert (tmp_path / "all.csv").read_text() == every.csv()

    result, measured = series("pico")  # again
    assert result.exit_code == 0, result.output
    assert measured == []
    assert "pico@step0: kept" in result.stdout


def test_a_series_continues_from_a_checkpoint_that_was_probed_alone(series):
    assert series("pico@step10")[1] == ["pico@step10"]
    assert series("pico@step0", "pico@step10")[1] == ["pico@step0"]


def test_what_changed_is_measured_again(series, tmp_path):
    series("pico")
    save(gpt2(5), tmp_path / "pico" / "step1000", words=False)
    assert series("pico")[1] == ["pico@step1000"]  # other weights
    config = tmp_path / "pico" / "step10" / "config.json"
    settings = config.read_text()
    config.write_text(settings.replace('"gelu_new"', '"relu"'))
    assert series("pico")[1] == ["pico@step10"]  # another function of the same weights
    config.write_text(settings)
    assert series("pico")[1] == ["pico@step10"]
    run = tmp_path / "runs" / "pico" / "step0" / "run.json"
    content = json.loads(run.read_text())
    run.write_text(json.dumps({**content, "complete": False}))
    assert series("pico")[1] == ["pico@step0"]  # a run that was interrupted
    assert series("pico", "--seed", "3")[1] == ["pico@step0", "pico@step10", "pico@step1000"]  # other settings
    text = tmp_path / "text.jsonl"
    text.write_text(text.read_text().replace("9", "8"))
    assert series("pico", "--seed", "3")[1] == ["pico@step0", "pico@step10", "pico@step1000"]  # another text


def test_measured_or_copied_a_checkpoint_of_a_series_has_the_findings_of_a_run_alone(series):
    assert series("pico@step10", "pico@step2000")[1] == ["pico@step10"]
    for part in ("step10", "step2000"):
        result, measured = series(f"pico@{part}", "--out", f"alone/{part}")
        assert result.exit_code == 0, result.output
        assert measured == [f"pico@{part}"]
        alone, within = read_run(f"alone/{part}"), read_run(f"runs/pico/{part}")
        assert alone.findings.csv() == within.findings.csv()
        assert alone.model["weights_sha256"] == within.model["weights_sha256"]


def test_an_interrupted_checkpoint_ends_the_series(series, monkeypatch):
    original = run_probe.measure

    def interrupted(*args, **options):
        measured = original(*args, **options)
        return measured._replace(complete=options["name"] != "pico@step10")

    monkeypatch.setattr(run_probe, "measure", interrupted)
    result, measured = series("pico")
    assert result.exit_code == 130
    assert measured == ["pico@step0", "pico@step10"]
    assert "2 of 4 checkpoints" in result.stdout
    monkeypatch.setattr(run_probe, "measure", original)
    assert "pico@step0: kept" in series("pico")[0].stdout
