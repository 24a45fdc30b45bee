"""Images from a folder, one document each, preprocessed by the model's image processor.

Read next: inputs.py (their batches), readers.py (the reader for each kind of model).
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..._errors import InputValueError, MissingPackageError
from ..._typing import Tensor

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
TOGETHER = 16  # images in a batch, before it is divided into groups


def reads_images(processor: Any) -> bool:
    """Return whether the processor is an image processor."""
    return "pixel_values" in getattr(processor, "model_input_names", ())


def images(
    folder: str | os.PathLike[str], processor: Any, *, size: int = TOGETHER
) -> Iterator[tuple[list[str], dict[str, Tensor]]]:
    """Yield the names and model inputs of all images in a folder and its subfolders, in the order of their names."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        remedy = "Install it with: pip install pillow."
        raise MissingPackageError("images", "pillow", "pillow is not installed", remedy) from None
    path = Path(folder).expanduser()
    files = sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES)
    if not files:
        remedy = f"Pass a folder of files that end in {', '.join(SUFFIXES)}."
        raise InputValueError("images", "folder", f"the folder {str(path)!r} contains no images", remedy)
    for chunk in (files[i : i + size] for i in range(0, len(files), size)):
        opened = []
        for file in chunk:
            try:
                with Image.open(file) as image:
                    opened.append(image.convert("RGB"))
            except (OSError, UnidentifiedImageError):
                remedy = "Remove the file, or save it again."
                raise InputValueError("images", "folder", f"{file.name} is not a readable image", remedy) from None
        features = processor(images=opened, return_tensors="pt")
        yield [p.relative_to(path).as_posix() for p in chunk], {"pixel_values": features["pixel_values"]}
