"""Two small runs that keep their statistics, and the model of another."""

import tempfile
from functools import cache
from pathlib import Path

from gradlogz.commands import probe
from support.divided_probes import text
from support.saved_models import gpt2, save


@cache
def kept_runs():
    """Folders of two runs of one model over different texts; beside them the texts, the model and another one."""
    place = Path(tempfile.mkdtemp())
    save(gpt2(3), place / "model")
    save(gpt2(4), place / "other")
    for name, span in (("a", (4, 0)), ("b", (8, 4))):
        (place / f"{name}.jsonl").write_text(text(*span))
        probe.command(
            [str(place / "model")], text=str(place / f"{name}.jsonl"), tokens=0, only=["entropy"], draws=2,
            keep_statistics=True, device="cpu", out=str(place / name),
        )  # fmt: skip
    return place / "a", place / "b"
