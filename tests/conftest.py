"""Set-up of the suite: shapes checked at run time on request, threads fixed, Hypothesis made reproducible."""

import os

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("suite", deadline=None, derandomize=True, max_examples=20, print_blob=True)
hypothesis.settings.register_profile("long", deadline=None, max_examples=500, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--typecheck", action="store_true", help="check annotated shapes at run time (not with compile)")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--typecheck"):
        from jaxtyping import install_import_hook

        install_import_hook("gradlogz", "beartype.beartype")
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
