"""Hashes of a checkpoint: of its weights, however they are divided into files, and of its configuration.

    weights        sha256 over all tensors, sorted by name: name, dtype, shape, bytes
    configuration  sha256 over the settings in config.json that the model depends on, and the files of the tokenizer

Tensors are hashed as they are stored, before any conversion of dtype, and read one at a time. Training runs publish
checkpoints that repeat the weights of another step by mistake; their hashes show it.

Read next: checkpoint_names.py (several checkpoints), loading.py (the files of a checkpoint).
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .checkpoint_files import AGAIN, reading, weight_files
from .loading import Checkpoint

UNUSED = ("_name_or_path", "transformers_version")  # settings on which a model does not depend
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "merges.txt")


def weights_hash(checkpoint: Checkpoint) -> str:
    """Return the sha256 of the weights in the files of a checkpoint, in hexadecimal digits.

    Law: tests/laws/test_checkpoints_are_probed_once.py.
    """
    read = {"safetensors": _safetensors, "pickle": _pickle, "GGUF": _gguf}[checkpoint.format]
    digest = hashlib.sha256()
    what = f"the weights in {checkpoint.folder.name} are not readable"
    with reading(what, AGAIN, call="weights_hash", argument="checkpoint"):
        for name, kind, shape, content in read(checkpoint):
            digest.update(json.dumps([name, kind, shape]).encode())
            digest.update(content)
    return digest.hexdigest()


def config_hash(checkpoint: Checkpoint) -> str:
    """Return the sha256 of the configuration and of the tokenizer beside the weights, in hexadecimal digits.

    The name of the model and the version of transformers do not count. A GGUF file contains both.
    """
    digest = hashlib.sha256()
    if checkpoint.format == "GGUF":
        for name, content in _gguf_fields(checkpoint):
            digest.update(name.encode() + content)
    for name in ("config.json", *TOKENIZER_FILES):
        file = checkpoint.folder / name
        if file.is_file():
            digest.update(f"{name}\0".encode() + (_settings(file) if name == "config.json" else file.read_bytes()))
    return digest.hexdigest()


def _settings(file: Path) -> bytes:
    """Return the settings of a configuration in a fixed order; the bytes of the file if it is no JSON object."""
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        return file.read_bytes()
    return json.dumps({k: v for k, v in content.items() if k not in UNUSED}, sort_keys=True).encode()


def _gguf_fields(checkpoint: Checkpoint) -> Iterator[tuple[str, bytes]]:
    import gguf

    what = f"the settings in {checkpoint.gguf} are not readable"
    with reading(what, AGAIN, call="config_hash", argument="checkpoint"):
        reader = gguf.GGUFReader(checkpoint.folder / str(checkpoint.gguf))
    for name in sorted(reader.fields):
        if name != "general.name":
            yield name, b"".join(part.tobytes() for part in reader.fields[name].parts)


def _safetensors(checkpoint: Checkpoint) -> Iterator[tuple[str, str, list[int], Any]]:
    from safetensors import safe_open

    files = {file: safe_open(file, framework="pt") for file in weight_files(checkpoint.folder, "safetensors")}
    for name, file in sorted((name, file) for file, opened in files.items() for name in opened.keys()):  # noqa: SIM118
        yield _described(name, files[file].get_tensor(name))


def _pickle(checkpoint: Checkpoint) -> Iterator[tuple[str, str, list[int], Any]]:
    tensors: dict[str, Any] = {}
    for file in weight_files(checkpoint.folder, "pickle"):
        tensors |= torch.load(file, map_location="cpu", weights_only=True)
    for name in sorted(tensors):
        yield _described(name, tensors[name])


def _gguf(checkpoint: Checkpoint) -> Iterator[tuple[str, str, list[int], Any]]:
    import gguf

    reader = gguf.GGUFReader(checkpoint.folder / str(checkpoint.gguf))
    for tensor in sorted(reader.tensors, key=lambda each: each.name):
        yield tensor.name, tensor.tensor_type.name, [int(n) for n in tensor.shape], tensor.data.tobytes()


def _described(name: str, tensor: torch.Tensor) -> tuple[str, str, list[int], Any]:
    content = tensor.contiguous().flatten().view(torch.uint8).numpy()
    return name, str(tensor.dtype), list(tensor.shape), content
