"""Small probes in parts, computed by any engine, some of whose workers die or fail."""

from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from gradlogz.engine import InProcess
from gradlogz.probing.corpus.readers import corpus_of
from gradlogz.probing.divided.corpus_parts import DividedPass
from gradlogz.probing.divided.divided_pass import divided_measure
from gradlogz.probing.divided.model_source import ModelSource
from gradlogz.probing.measurement_file import STATISTICS, write_measurement
from gradlogz.probing.prediction_files import selected
from gradlogz.probing.run_probe import chosen
from support.saved_models import SIZES, save

NAMES = ("entropy", "linearity", "expansion")
UNTRAINED = str(Path(__file__).with_name("untrained.py"))  # a prediction with a random-weights baseline
FAULT = """
import os, signal
from pathlib import Path

from gradlogz.probing.inside.events import ForwardOutput
from gradlogz.probing.prediction import Prediction
from gradlogz.probing.predictions import entropy

MARKS, GROUP, FAULT = Path({marks!r}), {group}, {fault!r}


def statistics(event, batch_pass):
    if isinstance(event, ForwardOutput) and batch_pass.batch.group == GROUP:
        with (MARKS / "marks").open("a") as file:
            file.write("x")
        first = len((MARKS / "marks").read_text()) == 1
        if FAULT == "kill" or FAULT == "kill once" and first:
            os.kill(os.getpid(), signal.SIGKILL)
        if FAULT == "raise":
            raise ZeroDivisionError("an unlucky group")
    return None


PREDICTION = Prediction(
    __name__, entropy.DECLARATION, statistics, lambda *_: [], lambda *_: [], lambda rows: entropy.verdict([])
)
"""


def text(count, first=0):
    """Documents of different lengths, one per line."""
    lines = [" ".join(str((7 * i + 3 * j * j) % 60) for j in range(6 + (5 * i) % 23)) for i in range(first, count)]
    return "".join(f'{{"text": "{line}"}}\n' for line in lines)


def saved(place, *, layers=2, width=16, documents=24):
    """A folder with a small model and a text."""
    torch.manual_seed(0)
    config = GPT2Config(n_embd=width, n_layer=layers, n_head=2, n_positions=32, **SIZES)
    save(GPT2LMHeadModel(config).eval(), place / "model")
    (place / "text.jsonl").write_text(text(documents))
    return place


def with_fault(place, fault, group=0):
    """Write a prediction whose statistics kill the worker ("kill", "kill once") or raise ("raise") in one group."""
    path = place / "fault.py"
    path.write_text(FAULT.format(marks=str(place), group=group, fault=fault))
    return (str(path),)


def divided(
    place, folder, engine=None, *, names=NAMES, files=(), baseline=0.3, draws=2, dtype=None, parts=64, facts=None,
    restart=False, progress=None,
):  # fmt: skip
    """Measure the model of a folder in parts."""
    predictions = chosen(selected([*names, *(Path(file).stem for file in files)], files))
    every = tuple(p.name for p in predictions)
    source = ModelSource("m", str(place / "model"), None, "cpu", None, dtype, False, False, every, files, 0)
    loaded = source.load()
    return divided_measure(
        source, loaded, corpus_of(loaded.tokenizer, str(place / "text.jsonl")),
        DividedPass(None, None, 0, baseline, draws, parts), predictions=predictions, facts=facts or {},
        known=loaded.facts, folder=Path(folder), engine=engine or InProcess(), restart=restart, progress=progress,
    )  # fmt: skip


def content(outcome, folder):
    """Bytes of a measurement, without its times."""
    assert outcome.measured is not None
    folder.mkdir(exist_ok=True)
    assert write_measurement(folder, outcome.measured._replace(seconds={}), {}) == ""
    return (folder / STATISTICS).read_bytes()
