"""Here the package speaks for itself: the shape checker of `--typecheck` would refuse the same calls before it."""

import jaxtyping
import pytest


@pytest.fixture(autouse=True)
def _no_shape_checker():
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)
