"""Outputs go into devices and pipes, through links, and never in place of a folder or of another's file.

The devices, pipes, links, full disks and encodings are real ones; each command is run as a user runs it.
"""

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from test_a_run_is_written_whole_or_not_at_all import run_of, same
from typer.testing import CliRunner

from gradlogz import cli
from gradlogz._output_files import check_file, is_own, replaced, same_file, write
from gradlogz.commands.outputs import check_files
from gradlogz.probing.runs.run_folder import check_place, read_run, write_run
from gradlogz.tracking.run_tracking import track
from gradlogz.tracking.table import write_table

ROOT = os.geteuid() == 0
VERIFY = ["verify", "--only", "Eq. 4"]


def gradlogz(words, cwd, **options):
    environment = {**os.environ, **options.pop("env", {})}
    command = [sys.executable, "-m", "gradlogz", *map(str, words)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, check=False, timeout=120, **options)


@pytest.fixture(scope="module")
def tracks():
    return track()


# Files --------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not ROOT, reason="only root makes devices")
def test_bytes_go_into_a_device(tmp_path):
    device = tmp_path / "null"
    os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    check_file("verify", "--json", device)
    write(device, "text")
    assert stat.S_ISCHR(device.stat().st_mode)
    assert [p.name for p in tmp_path.iterdir()] == ["null"]


@pytest.mark.skipif(not ROOT, reason="only root makes devices")
def test_a_disk_is_refused(tmp_path):
    disk = tmp_path / "disk"
    os.mknod(disk, 0o666 | stat.S_IFBLK, os.makedev(7, 200))
    with pytest.raises(ValueError, match="disk"):
        check_file("verify", "--out", disk)


def test_bytes_go_into_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE) as reader:
        write(pipe, "ñ" * 10_000)
        assert reader.stdout.read().decode() == "ñ" * 10_000
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
@pytest.mark.parametrize("sink", ["pipe", "file"])
def test_standard_output_is_appended_to(tmp_path, name, sink):
    code = f"""
from gradlogz._output_files import check_file, write
check_file("verify", "--json", {name!r})
print("before")
write({name!r}, "text\\n")
print("after")
"""
    target = tmp_path / "file" if sink == "file" else None
    with open(target or os.devnull, "wb") as file:
        out = subprocess.run(
            [sys.executable, "-c", code], stdout=file if target else subprocess.PIPE, check=True, timeout=60
        ).stdout
    assert (target.read_bytes() if target else out) == b"before\ntext\nafter\n"


def test_a_link_stays_and_its_file_is_replaced(tmp_path):
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "page.html", tmp_path / "link.html"
    link.symlink_to("there/page.html")
    write(link, "first")  # a link to a file that is not there yet
    write(link, "second")
    assert link.is_symlink()
    assert target.read_text() == "second"
    assert [p.name for p in target.parent.iterdir()] == ["page.html"]


def test_a_ring_of_links_is_refused(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(ValueError, match="--out"):
        check_file("verify", "--out", tmp_path / "a")


def test_a_new_file_has_ordinary_permissions_and_an_old_one_keeps_its_own(tmp_path):
    new, old = tmp_path / "new", tmp_path / "old"
    plain = tmp_path / "plain"
    plain.touch()
    write(new, "")
    assert new.stat().st_mode == plain.stat().st_mode
    old.touch(0o640)
    write(old, "")
    assert stat.S_IMODE(old.stat().st_mode) == 0o640


def test_files_of_killed_processes_are_removed_after_an_hour(tmp_path):
    with subprocess.Popen(["true"]) as process:
        pass
    abandoned = tmp_path / f".page.html.{process.pid}.0a1b2c3d.part"
    fresh = tmp_path / f".page.html.{process.pid}.0a1b2c3e.part"
    running = tmp_path / f".page.html.{os.getpid()}.0a1b2c3f.part"
    for path in (abandoned, fresh, running):
        path.touch()
    for path in (abandoned, running):
        os.utime(path, (time.time() - 7200,) * 2)
    write(tmp_path / "page.html", "")
    assert {p.name for p in tmp_path.iterdir()} == {"page.html", fresh.name, running.name}


def test_a_name_as_long_as_names_may_be_is_written(tmp_path):
    path = tmp_path / ("x" * 250 + ".html")
    write(path, "text")
    assert path.read_text() == "text"


@pytest.mark.parametrize("content", ["\\documentclass{book}", '{"name": "package"}', "time,target,x,y\n", "<html>"])
def test_a_file_of_another_origin_needs_force(tmp_path, content):
    path = tmp_path / "thesis"
    path.write_text(content)
    with pytest.raises(ValueError, match="--force"):
        check_file("track", "--out", path)
    check_file("track", "--out", path, force=True)


def test_a_file_without_permission_to_write_needs_force(tmp_path):
    path = tmp_path / "page.html"
    path.touch(0o444)
    with pytest.raises(ValueError, match="--force"):
        check_file("track", "--out", path)
    check_file("track", "--out", path, force=True)


def test_a_user_replaces_a_file_of_their_own_without_permission_to_write():
    """As another user than root, whom permissions do not stop."""
    folder, user, nobody = Path(tempfile.mkdtemp()), os.geteuid(), 65534  # folders of pytest are closed to others
    path = folder / "page.html"
    path.touch(0o444)
    if user == 0:
        os.chown(folder, nobody, -1)
        os.chown(path, nobody, -1)
    try:
        if user == 0:
            os.seteuid(nobody)
        write(path, "new")
    finally:
        os.seteuid(user)
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o444
    shutil.rmtree(folder)


def test_outputs_are_neither_inputs_nor_each_other(tmp_path):
    path = tmp_path / "flights.csv"
    path.touch()
    other = tmp_path / "other.csv"
    os.link(path, other)
    for files in ({"--out": path}, {"--out-table": other}):
        with pytest.raises(ValueError, match="the input"):
            check_files("track", files, inputs=[str(path)], force=True)
    with pytest.raises(ValueError, match="that of --out"):
        check_files("track", {"--out": tmp_path / "new", "--json": tmp_path / "." / "new"})
    check_files("track", {"--out": "/dev/null", "--json": "/dev/null"})
    assert not same_file("/dev/null", "/dev/null")


def test_commands_know_what_they_wrote(tmp_path, monkeypatch, tracks):
    monkeypatch.chdir(tmp_path)
    words = [*VERIFY, "--out", "page.html", "--json", "results.json"]
    for _ in range(2):  # the second time without --force
        assert CliRunner().invoke(cli.application(), words).exit_code == 0
    words = ["track", "--out", "t.html", "--json", "t.json"]
    assert CliRunner().invoke(cli.application(), words).exit_code == 0
    before = (tmp_path / "t.json").read_bytes()
    refused = CliRunner().invoke(cli.application(), [*words, "--levels", "t.json"])
    assert refused.exit_code == 2
    assert "the input of this command" in refused.stderr
    assert (tmp_path / "t.json").read_bytes() == before
    write_table(tracks, tmp_path / "t.csv")
    write_table(tracks, tmp_path / "t.parquet")
    for name in ("t.html", "t.json", "t.csv", "t.parquet"):
        assert is_own(tmp_path / name), name
    findings = run_of(1).findings
    write(tmp_path / "findings.csv", findings.csv())
    findings.frame().write_parquet(tmp_path / "findings.parquet")
    write_run(tmp_path / "run", run_of(1))
    for name in ("findings.csv", "findings.parquet", "run/findings.json", "run/findings.parquet"):
        assert is_own(tmp_path / name), name


# Full disks, streams and encodings ------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = ROOT and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True, check=False
    ).returncode == 0  # fmt: skip
    if not mounted:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_one_sentence_and_leaves_the_old_file(small_disk):
    page = small_disk / "page.html"
    write(page, "old")
    with pytest.raises(RuntimeError, match="No space left"):
        write(page, "x" * 200_000)
    assert page.read_text() == "old"
    assert [p.name for p in small_disk.iterdir()] == ["page.html"]
    result = gradlogz(["track", "--out", small_disk / "t.html"], small_disk)
    assert result.returncode == 2
    assert b"No space left" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_table_on_a_full_disk_is_one_sentence(small_disk, suffix, tracks):
    filling(small_disk)
    with pytest.raises(RuntimeError, match="No space left"):
        write_table(tracks, small_disk / f"t{suffix}")
    assert [p.name for p in small_disk.iterdir()] == ["filling"]


def test_an_output_that_fails_after_another_is_status_3(small_disk, tmp_path):
    filling(small_disk, left=0)
    result = gradlogz(["track", "--out", tmp_path / "t.html", "--json", small_disk / "t.json"], tmp_path)
    assert result.returncode == 3
    assert b"t.html are kept" in result.stderr


def test_a_run_on_a_full_disk_is_one_sentence_and_keeps_the_old_run(small_disk):
    place = write_run(small_disk / "run", run_of(1))
    filling(small_disk)
    with pytest.raises(ValueError, match="No space left"):
        write_run(place, run_of(2))
    (small_disk / "filling").unlink()
    assert same(read_run(place), run_of(1))
    assert [p.name for p in small_disk.iterdir()] == ["run"]


def filling(folder, left=4096):
    """Fill a file system but for this many bytes."""
    status = os.statvfs(folder)
    (folder / "filling").write_bytes(b"x" * (status.f_bavail * status.f_frsize - left))


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="no /dev/full")
@pytest.mark.parametrize("words", [VERIFY, ["simulate", "--list"], [*VERIFY, "--json", "-"]])
def test_a_full_standard_output_is_one_sentence(tmp_path, words):
    command = [sys.executable, "-m", "gradlogz", *words]
    with open("/dev/full", "wb") as full:
        result = subprocess.run(
            command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=120
        )
    assert result.returncode == 2
    assert "standard output cannot be written" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
    assert "Exception ignored" not in result.stderr


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
@pytest.mark.parametrize("words", [["verify", "--only", "Eq. 4", "--details"], ["simulate", "--list"]])
def test_every_encoding_can_be_printed_in(tmp_path, encoding, words):
    result = gradlogz(words, tmp_path, env={"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"})
    assert result.returncode == 0, result.stderr
    assert result.stdout.decode(encoding)


@pytest.mark.parametrize("encoding", ["ascii"])
def test_json_on_standard_output_is_utf_8(tmp_path, encoding):
    result = gradlogz([*VERIFY, "--json", "-"], tmp_path, env={"PYTHONIOENCODING": encoding, "LC_ALL": "C"})
    assert json.loads(result.stdout.decode("utf-8"))["statements"][0]["corrected"] == "E_η[x] = ∇ log Z(η)"


# Folders ------------------------------------------------------------------------------------------------------------


def test_a_run_does_not_replace_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    for name in (".", "", "..", tmp_path / "inner"):
        with pytest.raises(ValueError, match=r"working directory|other files"):
            check_place(name)
    write_run("run", run_of(1))
    assert Path.cwd() == tmp_path / "inner"
    monkeypatch.chdir("run")
    with pytest.raises(ValueError, match="working directory"):
        write_run(".", run_of(2))
    assert same(read_run("."), run_of(1))


def test_a_linked_run_folder_stays_a_link(tmp_path):
    (tmp_path / "large disk").mkdir()
    link = tmp_path / "run"
    link.symlink_to(tmp_path / "large disk" / "run")
    for number in (1, 2, 3):
        write_run(link, run_of(number))
        assert link.is_symlink()
        assert same(read_run(link), run_of(number))
        assert [p.name for p in (tmp_path / "large disk").iterdir()] == ["run"]


def test_files_of_others_beside_a_run_and_in_it_are_kept(tmp_path):
    place = write_run(tmp_path / "run", run_of(1))
    for name in (".run.old", ".run.new", ".run.gradlogz-old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.tex").write_text("x")
    for name in (".run.part-x", f".run.part-{os.uname().nodename}-abc", f".run.part-{os.uname().nodename}-{10**20}x"):
        (tmp_path / name).mkdir()
    (place / "notes").mkdir()
    (place / "notes" / "a.txt").write_text("y")
    (place / "dangling").symlink_to("nowhere")
    (place / "outside").symlink_to(tmp_path / ".run.old")
    before = {p.name for p in tmp_path.iterdir()}
    (tmp_path / ".run.gradlogz-old" / "thesis.tex").rename(tmp_path / "thesis.tex")
    (tmp_path / ".run.gradlogz-old").rmdir()
    write_run(place, run_of(2))
    assert same(read_run(place), run_of(2))
    assert {p.name for p in tmp_path.iterdir()} == (before | {"thesis.tex"}) - {".run.gradlogz-old"}
    assert (place / "notes" / "a.txt").read_text() == "y"
    assert (place / "dangling").readlink() == Path("nowhere")
    assert (place / "outside").is_symlink()
    assert (tmp_path / ".run.old" / "thesis.tex").read_text() == "x"


def test_a_folder_of_someone_else_that_is_in_the_way_is_kept(tmp_path):
    place = write_run(tmp_path / "run", run_of(1))
    aside = tmp_path / ".run.gradlogz-old"
    aside.mkdir()
    (aside / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match="not writable"):
        write_run(place, run_of(2))
    assert same(read_run(place), run_of(1))
    assert (aside / "thesis.tex").read_text() == "x"


def test_a_folder_is_not_replaced_with_a_mount_in_it(small_disk):
    with pytest.raises(ValueError, match="mount point"):
        check_place(small_disk)


def test_an_error_in_the_middle_of_a_table_leaves_nothing(tmp_path):
    def fail():
        with replaced(tmp_path / "table.csv") as part:
            part.write_text("half")
            raise KeyError("a bug")

    with pytest.raises(KeyError):
        fail()
    assert list(tmp_path.iterdir()) == []
