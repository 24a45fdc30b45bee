"""Choice of the reader for a model: the one file that lists every kind of data.

    a tokenizer            documents of text (text.py, smiles.py), in batches of tokens (batching.py)
    an image processor     images from a folder (images.py), in batches of inputs (inputs.py)
    None                   batches supplied by the caller (inputs.py)

A new kind of data needs one file in this folder and a branch in each of the two functions below.
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
    """Return the documents or inputs of a source, for a model with this tokenizer or processor.

    source: a file, a folder, "-" for standard input, or texts; for an image model a folder or batches; batches if there
        is no processor. None selects the help topics of Python, or built-in reactions if the model reads reactions.
    """
    if processor is not None and not reads_images(processor):
        return documents(source, reads=reads)
    if source is None:
        remedy = "Pass a folder of images (--text, or texts=), or batches such as {'pixel_values': images}."
        raise InputValueError("probe", "texts", "there is no default input for a model that does not read text", remedy)
    return images(source, processor) if isinstance(source, str | os.PathLike) else source


def batches_of(
    processor: Any, corpus: Iterable[Any], *, tokens: int | None, length: int | None, padded: int, seed: int
) -> Batches | Inputs:
    """Return the batches of a corpus: `tokens` tokens in windows of at most `length`, or all inputs unchanged."""
    if processor is None or reads_images(processor):
        return Inputs(corpus)
    return batches(corpus, processor, tokens=tokens, length=length, padded=padded, seed=seed)
