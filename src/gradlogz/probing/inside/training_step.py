"""The training step in the name of a checkpoint."""

import re


def step_in(name: str) -> int | None:
    """Return the training step in a name: 500 for "checkpoint-500", "step500" or "global_step_500"; else None."""
    match = re.search(r"(?:step|checkpoint)s?[-_ =]?(\d+)", name, re.IGNORECASE)
    return int(match[1]) if match else None
