"""A pytest plugin that happens to be installed, and that warns, does not fail the suite: warnings are errors here."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
GROUP = "pytest11"  # entry points of plugins


def test_a_plugin_that_warns_is_not_loaded(tmp_path):
    (tmp_path / "noisy_plugin.py").write_text(
        "import warnings\n\ndef pytest_configure():\n    warnings.warn('noise')\n"
    )
    metadata = tmp_path / "noisy_plugin-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: noisy-plugin\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{GROUP}]\nnoisy = noisy_plugin\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "tests/package/test_words_are_checked.py"]

    def status(*options):
        environment = {**os.environ, "PYTHONPATH": path}
        return subprocess.run(
            [*command, *options], cwd=ROOT, env=environment, capture_output=True, check=False
        ).returncode

    assert status() == 0
    assert status("-p", "noisy_plugin") != 0  # loaded, it does fail the suite
