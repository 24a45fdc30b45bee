"""Every case compiles from scratch."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
