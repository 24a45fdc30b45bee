"""Alerts of a monitor: NaN is one, padding is none, fresh models have none, and a resumed run continues."""

import warnings

import pytest
import torch

import gradlogz
from support.architectures import ARCHITECTURES
from support.small_trainings import GPT, batches, train

THRESHOLDS = gradlogz.attention.Thresholds


def made(layers=2):
    torch.manual_seed(0)
    return GPT(dropout=0.0, layers=layers).train()


def test_not_a_number_is_an_alert():
    model, alerts = made(), []
    with torch.no_grad():
        model.blocks[1].attention.qkv.weight[3] = torch.nan  # of the queries of the first head
    with gradlogz.monitor(model, every=1, on_alert=alerts.append) as m:
        model(batches(1)[0])
        m.step()
    assert [(a.kind, a.layer, a.value) for a in alerts] == [("NaN", "blocks.1.attention", 1.0)]
    assert str(alerts[0]) == "NaN in blocks.1.attention at step 0: 1 heads"
    assert m.row().layers["blocks.1.attention"].nan_heads == 1


def test_a_batch_of_padding_is_not_an_alert():
    architecture = next(a for a in ARCHITECTURES if a.name == "bert")
    model, inputs, alerts = architecture.build("eager").train(), architecture.inputs("right"), []
    inputs["attention_mask"] = torch.zeros_like(inputs["attention_mask"])
    thresholds = THRESHOLDS(sink=None, logit=None)
    with gradlogz.monitor(model, every=1, on_alert=alerts.append, thresholds=thresholds) as m:
        model(**inputs)
        m.step()
    assert {heads.rows for heads in m.row().layers.values()} == {0}
    assert not alerts


@pytest.mark.parametrize("tokens", [2, 4, 8])
def test_a_fresh_model_has_no_sink_at_short_sequences(tokens):
    model, alerts = made(), []
    with gradlogz.monitor(model, every=1, on_alert=alerts.append) as m:
        model(batches(1)[0][:, :tokens])
        m.step()
    assert float(m.row().layers["blocks.0.attention"].sink.mean.median()) > 0.3, "the uniform share"
    assert not alerts


def test_one_warning_names_all_layers():
    model = made(layers=6)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.qkv.weight.mul_(1000.0)
    with (
        warnings.catch_warnings(record=True) as issued,
        gradlogz.monitor(model, every=1, thresholds=THRESHOLDS(entropy=None, sink=None)),
    ):
        warnings.simplefilter("always")
        train(model, batches(2))
    messages = [str(each.message) for each in issued if "logit explosion" in str(each.message)]
    assert len(messages) == 1
    assert all(f"blocks.{i}.attention" in messages[0] for i in range(4))
    assert "2 other layers" in messages[0]


def test_a_resumed_run_continues_steps_and_alerts():
    def collapsed():
        model = made()
        with torch.no_grad():
            model.blocks[1].attention.qkv.weight.mul_(100.0)
        return model

    model, thresholds = made(), THRESHOLDS(logit=None, sink=None)
    with gradlogz.monitor(model, every=3, thresholds=thresholds) as m:
        train(model, batches(4))
        state = m.state_dict()
    model = collapsed()
    alerts, rows = [], []
    with gradlogz.monitor(model, every=3, thresholds=thresholds, on_alert=alerts.append, writer=rows.append) as m:
        m.load_state_dict(state)
        assert m.steps == 4
        train(model, batches(3))
    assert [row.step for row in rows] == [6]
    assert [(a.kind, a.layer, a.step) for a in alerts] == [("entropy collapse", "blocks.1.attention", 6)]

    again, other = [], collapsed()
    with gradlogz.monitor(other, every=3, thresholds=thresholds, on_alert=again.append) as resumed:
        resumed.load_state_dict(m.state_dict())
        train(other, batches(3))
    assert not again, "an alert is reported once in a run"


def test_the_state_is_loaded_by_torch(tmp_path):
    model = made()
    with gradlogz.monitor(model, every=1) as m:
        train(model, batches(1))
    torch.save(m.state_dict(), tmp_path / "monitor.pt")
    assert torch.load(tmp_path / "monitor.pt", weights_only=True) == m.state_dict()


def test_a_printed_row_keeps_its_columns():
    model, rows = made(), []
    with gradlogz.monitor(model, every=1, thresholds=THRESHOLDS(None, None, None, None), writer=rows.append):
        train(model, batches(1))
        with torch.no_grad():
            model.blocks[1].attention.qkv.weight.mul_(1e9)
        train(model, batches(1))
    for row in rows:
        lines = str(row).splitlines()
        assert len({len(line) for line in lines}) == 1
        assert all(len(line.split()) == 7 for line in lines[1:])
