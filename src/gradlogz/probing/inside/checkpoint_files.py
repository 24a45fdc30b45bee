"""Files of a model, checked before a library reads them: paths, the index of shards, and sizes that a file declares.

    paths     every file that is read is a regular file of the folder; links may lead to files of the folder, or of the
              hub's cache if the folder is in it
    index     a shard is a name without a path and has the suffix of its format, so that no pickle comes with an index
    sizes     numbers of layers, units and labels are at most what the bytes of the weights can hold

Model files come from strangers. A library that builds a model of 10^9 layers, or opens /dev/zero, does not end.

Read next: gguf_header.py (GGUF files), loading.py (the model).
"""

import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..._errors import InputError, InputValueError
from .gguf_header import gguf_problem

SINGLE = {"safetensors": "model.safetensors", "pickle": "pytorch_model.bin"}
READ = (".json", ".txt", ".model", ".vocab", ".jinja", ".safetensors", ".bin", ".py", ".md")
LARGEST_JSON = 2**29  # bytes; tokenizers of 250 000 tokens have 20 MB
LARGEST_HEADER = 10**8  # bytes; the limit of safetensors
LABELS = re.compile(r"^num_labels$")  # of which the configuration makes a dictionary, whatever the weights
LAYERS = re.compile(r"layers?$|^depths?$|blocks?$|^attention_types$|stages?$")
POSITIONS = re.compile(r"position|_length$|_len$|^n_ctx$")
SIZES = re.compile(r"^(num|n|d)_|_(size|dim|dims|heads|experts|ratio|rank|channels)$|^dim$")
FEWEST_LAYERS, FEWEST_POSITIONS, FEWEST = 256, 2**20, 2**16  # allowed for any checkpoint: layers may share weights
MOST_LABELS = 10**5
# Settings that choose code, or data elsewhere, and that a measurement does not need.
REFUSED = (
    "attn_implementation", "_attn_implementation", "_attn_implementation_internal", "_attn_implementation_autoset",
    "experts_implementation", "_experts_implementation", "_experts_implementation_internal", "auto_map",
    "use_kernels", "kernel_config", "num_labels", "id2label", "label2id",
)  # fmt: skip
AGAIN = "Copy or download the checkpoint again."


def check_checkpoint(folder: Path, kind: str, gguf: str | None) -> None:
    """Raise if a file of a checkpoint is none of the folder, is damaged, or declares more than it has."""
    roots = _roots(folder)
    # Libraries choose by name what they read, so that every such file of the folder counts.
    suffixes = READ if gguf is None else (".json",)
    for file in (file for file in folder.iterdir() if file.suffix in suffixes or file.name == gguf):
        _check_path(file, roots)
        if file.suffix == ".json" and file.stat().st_size > LARGEST_JSON:
            raise InputValueError("load", "name", f"{file.name} has more than {LARGEST_JSON} bytes", AGAIN)
    if (folder / "adapter_config.json").exists():
        problem = f"{folder.name} has adapter_config.json: an adapter of a model that is elsewhere"
        raise InputValueError("load", "name", problem, "Merge the adapter into its model, and save the result.")
    if gguf is not None:
        problem, _ = gguf_problem(folder / gguf)
        if problem:
            raise InputValueError("load", "name", f"{gguf} is damaged: {problem}", AGAIN)
    else:
        weight_files(folder, kind)
    _check_tokenizer(folder / "tokenizer_config.json")


def weight_files(folder: Path, kind: str) -> list[Path]:
    """Return the one file of the weights, or the shards that an index lists; raise if one is not of the folder."""
    name = SINGLE[kind]
    index = folder / f"{name}.index.json"
    if (folder / name).is_file() or not index.is_file():
        return [folder / name]
    with reading(f"{index.name} is not a list of shards", AGAIN):
        names = {str(file) for file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    for file in sorted(names):
        if Path(file).name != file or not file.endswith(Path(name).suffix) or not (folder / file).is_file():
            problem = f"{index.name} names the shard {file[:80]!r}, which is no {Path(name).suffix} file of the folder"
            raise InputValueError("load", "name", problem, AGAIN)
    return [folder / file for file in sorted(names)]


def checked_config(content: Any, folder: Path, kind: str, gguf: str | None) -> dict[str, Any]:
    """Return a configuration without settings that choose code; raise if its sizes exceed the weights."""
    if not isinstance(content, Mapping):
        problem = f"config.json has a {type(content).__name__} in place of an object"
        raise InputValueError("load", "name", problem, AGAIN)
    files = [folder / gguf] if gguf is not None else weight_files(folder, kind)
    size = sum(file.stat().st_size for file in files if file.is_file())
    tensors = sum(_tensors(file) for file in files if file.is_file())
    limits = {
        LABELS: (MOST_LABELS, "no more of them"),
        LAYERS: (tensors if gguf is not None else max(tensors, FEWEST_LAYERS), f"{tensors} tensors"),
        POSITIONS: (max(size, FEWEST_POSITIONS), f"{size} bytes"),
        SIZES: (max(size, FEWEST), f"{size} bytes"),
    }
    for name, number in _numbers(content):
        limit, fact = next((limits[pattern] for pattern in limits if pattern.search(name)), (None, ""))
        if limit is not None and number > limit:
            problem = f"config.json declares {name} {str(number)[:20]}, but the weights have {fact}"
            raise InputValueError("load", "name", problem, "Check that config.json belongs to this checkpoint.")
    return _without_code(content)


@contextmanager
def reading(
    what: str,
    remedy: str,
    *,
    call: str = "load",
    argument: str = "name",
    passing: type[Exception] = InputError,
) -> Iterator[None]:
    """Context of calls of other libraries on files of strangers: any error of theirs becomes one sentence.

    Their types are many (struct.error, OverflowError, StrictDataclassFieldValidationError, a panic of Rust), and none
    of this package's own code runs here. passing: errors of this type stay as they are.
    """
    try:
        yield
    except (InputError, passing):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise InputValueError(call, argument, f"{what} ({first_line(error)})", remedy) from None


def first_line(error: BaseException) -> str:
    """Return the type and the first line of another library's error, for use inside an error message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = (lines[0] if lines else type(error).__name__).rstrip(".").replace("; got", ", got")
    return f"{type(error).__name__}: {text[:160]}"


def _roots(folder: Path) -> list[Path]:
    """Folders that may hold the files of a model: its own, and the store of the hub's cache beside its snapshots."""
    real = folder.resolve()
    return [real, *([real.parents[1] / "blobs"] if real.parent.name == "snapshots" else [])]


def _check_path(file: Path, roots: list[Path]) -> None:
    try:
        real = file.resolve(strict=True)
    except (OSError, RuntimeError):
        raise InputValueError("load", "name", f"{file.name} is a link to nothing", "Remove it.") from None
    if not (real.is_file() or real.is_dir()):
        raise InputValueError("load", "name", f"{file.name} is neither a file nor a folder", "Remove it.")
    if real.is_file() and not any(root in real.parents for root in roots):
        problem = f"{file.name} is a link to a file outside of the folder"
        raise InputValueError("load", "name", problem, "Copy the file into the folder.")


def _check_tokenizer(file: Path) -> None:
    """Raise if the settings of a tokenizer name files elsewhere."""
    if not file.is_file():
        return
    with reading(f"{file.name} is not readable", AGAIN):
        content = json.loads(file.read_text(encoding="utf-8"))
    for name, value in content.items() if isinstance(content, dict) else ():
        if name.endswith("_file") and isinstance(value, str) and Path(value).name != value:
            problem = f"{file.name} names the file {value[:80]!r}, which is not of the folder"
            raise InputValueError("load", "name", problem, f"Remove {name}.")


def _tensors(file: Path) -> int:
    """Return the number of tensors in a file of weights."""
    if file.suffix == ".gguf":
        return gguf_problem(file)[1]
    if file.suffix != ".safetensors":
        return len(zipfile.ZipFile(file).namelist()) if zipfile.is_zipfile(file) else FEWEST_LAYERS
    with file.open("rb") as content:
        length = int.from_bytes(content.read(8), "little")
        if length > min(LARGEST_HEADER, file.stat().st_size - 8):
            raise InputValueError("load", "name", f"{file.name} declares a header longer than itself", AGAIN)
        return content.read(length).count(b'"data_offsets"')


def _numbers(content: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a configuration, at any depth, with the last name above them."""
    if isinstance(content, Mapping):
        for key, value in content.items():
            yield from _numbers(value, str(key), depth + 1) if depth < 50 else ()
    elif isinstance(content, list | tuple):
        for value in content:
            yield from _numbers(value, name, depth + 1) if depth < 50 else ()
    elif isinstance(content, int | float) and not isinstance(content, bool):
        yield name, content


def _without_code(content: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_code(value) if isinstance(value, Mapping) and key.endswith("config") else value
        for key, value in content.items()
        if key not in REFUSED
    }
