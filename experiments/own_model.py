"""A small language model with checkpoints through its training, for `gradlogz probe` and `gradlogz compare`.

    python -m experiments.own_model runs/own_model        about half a minute of one free core, 3 MB
    gradlogz probe runs/own_model/checkpoints --text runs/own_model/held_out.txt --tokens 4096      under a minute

It is the free, causal, pre-norm model of the extended form of `ascent`. checkpoints/checkpoint-STEP has the format of
transformers, at steps 0, 1, 2, 4, ... and 2000.

Read next: ascent/experiment.py (the model), exporting.py (the format).
"""

import argparse
from pathlib import Path
from typing import Any

from .ascent.experiment import EXTENDED, Cell, Settings, member
from .exporting import export_run
from .training import train

HELD_OUT = 200_000  # tokens of text that was not trained on


def make(folder: Path, settings: Settings = EXTENDED) -> Path:
    """Train the model, and return the folder of its checkpoints; what is complete is read."""
    from tokenizers import Tokenizer

    text = settings.text(folder)
    each = member(Cell("causal", "pre", "free"), settings.first_seed, settings, text, folder / "run")
    train(each.model, each.task, each.training, seed=each.seed, folder=each.folder)
    export_run(each.folder, folder / "checkpoints")
    tokenizer: Any = Tokenizer.from_file(str(text.folder / "tokenizer.json"))
    (folder / "held_out.txt").write_text(tokenizer.decode(text.held_out[:HELD_OUT].tolist()))
    return folder / "checkpoints"


def main() -> None:
    """Train the model and print what to do with it."""
    parser = argparse.ArgumentParser(prog="python -m experiments.own_model")
    parser.add_argument("folder", type=Path, help="where the run and its checkpoints are written")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    trained = max(make(folder).iterdir(), key=lambda checkpoint: int(checkpoint.name.partition("-")[2]))
    print(f"gradlogz probe {trained} --text {folder / 'held_out.txt'} --tokens 8192")


if __name__ == "__main__":
    main()
