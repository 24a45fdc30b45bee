"""Batches of targets, filtered by any engine and through any fault, are the tracks of one process."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from threading import Thread

import pytest
import torch
from typer.testing import CliRunner

from gradlogz import cli
from gradlogz.engine import InProcess, LocalProcesses, RayCluster, SlurmArray
from gradlogz.tracking import filtered_batches, run_tracking
from gradlogz.tracking.run_tracking import track

SETTINGS = {"sigma": 0.5, "noise": 0.1, "jitter": 0.0, "smooth": True}


def detections(targets=12):
    generator = torch.Generator().manual_seed(0)
    columns = {"time": [], "target": [], "x": [], "y": []}
    for target in range(targets):
        for t in range(5 + 3 * target):
            noise = torch.randn(2, generator=generator, dtype=torch.float64).tolist()
            columns["time"].append(float(t))
            columns["target"].append(f"t{target}")
            columns["x"].append(t * 2.0 + noise[0])
            columns["y"].append(target - t + noise[1])
    return columns


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    """Several batches of few rows."""
    monkeypatch.setattr(run_tracking, "ROWS", 60)


def same(one, other, rows=slice(None)):
    for name in ("nis", "nis_low", "nis_high", "degrees", "innovation", "score", "log_score"):
        a, b = getattr(one, name)[rows], getattr(other, name)[rows]
        assert torch.equal(a.isnan(), b.isnan()), name
        assert torch.equal(a.nan_to_num(), b.nan_to_num()), name
    for name in ("filtered", "smoothed"):
        for a, b in zip(getattr(one, name), getattr(other, name), strict=True):
            assert torch.equal(a[rows].nan_to_num(), b[rows].nan_to_num()), name


@pytest.mark.parametrize("engine", [InProcess(), LocalProcesses(2)], ids=["process", "processes"])
def test_tracks_do_not_depend_on_the_engine(tmp_path, engine):
    one = track(detections(), **SETTINGS)
    other = track(detections(), **SETTINGS, engine=engine, folder=tmp_path / "parts")
    same(one, other)
    assert other.log_likelihood == one.log_likelihood
    assert len(list((tmp_path / "parts/items").iterdir())) > 3


def kill_a_job(folder):
    """Kill the first process of submitit that works in this folder; return the thread that does so."""

    def kill():
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for process in Path("/proc").glob("[0-9]*"):
                with suppress(OSError):
                    words = (process / "cmdline").read_bytes()
                    if b"submitit.core._submit" in words and str(folder).encode() in words:
                        os.kill(int(process.name), signal.SIGKILL)
                        killed.append(int(process.name))
                        return
            time.sleep(0.01)

    killed = []
    thread = Thread(target=kill)
    thread.start()
    return thread, killed


def test_the_batch_of_a_killed_job_of_submitit_is_filtered_again(tmp_path):
    thread, killed = kill_a_job(tmp_path / "jobs")
    options = {"engine": SlurmArray(tmp_path / "jobs", 2), "folder": tmp_path / "parts"}
    other = track(detections(4), **SETTINGS, **options)
    thread.join()
    assert len(killed) == 1
    assert not other.failures
    same(track(detections(4), **SETTINGS), other)


def test_two_nodes_of_ray_share_tracks_and_survive_the_death_of_one(tmp_path):
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    node = cluster.add_node(num_cpus=1)
    events = tmp_path / "parts/events.jsonl"

    def kill_node():
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if events.is_file() and '"finished", "item"' in events.read_text():
                cluster.remove_node(node, allow_graceful=False)
                return
            time.sleep(0.005)

    thread = Thread(target=kill_node)
    thread.start()
    try:
        other = track(detections(), **SETTINGS, engine=RayCluster(cluster.address), folder=tmp_path / "parts")
        thread.join()
        assert not cluster.worker_nodes
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert not other.failures
    same(track(detections(), **SETTINGS), other)


def test_a_pipe_of_detections_is_refused(tmp_path):
    """It could be read only once, and opening it would wait for its writer."""
    os.mkfifo(tmp_path / "seen.csv")
    result = CliRunner().invoke(cli.application(), ["track", str(tmp_path / "seen.csv")])
    assert result.exit_code == 2
    assert "pipe" in result.output


def test_finished_batches_are_not_filtered_again_and_damaged_ones_are(tmp_path, monkeypatch):
    one = track(detections(), **SETTINGS, engine="process", folder=tmp_path / "parts")
    files = sorted((tmp_path / "parts/items").iterdir())
    files[1].write_bytes(files[1].read_bytes()[:-5])
    calls = []
    monkeypatch.setattr(
        run_tracking, "filtered_batch", lambda work: calls.append(1) or filtered_batches.filtered_batch(work)
    )
    same(one, track(detections(), **SETTINGS, engine="process", folder=tmp_path / "parts"))
    assert len(calls) == 1


def test_other_rows_and_settings_are_refused_and_named(tmp_path):
    track(detections(), **SETTINGS, engine="process", folder=tmp_path / "parts")
    with pytest.raises(ValueError, match=r"noise was 0\.1 and is 0\.2"):
        track(detections(), **{**SETTINGS, "noise": 0.2}, engine="process", folder=tmp_path / "parts")
    with pytest.raises(ValueError, match="rows was"):
        track(detections(11), **SETTINGS, engine="process", folder=tmp_path / "parts")


def test_a_batch_that_fails_is_named_and_the_others_are_kept(tmp_path, monkeypatch):
    one = track(detections(), **SETTINGS)
    right = filtered_batches.filtered_batch

    def broken(work):
        if len(work.batch.rows) == 1:  # the batch of the longest target
            raise MemoryError("out of memory")
        return right(work)

    monkeypatch.setattr(run_tracking, "filtered_batch", broken)
    other = track(detections(), **SETTINGS, engine="process")
    assert "MemoryError: out of memory" in other.failures["targets-000000"]
    lost = other.filtered.mean.isnan().all(-1) & ~one.filtered.mean.isnan().all(-1)
    assert 0 < int(lost.sum()) < len(lost)
    same(one, other, ~lost)
    monkeypatch.chdir(tmp_path)
    rows = detections()
    lines = [",".join(map(str, row)) for row in zip(*rows.values(), strict=True)]
    (tmp_path / "seen.csv").write_text("\n".join([",".join(rows), *lines]))
    words = ["track", "seen.csv", "--sigma", "0.5", "--noise", "0.1", "--engine", "process", "--out-table", "out.csv"]
    result = CliRunner().invoke(cli.application(), words)
    assert result.exit_code == 3, result.output
    assert "targets-000000 failed: MemoryError: out of memory" in result.output
    assert (tmp_path / "seen.html").is_file()


def test_a_killed_command_continues_to_the_same_bytes(tmp_path):
    rows = detections(300)
    lines = [",".join(map(str, row)) for row in zip(*rows.values(), strict=True)]
    (tmp_path / "seen.csv").write_text("\n".join([",".join(rows), *lines]))
    words = ["track", "seen.csv", "--sigma", "0.5", "--noise", "0.1", "--jitter", "0", "--outliers", "0"]
    words += ["--json", "out.json", "--resume", "parts", "--engine", "process"]
    process = subprocess.Popen([sys.executable, "-m", "gradlogz", *words], cwd=tmp_path, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("parts/items/targets-*")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.kill()
    process.wait()
    before = {path.name for path in tmp_path.glob("parts/items/targets-*")}
    for folder in ("parts", "other"):
        words[words.index("--resume") + 1] = folder
        words[words.index("--json") + 1] = f"{folder}.json"
        command = [sys.executable, "-m", "gradlogz", *words]
        assert subprocess.run(command, cwd=tmp_path, stdout=subprocess.DEVNULL, check=False).returncode == 0
    assert before <= {path.name for path in tmp_path.glob("parts/items/targets-*")}
    one, other = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("parts", "other"))
    assert one.pop("command").replace("parts", "other") == other.pop("command")
    assert one == other
    shutil.rmtree(tmp_path / "parts")
