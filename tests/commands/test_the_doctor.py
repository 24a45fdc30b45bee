"""gradlogz doctor: every call is served and right, a wrong kernel is seen, and what is missing has a command."""

import json
import os
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from gradlogz import cli
from gradlogz.diagnosis import kernel_calls, machine, packages
from gradlogz.diagnosis.packages import NeededPackage
from gradlogz.diagnosis.records import Diagnosis
from gradlogz.kernels.attention import dispatch
from gradlogz.reporting.diagnosis_terminal import diagnosis_lines


@pytest.fixture
def quick(monkeypatch):
    """Small problems, without a measurement of time."""
    calls = [call._replace(heads=2, queries=min(call.queries, 40), keys=40) for call in kernel_calls.CPU_CALLS]
    monkeypatch.setattr(kernel_calls, "CPU_CALLS", tuple(calls))
    monkeypatch.setattr(kernel_calls, "_compared", lambda ours, theirs, device: (0.5, 1.0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("quick")
def test_every_call_is_served_and_right():
    updates = []
    diagnosis = machine.diagnose(lambda done, total: updates.append((done, total)))
    kernels = {call.call: call.kernel for call in diagnosis.calls}
    assert kernels["attend"] == kernels["attend, backward"] == kernels["imm, 3 modes, 500 targets"] == "numba"
    assert kernels["attend, float64"] == "blocked"
    assert diagnosis.passes
    assert all(call.error < 1e-2 for call in diagnosis.calls)
    assert updates == [(number, len(diagnosis.calls)) for number in range(1, len(diagnosis.calls) + 1)]


@pytest.mark.usefixtures("quick")
def test_a_wrong_kernel_fails_and_exits_with_1(monkeypatch):
    right = dispatch.forward

    def wrong(*args, **options):
        result = right(*args, **options)
        return result._replace(entropy=result.entropy * 1.05)

    monkeypatch.setattr(dispatch, "forward", wrong)
    result = CliRunner().invoke(cli.application(), ["doctor"])
    assert result.exit_code == 1
    assert "✗ fails" in result.stdout


@pytest.mark.usefixtures("quick")
def test_a_kernel_that_raises_is_named_and_the_others_are_measured(monkeypatch):
    right = dispatch.forward

    def broken(query, *args, **options):
        if query.dtype == torch.bfloat16:
            raise RuntimeError("no binary for this device")
        return right(query, *args, **options)

    monkeypatch.setattr(dispatch, "forward", broken)
    result = CliRunner().invoke(cli.application(), ["doctor"])
    assert result.exit_code == 1
    assert result.stdout.count("raises RuntimeError") == result.stdout.count("✗ fails") == 1
    assert max(map(len, result.stdout.splitlines())) <= 80


@pytest.mark.usefixtures("quick")
def test_json_has_versions_devices_packages_and_calls(tmp_path):
    file = tmp_path / "machine.json"
    result = CliRunner().invoke(cli.application(), ["doctor", "--json", str(file)])
    assert result.exit_code == 0, result.output
    data = json.loads(file.read_text())
    assert data["versions"]["torch"] == torch.__version__
    assert {"cli", "fast", "probe", "report", "tables"} <= {package["extra"] for package in data["packages"]}
    assert all(call["passes"] and call["ratio"] == 0.5 for call in data["calls"])
    assert max(map(len, result.stdout.splitlines())) <= 80
    again = CliRunner().invoke(cli.application(), ["doctor", "--json", str(file)])
    assert again.exit_code == 0, again.output  # it replaces a file of its own


@pytest.mark.usefixtures("quick")
def test_json_of_a_kernel_without_numbers_is_json(monkeypatch):
    monkeypatch.setattr(kernel_calls, "_largest_error", lambda *_: float("nan"))
    result = CliRunner().invoke(cli.application(), ["doctor", "--json", "-"])
    assert result.exit_code == 1
    data = json.loads(result.stdout, parse_constant=pytest.fail)
    assert {call["error"] for call in data["calls"]} == {None}


def test_what_is_missing_has_a_command(monkeypatch):
    lines = [
        "torch>=2.11",
        "numba>=0.68; extra == 'fast'",
        "no-such-package; extra == 'fast'",
        "gradlogz[cli]; extra == 'all'",
    ]
    monkeypatch.setattr(packages, "_requirements", lambda: lines)
    needed = packages.packages()
    assert [package.name for package in needed] == ["torch", "numba", "no-such-package"]
    assert needed[1] == NeededPackage("numba", ">=0.68", "fast", packages.installed("numba"))
    diagnosis = Diagnosis({}, needed, [], [])
    text = "\n".join(line.plain for line in diagnosis_lines(diagnosis, 80))
    assert "compiled CPU kernels of attention and filters: no-such-package\n  pip install 'gradlogz[fast]'" in text


def test_the_definition_is_that_of_torch():
    """Against SDPA and torch.distributions in float64."""
    call = kernel_calls.MeasuredCall("attend", 1, 2, 5, 7, 4, torch.float64)
    operands = [torch.randn(1, 2, n, 4, dtype=torch.float64) for n in (5, 7, 7)]
    output, G, entropy = kernel_calls._definition(call, operands, operands[0])
    logits = operands[0] @ operands[1].mT / 2
    torch.testing.assert_close(output, torch.nn.functional.scaled_dot_product_attention(*operands))
    torch.testing.assert_close(G, logits.logsumexp(-1))
    torch.testing.assert_close(entropy, torch.distributions.Categorical(logits=logits).entropy())


@pytest.mark.parametrize(("words", "expected"), [("gradlogz pro", "probe"), ("gradlogz verify --on", "--only")])
def test_shells_complete_commands_and_options(words, expected):
    environment = {"_GRADLOGZ_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    code = "import sys; sys.argv[0] = 'gradlogz'; from gradlogz.cli import main; main()"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.stdout.split() == [expected]
