"""A probe in parts ends with the same bytes whatever computes it and whatever dies; a part that fails is named.

Faults are real: processes are killed, files are cut and changed, a disk is full.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from typer.testing import CliRunner

from gradlogz import cli
from gradlogz.engine import LocalProcesses, RayCluster, SlurmArray
from gradlogz.engine.work_folder import WorkFolder
from gradlogz.probing.divided import divided_pass
from gradlogz.probing.runs.findings_file import FINDINGS
from gradlogz.probing.runs.replicates import REPLICATES
from gradlogz.probing.runs.run_folder import read_run
from support.divided_probes import content, divided, saved, with_fault
from support.saved_models import gpt2, save, save_text


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("divided"))


@pytest.fixture(scope="module")
def expected(place):
    """Bytes of an undisturbed measurement."""
    return content(divided(place, place / "undisturbed"), place / "expected")


# The main process -----------------------------------------------------------------------------------------------------


def killed(place, folder, seconds):
    """Measure in a child of this process, which is killed after some seconds; whether it ended before."""
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)
            divided(place, folder)
        finally:
            os._exit(0)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("kills", [10, pytest.param(100, marks=pytest.mark.long)])
def test_a_probe_that_is_killed_at_random_instants_continues_to_the_same_bytes(place, expected, tmp_path, kills):
    """Work that comes to its end before it is killed is compared, and begins again in another folder."""
    begun = time.monotonic()
    divided(place, tmp_path / "timed")
    span = time.monotonic() - begun
    instants = random.Random(0)
    work, counts, died = tmp_path / "work", [0], 0
    while died < kills:
        ended = killed(place, work, instants.uniform(0.0, span / 2))
        died += not ended
        counts.append(len(list(work.glob("items/[!.]*"))))
        assert counts == sorted(counts)  # nothing that is finished is lost
        if ended or died == kills:
            assert content(divided(place, work), tmp_path / "x") == expected
            assert not list(work.glob("*/.*"))  # hidden files of killed processes are removed
            work, counts = tmp_path / f"work-{died}", [0]


def test_a_killed_probe_of_checkpoints_continues_to_the_same_bytes(tmp_path):
    """Killed in the second checkpoint: the run of the first is kept, and the parts of the second."""
    for step in (100, 200):
        save(gpt2(step), tmp_path / f"runs/checkpoint-{step}")
    save_text(tmp_path / "text.jsonl")
    words = ["probe", "runs", "--text", "text.jsonl", "--tokens", "0", "--only", "entropy", "--draws", "2"]
    words += ["--engine", "process", "--device", "cpu", "--json", "trajectory.json", "--resume"]
    command = [sys.executable, "-m", "gradlogz", *words]

    def run(folder):
        arguments = [*command, f"{folder}-parts", "--out", folder]
        return subprocess.Popen(arguments, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    process = run("killed")
    deadline = time.monotonic() + 240
    while not list(tmp_path.glob("killed-parts/runs/checkpoint-200/items/[!.]*")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.kill()
    process.wait()
    kept = (tmp_path / "killed/checkpoint-100/run.json").read_bytes()
    assert not (tmp_path / "killed/checkpoint-200/run.json").exists()
    assert run("killed").wait() == 0
    assert (tmp_path / "killed/checkpoint-100/run.json").read_bytes() == kept  # not measured again
    assert run("other").wait() == 0
    for step in (100, 200):
        for name in (FINDINGS, REPLICATES):
            files = [tmp_path / folder / f"checkpoint-{step}" / name for folder in ("killed", "other")]
            assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_command_ends_with_130_and_continues(place, tmp_path, ending):
    words = ["probe", place / "model", "--text", place / "text.jsonl", "--tokens", "0", "--only", "entropy,expansion"]
    words += ["--draws", "2", "--resume", "work", "--engine", "process", "--device", "cpu"]
    script = "import signal, sys, torch; from gradlogz import cli; torch.set_num_threads(1); "
    # Scripts start commands in the background with SIGINT ignored: SIGTERM must end them all the same.
    handler = "default_int_handler" if ending == signal.SIGINT else "SIG_IGN"
    script += f"signal.signal(signal.SIGINT, signal.{handler}); cli.main()"
    process = subprocess.Popen([sys.executable, "-c", script, *map(str, words), "--out", "run"], cwd=tmp_path)
    deadline = time.monotonic() + 120
    while len(list(tmp_path.glob("work/items/[!.]*"))) < 3:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(ending)
    assert process.wait() == 130
    before = {path.name for path in tmp_path.glob("work/items/[!.]*")}
    assert json.loads((tmp_path / "work/events.jsonl").read_text().splitlines()[-1])["interrupted"]
    words[words.index("work")] = tmp_path / "work"
    result = CliRunner().invoke(cli.application(), [*map(str, words), "--out", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    assert before < {path.name for path in tmp_path.glob("work/items/[!.]*")}
    assert read_run(tmp_path / "run").counts["documents"] == 24


def test_a_second_process_in_the_folder_is_refused(place, tmp_path):
    fcntl = pytest.importorskip("fcntl")
    divided(place, tmp_path / "work", baseline=0.0)
    with (tmp_path / "work/.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RuntimeError, match="another process works"):
            divided(place, tmp_path / "work", baseline=0.0)


# Files ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["items", "inputs"])
@pytest.mark.parametrize("damage", ["cut", "changed", "foreign", "removed"])
def test_damaged_files_are_made_again(place, expected, tmp_path, folder, damage):
    shutil.copytree(place / "undisturbed", tmp_path / "work")
    for path in sorted((tmp_path / "work" / folder).glob("[!.]*"))[::3]:
        data = path.read_bytes()
        flipped = data[:-1] + bytes([data[-1] ^ 1])
        path.write_bytes({"cut": data[:-9], "changed": flipped, "foreign": b"other", "removed": b""}[damage])
        if damage == "removed":
            path.unlink()
    assert content(divided(place, tmp_path / "work"), tmp_path / "x") == expected


def exchanged(work, folder, name, state):
    """Put another state in place of a finished one, with its own checksum, as anyone can who may write there."""
    (path,) = (work / folder).glob(f"{name}-[0-9a-f]*.safetensors")
    path.unlink()
    return WorkFolder("test", work, {}).write(name, state, folder)


def test_exchanged_states_are_made_again_or_refused(place, expected, tmp_path):
    shutil.copytree(place / "undisturbed", tmp_path / "work")
    exchanged(tmp_path / "work", "inputs", "index", {"first": "../../model/config.json"})
    assert content(divided(place, tmp_path / "work"), tmp_path / "x") == expected
    exchanged(tmp_path / "work", "items", "model", "a reason")
    with pytest.raises(RuntimeError, match=r"the file of model in .* has another state.*--restart"):
        divided(place, tmp_path / "work")


def test_a_full_disk_is_named_and_the_work_continues_when_there_is_space(place, expected, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting needs root")
    try:
        outcome = divided(place, disk / "work")
        assert outcome.failures
        assert any("No space left" in error or "os error 28" in error for error in outcome.failures.values())
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        assert content(divided(place, disk / "work"), tmp_path / "x") == expected
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)  # files may be mapped if an assertion fails


# Workers --------------------------------------------------------------------------------------------------------------


def test_a_killed_worker_changes_nothing(place, tmp_path):
    files = with_fault(tmp_path, "kill once")
    outcome = divided(place, tmp_path / "work", LocalProcesses(2), files=files, baseline=0.0)
    assert len((tmp_path / "marks").read_text()) > 1
    undisturbed = divided(place, tmp_path / "other", files=with_fault(tmp_path, "none"), baseline=0.0)
    assert content(outcome, tmp_path / "x") == content(undisturbed, tmp_path / "y")


def test_draws_that_run_out_of_memory_are_computed_again(place, expected, tmp_path, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("no memory is left")

    with monkeypatch.context() as patched:
        patched.setattr(divided_pass, "drawn", full)
        outcome = divided(place, tmp_path / "work")
    assert outcome.failures
    assert all(name.startswith("draws-") for name in outcome.failures)
    assert "no memory is left" in next(iter(outcome.failures.values()))
    assert not outcome.measured.complete
    again = divided(place, tmp_path / "work")
    assert not again.failures
    assert content(again, tmp_path / "x") == expected


def test_a_part_that_always_fails_is_named_and_the_others_are_kept(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (file,) = with_fault(tmp_path, "raise", group=1)
    words = ["probe", place / "model", "--text", place / "text.jsonl", "--tokens", "0", "--only", "entropy,fault"]
    words += ["--prediction", file, "--baseline", "0", "--resume", "work", "--engine", "process", "--out", "run"]
    result = CliRunner().invoke(cli.application(), [*map(str, words)])
    assert result.exit_code == 3, result.output
    assert "text-1-0000 failed: ZeroDivisionError: an unlucky group" in result.output
    run = read_run("run", strict=False)
    assert not run.complete
    assert 0 < run.counts["documents"] < 24
    (tmp_path / "fault.py").write_text((tmp_path / "fault.py").read_text().replace("'raise'", "'none'"))
    result = CliRunner().invoke(cli.application(), [*map(str, words)])
    assert result.exit_code == 2  # another prediction is other work
    assert "files was" in result.output


def test_a_job_of_submitit_that_is_killed_is_tried_again(tmp_path):
    saved(tmp_path, layers=1, documents=3)
    files = with_fault(tmp_path, "kill once", group=6)
    options = {"baseline": 0.0, "names": ("entropy",)}
    outcome = divided(tmp_path, tmp_path / "work", SlurmArray(tmp_path / "jobs", 2), files=files, **options)
    assert not outcome.failures
    assert len((tmp_path / "marks").read_text()) > 1
    undisturbed = divided(tmp_path, tmp_path / "other", files=with_fault(tmp_path, "none", group=6), **options)
    assert content(outcome, tmp_path / "x") == content(undisturbed, tmp_path / "y")


def test_two_nodes_of_ray_share_a_probe_and_survive_the_death_of_one(place, expected, tmp_path):
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    other = cluster.add_node(num_cpus=1)
    workers = set()

    def kill_node(done, _):
        events = [json.loads(line) for line in (tmp_path / "work/events.jsonl").read_text().splitlines()]
        workers.update(event["worker"] for event in events if event["event"] == "finished")
        if len(workers) == 2 and cluster.worker_nodes:
            cluster.remove_node(other, allow_graceful=False)

    try:
        outcome = divided(place, tmp_path / "work", RayCluster(cluster.address), progress=kill_node)
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert not cluster.worker_nodes
    assert len(workers) >= 2
    assert content(outcome, tmp_path / "x") == expected
