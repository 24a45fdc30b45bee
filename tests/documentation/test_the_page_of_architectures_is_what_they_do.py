"""docs/architectures.md says what `observe`, `register` and `monitor` do with every architecture of transformers.

As a script, this file writes the page again.
"""

import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch
import transformers

import gradlogz
from gradlogz._errors import InputError
from gradlogz.attention import Thresholds
from support.tiny_models import KINDS, NotBuiltError, architectures, distance, output_of, tiny

pytestmark = pytest.mark.filterwarnings("ignore")  # of the models: a warning would be an error here, not in the script

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
NO_ALERTS = Thresholds(None, None, None)
NONE = "no attention"
COLUMNS = ("observe", "register", "monitor")
FEW = [
    ("causal", "llama"), ("causal", "bloom"), ("causal", "kimi_linear"), ("causal", "rwkv"), ("causal", "mamba"),
    ("seq2seq", "nllb-moe"), ("sound", "wavlm"), ("image", "siglip"),
]  # fmt: skip
TEXT = """# Architectures

The table says what `observe`, `register` and `monitor` do with the architectures of transformers {version}, each as a
small random model with eager attention. The test that checks it also writes it
(tests/documentation/test_the_page_of_architectures_is_what_they_do.py).

| | meaning |
|---|---|
| yes | The output equals that of the model: to 1e-5 of its scale (`observe`, `register`), bitwise (`monitor`) |
| yes; linear | The same; the named layers of linear attention compute as usual, without statistics |
| partly | The same with `strict=False`; the named layers stay as they are, without statistics |
| no | An error names the layers, which call no softmax (`register`: do not use the interface of transformers) |
| no attention | The model has no layer with softmax attention |

`observe` supports {observe} of {built} models, `register` {register} and `monitor` {monitor}. The following could not
be built small, or do not run on the inputs of the test, which says nothing about them:

{rest}

| architecture | kind | observe | register | monitor |
|---|---|---|---|---|
"""


def observed(model, batch, expected, **options):
    with gradlogz.observe(model, **options) as observation:
        output = output_of(model, batch)
    assert distance(output, expected) < 1e-5
    return len(observation) > 0, observation.without_softmax


def registered(model, batch, expected, **options):
    gradlogz.register(model, **options)
    try:
        assert distance(output_of(model, batch), expected) < 1e-5
    finally:
        gradlogz.attention.unregister(model)
    return True, {}


def monitored(model, batch, expected, **options):
    with gradlogz.monitor(model, every=1, thresholds=NO_ALERTS, **options) as m:
        with torch.enable_grad():
            result = model(**batch)
        assert any(isinstance(t, torch.Tensor) and torch.equal(t, expected) for t in result.values())
        m.step()
    return len(m.row().layers) > 0, dict.fromkeys(m.row().without_softmax, "linear")


def verdict(function, model, batch, expected):
    """Return a cell of the table."""
    try:
        _, kinds = function(model, batch, expected)
    except InputError as error:
        classes = dict.fromkeys(re.findall(r"\((\w+)\)", str(error)))
        if not classes:
            return NONE
        try:
            partly, _ = function(model, batch, expected, strict=False)
        except InputError:
            partly = False
        return f"{'partly' if partly else 'no'}: {', '.join(f'`{name}`' for name in classes)}"
    if not kinds:
        return "yes"
    assert set(kinds.values()) == {"linear"}
    classes = dict.fromkeys(type(model.get_submodule(name)).__name__ for name in kinds)
    return f"yes; linear: {', '.join(f'`{name}`' for name in classes)}"


def cells(kind, name):
    """Return the three cells of an architecture; raises NotBuiltError."""
    model, batch, expected = tiny(kind, name)
    observe, monitor = (verdict(function, model, batch, expected) for function in (observed, monitored))
    register = NONE if observe == NONE else verdict(registered, model, batch, expected)
    return observe, register, monitor


def page():
    rows, not_built, counts = [], defaultdict(list), Counter()
    for kind in KINDS:
        for name in architectures(kind):
            try:
                found = cells(kind, name)
            except NotBuiltError:
                not_built[kind].append(name)
                continue
            counts.update(column for column, cell in zip(COLUMNS, found, strict=True) if cell.startswith("yes"))
            rows.append(line(kind, name, found))
    numbers = {column: counts[column] for column in COLUMNS}
    rest = "\n".join(f"- {kind}: {', '.join(names)}" for kind, names in not_built.items())
    head = TEXT.format(version=transformers.__version__, built=len(rows), rest=rest, **numbers)
    return head + "\n".join(rows) + "\n"


def line(kind, name, found):
    return f"| {name} | {kind} | {' | '.join(found)} |"


def test_the_page_names_every_architecture():
    text = PAGE.read_text(encoding="utf-8")
    assert f"transformers {transformers.__version__}," in text, "run this file as a script"
    not_built = {kind: names.split(", ") for kind, names in re.findall(r"^- (.+?): (.+)$", text, re.MULTILINE)}
    for kind in KINDS:
        for name in architectures(kind):
            assert f"\n| {name} | {kind} |" in text or name in not_built.get(kind, ()), (kind, name)


@pytest.mark.parametrize(("kind", "name"), FEW)
def test_a_row_is_what_the_functions_do(kind, name):
    assert line(kind, name, cells(kind, name)) in PAGE.read_text(encoding="utf-8")


@pytest.mark.long
def test_the_page_is_what_they_do():
    assert PAGE.read_text(encoding="utf-8") == page()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
