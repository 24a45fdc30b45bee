"""Set-up of the suite: shapes checked at run time on request, threads fixed, Hypothesis made reproducible."""

import os
from pathlib import Path

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported, by whichever test

hypothesis.settings.register_profile("suite", deadline=None, derandomize=True, max_examples=20, print_blob=True)
hypothesis.settings.register_profile("long", deadline=None, max_examples=500, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))


def checked_modules() -> set[str]:
    """All modules but those whose functions a compiler of its own reads: numba and Triton."""
    source = Path(__file__).parent.parent / "src"
    names = {".".join(path.relative_to(source).with_suffix("").parts) for path in source.rglob("*.py")}
    return {name.removesuffix(".__init__") for name in names} - {
        "gradlogz",
        "gradlogz.kernels",
        "gradlogz.kernels.attention",  # a package is checked with all its modules
        "gradlogz.kernels.filters",
        "gradlogz.kernels.attention.cpu",
        "gradlogz.kernels.attention.decoding",
        "gradlogz.kernels.attention.gpu",
        "gradlogz.kernels.filters.lanes",
        "gradlogz.kernels.simd",
        "gradlogz.kernels.filters.modes_in_lanes",
        "gradlogz.kernels.filters.cpu",
        "gradlogz.kernels.filters.targets_in_lanes",
        "gradlogz.kernels.attention.tiles",
        "gradlogz.kernels.workers",
    }


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--typecheck", action="store_true", help="check annotated shapes at run time (not with compile)")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--typecheck"):
        from jaxtyping import install_import_hook

        install_import_hook(sorted(checked_modules()), "beartype.beartype")
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
