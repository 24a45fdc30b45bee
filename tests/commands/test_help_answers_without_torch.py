"""Options stand beside their commands, and are known before torch is imported."""

import pkgutil
import subprocess
import sys

from gradlogz import cli, commands

SHARED = {
    "boundary",
    "checkpoint_runs",
    "divided_probe",
    "engine_options",
    "interventions",
    "logs",
    "model_options",
    "outputs",
    "simulate_model",
}


def test_every_module_is_a_command_of_its_name():
    modules = {info.name for info in pkgutil.iter_modules(commands.__path__)}
    assert {command.name for command in cli.application().registered_commands} == modules - SHARED


def test_help_of_every_command_imports_no_torch_and_no_page():
    code = """
import sys
from gradlogz import cli

app = cli.application()
for command in app.registered_commands:
    try:
        app([command.name, "--help"])
    except SystemExit as end:
        assert not end.code
print([name for name in ("torch", "numpy", "plotly", "gradlogz.page", "gradlogz.reporting") if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"


def test_a_missing_file_is_reported_without_torch(tmp_path):
    code = f"""
import sys
from gradlogz import cli

try:
    cli.application()(["track", {str(tmp_path / "missing.csv")!r}])
except SystemExit as end:
    assert end.code == 2
print("torch" in sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "False"
    assert "missing.csv cannot be read: No such file" in " ".join(result.stderr.split())
