"""Triton kernels of attention and of losses compile for a GPU that need not be there: the interpreter accepts more."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="an optional package")

SCRIPT = Path(__file__).parents[1] / "support" / "compiled_triton_kernels.py"


def test_every_kernel_compiles_with_masks_and_without():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == [
        "_backward_key", "_backward_query", "_coefficients", "_extreme_keys", "_forward", "_join", "_segment_spans",
        "_split", "_sum_heads", "finish_lines", "join_columns", "tile_slopes", "tile_statistics",
    ]  # fmt: skip
