"""`import gradlogz` works where only torch and jaxtyping are installed."""

import subprocess
import sys

EXTRAS = ("typer", "rich", "scipy", "sklearn", "hypothesis", "beartype")
LATER = ("transformers", "plotly", "jinja2", "polars", "numba")


def run(code: str) -> str:
    block = "import sys\n" + "".join(f"sys.modules[{name!r}] = None\n" for name in EXTRAS + LATER)
    result = subprocess.run([sys.executable, "-c", block + code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_every_public_name_is_there_without_any_extra():
    code = "import gradlogz\nprint(len([getattr(gradlogz, name) for name in gradlogz.__all__]) > 30)"
    assert run(code) == "True"


def test_importing_the_package_does_not_import_torch():
    assert run("import gradlogz\nprint('torch' in sys.modules)") == "False"


def test_a_computation_runs_without_any_extra():
    code = "import torch, gradlogz as gz\nprint(float(gz.Empirical(torch.zeros(3, 2)).log_normalizer(torch.zeros(2))))"
    assert abs(float(run(code)) - 1.0986123) < 1e-6


def test_the_compiler_of_torch_is_not_imported_before_it_is_needed():
    """It takes as long as torch itself; sympy comes with it."""
    code = "import torch, gradlogz\n[getattr(gradlogz, name) for name in gradlogz.__all__]\n"
    assert run(code + "print([name for name in ('torch._dynamo', 'sympy', 'numba') if sys.modules.get(name)])") == "[]"


def test_attention_runs_without_any_extra():
    code = "import torch, gradlogz as gz\nx = torch.randn(2, 64, 8, requires_grad=True)\na = gz.attend(x, x, x)\n"
    code += "a.output.sum().backward()\nprint(a.entropy.shape == (2, 64) and bool(x.grad.isfinite().all()))"
    assert run(code) == "True"
