"""A run is a function of its settings and its seed, also if it is killed and resumed."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from experiments.run_folders import RunFolder
from experiments.tasks import ModularAddition, TextTask
from experiments.training import TrainSettings, logarithmic_steps, train
from experiments.transformer import ModelSettings, Transformer
from gradlogz._errors import InputValueError

ROOT = Path(__file__).parents[2]
MODEL = ModelSettings(vocabulary=12, context=3, width=8, heads=2, layers=1, hidden=16, objective="masked")
TRAINING = TrainSettings(steps=400, record_every=5, save_every=20, weight_decay=0.5)
PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
import torch
torch.set_num_threads(1)
from experiments.tasks import ModularAddition
from experiments.training import TrainSettings, train
from experiments.transformer import ModelSettings, Transformer
model = Transformer(ModelSettings(**{model!r}), seed=3)
train(model, ModularAddition(11, 0.5, 0), TrainSettings(steps=400, record_every=5, save_every=20, weight_decay=0.5),
      seed=3, folder=Path(sys.argv[1]))
"""


def trained(folder, training=TRAINING, seed=3):
    return train(Transformer(MODEL, seed=seed), ModularAddition(11, 0.5, 0), training, seed=seed, folder=folder)


def test_a_killed_run_continues_to_identical_curves_and_weights(tmp_path):
    uninterrupted = trained(tmp_path / "uninterrupted")
    folder = tmp_path / "killed"
    program = PROGRAM.format(root=str(ROOT), model=MODEL.as_dict())
    process = subprocess.Popen([sys.executable, "-c", program, str(folder)])
    while len(RunFolder(folder).curves) < 20 and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert RunFolder(folder).complete is None, "the run was complete before it could be killed"
    rows = len(RunFolder(folder).curves)
    resumed = trained(folder)
    assert rows < len(resumed.curves)
    assert (folder / "curves.jsonl").read_bytes() == (tmp_path / "uninterrupted" / "curves.jsonl").read_bytes()
    for step, checkpoint in uninterrupted.checkpoints().items():
        expected, actual = (load_file(f / "model.safetensors") for f in (checkpoint, resumed.checkpoints()[step]))
        assert all(torch.equal(expected[name], actual[name]) for name in expected)


def test_a_half_written_row_is_dropped(tmp_path):
    folder = RunFolder(tmp_path)
    for step in range(3):
        folder.record({"step": step})
    with (tmp_path / "curves.jsonl").open("a") as file:
        file.write('{"step": 3')
    folder.cut_curves(2)
    assert folder.curves == [{"step": 0}, {"step": 1}]


def test_a_run_folder_has_its_files(tmp_path):
    run = trained(tmp_path, replace(TRAINING, steps=20))
    assert set(run.checkpoints()) == logarithmic_steps(20) == {0, 1, 2, 4, 8, 16, 20}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["seed"] == 3
    assert config["model"] == MODEL.as_dict()
    assert {"torch", "device", "threads"} <= set(json.loads((tmp_path / "environment.json").read_text()))
    assert [row["step"] for row in run.curves] == [0, 5, 10, 15, 20]
    assert not (tmp_path / "resume.safetensors").exists()
    again = trained(tmp_path, replace(TRAINING, steps=20))
    assert again.complete == run.complete  # read, not trained again


def test_a_folder_of_other_settings_is_refused(tmp_path):
    trained(tmp_path, replace(TRAINING, steps=2))
    with pytest.raises(InputValueError, match="folder"):
        trained(tmp_path, replace(TRAINING, steps=3))


def test_a_run_stops_at_the_value_of_a_quantity(tmp_path):
    run = trained(tmp_path, replace(TRAINING, stop_at=("train_accuracy", 0.5)))
    assert run.curves[-1]["train_accuracy"] >= 0.5 > run.curves[-2]["train_accuracy"]
    assert run.curves[-1]["step"] in run.checkpoints()


def test_bfloat16_changes_little_and_saves_float32(tmp_path):
    exact = trained(tmp_path / "exact", replace(TRAINING, steps=20))
    rough = trained(tmp_path / "rough", replace(TRAINING, steps=20, bfloat16=True))
    assert rough.curves[-1]["loss"] != exact.curves[-1]["loss"]
    assert rough.curves[-1]["loss"] == pytest.approx(exact.curves[-1]["loss"], rel=0.02)
    weights = load_file(rough.checkpoints()[20] / "model.safetensors")
    assert {t.dtype for t in weights.values()} == {torch.float32}


def test_learning_rates_warm_up_and_decay_as_a_cosine():
    settings = TrainSettings(steps=110, learning_rate=2.0, warm_up=10, last_rate=0.5)
    assert settings.rate(0) == 0.2
    assert settings.rate(10) == 2.0
    assert settings.rate(60) == pytest.approx(1.5)
    assert settings.rate(110) == pytest.approx(1.0)


def test_masked_windows_predict_the_hidden_tokens_alone():
    text = torch.arange(100, 400, dtype=torch.int32)
    tokens, targets = TextTask(text, text, length=20, batch_size=50, mask=1).batch(seed=0, step=5)
    hidden = tokens == 1
    assert torch.equal(targets != -100, hidden)
    assert (targets.masked_fill(~hidden, 0) + tokens.masked_fill(hidden, 0)).diff().eq(1).all()
    assert 0.1 < hidden.float().mean() < 0.2


def test_causal_windows_predict_the_next_token_and_depend_on_the_step():
    text = torch.arange(100, 400, dtype=torch.int32)
    task = TextTask(text, text, length=20, batch_size=50)
    tokens, targets = task.batch(seed=0, step=5)
    assert torch.equal(targets, tokens + 1)
    assert torch.equal(tokens, task.batch(seed=0, step=5).tokens)
    assert not torch.equal(tokens, task.batch(seed=0, step=6).tokens)


def test_modular_addition_splits_all_pairs():
    task = ModularAddition(7, 0.4, split_seed=2)
    both = torch.cat((task.train.tokens, task.test.tokens))
    assert {(int(a), int(b)) for a, b, _ in both} == {(a, b) for a in range(7) for b in range(7)}
    assert all(int(y[2]) == (int(x[0]) + int(x[1])) % 7 for x, y in zip(*task.train, strict=True))
    assert len(task.train.tokens) == round(0.4 * 49)


def test_other_seeds_have_other_batches_and_other_splits():
    text = torch.arange(1000)
    task = TextTask(text, text, length=8, batch_size=4)
    batches = {
        (seed, step): tuple(task.batch(seed, step).tokens[:, 0].tolist()) for seed in range(4) for step in range(4)
    }
    assert len(set(batches.values())) == 16
    assert tuple(task.batch(2, 3).tokens[:, 0].tolist()) == batches[2, 3]
    splits = [ModularAddition(11, 0.5, seed).train.tokens for seed in range(3)]
    assert not any(torch.equal(splits[i], splits[j]) for i, j in ((0, 1), (0, 2), (1, 2)))
