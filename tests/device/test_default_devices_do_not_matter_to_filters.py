"""Filters work where their arguments are, whatever device torch makes new tensors on."""

import sys

import pytest
import torch

from support.filter_calls import CALLS, Place, same_everywhere

DEVICES = (
    ("meta", "cuda") if torch.cuda.is_available() else ("meta",)
)  # a tensor on "meta" has no numbers to go on with


@pytest.mark.parametrize("default", DEVICES)
@pytest.mark.parametrize("name", CALLS)
def test_results_are_those_of_the_arguments(name, default):
    run = CALLS[name]()
    for place in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        if (kernel := sys.modules.get("gradlogz.kernels.filters.cpu")) is not None:
            kernel._form.cache_clear()  # what was made before this is not what is asked here
        with torch.device(default):
            found = run(Place(place))
        expected = run(Place(place))
        same_everywhere(found, Place()(expected), device=place)
