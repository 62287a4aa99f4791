"""Checkpoints: whole or not there, whatever happens while they are written."""

import errno
import json
import os
import stat
from pathlib import Path

import pytest
import torch

from leadline.errors import LeadlineError
from leadline.models import checkpoints
from leadline.models.checkpoints import check, digest, find_checkpoint, listed, newest
from leadline.training import Stopped
from leadline.training.run_folder import checkpoint
from leadline.training.run_folder.checkpoint import prune, save, write_json, write_tensors
from leadline.training.run_folder.logs import cut


def write(step, score=None):
    def into(folder):
        write_tensors(folder / "model.safetensors", {"w": torch.full((50,), float(step))})
        (folder / "ema").mkdir()
        write_tensors(folder / "ema" / "model.safetensors", {"w": torch.full((50,), step + 0.5)})
        write_json(folder / "state.json", {"step": step, "score": score})

    return into


class Killed(BaseException):
    """Not an OSError: nothing may tidy up after it."""


@pytest.fixture
def kill_at(monkeypatch):
    """kill_at(n): the n-th access to the disk does not happen, nor anything after it."""
    count = {"now": 0, "at": -1}

    def counted(function):
        def wrapper(*arguments, **options):
            if count["now"] == count["at"]:
                raise Killed
            count["now"] += 1
            return function(*arguments, **options)

        return wrapper

    for owner, name in [
        (os, "replace"), (os, "fsync"), (os, "mkdir"), (os, "rmdir"), (os, "unlink"), (Path, "rename"),
        (checkpoint, "save_tensors"), (checkpoint, "digest"),
    ]:  # fmt: skip
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))

    def start(at):
        count.update(now=0, at=at)
        return count

    return start


def save_some(out):
    save(out, 1, write(1))
    save(out, 2, write(2))
    prune(out, 1)
    save(out, 2, write(2))  # again, as when its evaluation is made up
    prune(out, 1)


def test_a_kill_at_any_instant_leaves_a_whole_one(tmp_path, kill_at):
    accesses = kill_at(-1)
    save_some(tmp_path / "count")
    needed = accesses["now"]
    assert needed > 20
    steps = []
    for instant in range(needed):
        out = tmp_path / str(instant)
        kill_at(instant)
        with pytest.raises(Killed):
            save_some(out)
        kill_at(-1)
        found = newest(out)
        steps.append(found.step if found else 0)
        for step, folder in listed(out):  # what has the name of a checkpoint is one
            assert check(folder).step == step
            assert torch.equal(check(folder).tensors("model")["w"], torch.full((50,), float(step)))
        save(out, 3, write(3))  # and the rubbish is in nobody's way
        prune(out, 1)
        assert [path.name for path in out.iterdir()] == ["step-000003"]
    assert set(steps) == {0, 1, 2}
    assert steps == sorted(steps)  # what was there stays there


def test_a_damaged_one_is_passed_over(tmp_path):
    for step in (1, 2, 3, 4, 5):
        save(tmp_path, step, write(step))
    (tmp_path / "step-000005" / "ema" / "model.safetensors").unlink()
    file = tmp_path / "step-000004" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    file = tmp_path / "step-000003" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    (tmp_path / "step-000002" / "manifest.json").write_text('{"step": 2, "fil')
    assert newest(tmp_path).step == 1
    with pytest.warns(UserWarning, match=r"step-00000\d is damaged .*; .*step-000001 is taken") as told:
        assert find_checkpoint(tmp_path).step == 1
    assert sorted((str(warning.message).split(";")[0] for warning in told), reverse=True) == [
        f"step-000005 is damaged ({tmp_path}/step-000005/ema/model.safetensors is missing)",
        f"step-000004 is damaged ({tmp_path}/step-000004/model.safetensors has 262 bytes instead of 272)",
        f"step-000003 is damaged ({tmp_path}/step-000003/model.safetensors is not what was written)",
        f"step-000002 is damaged ({tmp_path}/step-000002/manifest.json cannot be read)",
    ]
    save(tmp_path, 4, write(4))  # the run comes by again
    assert newest(tmp_path).step == 4
    with pytest.raises(LeadlineError, match=r"manifest.json is missing"):
        check(tmp_path)


def test_one_that_may_not_be_read_is_not_damaged(tmp_path, monkeypatch):
    """It may be whole: neither passed over nor called so. (Root may read all, so the system's answer is made up.)"""

    def refused(file):
        if "step-000002" in str(file):
            raise PermissionError(errno.EACCES, "Permission denied", str(file))
        return digest(file)

    save(tmp_path, 1, write(1))
    save(tmp_path, 2, write(2))
    monkeypatch.setattr(checkpoints, "digest", refused)
    for read in (newest, find_checkpoint, lambda out: checkpoint.set_aside(out, print)):
        with pytest.raises(LeadlineError, match=r"step-000002/.* cannot be read \(Permission denied\); have"):
            read(tmp_path)
    assert [step for step, _ in listed(tmp_path)] == [1, 2]


def test_whoever_may_read_the_state_may_read_the_weights(tmp_path):
    for mask in (0o022, 0o077):
        before = os.umask(mask)
        try:
            save(tmp_path, mask, write(mask))
        finally:
            os.umask(before)
        files = [file for file in checkpoint.folder_of(tmp_path, mask).rglob("*") if file.is_file()]
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o666 & ~mask}


def test_the_last_ones_and_the_best_are_kept(tmp_path):
    for step, score in ((1, 0.3), (2, 0.9), (3, None), (4, 0.9), (5, 0.1)):
        save(tmp_path, step, write(step, score))
        prune(tmp_path, 2)
    assert [step for step, _ in listed(tmp_path)] == [2, 4, 5]
    assert find_checkpoint(tmp_path, "best").step == 2
    assert find_checkpoint(tmp_path, "last").step == 5
    assert find_checkpoint(tmp_path / "nothing") is None


def test_a_full_disk_is_said_and_what_there_was_is_intact(tmp_path, monkeypatch):
    save(tmp_path, 1, write(1))

    def full(tensors, file):
        Path(file).write_bytes(b"half a che")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_tensors", full)
    with pytest.raises(Stopped, match=r"step 2 could not be written .*No space left.*step-000001 is intact") as caught:
        save(tmp_path, 2, write(2))
    assert caught.value.code == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    assert newest(tmp_path).step == 1


def test_one_that_cannot_be_replaced_stays(tmp_path, monkeypatch):
    save(tmp_path, 1, write(1, score=0.5))
    rename = Path.rename

    def fails(path, target):
        if path.name.startswith(".new-"):
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(Stopped, match=r"Input/output error.*step-000001 is intact"):
        save(tmp_path, 1, write(1))
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    assert newest(tmp_path).state["score"] == 0.5


def test_no_pickle(tmp_path):
    folder = save(tmp_path, 1, write(1))
    assert {path.suffix for path in folder.rglob("*") if path.is_file()} == {".safetensors", ".json"}
    assert json.loads((folder / "manifest.json").read_text())["files"].keys() == {
        "model.safetensors", "ema/model.safetensors", "state.json",
    }  # fmt: skip


def test_logs_are_cut_to_the_checkpoint(tmp_path):
    file = tmp_path / "log.csv"
    file.write_text("step,loss\n1,.5\n2,.4\n10,.3\n11,.2\n12,.")
    cut(file, 10)
    assert file.read_text() == "step,loss\n1,.5\n2,.4\n10,.3\n"
    file.write_text("step,lo")
    cut(file, 10)
    assert file.read_text() == ""
    cut(tmp_path / "nothing.csv", 3)


@pytest.mark.skipif(os.name == "nt", reason="stands in for Windows elsewhere")
def test_files_are_flushed_as_windows_asks_for(tmp_path, monkeypatch):
    """It flushes no file that was opened to be read."""
    import fcntl

    real = os.fsync

    def strict(handle):
        file = not stat.S_ISDIR(os.fstat(handle).st_mode)
        if file and fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        real(handle)

    monkeypatch.setattr(os, "fsync", strict)
    save(tmp_path, 1, write(1))
    assert find_checkpoint(tmp_path).step == 1
