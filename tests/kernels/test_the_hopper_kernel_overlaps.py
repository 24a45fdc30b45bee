"""The machine code of the Hopper kernels takes exponentials while products run, and spills no or few registers.

An update of the compiler may lose either without a word, and with it a tenth of the speed. The kernels are compiled
here for a GPU that need not be there.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

SCRIPT = Path(__file__).parents[1] / "support" / "machine_code_of_the_hopper_kernel.py"


@pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="the kernel is used with Triton 3.6 alone")
def test_exponentials_overlap_with_products_and_nothing_spills():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    # Triton's table of what each warp runs: support/warp_states.py tells it from races.
    assert {variant["bytes read from shared memory"] for variant in found.values()} == {1}
    forward = {"128, causal": 0, "64, window": 0, "128, segments": 64}  # and the registers that may be spilled
    assert set(found) == {*forward, "128, causal, backward", "64, full, backward"}
    for name, spills in forward.items():
        variant = found[name]
        assert variant["spills"] <= spills
        # One loop for each of the two consumers. A thread has 64 of the 64 x 128 logits of a tile, and takes at least
        # half of the exponentials before it waits for the product with the values.
        assert len(variant["overlapped exponentials"]) == 2
        assert min(variant["overlapped exponentials"]) >= 32
        assert variant["products"] == (48 if name.startswith("128") else 40)
    for name in ("128, causal, backward", "64, full, backward"):
        # Five products of each consumer, and dQ once more after the last step of a tile of keys. What is spilled are
        # numbers that are read once per step; a loop that holds no accumulator in registers has hundreds.
        assert found[name]["products"] == (80 if name.startswith("128") else 96)
        assert found[name]["spills"] <= 128
