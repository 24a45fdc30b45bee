"""Images of a folder, one document each, through the image processor of the model.

Read next: inputs.py (their batches), readers.py (which reader fits a model).
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..._errors import InputValueError, MissingPackageError
from ..._typing import Tensor

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
TOGETHER = 16  # images of a batch, before it is told apart into groups


def reads_images(processor: Any) -> bool:
    """Whether this is what makes the inputs of a model of images."""
    return "pixel_values" in getattr(processor, "model_input_names", ())


def images(
    folder: str | os.PathLike[str], processor: Any, *, size: int = TOGETHER
) -> Iterator[tuple[list[str], dict[str, Tensor]]]:
    """Names and inputs of all images of a folder, read to the bottom in the order of names."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        remedy = "Install it with: pip install pillow."
        raise MissingPackageError("images", "pillow", "pillow must be installed, got none", remedy) from None
    path = Path(folder).expanduser()
    files = sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES)
    if not files:
        remedy = f"They end in {', '.join(SUFFIXES)}."
        raise InputValueError(
            "images", "source", f"source must be a folder that holds images, got {str(path)!r}", remedy
        )
    for some in (files[i : i + size] for i in range(0, len(files), size)):
        opened = []
        for file in some:
            try:
                with Image.open(file) as image:
                    opened.append(image.convert("RGB"))
            except (OSError, UnidentifiedImageError):
                remedy = "Leave it out, or save it again."
                raise InputValueError(
                    "images", "folder", f"every image must be readable, got {file.name}", remedy
                ) from None
        found = processor(images=opened, return_tensors="pt")
        yield [p.relative_to(path).as_posix() for p in some], {"pixel_values": found["pixel_values"]}
