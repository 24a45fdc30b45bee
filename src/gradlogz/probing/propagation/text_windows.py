"""Windows of a text for the clouds of each seed.

Read next: ../corpus/batching.py (the sample of windows), run_propagation.py, layer_iteration.py.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..._errors import InputValueError
from ..._typing import Tensor
from ..corpus.batching import Batch
from ..corpus.readers import batches_of, corpus_of
from ..passes.memory_limits import tokens_of_a_batch
from ..passes.placement import placed

TOKENS, LENGTH, SEEDS = 2048, 128, 5  # defaults


def text_batches(
    model: nn.Module,
    tokenizer: Any,
    texts: Any,
    *,
    tokens: int,
    length: int,
    seeds: int,
    seed: int,
    reads: str,
) -> list[list[Batch]]:
    """Return the batches of each seed: rows of one sample of the text, dealt in turn."""
    reading = batches_of(
        tokenizer, corpus_of(tokenizer, texts, reads=reads), tokens=tokens * seeds + length * seeds, length=length,
        padded=tokens_of_a_batch(model), seed=seed,
    )  # fmt: skip
    clouds: list[list[Batch]] = [[] for _ in range(seeds)]
    row = 0
    for batch in reading:
        rows = len(batch.keys)
        for each in range(seeds):
            dealt = [i for i in range(rows) if (row + i) % seeds == each]
            if dealt:
                clouds[each].append(placed(batch.rows(dealt), model))
        row += rows
    if row < seeds:
        problem = f"the text has {row} windows, fewer than the {seeds} seeds"
        raise InputValueError("propagate", "texts", problem, "Pass a longer text, or fewer seeds.")
    return clouds


def window_length(tokenizer: Any, length: int | None) -> int:
    """Return the largest number of tokens of a window: `length`, or 128 or the context length if that is smaller."""
    return length or min(LENGTH, getattr(tokenizer, "model_max_length", LENGTH))


def longest_row(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a batch with the most tokens, without padding."""
    mask = inputs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        return {name: t[:1] if isinstance(t, Tensor) and t.ndim else t for name, t in inputs.items()}
    row, n = int(mask.sum(-1).argmax()), int(mask.sum(-1).max())
    at = mask[row].nonzero().squeeze(-1)
    return {
        name: t[row : row + 1, at] if t.ndim == 2 and t.shape[1] == mask.shape[1] else t[row : row + 1]
        for name, t in inputs.items()
        if isinstance(t, Tensor) and t.ndim and n
    }
