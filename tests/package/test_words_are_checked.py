"""The check of words in tools/ reports what it lists, honours its escape, and reaches every place that people read."""

import pytest

import plain_words


@pytest.mark.parametrize(
    "line",
    [
        "The middle head is sharp.",
        "as told above",
        "Of these, two hold.",
        "- Of these",
        "an interval of 95 %",
        "a twin",
    ],
)
def test_a_listed_phrase_is_reported_unless_it_is_escaped(line):
    assert [number for number, _ in plain_words.phrases(f"A heading\n{line}")] == [2]
    assert not list(plain_words.phrases(f"{line}  # {plain_words.ESCAPE}"))


@pytest.mark.parametrize("opening", ["Of two columns.", "What is done.", "Whether it holds.", "The same backward."])
def test_a_docstring_that_opens_with_a_fragment_is_reported(opening):
    code = f'''def f():\n    """{opening}"""'''
    assert [number for number, _ in plain_words.docstrings_and_names(code)] == [2]


@pytest.mark.parametrize("code", ["found = 1", "def f(given): pass", "for of in (): pass", "f(lambda told: 0)"])
def test_a_name_that_is_no_noun_is_reported(code):
    assert len(list(plain_words.docstrings_and_names(code))) == 1
    assert not list(plain_words.docstrings_and_names(f"{code}  # {plain_words.ESCAPE}"))


def test_plain_sentences_pass():
    assert not list(plain_words.phrases("Median over heads: 0.71. Of course it holds in the middle of the text."))
    assert not list(plain_words.docstrings_and_names('def f(values):\n    """Return the median."""'))


def test_every_place_is_read():
    suffixes = {path.suffix for path in plain_words.files([])}
    assert {".py", ".md", ".html", ".js", ".css", ".cu"} <= suffixes
    assert all((plain_words.ROOT / place).exists() for place in (*plain_words.PLACES, *plain_words.EXEMPT))
