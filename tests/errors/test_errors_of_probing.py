"""Loading models, reading texts, holding findings and keeping runs: what is wrong is said in one sentence."""

import atexit
import contextlib
import functools
import io
import json
import os
import pickle
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import transformers
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from torch import nn

from gradlogz.probing.corpus.batching import batches
from gradlogz.probing.corpus.text import Document, documents
from gradlogz.probing.inside.loading import load
from gradlogz.probing.inside.random_models import with_random_weights
from gradlogz.probing.runs.findings import Claim, Finding, Findings
from gradlogz.probing.runs.findings_file import read_findings
from gradlogz.probing.runs.records import Declaration
from gradlogz.probing.runs.run_folder import Run, check_place, read_run, write_run
from support.error_form import check_form, each_of, refused

HERE = Path(tempfile.mkdtemp(prefix="gradlogz-errors-"))
atexit.register(shutil.rmtree, HERE, ignore_errors=True)
BERT = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


class Unset(nn.Module):
    """A parameter without a method that sets it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))


class Trap:
    """Opens a file when it is unpickled."""

    def __reduce__(self):
        return open, (str(HERE / "sprung"), "w")


# Models -------------------------------------------------------------------------------------------------------------


@functools.cache
def saved():
    """A folder with a small BERT in it."""
    model = transformers.BertModel(transformers.BertConfig(**BERT))
    model.save_pretrained(HERE / "bert")
    return HERE / "bert"


def pictured(processor):
    """A folder with a small ViT in it, and what is written about its image processor."""
    sizes = {key: BERT[key] for key in BERT if key != "vocab_size"}
    config = transformers.ViTConfig(**sizes, image_size=8, patch_size=4)
    transformers.ViTModel(config, add_pooling_layer=False).save_pretrained(HERE / "vit")
    (HERE / "vit" / "preprocessor_config.json").write_text(processor)
    return HERE / "vit"


def changed(name, **changes):
    """A copy of that folder in which files are written anew: text, bytes, tensors, or None for none."""
    place = HERE / name
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(saved(), place)
    for key, content in changes.items():
        file = place / key.replace("__", ".")
        if content is None:
            file.unlink()
        elif isinstance(content, dict):
            save_file(content, file, metadata={"format": "pt"})
        elif isinstance(content, bytes):
            file.write_bytes(content)
        else:
            file.write_text(content)
    return place


def config(**changes):
    said = json.loads((saved() / "config.json").read_text()) | changes
    return json.dumps({name: value for name, value in said.items() if value is not None})


def tensors(without=(), **others):
    held = load_file(saved() / "model.safetensors")
    return {name: t for name, t in held.items() if name not in without} | others


def pickled(name, content, **options):
    place = changed(name, model__safetensors=None)
    with (place / "pytorch_model.bin").open("wb") as file:
        pickle.dump(content, file, protocol=2)
    return load(place, **options)


def without(module, call):
    with mock.patch.dict("sys.modules", {module: None}):
        return call()


def with_hub(name, answer=None, download=LocalEntryNotFoundError("not there")):
    session = SimpleNamespace(head=mock.Mock(side_effect=answer))
    with (
        mock.patch("huggingface_hub.get_session", return_value=session),
        mock.patch("huggingface_hub.snapshot_download", side_effect=download),
    ):
        return load(name)


def of_package(name):
    with mock.patch("gradlogz.probing.inside.loading.find_spec", return_value=None):
        return load(name)


def empty():
    (HERE / "empty").mkdir(exist_ok=True)
    return HERE / "empty"


def two_files():
    (HERE / "two").mkdir(exist_ok=True)
    for name in ("a.gguf", "b.gguf"):
        (HERE / "two" / name).touch()
    return HERE / "two"


def indexed(name, shard):
    """A folder whose index names a shard."""
    index = json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors(), shard)})
    place = changed(name, model__safetensors=None)
    (place / "model.safetensors.index.json").write_text(index)
    return load(place)


def linked(name, file, target):
    """A folder in which a file is a link."""
    place = changed(name)
    (place / file).unlink(missing_ok=True)
    (place / file).symlink_to(target)
    return load(place)


def with_a_pipe_for_a_tokenizer():
    place = changed("with a pipe")
    os.mkfifo(place / "tokenizer.json")
    return load(place)


def with_a_long_header():
    data = (saved() / "model.safetensors").read_bytes()
    return load(changed("long header", model__safetensors=(2**40).to_bytes(8, "little") + data[8:]))


def without_a_class():
    with mock.patch("gradlogz.probing.inside.loading._classes", return_value=[]):
        return load(saved())


def with_much_json():
    with mock.patch("gradlogz.probing.inside.checkpoint_files.LARGEST_JSON", 10):
        return load(saved())


BIAS = "encoder.layer.0.output.dense.bias"
QUERY = "encoder.layer.1.attention.self.query.weight"
ALONE = torch.ones(3)

UNINDEXED = {"model__safetensors": None, "model__safetensors__index__json": '{"weight_map": []}'}
ELSEWHERE = json.dumps({"tokenizer_class": "BertTokenizer", "vocab_file": "/etc/passwd"})
FILES = [
    (ValueError, "load: name", "name of a file", lambda: load("x" * 5000)),
    (ValueError, "load: name", "name of a file", lambda: load("~nosuchuser/model")),
    (ValueError, "load: name", "bytes", with_much_json),
    (ValueError, "load: name", "adapter", lambda: load(changed("adapter", adapter_config__json="{}"))),
    (ValueError, "load: name", "shard", lambda: indexed("pickles", "weights.bin")),
    (ValueError, "load: name", "shard", lambda: indexed("above", "../bert/model.safetensors")),
    (ValueError, "load: name", "shard", lambda: indexed("absolute", "/etc/passwd")),
    (ValueError, "load: name", "shard", lambda: indexed("zero", "/dev/zero")),
    (ValueError, "load: name", "list of shards", lambda: load(changed("list", **UNINDEXED))),
    (ValueError, "load: name", "link to nothing", lambda: linked("nothing", "vocab.txt", "nowhere")),
    (ValueError, "load: name", "outside", lambda: linked("outside", "vocab.txt", "/etc/passwd")),
    (ValueError, "load: name", "neither", with_a_pipe_for_a_tokenizer),
    (ValueError, "load: name", "vocab_file", lambda: load(changed("vocab", tokenizer_config__json=ELSEWHERE))),
    (ValueError, "load: name", "header", with_a_long_header),
    (ValueError, "load: name", "neither a language", without_a_class),
    (ValueError, "load: name", "place of an object", lambda: load(changed("list config", config__json="[]"))),
    *(
        (ValueError, "load: name", name, lambda name=name: load(changed("many", config__json=config(**{name: 10**9}))))
        for name in ("num_hidden_layers", "vocab_size", "hidden_size", "max_position_embeddings", "num_labels")
    ),
    *(
        (ValueError, "load: name", "readable", lambda text=text: load(changed("odd", config__json=text)))
        for text in ("[" * 10**5, '{"model_type": "bert", "layer_norm_eps": 0, "hidden_size": "x"}')
    ),
]
MODELS = [
    (
        ImportError,
        "load: transformers",
        "installed",
        lambda: without("transformers", lambda: load("minilm")),
    ),
    (
        ValueError,
        "load: device",
        "torch",
        lambda: load("minilm", device="abacus"),
    ),
    (
        ValueError,
        "load: dtype",
        "int8",
        lambda: load("minilm", dtype="int8"),
    ),
    (
        ValueError,
        "load: name",
        "installed",
        lambda: of_package("minilm"),
    ),
    (
        ValueError,
        "load: name",
        "folder",
        lambda: load("./nowhere"),
    ),
    (
        ValueError,
        "load: name",
        "valid",
        lambda: load("some..one"),
    ),
    (
        ValueError,
        "load: name",
        "reachable",
        lambda: with_hub("some/one", answer=ConnectionError("no")),
    ),
    (
        ValueError,
        "load: name",
        "downloaded",
        lambda: with_hub("some/one", download=[LocalEntryNotFoundError("not there"), OSError("gated")]),
    ),
    (
        ValueError,
        "load: name",
        "weights",
        lambda: load(empty()),
    ),
    (ValueError, "load: name", "GGUF", lambda: load(two_files())),
    (
        ValueError,
        "load: allow_pickle",
        "safetensors",
        lambda: pickled("pickle", {"a": 1}),
    ),
    (
        ValueError,
        "load: name",
        "plain tensors",
        lambda: pickled("trap", {"a": Trap()}, allow_pickle=True),
    ),
    (
        ValueError,
        "load: name",
        "readable",
        lambda: load(changed("bad config", config__json="{")),
    ),
    (
        ValueError,
        "load: name",
        "damaged",
        lambda: load(two_files() / "a.gguf"),
    ),
    (
        ValueError,
        "load: name",
        "config.json",
        lambda: load(changed("no config", config__json=None)),
    ),
    (
        ValueError,
        "load: name",
        "architecture",
        lambda: load(changed("abacus", config__json=config(model_type="abacus"))),
    ),
    (
        ValueError,
        "load: allow_remote_code",
        "transformers",
        lambda: load(changed("own", config__json=config(model_type="abacus", auto_map={"AutoModel": "a.B"}))),
    ),
    (
        ValueError,
        "load: name",
        "BertModel",
        lambda: load(changed("missing", model__safetensors=tensors(without=(BIAS, QUERY)))),
    ),
    (
        ValueError,
        "load: name",
        "BertModel",
        lambda: load(changed("more", model__safetensors=tensors(**{"encoder.layer.2.bias": ALONE}))),
    ),
    (
        ValueError,
        "load: name",
        "readable",
        lambda: load(changed("cut", model__safetensors=(saved() / "model.safetensors").read_bytes()[:-9])),
    ),
    (
        ValueError,
        "load: name",
        "readable",
        lambda: load(changed("sizes", config__json=config(hidden_size=32))),
    ),
    (
        ValueError,
        "load: name",
        "readable",
        lambda: load(changed("tokens", tokenizer__json="{", tokenizer_config__json="{")),
    ),
    (
        ValueError,
        "load: name",
        "readable",
        lambda: load(pictured("{")),
    ),
    (
        ValueError,
        "with_random_weights: model",
        "reset_parameters",
        lambda: with_random_weights(Unset(), seed=0),
    ),
]

# Texts --------------------------------------------------------------------------------------------------------------


def text(name, content):
    (HERE / name).write_bytes(content)
    return list(documents(HERE / name))


def typed(content):
    with mock.patch("sys.stdin", io.TextIOWrapper(io.BytesIO(content))):
        return list(documents("-"))


def closed():
    (HERE / "closed.txt").write_text("text")
    with mock.patch.object(Path, "open", side_effect=PermissionError):
        return list(documents(HERE / "closed.txt"))


class Words:
    """A tokenizer of words, without special tokens."""

    is_fast, model_max_length, pad_token_id, eos_token_id = False, 16, 0, None

    def num_special_tokens_to_add(self, pair):
        return 0

    def __call__(self, text, add_special_tokens):
        return {"input_ids": [len(word) for word in text.split()]}

    def build_inputs_with_special_tokens(self, ids):
        return ids


def batched(text="one two", tokenizer=Words(), **options):
    return list(batches([Document("a", text)], tokenizer, **{"tokens": None, **options}))


TEXTS = [
    (
        ValueError,
        "documents: source",
        "folder",
        lambda: documents("/nowhere/at all"),
    ),
    (TypeError, "documents: source", "texts", lambda: documents(3)),
    (
        ValueError,
        "documents: source",
        "images",
        lambda: documents(reads="images"),
    ),
    (
        TypeError,
        "documents: source",
        "entry 2",
        lambda: list(documents(["a", 3])),
    ),
    (ValueError, "documents: source", "text", lambda: typed(b" \n")),
    (ValueError, "documents: source", "text", lambda: text("nil.txt", b"")),
    (
        ValueError,
        "documents: source",
        "UTF-8",
        lambda: text("nul.txt", b"a\0b"),
    ),
    (
        ValueError,
        "documents: source",
        "UTF-8",
        lambda: text("latin.txt", "é".encode("latin-1")),
    ),
    (
        ValueError,
        "documents: source",
        "UTF-8",
        lambda: typed(b"\xff\xfe"),
    ),
    (
        ValueError,
        "documents: source",
        "readable",
        closed,
    ),
    (
        ValueError,
        "documents: source",
        "line 2",
        lambda: text("a.jsonl", b'{"text": "a"}\n{"body": 3}\n'),
    ),
    (TypeError, "batches: tokenizer", "tokens", lambda: batched(tokenizer=None)),
    (ValueError, "batches: tokens", "more", lambda: batched(tokens=0)),
    (ValueError, "batches: size", "more", lambda: batched(size=-1)),
    (
        ValueError,
        "batches: length",
        "context",
        lambda: batched(length=17),
    ),
    (
        ValueError,
        "batches: documents",
        "tokens",
        lambda: batched("one"),
    ),
]

# Findings -----------------------------------------------------------------------------------------------------------

ROW = Finding("tiny", "tie", "layer", 1, 0, "cosine", 0.5)
ONE = Findings({"tiny": {"heads": 2}}, [ROW])
TIE = Declaration("Tie", "They tie.", "1 = 1", "", (), "", {})

FINDINGS = [
    (
        ValueError,
        "Findings: verdict",
        "applicable",
        lambda: Findings({"tiny": {}}, [ROW._replace(verdict="perhaps")]),
    ),
    (ValueError, "Findings: facts", "facts", lambda: Findings({}, [ROW])),
    (
        ValueError,
        "Findings: entries",
        "prediction",
        lambda: ONE.merge(ONE),
    ),
    (
        ValueError,
        "Findings.merge: facts",
        "findings",
        lambda: ONE.merge(Findings({"tiny": {"heads": 3}}, [])),
    ),
    (
        ValueError,
        "Findings.merge: declarations",
        "findings",
        lambda: Findings({}, [], declarations={"tie": TIE}).merge(
            Findings({}, [], declarations={"tie": TIE._replace(title="Ties")})
        ),
    ),
    (
        ValueError,
        "Findings: quantity",
        "rows",
        lambda: ONE.table(quantity="sine"),
    ),
    (
        ImportError,
        "Findings.frame: polars",
        "installed",
        lambda: without("polars", ONE.frame),
    ),
]

# Runs ---------------------------------------------------------------------------------------------------------------

RUN = Run({"name": "tiny"}, {}, 0, "probe", {"tokens": 7}, {}, ONE)


def damaged(name, change):
    """A run in which one file is changed, read."""
    shutil.rmtree(HERE / "run", ignore_errors=True)
    path = write_run(HERE / "run", RUN) / name
    path.write_bytes(change(path.read_bytes()))
    return read_run(HERE / "run")


def other(**changes):
    return lambda data: json.dumps(json.loads(data) | changes).encode()


def findings_with(**changes):
    """A run whose findings are others than those that were written, and which does not know it."""
    damaged("run.json", other(files={}))
    path = HERE / "run" / "findings.json"
    path.write_bytes(other(**changes)(path.read_bytes()))
    return read_run(HERE / "run")


def full():
    with mock.patch("os.fsync", side_effect=OSError(28, "No space left on device")):
        write_run(HERE / "full", RUN)


def read_only():
    with mock.patch.object(Path, "mkdir", side_effect=PermissionError):
        check_place(HERE / "read only" / "run")


def working_directory():
    (HERE / "empty").mkdir(exist_ok=True)
    with contextlib.chdir(HERE / "empty"):
        check_place(".")


def with_a_pipe():
    shutil.rmtree(HERE / "piped", ignore_errors=True)
    os.mkfifo(write_run(HERE / "piped", RUN) / "pipe")
    check_place(HERE / "piped")


def file():
    (HERE / "file").touch()
    return HERE / "file"


RUNS = [
    (ValueError, "write_run: folder", "a folder", lambda: check_place(file())),
    (ValueError, "write_run: folder", "working directory", working_directory),
    (ValueError, "write_run: folder", "pipe", with_a_pipe),
    (
        ValueError,
        "write_run: folder",
        "other files",
        lambda: write_run(saved(), RUN),
    ),
    (
        ValueError,
        "write_run: folder",
        "written",
        read_only,
    ),
    (
        ValueError,
        "write_run: folder",
        "writable",
        full,
    ),
    (
        ValueError,
        "read_run: path",
        "findings",
        lambda: read_run("/nowhere/at/all"),
    ),
    (
        ValueError,
        "read_run: path",
        "readable",
        lambda: damaged("run.json", lambda data: data[:-9]),
    ),
    (
        ValueError,
        "read_run: path",
        "readable",
        lambda: damaged("run.json", lambda _: b"[]"),
    ),
    (
        ValueError,
        "read_findings: path",
        "readable",
        lambda: read_findings(HERE / "findings.json"),
    ),
    (
        ValueError,
        "read_run: path",
        "format",
        lambda: damaged("run.json", other(format=4, version="9.9")),
    ),
    (
        ValueError,
        "read_run: path",
        "incomplete",
        lambda: damaged("run.json", other(seed="one", times=None)),
    ),
    (
        ValueError,
        "read_run: path",
        "readable",
        lambda: findings_with(rows=[ROW._asdict(), {"value": "much"}]),
    ),
    (
        ValueError,
        "read_run: path",
        "readable",
        lambda: findings_with(declarations={"tie": {"title": 3}}),
    ),
    (
        ValueError,
        "read_run: path",
        "complete",
        lambda: damaged("run.json", other(complete=False)),
    ),
    (
        ValueError,
        "read_run: path",
        "written",
        lambda: damaged("findings.json", lambda data: data.replace(b"0.5", b"0.6")),
    ),
    (
        ValueError,
        "read_run: path",
        "written",
        lambda: damaged("findings.parquet", lambda data: data[:3]),
    ),
]

ERRORS = FILES + MODELS + TEXTS + FINDINGS + RUNS


@each_of(ERRORS)
def test_mistakes_are_explained(refusal):
    refused(refusal)


def test_a_trap_in_a_pickle_is_not_sprung():
    assert not (HERE / "sprung").exists()


def test_a_full_disk_leaves_nothing_behind():
    with pytest.raises(ValueError, match="No space left"):
        full()
    assert not [path.name for path in HERE.iterdir() if "full" in path.name]


def test_a_claim_needs_no_verdict_and_its_words_may_be_any():
    claim = Claim("tiny", "tie", "<b>", "cosine", 0.5, 0.4, 0.6, 0.0, "", "a; got b")
    assert "&lt;b&gt;" in Findings({"tiny": {}}, [ROW], [claim])._repr_html_()


def test_names_with_quotes_and_brackets_keep_the_form():
    with pytest.raises(ValueError, match="source") as caught:
        documents("[[a'b\"c")
    check_form(str(caught.value).replace("[[", ""))
