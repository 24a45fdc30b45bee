"""Which reader fits a model: the one place that knows every kind of data.

    a tokenizer            documents of text (text.py, smiles.py), in batches of tokens (batching.py)
    an image processor     images of a folder (images.py), in batches of inputs (inputs.py)
    None                   batches as they are (inputs.py)

A new kind of data is one file beside this one, and a branch in each of the two functions below.
"""

import os
from collections.abc import Iterable
from typing import Any

from ..._errors import InputValueError
from .batching import Batches, batches
from .images import images, reads_images
from .inputs import Inputs
from .text import documents


def corpus_of(processor: Any, source: Any, *, reads: str = "text") -> Iterable[Any]:
    """The documents or inputs of a source, for a model with this tokenizer or processor.

    source: a file, a folder, - for standard input, or texts; for images a folder or batches; batches without a
        processor. None: the prose that comes with Python, or reactions for a model that reads those.
    """
    if processor is not None and not reads_images(processor):
        return documents(source, reads=reads)
    if source is None:
        fact, remedy = (
            "none",
            "Pass a folder of images (--text, or texts=), or batches such as {'pixel_values': images}.",
        )
        raise InputValueError(
            "probe", "source", f"a model that reads no text must be given its inputs, got {fact}", remedy
        )
    return images(source, processor) if isinstance(source, str | os.PathLike) else source


def batches_of(
    processor: Any, corpus: Iterable[Any], *, tokens: int | None, length: int | None, padded: int, seed: int
) -> Batches | Inputs:
    """The batches of a corpus: `tokens` of them in windows of `length`, or all inputs as they are."""
    if processor is None or reads_images(processor):
        return Inputs(corpus)
    return batches(corpus, processor, tokens=tokens, length=length, padded=padded, seed=seed)
