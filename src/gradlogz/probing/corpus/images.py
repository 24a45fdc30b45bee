"""Images from a folder, one document each, preprocessed by the model's image processor.

Read next: inputs.py (their batches), readers.py (the reader for each kind of model).
"""

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..._errors import InputValueError, MissingPackageError
from ..._typing import Tensor

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")  # not by suffix alone: pillow runs Ghostscript on an EPS
PIXELS = 2**26  # of one image: 200 MB once it is decoded
TOGETHER = 16  # images in a batch, before it is divided into groups


def reads_images(processor: Any) -> bool:
    """Return whether the processor is an image processor."""
    return "pixel_values" in getattr(processor, "model_input_names", ())


def images(
    folder: str | os.PathLike[str], processor: Any, *, size: int = TOGETHER
) -> Iterator[tuple[list[str], dict[str, Tensor]]]:
    """Yield the names and model inputs of all images in a folder and its subfolders, in the order of their names."""
    try:
        from PIL import Image
    except ImportError:
        remedy = "Install it with: pip install pillow."
        raise MissingPackageError("images", "pillow", "pillow is not installed", remedy) from None
    path = Path(folder).expanduser()
    files = sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
    if not files:
        remedy = f"Pass a folder of files that end in {', '.join(SUFFIXES)}."
        raise InputValueError("images", "folder", f"the folder {str(path)!r} contains no images", remedy)
    for chunk in (files[i : i + size] for i in range(0, len(files), size)):
        # One by one: a small file may contain a large image.
        pixels = [processor(images=[_opened(Image, file)], return_tensors="pt")["pixel_values"] for file in chunk]
        yield [p.relative_to(path).as_posix() for p in chunk], {"pixel_values": torch.cat(pixels)}


def _opened(library: Any, file: Path) -> Any:
    """Return the image of a file, decoded; raise if it is none of FORMATS, damaged, or too large."""
    remedy = "Remove the file, or save it again."
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pillow, about large images
            image = library.open(file, formats=FORMATS)
        with image:
            size = image.width * image.height
            decoded = image.convert("RGB") if size <= PIXELS else None
    except Exception:  # each format of pillow has its own errors for damaged files
        raise InputValueError("images", "folder", f"{file.name} is not a readable image", remedy) from None
    if decoded is None:
        problem = f"{file.name} has {size:.3g} pixels, more than {PIXELS:.3g}"
        raise InputValueError("images", "folder", problem, "Remove the file, or save it smaller.")
    return decoded
