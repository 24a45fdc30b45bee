"""The public surface: every name has one home, and no function bears the name of a module beside it."""

import ast
import importlib
import importlib.util
import inspect
import pkgutil
from pathlib import Path

import gradlogz
import gradlogz.attention
import gradlogz.contrastive
import gradlogz.dynamics
import gradlogz.filters
import gradlogz.integrations
import gradlogz.measures
import gradlogz.probing
import gradlogz.reporting
import gradlogz.simulation
import gradlogz.tracking

OF_NUMBA = (
    "gradlogz.kernels.workers",
    "gradlogz.kernels.attention.cpu",
    "gradlogz.kernels.simd",
    "gradlogz.kernels.attention.tiles",
    "gradlogz.kernels.losses.compiled_rows",
    "gradlogz.kernels.losses.row_fields",
    "gradlogz.kernels.losses.row_losses",
    "gradlogz.kernels.losses.row_products",
    "gradlogz.kernels.losses.row_vectors",
)
OF_TRITON = ("gradlogz.kernels.attention.decoding", "gradlogz.kernels.attention.gpu")
OF_AN_EXTRA = {**dict.fromkeys(OF_NUMBA, "numba"), **dict.fromkeys(OF_TRITON, "triton")}
OF_AN_EXTRA["gradlogz.integrations.lightning_callback"] = "lightning"


# Of the two Triton kernels, whose sources are tied to measured numbers by their hashes.
TILING = "Tiling"


def modules():
    yield gradlogz
    for info in pkgutil.walk_packages(gradlogz.__path__, "gradlogz."):
        needs = OF_AN_EXTRA.get(info.name)
        if needs is None or importlib.util.find_spec(needs):
            yield importlib.import_module(info.name)


def public_names(module):
    """The names that a chapter re-exports: all that do not begin with an underscore, but for its modules."""
    return {n for n, value in vars(module).items() if not n.startswith("_") and not inspect.ismodule(value)}


CHAPTERS = [
    gradlogz.measures,
    gradlogz.attention,
    gradlogz.dynamics,
    gradlogz.filters,
    gradlogz.contrastive,
    gradlogz.probing,
    gradlogz.reporting,
    gradlogz.simulation,
    gradlogz.tracking,
    gradlogz.integrations,
]


def test_the_root_exports_a_few_names_of_its_chapters():
    exported = set(gradlogz.__all__)
    assert exported <= {*(name for chapter in CHAPTERS for name in public_names(chapter)), "measure"}
    assert all(hasattr(gradlogz, name) for name in exported)
    assert exported <= set(dir(gradlogz))
    assert len(exported) <= 64  # those of the README and of the first page of each chapter


def test_no_name_is_public_in_two_chapters():
    names = [name for chapter in CHAPTERS for name in public_names(chapter)]
    assert len(names) == len(set(names))


def test_no_two_classes_of_the_package_share_a_name():
    """But for private ones, and those that every file of predictions has, by the same names."""
    homes = {}
    for path in sorted(Path(gradlogz.__file__).parent.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and path.parent.name != "predictions":
                homes.setdefault(node.name, []).append(path.stem)
    assert not {name: files for name, files in homes.items() if len(files) > 1 and name != TILING}


def test_an_unknown_name_is_refused_as_by_any_module():
    assert not hasattr(gradlogz, "logsumexp")


def test_no_public_name_is_that_of_a_module_beside_it():
    for module in modules():
        if hasattr(module, "__path__"):
            beside = {info.name for info in pkgutil.iter_modules(module.__path__)}
            assert not beside & public_names(module), f"{module.__name__}: {beside & public_names(module)}"


def test_every_public_callable_is_documented():
    undocumented = [name for name in gradlogz.__all__ if not inspect.getdoc(getattr(gradlogz, name))]
    assert not undocumented
