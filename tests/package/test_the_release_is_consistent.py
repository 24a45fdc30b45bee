"""The version is the same everywhere, workflows call targets that exist, and the check of a release sees faults."""

import importlib.util
import io
import random
import re
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

import gradlogz

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_the_version_is_repeated_correctly():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == gradlogz.__version__
    assert f"version = {{{gradlogz.__version__}}}" in (ROOT / "docs" / "citing.md").read_text()


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_targets_of_make(workflow):
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    commands = [step["run"] for job in jobs for step in job["steps"] if step.get("run", "").startswith("make")]
    assert commands
    for command in commands:
        targets = {word for word in command.split()[1:] if "=" not in word}
        assert targets <= TARGETS


def test_every_form_of_an_issue_is_complete():
    forms = [path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml"]
    assert len(forms) >= 3
    for form in forms:
        content = yaml.safe_load(form.read_text())
        assert {"name", "description", "body"} <= set(content)
        assert all({"type", "id", "attributes"} <= set(field) for field in content["body"])


def distribution(path, names, size=0):
    files = {**dict.fromkeys(names, b""), "gradlogz/large.py": random.Random(0).randbytes(size)}
    if path.suffix == ".whl":
        with zipfile.ZipFile(path, "w") as wheel:
            for name, content in files.items():
                wheel.writestr(name, content)
        return path
    with tarfile.open(path, "w:gz") as sdist:
        for name, content in files.items():
            entry = tarfile.TarInfo(f"gradlogz-0/{name}")
            entry.size = len(content)
            sdist.addfile(entry, io.BytesIO(content))
    return path


@pytest.mark.parametrize("suffix", [".whl", ".gz"])
def test_the_check_of_a_release_sees_what_is_missing_and_what_is_too_much(suffix, tmp_path):
    spec = importlib.util.spec_from_file_location("release_check", ROOT / "tools" / "release_check.py")
    check = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(check)
    complete = list(check.EXPECTED[suffix])
    assert check.version() == gradlogz.__version__

    def faults(names, size=0):
        return check.faults_of(distribution(tmp_path / f"archive{suffix}", names, size))

    assert faults(complete) == []
    (fault,) = faults(complete[:1] + complete[2:])
    assert "lacks gradlogz/py.typed" in fault
    (fault,) = faults([*complete, "tests/test_x.py"])
    assert "contains" in fault
    assert "tests/test_x.py" in fault
    (fault,) = faults(complete, size=check.LIMIT)
    assert "bytes, more than" in fault
