"""Every figure of the gallery exists and has one command, which runs a file of the repository or the command line."""

import re
import shlex
from pathlib import Path

import pytest

from gradlogz import cli

ROOT = Path(__file__).parents[2]
CARDS = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8").split("<figure markdown>")[1:]
NOT_FIGURES = {"report_phone.png", "logit_variance_loss.svg"}  # variants of figures that are shown


def test_there_are_at_least_twelve_figures_and_none_is_left_out():
    shown = {re.search(r"!\[[^]]+\]\(pictures/([^)]+)\)", card)[1] for card in CARDS}
    files = {path.name for path in (ROOT / "docs" / "pictures").iterdir() if path.suffix in {".svg", ".png"}}
    assert len(shown) == len(CARDS) >= 12
    assert shown == files - NOT_FIGURES


@pytest.mark.parametrize("card", CARDS, ids=lambda card: re.search(r"pictures/([^)]+)", card)[1])
def test_a_figure_has_one_command(card):
    (block,) = re.findall(r"```console\n(.*?)```", card, re.DOTALL)
    program, *words = shlex.split(block.strip())
    if program == "python":
        file = f"{words[1].replace('.', '/')}.py" if words[0] == "-m" else words[0]
        assert (ROOT / file).is_file()
    elif program == "make":
        (name,) = [word.removeprefix("NAME=") for word in words if word.startswith("NAME=")]
        assert words[0] == "experiment"
        assert (ROOT / "experiments" / name / "experiment.py").is_file()
    else:
        assert program == "gradlogz"
        assert words[0] in {command.name for command in cli.application().registered_commands}
