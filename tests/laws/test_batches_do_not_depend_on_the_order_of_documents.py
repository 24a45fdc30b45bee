"""Batches hold every token once, of documents that hashes choose: not their order, not the way they are cut."""

import functools
import io
import json
import random
import string

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from gradlogz.probing.corpus.batching import BUFFER, PADDED, batches
from gradlogz.probing.corpus.text import PART, Document, documents
from gradlogz.probing.statistics import GROUPS, group_of, hash_of

WORDS = [a + b for a in string.ascii_lowercase for b in string.ascii_lowercase]


@functools.cache
def tokenizer(special=True):
    """One token for each word of two letters, between two special ones."""
    numbers = {word: n for n, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    backend = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if special:
        backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", model_max_length=32)


def corpus(count, seed=0, longest=100):
    draw = random.Random(seed)
    return [Document(f"{seed}/{n}", " ".join(draw.choices(WORDS, k=draw.randint(2, longest)))) for n in range(count)]


def rows_of(found):
    """{(document, start): tokens} of batches, with what every batch promises checked on the way."""
    rows = {}
    for batch in found:
        ids, mask = batch.inputs["input_ids"], batch.inputs["attention_mask"]
        lengths = mask.sum(-1)
        assert ids.shape == mask.shape == (len(batch.names), int(lengths.max()))
        assert torch.equal(mask, (torch.arange(ids.shape[1]) < lengths[:, None]).long())  # padded on the right
        assert bool((ids[mask == 0] == 0).all())
        for row, name, key, start, length in zip(ids, batch.names, batch.keys, batch.starts, lengths, strict=True):
            assert int(key) == hash_of(name)
            assert group_of(int(key)) == batch.group
            assert (name, int(start)) not in rows
            rows[name, int(start)] = row[:length].tolist()
    return rows


def whole(rows, special=True):
    """The documents put together again from their rows, without special tokens."""
    texts = {}
    for (name, start), ids in sorted(rows.items()):
        assert start == sum(len(part) for part in texts.setdefault(name, []))
        texts[name].append(ids)
    return {name: [n for ids in parts for n in (ids[1:-1] if special else ids)] for name, parts in texts.items()}


@pytest.mark.parametrize("special", [True, False])
@given(count=st.integers(1, 60), size=st.none() | st.integers(1, 9), length=st.none() | st.integers(4, 32))
def test_every_token_is_in_one_row(special, count, size, length):
    texts = corpus(count)
    found = batches(texts, tokenizer(special), tokens=None, size=size, length=length)
    rows = rows_of(found)
    number = {word: n for n, word in enumerate(WORDS, start=4)}
    again = whole(rows, special)
    for document in texts:
        expected = [number[word] for word in document.text.split()]
        # a last window of one word is left out: nothing can be attended to there
        assert again[document.name] in (expected, expected[:-1])
    assert max(map(len, rows.values())) <= (length or 32)
    assert found.report.tokens == sum(map(len, rows.values()))
    assert found.report.rows == len(rows)
    assert (found.report.documents, found.report.short, found.report.left) == (count, 0, 0)


@given(seed=st.integers(0, 5), tokens=st.integers(100, 8000), shuffle=st.randoms())
def test_the_choice_does_not_depend_on_the_order(seed, tokens, shuffle):
    texts = corpus(150, seed)
    expected = rows_of(batches(texts, tokenizer(), tokens=tokens))
    shuffle.shuffle(texts)
    assert rows_of(batches(iter(texts), tokenizer(), tokens=tokens)) == expected


def test_every_window_is_read_with_the_same_probability():
    """Beginnings and ends, of long documents and of short ones; and in the mean no length is preferred by the limit."""
    draw = random.Random(1)
    lengths = [600, 590, 400, *(draw.randint(2, 30) for _ in range(45))]
    texts = [Document(f"{i}", " ".join(draw.choices(WORDS, k=length))) for i, length in enumerate(lengths)]
    windows = rows_of(batches(texts, tokenizer(), tokens=None))
    kinds = {
        "beginning of a long document": [w for w in windows if int(w[0]) < 3 and w[1] == 0],
        "rest of a long document": [w for w in windows if int(w[0]) < 3 and w[1] > 0],
        "short document": [w for w in windows if int(w[0]) >= 3 and len(windows[w]) <= 16],
        "document of a window": [w for w in windows if int(w[0]) >= 3 and len(windows[w]) > 16],
    }
    samples = [set(rows_of(batches(texts, tokenizer(), tokens=300, seed=seed))) for seed in range(250)]
    expected = sum(map(len, samples)) / len(samples) / len(windows)
    for kind, members in kinds.items():
        share = torch.tensor([len(sample & set(members)) / len(members) for sample in samples])
        error = 4 * float(share.std()) / len(samples) ** 0.5
        assert float(share.mean()) == pytest.approx(expected, abs=error), kind
    tokens = torch.tensor([[float(sum(len(windows[w]) for w in sample)), len(sample)] for sample in samples]).mean(0)
    mean_length = sum(map(len, windows.values())) / len(windows)
    assert float(tokens[0] / tokens[1]) == pytest.approx(mean_length, rel=0.02)


@given(seed=st.integers(0, 5), tokens=st.integers(1, 12_000))
def test_the_limit_is_reached_by_the_last_window(seed, tokens):
    texts = corpus(100, seed)
    everything = batches(texts, tokenizer(), tokens=None)
    windows = rows_of(everything)
    found = batches(texts, tokenizer(), tokens=tokens, seed=seed)
    rows = rows_of(found)
    assert all(windows[window] == ids for window, ids in rows.items())
    if tokens >= everything.report.tokens:
        assert (rows, found.report.left) == (windows, 0)
    else:
        assert tokens <= found.report.tokens < tokens + 32
        counts = [(sum(w[0] == d.name for w in rows), sum(w[0] == d.name for w in windows)) for d in texts]
        assert found.report.left == sum(read < present for read, present in counts)


def test_the_effective_number_of_documents_is_that_of_kish():
    found = batches([Document(f"{i}", "aa " * n) for i, n in enumerate((10, 10, 40))], tokenizer(False), tokens=None)
    list(found)
    assert found.report.effective == pytest.approx(60**2 / (10**2 + 10**2 + 40**2))
    assert "effective number 2.0" in found.report.words()


def test_other_seeds_choose_other_documents():
    texts = corpus(200)
    chosen = [set(rows_of(batches(texts, tokenizer(), tokens=1000, seed=seed))) for seed in (0, 1)]
    assert chosen[0] != chosen[1]


def test_documents_beyond_the_limit_are_not_kept():
    """A corpus without end is read in bounded memory: what is held is the limit and one window at most."""
    held = batches(corpus(3000, longest=30), tokenizer(), tokens=200)
    list(held)
    assert held.report.left + held.report.documents == 3000
    assert 200 <= held.report.tokens < 200 + 32


def test_a_stream_is_given_back_before_it_ends():
    """Without a limit a batch comes as soon as a group has enough, however long the corpus is."""
    read = 0

    def endless():
        nonlocal read
        while True:
            read += 1
            yield Document(f"{read}", "aa " * 1000)

    found = batches(endless(), tokenizer(), tokens=None)
    for _ in range(5):
        batch = next(found)
        assert batch.inputs["input_ids"].numel() <= PADDED
    assert read * 1000 < 3 * GROUPS * BUFFER


def test_short_documents_are_counted_and_long_ones_windowed():
    found = batches([Document("a", "aa"), Document("b", "aa bb"), Document("c", "aa " * 90)], tokenizer(), tokens=None)
    list(found)
    assert (found.report.short, found.report.windowed, found.report.rows) == (1, 1, 4)
    for fact in ("100 tokens from 2 documents", "2 groups", "longer than 32 tokens", "fewer than two tokens"):
        assert fact in found.report.words()


def test_a_tokenizer_in_python_makes_the_same_windows():
    class InPython:
        """The part of a tokenizer without a backend that is asked for."""

        is_fast, model_max_length, pad_token_id, eos_token_id = False, 32, None, 7

        def num_special_tokens_to_add(self, pair):
            return 2

        def __call__(self, text, add_special_tokens):
            return {"input_ids": tokenizer(False)(text)["input_ids"]}

        def build_inputs_with_special_tokens(self, ids):
            return [2, *ids, 3]

    expected = rows_of(batches(corpus(9), tokenizer(), tokens=None, size=1))
    assert rows_of(batches(corpus(9), InPython(), tokens=None, size=1)) == expected
    one, other = [name for name in WORDS if group_of(hash_of(name)) == 0][:2]
    batch = next(batches([Document(one, "aa bb"), Document(other, "aa bb cc")], InPython(), tokens=None, size=2))
    # without a token for padding the one for the end pads
    assert batch.inputs["input_ids"].tolist() == [[2, 4, 31, 58, 3], [2, 4, 31, 3, 7]]


# Sources ------------------------------------------------------------------------------------------------------------


def test_the_default_is_the_prose_of_python():
    found = list(documents())
    assert len(found) > 50
    assert len({d.name for d in found}) == len(found)
    assert "assert" in next(d.text for d in found if d.name == "python: assert")


def test_files_and_folders(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "deep" / "a.md").write_text("third", encoding="utf-8")
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "one"}) + "\n\n" + json.dumps({"text": "two", "id": 3}))
    (tmp_path / "c.smi").write_text("CC>>CO\nCCC>>CCO\n")
    (tmp_path / ".hidden").write_bytes(b"\0")
    assert [tuple(d) for d in documents(tmp_path)] == [
        ("a.jsonl:1", "one"),
        ("a.jsonl:3", "two"),
        ("b.txt", "second"),
        ("c.smi:1", "CC>>CO"),
        ("c.smi:2", "CCC>>CCO"),
        ("deep/a.md", "third"),
    ]
    assert list(documents(str(tmp_path / "b.txt"))) == [("b.txt", "second")]


def test_standard_input_and_lists(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("what was typed"))
    assert list(documents("-")) == [("standard input", "what was typed")]
    assert list(documents(["one", ("name", "two"), "  "])) == [("text 1", "one"), ("name", "two")]


@pytest.mark.parametrize("break_", ["\n\n", " "])
def test_a_long_file_is_cut_into_documents_and_nothing_is_lost(tmp_path, break_):
    text = break_.join("word " * 100 for _ in range(300))
    (tmp_path / "book.txt").write_text(text)
    found = list(documents(tmp_path / "book.txt"))
    assert "".join(d.text for d in found) == text
    assert found[0].name == "book.txt"
    assert len({d.name for d in found}) == len(found) > 3
    assert all(PART <= len(d.text) <= 2 * PART for d in found[:-1])
