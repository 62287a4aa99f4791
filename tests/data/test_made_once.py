"""A folder of the cache is taken as it was made, or made again."""

import os

import pytest

from leadline.data import made_once as module
from leadline.data.made_once import made_once
from leadline.errors import LeadlineError


def made(cache, content=b"right"):
    calls = []

    def make(folder):
        calls.append(folder)
        (folder / "sub").mkdir()
        (folder / "sub" / "data").write_bytes(content)

    folder = made_once("things", cache, make, "things")
    assert (folder / "sub" / "data").read_bytes() == content
    return folder, len(calls)


def test_changed_files_are_made_again(tmp_path):
    folder, calls = made(tmp_path)
    assert calls == 1
    assert made(tmp_path)[1] == 0
    (folder / "sub" / "data").write_bytes(b"wrong")  # of the same size
    assert made(tmp_path)[1] == 1
    (folder / "sub" / "more").touch()
    assert made(tmp_path)[1] == 1
    (folder / "fingerprint.json").write_text("[")
    assert made(tmp_path)[1] == 1
    (folder / "fingerprint.json").unlink()  # of an earlier version
    assert made(tmp_path)[1] == 1
    assert made(tmp_path)[1] == 0


def test_large_files_are_checked_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_PIECE", 16)
    monkeypatch.setattr(module, "_PIECES", 4)
    content = bytes(range(200))
    folder, _ = made(tmp_path, content)
    assert made(tmp_path, content)[1] == 0
    for place in (0, 199):
        changed = bytearray(content)
        changed[place] ^= 1
        (folder / "sub" / "data").write_bytes(changed)
        assert made(tmp_path, content)[1] == 1
    (folder / "sub" / "data").write_bytes(content[:-1])
    assert made(tmp_path, content)[1] == 1


def test_planted_links_are_not_followed(tmp_path):
    theirs = tmp_path / "theirs"
    (theirs / "sub").mkdir(parents=True)
    (theirs / "sub" / "data").write_bytes(b"evil!")
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "things").symlink_to(theirs)
    folder, calls = made(cache)
    assert calls == 1
    assert not folder.is_symlink()
    assert (theirs / "sub" / "data").read_bytes() == b"evil!"
    (cache / "other.lock").symlink_to(theirs / "sub" / "data")
    with pytest.raises(LeadlineError, match="cannot be cached"):
        made_once("other", cache, lambda folder: None, "things")
    assert (theirs / "sub" / "data").read_bytes() == b"evil!"


def test_a_cache_that_everybody_can_write_to(tmp_path, monkeypatch):
    made(tmp_path)
    tmp_path.chmod(0o777)
    with pytest.warns(UserWarning, match=r"everybody can write to the cache .* chmod o-w"):
        made(tmp_path)
    real = os.lstat

    def strange(path, **options):
        result = real(path, **options)
        return os.stat_result([*result[:4], 4242, *result[5:]]) if str(path).endswith("things") else result

    monkeypatch.setattr("os.lstat", strange)
    monkeypatch.setattr("pathlib.Path.lstat", strange)
    with (
        pytest.warns(UserWarning, match="everybody"),
        pytest.raises(LeadlineError, match=r"made by another user \(number 4242\)"),
    ):
        made(tmp_path)
    tmp_path.chmod(0o755)
    made(tmp_path)  # the owner of the folder alone can plant files
