"""What a page cites is read from references.bib, the one bibliography."""

from gradlogz.reporting.citations import bibliography, cited, keys_in, parse

UNKNOWN = "nobody99"
ENTRY = """@article{renyi58,
  title         = {On a {R}andom Problem},
  author        = {R{\\'e}nyi, Alfr{\\'e}d and Bar-Shalom, Yaakov},
  journal       = {Sankhy{\\=a}},
  volume        = {3},
  year          = {1958},
  eprint        = {5801.00001},
  archiveprefix = {arXiv},
}
"""


def test_an_entry_becomes_a_line():
    (reference,) = parse(ENTRY).values()
    assert reference.text == "Rényi, Bar-Shalom, On a Random Problem, Sankhyā 3, 1958."
    assert reference.address == "arXiv 5801.00001"


def test_many_authors_are_the_first_and_others():
    (reference,) = parse(
        "@book{a01,\n  author = {A, B and C, D and E, F and G, H and I, J},\n  year = {2001},\n}\n"
    ).values()
    assert reference.text == "A et al., 2001."


def test_every_work_is_spelt_without_tex():
    assert len(bibliography()) > 70
    assert not [r.key for r in bibliography().values() if set(r.text) & set("\\{}") or not r.text[-5:-1].isdigit()]


def test_works_stand_in_the_order_of_the_bibliography_and_unknown_ones_last():
    keys = keys_in([f"as in [{UNKNOWN}], [benjamini95] and [shim22, Eq. 4]", "again [shim22]"])
    assert keys == [UNKNOWN, "benjamini95", "shim22"]
    assert [r.key for r in cited(keys)] == ["shim22", "benjamini95", UNKNOWN]
