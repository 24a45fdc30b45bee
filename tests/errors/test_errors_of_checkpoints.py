"""Checkpoints, own predictions, tables and hook names: what is wrong is said in one sentence."""

import atexit
import importlib.util
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from unittest import mock

import torch

import gradlogz
from gradlogz.commands import outputs, probe
from gradlogz.commands.outputs import check_tables
from gradlogz.probing.inside import loading
from gradlogz.probing.inside.checkpoint_names import checkpoints_of
from gradlogz.probing.inside.loading import Checkpoint, load
from gradlogz.probing.inside.random_models import with_random_weights
from gradlogz.probing.inside.weights_hash import config_hash, weights_hash
from gradlogz.probing.prediction_files import prediction_in, selected
from support.architectures import ARCHITECTURES
from support.error_form import each_of, refused
from support.saved_models import gpt2, save

HERE = Path(tempfile.mkdtemp(prefix="gradlogz-errors-"))
atexit.register(shutil.rmtree, HERE, ignore_errors=True)


def file(name, text):
    (HERE / name).write_text(text)
    return HERE / name


@cache
def model():
    return save(gpt2(), HERE / "model")


def of_another_package():
    """A folder whose weights are not those of the package that is named."""
    package = loading.PACKAGES["minilm"]._replace(folder="model")
    module = mock.Mock(origin=str(model().parent / "__init__.py"))
    with (
        mock.patch.dict(loading.PACKAGES, minilm=package),
        mock.patch.object(loading, "find_spec", return_value=module),
    ):
        loading.locate("minilm")


def twice():
    for folder in ("a", "b"):
        save(gpt2(), HERE / folder / "step5")
    return checkpoints_of([str(HERE / "a" / "step5"), str(HERE / "b" / "step5")])


def damaged():
    folder = HERE / "damaged"
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes((model() / "model.safetensors").read_bytes()[:-9])
    return weights_hash(Checkpoint(folder, "safetensors"))


def cut():
    (HERE / "cut.gguf").write_bytes(b"GGUF\3\0\0\0")
    return config_hash(Checkpoint(HERE, "GGUF", "cut.gguf"))


def quantised():
    folder = save(gpt2(), HERE / "quantised")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (folder / "config.json").write_text(json.dumps(config))
    with mock.patch("transformers.quantizers.quantizer_bnb_8bit.is_bitsandbytes_available", return_value=False):
        load(folder, device="cpu")


def two_devices():
    places = {torch.device("cuda", 0), torch.device("cuda", 1)}
    with mock.patch.object(loading, "devices_of", return_value=places):
        load(model(), device_map="auto")


def offloaded():
    return load(model(), device_map=OFFLOADED).model


def without_polars():
    find = importlib.util.find_spec
    with mock.patch.object(outputs, "find_spec", lambda name: None if name == "polars" else find(name)):
        check_tables("report", "rows.parquet")


def crossing():
    pair = next(each for each in ARCHITECTURES if each.kind == "pair" and each.name == "bart")
    return pair.build(), pair.inputs()


def observed():
    network, inputs = crossing()
    with torch.no_grad(), gradlogz.observe(network) as observation:
        network(**inputs)
    return observation


NO_PREDICTION = file("nothing.py", "x = 1\n")
BROKEN = file("broken.py", "\n\nraise KeyError('a')\n")
UNREADABLE = file("unreadable.py", "def f(:\n")
TIE = file(
    "tie.py", "from gradlogz.probing.predictions import known_predictions\nPREDICTION = known_predictions()[2]\n"
)
OWN = file(
    "own_tie.py",
    "import dataclasses\nfrom gradlogz.probing.predictions import known_predictions\n"
    "PREDICTION = dataclasses.replace(known_predictions()[2], name='own_tie')\n",
)

OFFLOADED = {"lm_head": "cpu", "transformer.h.1": "disk"} | {
    f"transformer.{part}": "cpu" for part in ("wte", "wpe", "drop", "h.0", "ln_f")
}

ERRORS = [
    (ValueError, "load: name", "not those that", of_another_package),
    (ValueError, "probe: --prediction", "existing", lambda: prediction_in(HERE / "none.py")),
    (ValueError, "probe: --prediction", "line 3, KeyError", lambda: prediction_in(BROKEN)),
    (ValueError, "probe: --prediction", "line 1, SyntaxError", lambda: prediction_in(UNREADABLE)),
    (TypeError, "probe: --prediction", "PREDICTION", lambda: prediction_in(NO_PREDICTION)),
    (ValueError, "probe: --prediction", "another", lambda: selected(None, [str(TIE)])),
    (ValueError, "probe: --only", "luck", lambda: selected(["ascent,luck"], [])),
    (ValueError, "probe: --only", "own_tie", lambda: selected(["ascent"], [str(OWN)])),
    (ValueError, "probe: --only", "no prediction", lambda: selected([" , "], [])),
    (ImportError, "report: polars", "installed", without_polars),
    (ValueError, "probe: model", "step5", twice),
    (ValueError, "probe: model", "step7", lambda: checkpoints_of([f"{model().parent}@step7"])),
    (ValueError, "probe: --text", "once", lambda: probe.command(model=["a", "b"], text="-")),
    (ValueError, "probe: --text", "again", lambda: probe.command(model=["minilm"], text="-", intervene="all")),
    (ValueError, "probe: --intervene", "several", lambda: probe.command(model=["a", "b"], intervene="all")),
    (ValueError, "weights_hash: checkpoint", "damaged", damaged),
    (ValueError, "config_hash: checkpoint", "cut.gguf", cut),
    (ValueError, "load: device_map", "together", lambda: load(model(), device="cpu", device_map="auto")),
    (ValueError, "load: device_map", "JSON", lambda: load(model(), device_map="{x")),
    (ValueError, "load: device_map", "one device", two_devices),
    (ValueError, "load: name", "device map", lambda: load(model(), device_map=OFFLOADED | {"transformer.wte": "disk"})),
    (ValueError, "with_random_weights: model", "offloaded", lambda: with_random_weights(offloaded(), seed=0)),
    (ValueError, "load: revision", "hub", lambda: load(model(), revision="step5")),
    (ValueError, "load: name", "quantised", quantised),
    (ValueError, "Captured.hooks: model", "cross-attention", lambda: gradlogz.capture(*crossing()).hooks()),
    (ValueError, "Observation.hooks: model", "cross-attention", lambda: observed().hooks()),
]


@each_of(ERRORS)
def test_what_is_wrong_is_said(refusal):
    refused(refusal)
