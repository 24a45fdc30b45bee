"""Numbers of the blocks of a model, from the names of its layers; TransformerLens names tensors by them."""

import re
from collections.abc import Sequence


def block_numbers(layers: Sequence[str]) -> list[int]:
    """Return the number of the block of each layer: the one in its name, or its order if they are not distinct."""
    numbers = [re.findall(r"(?:^|\.)(\d+)(?=[.#]|$)", layer) for layer in layers]
    distinct = {tuple(each) for each in numbers}
    if all(len(each) == 1 for each in numbers) and len(distinct) == len(layers):
        return [int(each[0]) for each in numbers]
    return list(range(len(layers)))
