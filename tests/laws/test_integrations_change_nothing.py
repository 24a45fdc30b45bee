"""Callbacks of training libraries leave the training bit for bit as it was, log every layer, and act on alerts.

Each is tested in a run of its library: transformers.Trainer, Lightning, accelerate and a plain loop, with TensorBoard
and Weights & Biases (offline).
"""

import json
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils.tensorboard import SummaryWriter

import gradlogz
from gradlogz.attention import Thresholds
from gradlogz.attention.in_models import interception
from gradlogz.integrations import LoopMonitor, heat_map, lower_learning_rate, save_checkpoint, stop
from gradlogz.integrations.head_maps import write_heads
from support.small_trainings import GPT, batches, train

# Libraries warn of their own changes; ours must pass through.
pytestmark = pytest.mark.filterwarnings("ignore", "default:logit explosion")
LOW = Thresholds(entropy=None, logit=0.01, sink=None)
STATISTICS = ("entropy", "entropy_of_lowest_head", "log_normalizer", "logit_variance", "max_logit", "sink")
RATE, STEPS = 1e-2, 6


def loss_of(model, ids):
    return functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def constant(optimizer):
    return LambdaLR(optimizer, lambda step: 1.0)


# One run of each library: options of the monitor or None, folder, tracker or None -> Run ------------------------------


class Run:
    """The weights after a run, the number of its steps, and the last learning rate."""

    def __init__(self, model, steps, optimizer):
        self.weights = [p.detach().clone() for p in model.parameters()]
        self.steps, self.rate = steps, optimizer.param_groups[0]["lr"]


class Losses(torch.nn.Module):
    """A model that returns its loss, as those of transformers do."""

    def __init__(self):
        super().__init__()
        self.model = GPT()

    def forward(self, ids):
        return {"loss": loss_of(self.model, ids)}


def with_trainer(options, folder, tracker=None, **arguments):
    from transformers import Trainer, TrainingArguments

    from gradlogz.integrations import TrainerMonitor

    torch.manual_seed(0)
    model = Losses()
    args = TrainingArguments(
        str(folder), max_steps=STEPS, per_device_train_batch_size=3, use_cpu=True, report_to=tracker or "none",
        logging_steps=1, save_strategy="no", disable_tqdm=True, learning_rate=RATE, lr_scheduler_type="constant",
        **arguments,
    )  # fmt: skip
    trainer = Trainer(model, args, train_dataset=[{"ids": ids} for ids in torch.cat(batches(STEPS))])
    if options is not None:
        trainer.add_callback(TrainerMonitor(trainer, **options))
    trainer.train()
    return Run(model, trainer.state.global_step, trainer.optimizer)


def lightning_and_module():
    """The library, if it is installed, and a module of it."""
    lightning = pytest.importorskip("lightning.pytorch", reason="of the extra [test]")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = GPT()

        def training_step(self, ids, index):
            return loss_of(self.model, ids)

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), RATE)
            return [optimizer], [{"scheduler": constant(optimizer), "interval": "step"}]

    return lightning, Module


def with_lightning(options, folder, tracker=None):
    lightning, Module = lightning_and_module()
    from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger

    from gradlogz.integrations import LightningMonitor

    torch.manual_seed(0)
    model = Module()
    loggers = {None: False, "tensorboard": TensorBoardLogger, "wandb": WandbLogger}
    trainer = lightning.Trainer(
        max_steps=STEPS, accelerator="cpu", default_root_dir=folder, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
        logger=loggers[tracker](save_dir=str(folder)) if tracker else False,
        callbacks=[] if options is None else [LightningMonitor(**options)],
    )  # fmt: skip
    trainer.fit(model, torch.utils.data.DataLoader(torch.cat(batches(STEPS)), 3))
    return Run(model, trainer.global_step, trainer.optimizers[0])


def with_accelerate(options, folder, tracker=None):
    from accelerate import Accelerator
    from accelerate.state import GradientState

    from gradlogz.integrations import AccelerateMonitor

    GradientState._reset_state()  # shared by all of a process: that of a Trainer would forbid accumulation
    accelerator = Accelerator(cpu=True, log_with=tracker, project_dir=folder, gradient_accumulation_steps=2)
    accelerator.init_trackers("run")
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, constant(optimizer))
    steps = 0

    def loop(m=None):
        nonlocal steps
        for ids in batches(2 * STEPS):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, ids))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            steps += accelerator.sync_gradients
            if m is not None and m.stopped:
                break

    if options is None:
        loop()
    else:
        with AccelerateMonitor(accelerator, model, scheduler=scheduler, **options) as m:
            loop(m)
    accelerator.end_training()
    return Run(model, steps, optimizer)


def in_a_loop(options, folder, tracker=None):
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    scheduler, log = constant(optimizer), None
    if tracker == "tensorboard":
        log = SummaryWriter(folder)
    elif tracker == "wandb":
        log = pytest.importorskip("wandb").init(dir=folder)
    steps = 0

    def loop(m=None):
        nonlocal steps
        for ids in batches(STEPS):
            loss_of(model, ids).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            steps += 1
            if m is not None and m.stopped:
                break

    if options is None:
        loop()
    else:
        (folder / "saved").mkdir(exist_ok=True)

        def save(step):
            torch.save(model.state_dict(), folder / "saved" / f"{step}.pt")

        with LoopMonitor(model, log=log, save=save, scheduler=scheduler, **options) as m:
            loop(m)
    if tracker == "tensorboard":
        log.close()
    return Run(model, steps, optimizer)


LIBRARIES = {"Trainer": with_trainer, "Lightning": with_lightning, "accelerate": with_accelerate, "loop": in_a_loop}
each_library = pytest.mark.parametrize("run", LIBRARIES.values(), ids=LIBRARIES)


@each_library
def test_weights_are_bitwise_those_of_a_run_without_it(run, tmp_path):
    """And TensorBoard has every scalar of every layer in every second step, and heat maps of all heads."""
    plain, monitored = run(None, tmp_path), run({"every": 2, "heads": True}, tmp_path, "tensorboard")
    assert plain.steps == monitored.steps == STEPS
    assert all(torch.equal(a, b) for a, b in zip(plain.weights, monitored.weights, strict=True))
    logs = [EventAccumulator(str(path)).Reload() for path in tmp_path.rglob("events.out.tfevents*")]
    scalars = {tag: [event.step for event in log.Scalars(tag)] for log in logs for tag in log.Tags()["scalars"]}
    prefix, shift = ("train/", 1) if run is with_trainer else ("", 0)  # the Trainer logs after it has counted the step
    inner = "" if run in (with_accelerate, in_a_loop) else "model."
    for layer in range(2):
        for name in STATISTICS:
            tag = f"{prefix}attention/{inner}blocks.{layer}.attention/{name}"
            assert scalars[tag] == [step + shift for step in (0, 2, 4)], tag
    assert {tag for log in logs for tag in log.Tags()["images"]} == {"attention/entropy", "attention/max_logit"}


def test_a_compiled_trainer_is_monitored_and_unchanged(tmp_path):
    compiled, rows = {"torch_compile": True, "torch_compile_backend": "aot_eager"}, []
    plain = with_trainer(None, tmp_path, **compiled)
    options = {"every": 2, "thresholds": LOW, "actions": [lambda alert, run: rows.append(alert.layer)]}
    monitored = with_trainer(options, tmp_path, **compiled)
    assert all(torch.equal(a, b) for a, b in zip(plain.weights, monitored.weights, strict=True))
    assert rows == [f"model.blocks.{i}.attention" for i in range(2)]


@each_library
def test_an_alert_saves_lowers_the_learning_rate_and_stops(run, tmp_path):
    alerts, actions = [], [save_checkpoint, lower_learning_rate(0.1), stop]
    options = {"every": 1, "thresholds": LOW, "actions": [lambda alert, run: alerts.append(alert), *actions]}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = run(options, tmp_path)
    assert [alert.kind for alert in alerts] == ["logit explosion"] * 2
    assert sum("logit explosion" in str(warning.message) for warning in caught) == 2
    assert result.steps == 1
    assert result.rate == pytest.approx(0.1 * RATE)
    assert any(path.suffix in (".pt", ".ckpt", ".safetensors") for path in tmp_path.rglob("*"))


@each_library
def test_logits_are_clipped_after_each_recorded_step(run, tmp_path):
    """A tau that no logit exceeds changes nothing; a small one keeps logits small."""
    plain, high, low = (run(o, tmp_path) for o in (None, {"every": 1, "qk_clip": 1e9}, {"every": 1, "qk_clip": 0.1}))
    assert all(torch.equal(a, b) for a, b in zip(plain.weights, high.weights, strict=True))

    def largest(weights):
        model = GPT(dropout=0.0)
        for p, weight in zip(model.parameters(), weights, strict=True):
            p.data.copy_(weight)
        with gradlogz.observe(model) as observation:
            model(batches(1)[0][:, :-1])
        return float(observation.stack("max_logit").max())

    assert largest(low.weights) < 0.3 < 0.9 < largest(plain.weights)


@each_library
def test_weights_and_biases_has_scalars_and_a_table_of_heads(run, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    for name, value in {"MODE": "offline", "SILENT": "true", "DIR": str(tmp_path), "CONSOLE": "off"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    wandb.teardown()  # the variables are read once in a process
    run({"every": 2, "heads": True}, tmp_path, "wandb")
    prefix = "train/" if run is with_trainer else ""
    inner = "model." if run in (with_trainer, with_lightning) else ""
    layers = [f"{inner}blocks.{i}.attention" for i in range(2)]
    if run is not with_accelerate:  # which ends the run itself
        summary = dict(wandb.run.summary)
        wandb.finish()
        assert all(summary[f"{prefix}attention/{layer}/{name}"] > -20.0 for layer in layers for name in STATISTICS)
    table = json.loads(sorted(tmp_path.rglob("*heads*.table.json"))[-1].read_text())
    places = [table["columns"].index(name) for name in ("layer", "head")]
    heads = [tuple(line[place] for place in places) for line in table["data"]]
    assert heads == [(layer, head) for layer in layers for head in range(4)]


# Resumption -----------------------------------------------------------------------------------------------------------


def test_a_resumed_trainer_continues_steps_and_alerts(tmp_path):
    from transformers import Trainer, TrainingArguments

    from gradlogz.integrations import TrainerMonitor

    alerts, steps = [], []
    for resumed in (False, True):
        args = TrainingArguments(
            str(tmp_path), max_steps=6 if resumed else 3, per_device_train_batch_size=3, use_cpu=True, report_to="none",
            save_steps=3, disable_tqdm=True, logging_strategy="no",
        )  # fmt: skip
        trainer = Trainer(Losses(), args, train_dataset=[{"ids": ids} for ids in torch.cat(batches(STEPS))])
        actions = [lambda alert, run: alerts.append(alert)]
        trainer.add_callback(TrainerMonitor(trainer, every=2, thresholds=LOW, actions=actions))
        trainer.train(resume_from_checkpoint=resumed)
        steps.append([entry["step"] for entry in trainer.state.log_history if any("entropy" in key for key in entry)])
    assert steps[1] == [1, 3, 5]  # every second step, over both runs
    assert len(alerts) == 2  # one for each layer


def test_a_resumed_lightning_run_continues_alerts(tmp_path):
    lightning, Module = lightning_and_module()
    from gradlogz.integrations import LightningMonitor

    alerts = []
    for steps in (3, 6):
        callback = LightningMonitor(every=2, thresholds=LOW, actions=[lambda alert, run: alerts.append(alert)])
        trainer = lightning.Trainer(
            max_steps=steps, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=False, callbacks=[callback],
        )  # fmt: skip
        loader = torch.utils.data.DataLoader(torch.cat(batches(STEPS)), 3)
        trainer.fit(Module(), loader, ckpt_path=None if steps == 3 else tmp_path / "run.ckpt")
        trainer.save_checkpoint(tmp_path / "run.ckpt")
    assert callback.state_dict()["steps"] == 6
    assert len(alerts) == 2


def test_a_resumed_loop_with_accelerate_continues_steps(tmp_path):
    from accelerate import Accelerator

    from gradlogz.integrations import AccelerateMonitor

    for resumed in (False, True):
        accelerator = Accelerator(cpu=True, project_dir=tmp_path)
        model = GPT()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), RATE))
        m = AccelerateMonitor(accelerator, model, every=2)
        if resumed:
            accelerator.load_state(str(tmp_path / "state"))
        with m:
            for ids in batches(3):
                accelerator.backward(loss_of(model, ids))
                optimizer.step()
                optimizer.zero_grad()
        accelerator.save_state(str(tmp_path / "state"))
    assert m.state_dict()["steps"] == 6


def test_any_function_is_a_log():
    logged = []
    model = GPT()
    with LoopMonitor(model, every=2, log=lambda scalars, step: logged.append((step, scalars))):
        train(model, batches(3))
    assert [step for step, _ in logged] == [0, 2]
    assert set(logged[0][1]) >= {f"attention/blocks.{i}.attention/{name}" for i in range(2) for name in STATISTICS}


def test_a_log_that_fails_does_not_end_the_training():
    def failing(scalars, step):
        raise ConnectionError("no server")

    model = GPT()
    with pytest.warns(UserWarning, match="no server"), LoopMonitor(model, every=1, log=failing):
        train(model, batches(2))


def test_an_ended_monitor_stays_removed():
    model = GPT()
    with LoopMonitor(model, every=1) as m:
        train(model, batches(1))
    m.load_state_dict(m.state_dict())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with m:
        train(model, batches(1))
    assert m.state_dict()["steps"] == 2
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@each_library
def test_a_run_that_raises_leaves_no_monitor(run, tmp_path):
    def fail(alert, training):
        raise ArithmeticError("planted")

    with pytest.raises(ArithmeticError, match="planted"), pytest.warns(UserWarning, match="logit explosion"):
        run({"every": 1, "thresholds": LOW, "actions": [fail]}, tmp_path)
    assert not interception._interceptions
    assert not _global_optimizer_post_hooks


def test_an_alert_of_the_last_row_may_raise():
    """On a GPU the last row is written when the run ends; `_delayed` stands for one here."""

    def fail(alert, training):
        raise ArithmeticError("planted")

    def run():
        with LoopMonitor(model, every=1, thresholds=Thresholds(logit=0.0), actions=[fail]) as m:
            m._session._monitor._delayed = True
            train(model, batches(1))

    model = GPT()
    with pytest.raises(ArithmeticError, match="planted"), pytest.warns(UserWarning, match="logit explosion"):
        run()
    assert not interception._interceptions
    assert not _global_optimizer_post_hooks


def test_a_checkpoint_is_saved_once_in_a_step():
    saved, model = [], GPT()
    always = Thresholds(logit=0.0)
    options = {"every": 1, "thresholds": always, "actions": [save_checkpoint], "save": saved.append}
    with pytest.warns(UserWarning, match="logit explosion"), LoopMonitor(model, **options):
        train(model, batches(1))
    assert saved == [0]


@pytest.mark.parametrize("kind", ["OneCycleLR", "SequentialLR", "LambdaLR"])
def test_a_lowered_learning_rate_stays_low(kind):
    def rates(factor):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 1.0)
        schedulers = torch.optim.lr_scheduler
        if kind == "OneCycleLR":
            scheduler = schedulers.OneCycleLR(optimizer, 1.0, total_steps=9)
        elif kind == "LambdaLR":
            scheduler = schedulers.LambdaLR(optimizer, lambda step: 0.9**step)
        else:
            parts = [schedulers.LambdaLR(optimizer, lambda step: 0.9**step) for _ in range(2)]
            scheduler = schedulers.SequentialLR(optimizer, parts, [5])
        run = mock.Mock(optimizers_and_schedulers=lambda: ([optimizer], [scheduler]))
        found = []
        for step in range(4):
            optimizer.step()
            scheduler.step()
            if step == 1:
                lower_learning_rate(factor)(mock.Mock(step=step), run)
            found.append(optimizer.param_groups[0]["lr"])
        return found

    plain, low = rates(1.0), rates(0.5)
    assert low[0] == plain[0]
    for one, other in zip(low[1:], plain[1:], strict=True):
        assert abs(one - other / 2) < 1e-12


def test_a_heat_map_is_dark_where_a_statistic_is_large():
    model = GPT(heads=4)
    with gradlogz.monitor(model, every=1) as m:
        train(model, batches(1))
    image = heat_map(m.row(), "max_logit")
    assert image.shape == (3, 2 * 16, 4 * 16)
    values = torch.stack([heads.max_logit.greatest for heads in m.row().layers.values()])
    brightness = image[0, ::16, ::16]
    assert torch.equal(brightness.flatten().argsort(descending=True), values.flatten().argsort())
    assert (brightness.max(), brightness.min()) == (1.0, pytest.approx(0.05))


def test_a_heat_map_is_grey_where_a_layer_lacks_a_statistic():
    """Layers that call softmax themselves have no norms; a model without softmax has an empty image."""
    model = GPT()
    with gradlogz.monitor(model, every=1) as m:
        train(model, batches(1))
    first, second = m.row().layers.values()
    row = m.row()._replace(layers={"one": first, "two": second._replace(key_norm=None)})
    image = heat_map(row, "key_norm")
    assert image.shape == heat_map(m.row(), "key_norm").shape
    assert bool((image[:, 16:] == torch.tensor(0.6)).all())
    assert heat_map(row._replace(layers={})).shape == (3, 0, 0)
    written = []
    write_heads(SimpleNamespace(add_image=lambda *image: written.append(image)), row._replace(layers={}), 0)
    assert not written


def test_no_library_is_imported_before_its_callback_is_named():
    code = (
        "import sys, gradlogz.integrations as i; i.LoopMonitor\n"
        "assert not {'transformers', 'lightning', 'accelerate', 'wandb', 'tensorboard'} & set(sys.modules)\n"
        "i.AccelerateMonitor; assert 'accelerate' in sys.modules"
    )
    source = Path(gradlogz.__file__).parents[1]
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(source)})
