"""Private names of other packages are listed in docs/decisions/private_names.md, and the installed ones have them."""

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORD = (ROOT / "docs" / "decisions" / "private_names.md").read_text()
OTHERS = {"torch", "transformers", "numba", "triton", "llvmlite"}


def is_private(name):
    parts = name.split(".")
    return parts[0] in OTHERS and (
        name.startswith("numba.core.") or any(p.startswith("_") and not p.startswith("__") for p in parts)
    )


def names_in(tree):
    """Dotted names of imports and attributes, as far as they can be read off."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and re.fullmatch(r"\w+(\.\w+)+", name := ast.unparse(node)):
            yield name


def used():
    """Private names in the source, each without those that only lead to it (torch._C)."""
    names = {
        name
        for path in (ROOT / "src").rglob("*.py")
        for name in names_in(ast.parse(path.read_text(encoding="utf-8")))
        if is_private(name)
    }
    return sorted(name for name in names if not any(other.startswith(f"{name}.") for other in names))


NAMES = used()


def test_the_source_is_read():
    assert {"torch._standard_gamma", "numba.core.cgutils", "torch.utils._pytree"} <= {
        n.removesuffix(".x") for n in NAMES
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_private_name_is_recorded(name):
    last = ".".join(name.split(".")[-2:]) if name.split(".")[-2][0].isupper() else name.split(".")[-1]
    assert f"`{name}`" in RECORD or f"`{last}`" in RECORD


@pytest.mark.parametrize("name", NAMES)
def test_a_private_name_is_there(name):
    if "_cuda_" in name or name.startswith("triton."):
        pytest.skip("only where torch is built with CUDA")
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return
    pytest.fail(f"{parts[0]} is not installed")


def test_nothing_is_recorded_that_is_not_used():
    recorded = [name for name in re.findall(r"`([a-z_.A-Z]+)`", RECORD) if is_private(name)]
    assert [name for name in recorded if not any(used.startswith(name) for used in NAMES)] == []


def test_the_setting_of_transformers_is_recorded_and_there():
    transformers = pytest.importorskip("transformers")
    assert "_attn_implementation_internal" in RECORD
    assert hasattr(transformers.PretrainedConfig(), "_attn_implementation_internal")
