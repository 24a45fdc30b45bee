"""Text that is on this machine, and a BPE tokenizer trained on it.

    standard library    Python source and its comments                     the licence of Python (PSF-2.0)
    installed packages  source and documentation of installed packages     each its own; names and licences are recorded
    documents           /usr/share/doc of Debian                           each its own: the copyright file beside it

`corpus` collects files in a fixed order until it has enough, each once by its hash, and splits documents into training
and held-out text by their hash. Nothing is downloaded. The text is not part of this repository and is not distributed;
a manifest with the source, size and hash of every file is written beside it.

Read next: tasks.py (windows of the text), training.py.
"""

import gzip
import hashlib
import json
import sysconfig
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradlogz._errors import InputValueError

LARGEST, SMALLEST = 400_000, 500  # bytes of a file: tables of data are longer, stubs shorter
HELD_OUT = 20  # one document of so many
SUFFIXES = {".py", ".md", ".rst", ".txt"}
PAD_TOKEN, MASK_TOKEN = "[PAD]", "[MASK]"  # ids 0 and 1
MASK_ID = 1


class Document(NamedTuple):
    """A text, where it is, and the source it belongs to."""

    text: str
    path: str
    source: str


class TokenisedText(NamedTuple):
    """Ids [n] of training and held-out text, the folder of its tokenizer, and the size of the vocabulary."""

    train: Tensor
    held_out: Tensor
    folder: Path
    vocabulary: int


def standard_library() -> Iterator[Path]:
    """Files of Python's standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return (path for path in sorted(root.rglob("*.py")) if "site-packages" not in path.parts)


def debian_documents(root: Path = Path("/usr/share/doc")) -> Iterator[Path]:
    """Texts of Debian's documentation, compressed or not, without the copyright files (mostly equal licences)."""
    names = ("changelog", "README", "NEWS", "*.txt", "*.md", "*.rst")
    every = {path for name in names for path in root.rglob(f"{name}*") if path.is_file() and not path.is_symlink()}
    return iter(sorted(path for path in every if path.suffix in {*SUFFIXES, ".gz", ".Debian", ""}))


def installed_packages() -> Iterator[Path]:
    """Source and documentation of installed packages."""
    root = Path(sysconfig.get_paths()["purelib"])
    return (path for path in sorted(root.rglob("*")) if path.suffix in SUFFIXES and path.is_file())


SOURCES = {
    "standard library": standard_library,
    "documents": debian_documents,
    "installed packages": installed_packages,
}


def documents() -> Iterator[Document]:
    """Every text of every source once, in the order of SOURCES."""
    hashes = set()
    for source, paths in SOURCES.items():
        for path in paths():
            try:
                content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
                text = content.decode()
            except (OSError, EOFError, UnicodeDecodeError):
                continue
            digest = hashlib.sha256(content).digest()
            if SMALLEST <= len(content) <= LARGEST and digest not in hashes:
                hashes.add(digest)
                yield Document(text, str(path), source)


def corpus(folder: Path, *, megabytes: float, vocabulary: int) -> TokenisedText:
    """Collect text, train a tokenizer on it and tokenise it; a folder that holds the same is read.

    Args:
        folder: where tokenizer.json, train.safetensors and manifest.json are.
        megabytes: of text; fewer files than that are an error.
        vocabulary: number of BPE tokens, with [PAD] and [MASK].
    """
    from safetensors.torch import load_file, save_file
    from tokenizers import Tokenizer

    wanted = {"megabytes": megabytes, "vocabulary": vocabulary}
    manifest = folder / "manifest.json"
    if manifest.exists() and json.loads(manifest.read_text())["wanted"] == wanted:
        ids = load_file(folder / "ids.safetensors")
        return TokenisedText(ids["train"], ids["held_out"], folder, vocabulary)
    chosen, size = [], 0
    for document in documents():
        chosen.append(document)
        size += len(document.text.encode())
        if size >= megabytes * 1e6:
            break
    else:
        problem = f"megabytes must be at most {size / 1e6:.1f}, the text on this machine, got {megabytes:g}"
        raise InputValueError("corpus", "megabytes", problem, "Ask for less, or install packages with documentation.")
    folder.mkdir(parents=True, exist_ok=True)
    parts = [[d for d in chosen if _is_held_out(d) == held_out] for held_out in (False, True)]
    tokenizer: Tokenizer = _trained([d.text for d in parts[0]], vocabulary)
    tokenizer.save(str(folder / "tokenizer.json"))
    train, held_out = (_ids(tokenizer, part) for part in parts)
    save_file({"train": train, "held_out": held_out}, folder / "ids.safetensors")
    record = {"wanted": wanted, "bytes": size, "tokens": len(train) + len(held_out), **_facts(chosen)}
    manifest.write_text(json.dumps(record, indent=1) + "\n")
    return TokenisedText(train, held_out, folder, vocabulary)


def _trained(texts: list[str], vocabulary: int) -> Any:
    """Byte-level BPE with [PAD] and [MASK] as the first two tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD_TOKEN, MASK_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _ids(tokenizer: Any, part: list[Document]) -> Tensor:
    encoded = tokenizer.encode_batch([document.text for document in part], add_special_tokens=False)
    return torch.cat([torch.tensor(each.ids, dtype=torch.int32) for each in encoded])


def _is_held_out(document: Document) -> bool:
    return hashlib.sha256(document.text.encode()).digest()[0] % HELD_OUT == 0


def _facts(chosen: list[Document]) -> dict[str, Any]:
    """Sizes by source, files with their hashes, and the licences that installed packages name."""
    sizes = {source: sum(len(d.text.encode()) for d in chosen if d.source == source) for source in SOURCES}
    files = [{"path": d.path, "sha256": hashlib.sha256(d.text.encode()).hexdigest()} for d in chosen]
    licences = {}
    for distribution in metadata.distributions():
        fields: Any = distribution.metadata
        named = fields.get("License-Expression") or fields.get("License") or "not stated"
        licences[fields["Name"]] = named.splitlines()[0][:80]
    return {"bytes by source": sizes, "licences of packages": dict(sorted(licences.items())), "files": files}
