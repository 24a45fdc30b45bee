"""docs/contrastive.md starts with five tasks, each a training loop of under 40 lines, which another test runs."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "contrastive.md"
TASKS = ("Two-tower retrieval", "CLIP", "SimCLR", "Supervised", "Language-model head")


def test_each_task_is_one_short_training_loop():
    titles, *_ = PAGE.read_text().split("## One likelihood")
    sections = re.split(r"\n## ", titles)[1:]
    assert tuple(section.splitlines()[0] for section in sections) == TASKS
    for section in sections:
        (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
        assert len(code.splitlines()) < 40
        assert ".backward()" in code
        assert "optimizer.step()" in code
        assert "assert " in code
