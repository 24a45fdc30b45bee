"""Hash of the weights in a checkpoint: equal for equal weights, however they are divided into files.

    sha256 over all tensors, sorted by name: name, dtype, shape, bytes

Tensors are hashed as they are stored, before any conversion of dtype, and read one at a time. Training runs publish
checkpoints that repeat the weights of another step by mistake; their hashes show it.

Read next: checkpoint_names.py (several checkpoints), loading.py (the files of a checkpoint).
"""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import torch

from ..._errors import InputValueError
from .loading import Checkpoint, first_line, reading_errors


def weights_hash(checkpoint: Checkpoint) -> str:
    """Return the sha256 of the weights in the files of a checkpoint, in hexadecimal digits.

    Law: tests/laws/test_checkpoints_are_probed_once.py.
    """
    read = {"safetensors": _safetensors, "pickle": _pickle, "GGUF": _gguf}[checkpoint.format]
    digest = hashlib.sha256()
    try:
        for name, kind, shape, content in read(checkpoint):
            digest.update(json.dumps([name, kind, shape]).encode())
            digest.update(content)
    except reading_errors() as error:
        problem = f"the weights in {checkpoint.folder.name} are not readable ({first_line(error)})"
        raise InputValueError("weights_hash", "checkpoint", problem, "Copy or download the checkpoint again.") from None
    return digest.hexdigest()


def _safetensors(checkpoint: Checkpoint) -> Iterator[tuple[str, str, list[int], Any]]:
    from safetensors import safe_open

    files = {file: safe_open(file, framework="pt") for file in _files(checkpoint, "model.safetensors")}
    for name, file in sorted((name, file) for file, opened in files.items() for name in opened.keys()):  # noqa: SIM118
        yield _described(name, files[file].get_tensor(name))


def _pickle(checkpoint: Checkpoint) -> Iterator[tuple[str, str, list[int], Any]]:
    tensors: dict[str, Any] = {}
    for file in _files(checkpoint, "pytorch_model.bin"):
        tensors |= torch.load(file, map_location="cpu", weights_only=True)
    for name in sorted(tensors):
        yield _described(name, tensors[name])


def _gguf(checkpoint: Checkpoint) -> Iterator[tuple[str, str, list[int], Any]]:
    import gguf

    reader = gguf.GGUFReader(checkpoint.folder / str(checkpoint.gguf))
    for tensor in sorted(reader.tensors, key=lambda each: each.name):
        yield tensor.name, tensor.tensor_type.name, [int(n) for n in tensor.shape], tensor.data.tobytes()


def _files(checkpoint: Checkpoint, name: str) -> list[str]:
    """Return the one file of the weights, or the files that the index of a sharded checkpoint lists."""
    single, index = checkpoint.folder / name, checkpoint.folder / f"{name}.index.json"
    if single.is_file() or not index.is_file():
        return [str(single)]
    return sorted({str(checkpoint.folder / file) for file in json.loads(index.read_text())["weight_map"].values()})


def _described(name: str, tensor: torch.Tensor) -> tuple[str, str, list[int], Any]:
    content = tensor.contiguous().flatten().view(torch.uint8).numpy()
    return name, str(tensor.dtype), list(tensor.shape), content
