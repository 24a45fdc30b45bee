"""docs/contrastive.md starts with five tasks, each a program of under 40 lines that trains, and that runs alone."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "contrastive.md"
TASKS = ("Two-tower retrieval", "CLIP", "SimCLR", "Supervised", "Language-model head")


def sections():
    tasks, *_ = PAGE.read_text().split("## One likelihood")
    return {section.splitlines()[0]: section for section in re.split(r"\n## ", tasks)[1:]}


def test_the_page_starts_with_the_tasks():
    assert tuple(sections()) == TASKS


@pytest.mark.parametrize("task", TASKS)
def test_each_task_is_one_short_training_loop(task):
    (code,) = re.findall(r"```python\n(.*?)```", sections()[task], re.DOTALL)
    assert len(code.splitlines()) < 40
    assert ".backward()" in code
    assert "optimizer.step()" in code
    assert "assert " in code
    exec(compile(code, task, "exec"), {})
