"""Every reader, on thousands of damaged and hostile files: a result or a documented error, no hang, bounded memory.

The cases run in another process, since a limit of memory is one of a process; support/fuzzing.py has them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradlogz.probing.corpus.images import PIXELS, images
from gradlogz.probing.inside import gguf_header
from gradlogz.probing.inside.loading import load
from support.fuzzing import READERS, gguf_sample
from support.saved_models import gpt2, save

TESTS = Path(__file__).parents[1]


class Processor:
    """An image processor that must not be reached."""

    model_input_names = ("pixel_values",)


def fuzzed(count, seed, place, timeout):
    command = [sys.executable, "-m", "support.fuzzing", str(count), seed, str(place)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=timeout)
    assert process.returncode == 0, process.stderr[-3000:]
    result = json.loads(process.stdout.splitlines()[-1])
    assert not result["failures"], result["failures"][:3]
    assert set(result["outcomes"]) == set(READERS)
    assert sum(sum(each.values()) for each in result["outcomes"].values()) >= count
    for name, outcomes in result["outcomes"].items():
        assert set(outcomes) <= {"read", "refused"}, name
        assert "refused" in outcomes or name == "names", name  # the damage is real
    assert max(result["slowest"].values()) < 10


def test_two_thousand_files_are_answered(tmp_path):
    fuzzed(2000, "suite", tmp_path, 600)


@pytest.mark.long
def test_a_hundred_thousand_files_are_answered(tmp_path):
    fuzzed(100_000, "long", tmp_path, 7200)


GGUF_FIELDS = ["general.architecture", *(f"llama.{name}" for name in (*gguf_header.REQUIRED, gguf_header.NORMS[0]))]


@pytest.mark.parametrize("name", GGUF_FIELDS)
def test_a_gguf_file_without_a_size_of_its_model_is_refused(tmp_path, name):
    """Transformers would take that of its default model, such as 32 layers."""
    gguf_sample(tmp_path / "model")
    file = tmp_path / "model" / "model.gguf"
    load(file, device="cpu")
    data = file.read_bytes()
    missing = "block_count" if name == "general.architecture" else name.removeprefix("llama.")
    for other in (name[:-1] + "X", "Q" + name[1:]):
        file.write_bytes(data.replace(name.encode(), other.encode(), 1))
        with pytest.raises(ValueError, match=rf"no field ARCHITECTURE\.{missing}"):
            load(file, device="cpu")


# Images -------------------------------------------------------------------------------------------------------------


def test_a_picture_that_is_a_program_is_not_run(tmp_path, monkeypatch):
    """An EPS is a program for Ghostscript, whatever its suffix."""
    (tmp_path / "x.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n")
    monkeypatch.setattr(subprocess, "Popen", None)
    monkeypatch.setattr(subprocess, "check_call", None)
    with pytest.raises(ValueError, match=r"x\.png is not a readable image"):
        next(images(tmp_path, Processor()))


@pytest.mark.parametrize("side", [9000, 20_000])
def test_a_small_file_with_a_large_picture_is_refused(tmp_path, side):
    from PIL import Image

    assert side**2 > PIXELS
    Image.new("1", (side, side)).save(tmp_path / "x.png")
    with pytest.raises(ValueError, match=r"x\.png"):
        next(images(tmp_path, Processor()))


def test_damaged_pictures_and_pipes_are_refused(tmp_path):
    from PIL import Image

    Image.new("RGB", (40, 40), "red").save(tmp_path / "x.png")
    data = (tmp_path / "x.png").read_bytes()
    for end in range(0, len(data) // 2, 3):
        (tmp_path / "x.png").write_bytes(data[:end])
        with pytest.raises(ValueError, match=r"x\.png"):
            next(images(tmp_path, Processor()))
    (tmp_path / "x.png").unlink()
    os.mkfifo(tmp_path / "y.png")
    with pytest.raises(ValueError, match="no images"):
        next(images(tmp_path, Processor()))


# Models -------------------------------------------------------------------------------------------------------------


def test_a_configuration_chooses_no_kernel(tmp_path):
    folder = save(gpt2(), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config |= {"attn_implementation": "kernels-community/flash-attn", "auto_map": {"A": "a.B"}}
    (folder / "config.json").write_text(json.dumps(config))
    loaded = load(folder, device="cpu")
    assert loaded.model.config._attn_implementation in ("sdpa", "eager")


def test_the_cache_of_the_hub_has_links(tmp_path):
    """As huggingface_hub stores models: files named by their hashes, and links to them."""
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0a1b"
    save(gpt2(), snapshot)
    blobs.mkdir()
    for number, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(f"../../blobs/{number}")
    assert load(snapshot, device="cpu").facts["layers"] == 2


def test_a_truncated_gguf_file_is_named(tmp_path):
    gguf_sample(tmp_path / "model")
    data = (tmp_path / "model" / "model.gguf").read_bytes()
    for end in (0, 3, 23, 24, 100, len(data) // 4):
        (tmp_path / "model" / "model.gguf").write_bytes(data[:end])
        with pytest.raises(ValueError, match=r"model\.gguf is damaged"):
            load(tmp_path / "model" / "model.gguf", device="cpu")
