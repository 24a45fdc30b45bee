"""A model of images is probed on a folder of them, and any model on batches of its inputs."""

import json

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from typer.testing import CliRunner

import gradlogz
from gradlogz import cli
from gradlogz.probing.corpus.images import images
from gradlogz.probing.corpus.inputs import Inputs
from gradlogz.probing.statistics import group_of, hash_of
from support.architectures import ARCHITECTURES

ONLY = ["identity", "entropy", "tie", "dropped_covariance"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A small ViT with its image processor, and a folder of 24 images beside it."""
    root = tmp_path_factory.mktemp("pictures")
    vit = next(a for a in ARCHITECTURES if a.name == "vit").build()
    vit.save_pretrained(root / "vit")
    transformers.ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(root / "vit")
    source = np.random.default_rng(0)
    for i in range(24):
        file = root / "images" / f"part {i % 3}" / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(source.integers(0, 255, (20, 24, 3), dtype=np.uint8)).save(file)
    (root / "images" / "notes.txt").write_text("not an image")
    return root


def test_the_command_probes_a_folder_of_images(place, tmp_path):
    words = [
        "probe",
        str(place / "vit"),
        "--text",
        str(place / "images"),
        "--out",
        str(tmp_path / "run"),
        "--json",
        "-",
        "--details",
    ]
    words += [word for name in ONLY for word in ("--only", name)]
    result = CliRunner().invoke(cli.application(), words)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    claims = {claim["prediction"]: claim["verdict"] for claim in found["claims"]}
    assert claims["identity"] == "passed"
    assert claims["dropped_covariance"] == "not applicable"
    rows = [row for row in found["rows"] if row["prediction"] == "entropy" and row["quantity"] == "entropy"]
    assert len(rows) == 8
    assert {row["tokens"] for row in rows} == {24 * 17}  # patches of 4 x 4, and one token for all
    assert "24 inputs" in result.stderr


def test_batches_of_inputs_are_read_as_the_folder_is(place):
    model = transformers.ViTModel.from_pretrained(place / "vit").eval()
    processor = transformers.ViTImageProcessorPil.from_pretrained(place / "vit")
    whole = gradlogz.probe(model, processor, place / "images", predictions=ONLY, baseline=0)
    pairs = list(images(place / "images", processor, size=7))
    assert [len(names) for names, _ in pairs] == [7, 7, 7, 3]
    again = gradlogz.probe(model, None, pairs, predictions=ONLY, baseline=0)
    for a, b in zip(whole.rows, again.rows, strict=True):
        assert a[:6] == b[:6]
        np.testing.assert_allclose(a[6:9], b[6:9], rtol=1e-4, atol=1e-5)
    plain = [{"pixel_values": inputs["pixel_values"]} for _, inputs in pairs]
    assert len(gradlogz.probe(model, None, plain, predictions=ONLY, baseline=0).rows) == len(whole.rows)


def test_rows_are_told_apart_into_the_groups_of_their_names():
    names = [f"picture {i}" for i in range(12)]
    rows = torch.arange(12.0).reshape(12, 1)
    reading = Inputs([(names, {"x": rows})])
    met = {}
    for batch in reading:
        assert {group_of(hash_of(name)) for name in batch.names} == {batch.group}
        met |= dict(zip(batch.names, batch.inputs["x"].flatten().tolist(), strict=True))
    assert met == {name: float(i) for i, name in enumerate(names)}
    assert reading.report.rows == 12
    assert reading.report.words() == f"12 inputs in {reading.report.groups} groups."


def test_batches_of_token_ids_need_no_tokenizer():
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=16)
    batches = [{"input_ids": torch.randint(0, 50, (4, 12))} for _ in range(2)]
    findings = gradlogz.probe(transformers.GPT2LMHeadModel(config), None, batches, predictions=["identity"])
    assert findings.summary()[0].verdict == "passed"
    ids = {str(i) for batch in batches for i in batch["input_ids"].flatten().tolist()}
    assert findings.tokens
    assert all(set(token.text.replace("[", "").replace("]", "").split()) <= ids for token in findings.tokens)
