"""Set-up of the suite: shapes checked at run time on request, threads fixed, Hypothesis made reproducible."""

import gc
import os
from pathlib import Path

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported, by whichever test

# One thread for numpy and scipy, as for torch below: on cores that are all busy the threads of OpenBLAS wait for each
# other longer than they compute. Processes that are started from here read it when they load the library.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# What modules create while they are imported stays: the garbage collector searches it once, when all tests are
# collected, and not in each of its full searches.
gc.disable()

hypothesis.settings.register_profile("suite", deadline=None, derandomize=True, max_examples=8, print_blob=True)
hypothesis.settings.register_profile("long", deadline=None, max_examples=500, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))


# Modules whose functions a compiler of its own reads: numba or Triton.
COMPILED = {
    "gradlogz.kernels.attention.cpu",
    "gradlogz.kernels.attention.decoding",
    "gradlogz.kernels.attention.gpu",
    "gradlogz.kernels.attention.tiles",
    "gradlogz.kernels.filters.backward",
    "gradlogz.kernels.filters.cpu",
    "gradlogz.kernels.filters.discretization",
    "gradlogz.kernels.filters.functions",
    "gradlogz.kernels.filters.gradients_in_lanes",
    "gradlogz.kernels.filters.lanes",
    "gradlogz.kernels.filters.modes_in_lanes",
    "gradlogz.kernels.filters.one_mode",
    "gradlogz.kernels.filters.own_functions",
    "gradlogz.kernels.filters.smoothing_in_lanes",
    "gradlogz.kernels.filters.targets_in_lanes",
    "gradlogz.kernels.losses.compiled_rows",
    "gradlogz.kernels.losses.row_fields",
    "gradlogz.kernels.losses.row_losses",
    "gradlogz.kernels.losses.row_products",
    "gradlogz.kernels.losses.row_vectors",
    "gradlogz.kernels.simd",
    "gradlogz.kernels.workers",
}


def checked_modules() -> set[str]:
    """All modules but the compiled ones, and the packages of those: a package would bring all its modules along."""
    source = Path(__file__).parent.parent / "src"
    names = {".".join(path.relative_to(source).with_suffix("").parts) for path in source.rglob("*.py")}
    modules = {name.removesuffix(".__init__") for name in names}
    return modules - COMPILED - {name for name in modules if any(one.startswith(f"{name}.") for one in COMPILED)}


# Folders that are run without the shape checks, each with the reason. Every other folder is run with them.
UNCHECKED = {
    "commands": "commands are processes and whole applications of their own",
    "compile": "torch.compile does not see through the checks",
    "documentation": "code blocks compile, and run the commands",
    "errors": "the checks would refuse the same calls before the package does",
    "experiments": "whole trainings, and processes of their own",
    "faults": "processes of their own, without the checks",
    "kernels": "numerical derivatives call small functions ten thousand times; tests/agreement checks their shapes",
    "laws": "laws are also about calls that the checks refuse",
    "report": "pages are made by the commands",
    "simulation": "the commands, and clouds of other shapes than annotated",
    "tracking": "numba does not pickle functions that are wrapped",
    "verification": "statements are evaluated thousands of times; tests/theorems checks the shapes of the same calls",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--typecheck", action="store_true", help="check annotated shapes; leave out what cannot bear it")
    parser.addoption("--no-typecheck", action="store_true", help="run only the folders that --typecheck leaves out")


def left_out(path: Path, *, checked: bool, unchecked: bool) -> bool:
    """Whether a path below tests/ is left to the other of the two runs of `make test`."""
    folder = path.relative_to(Path(__file__).parent).parts[:1]
    return bool(folder) and ((checked and folder[0] in UNCHECKED) or (unchecked and folder[0] not in UNCHECKED))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    options = {"checked": config.getoption("--typecheck"), "unchecked": config.getoption("--no-typecheck")}
    return left_out(collection_path, **options) or None  # None: as pytest would


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--typecheck"):
        from jaxtyping import install_import_hook

        install_import_hook(sorted(checked_modules()), "beartype.beartype")
    torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
