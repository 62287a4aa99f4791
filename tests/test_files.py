"""Files are written under names that nobody can plant, and through no link."""

import csv
import os
import stat
import time

import pytest
import torch

from leadline.files import csv_row, open_to_append, opened_to_lock, save_tensors, whole
from leadline.models import create_model
from leadline.probing import sinks
from leadline.training.run_folder import checkpoint


def test_a_link_in_place_of_a_file_is_replaced_and_not_followed(tmp_path):
    theirs = tmp_path / "theirs"
    theirs.write_text("precious")
    link = tmp_path / "page.html"
    link.symlink_to(theirs)
    with whole(link) as new:
        new.write_text("page")
    assert theirs.read_text() == "precious"
    assert link.read_text() == "page"
    assert not link.is_symlink()


def test_the_name_of_a_new_file_cannot_be_planted(tmp_path, monkeypatch):
    file, theirs = tmp_path / "page.html", tmp_path / "theirs"
    theirs.write_text("precious")
    (tmp_path / "page.html.new").symlink_to(theirs)  # a name that could be guessed
    names = set()
    for _ in range(3):
        with whole(file) as new:
            names.add(new.name)
            assert new.parent == tmp_path
            new.write_text("page")
    assert len(names) == 3
    assert theirs.read_text() == "precious"
    monkeypatch.setattr("secrets.token_hex", lambda size: "guessed")
    (tmp_path / ".page.html.guessed.new").symlink_to(theirs)  # and one that was
    with pytest.raises(FileExistsError), whole(file):
        pass
    assert theirs.read_text() == "precious"


def test_new_files_have_ordinary_permissions(tmp_path):
    before = os.umask(0o027)
    try:
        with whole(tmp_path / "x") as new:
            new.write_text("x")
        save_tensors({"a": torch.zeros(2)}, tmp_path / "x.safetensors")
        create_model("vit_tiny", depth=1, dim=8, heads=1).save(tmp_path / "model")
        with open_to_append(tmp_path / "log.csv") as log:
            log.write("x")
    finally:
        os.umask(before)
    for name in ("x", "x.safetensors", "model/config.json", "model/model.safetensors", "log.csv"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o640, name


def test_drafts_of_killed_processes_are_removed_after_a_day(tmp_path):
    old, young, other = (tmp_path / name for name in (".x.aa.new", ".x.bb.new", ".y.aa.new"))
    for file in (old, young, other):
        file.touch()
    for file in (old, other):
        os.utime(file, (time.time() - 90_000,) * 2)
    with whole(tmp_path / "x"):
        pass
    assert sorted(os.listdir(tmp_path)) == [".x.bb.new", ".y.aa.new", "x"]


def test_logs_and_locks_follow_no_link_and_do_not_wait_for_a_pipe(tmp_path):
    theirs = tmp_path / "theirs"
    theirs.write_text("precious")
    (tmp_path / "link.csv").symlink_to(theirs)
    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(OSError, match="symbolic links"):
        open_to_append(tmp_path / "link.csv")
    with pytest.raises(OSError, match=r"No such device|regular file"):
        open_to_append(tmp_path / "pipe.csv")
    with pytest.raises(OSError, match="symbolic links"), opened_to_lock(tmp_path / "link.csv"):
        pass
    (tmp_path / "lock").write_text("content")
    with opened_to_lock(tmp_path / "lock"):
        pass
    assert (tmp_path / "lock").read_text() == "content"
    assert theirs.read_text() == "precious"


def test_a_planted_link_does_not_stop_a_checkpoint(tmp_path):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "file").write_text("precious")
    out = tmp_path / "run"
    out.mkdir()
    (out / ".new-step-000007").symlink_to(theirs)
    (out / ".new-step-000008").symlink_to(tmp_path / "nowhere")
    for step in (7, 8):
        final = checkpoint.save(out, step, lambda folder: (folder / "state.json").write_text("{}"))
        assert not final.is_symlink()
    assert (theirs / "file").read_text() == "precious"
    assert os.listdir(theirs) == ["file"]


def test_cells_of_csv_files_start_no_formula(tmp_path):
    formulas = ["=1+1", "+1", "-1+2", "@SUM(A1)", "\t=1", "\r=1"]
    assert all(csv_row({"name": text})["name"] == f"'{text}" for text in formulas)
    assert csv_row({"=a": -0.5, "b": "layer.0"}) == {"'=a": -0.5, "b": "layer.0"}
    sink = sinks.open_sinks(tmp_path / "x.csv")[0]
    sink.write([{"step": 1, "name": "=1+1", "norm": -2.0}])
    sink.close()
    rows = list(csv.DictReader((tmp_path / "x.csv").open()))
    assert rows == [{"step": "1", "name": "'=1+1", "norm": "-2.0"}]
