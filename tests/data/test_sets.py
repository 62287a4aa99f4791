"""Sets in the hub's layout and as folders, decoded once: the pixels, the order, what is wrong with a file."""

import io
import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_files import Image, noise, pa, png, pq, write_cifar, write_folder, write_parquet

from leadline.data.images import cache
from leadline.data.images.cache import decoded, encoded
from leadline.data.images.cifar import load_cifar10
from leadline.data.images.sets import decode, open_rows
from leadline.data.made_once import cache_folder, reporting
from leadline.errors import LeadlineError, Stopped


def test_cifar_100_and_imagenet_have_their_own_columns_and_splits(tmp_path: Path) -> None:
    small, large = noise(4), noise(3, 48)
    file = tmp_path / "c" / "cifar100" / "test-00000-of-00001.parquet"
    write_parquet(file, [png(p) for p in small], fine_label=[99, 3, 5, 0], coarse_label=[1, 1, 1, 1])
    for shard, part in ((0, large[:2]), (1, large[2:])):
        where = tmp_path / "i" / "data" / f"validation-{shard:05d}-of-00002.parquet"
        write_parquet(where, [png(p) for p in part], image="image", label=[7 + shard] * len(part))
    images, labels = decoded(open_rows("cifar100", tmp_path / "c", "test"), 32, tmp_path / "cache")
    assert torch.equal(images, torch.from_numpy(small).permute(0, 3, 1, 2))
    assert labels.tolist() == [99, 3, 5, 0]
    packed = encoded(open_rows("imagenet", tmp_path / "i", "test"), tmp_path / "cache")
    assert packed.labels.tolist() == [7, 7, 8]
    assert [packed.read(i)[0] for i in (2, 0, 1)] == [png(large[i]) for i in (2, 0, 1)]
    assert packed.read(2)[1] == f"row 0 of {tmp_path}/i/data/validation-00001-of-00002.parquet"


def test_folder_rows_follow_classes_and_names(tmp_path: Path) -> None:
    write_folder(tmp_path)
    rows = open_rows("folder", tmp_path, "test")
    assert rows.classes == 2
    assert [row.label for row in rows] == [0] * 6 + [1] * 6
    found = encoded(rows)
    assert found.read(7) == ((tmp_path / "val/dog/1.png").read_bytes(), str(tmp_path / "val/dog/1.png"))
    pixels = decoded(rows, 16, tmp_path / "cache").images
    assert pixels.shape == (12, 3, 16, 16)
    with Image.open(tmp_path / "val/cat/0.png") as image:  # 40 x 40: resized as a whole
        expected = np.asarray(image.resize((16, 16), resample=Image.Resampling.BICUBIC)).transpose(2, 0, 1)
    assert np.array_equal(pixels[0].numpy(), expected)


def test_links_that_move_to_another_class_take_their_label_along(tmp_path: Path) -> None:
    write_folder(tmp_path / "pool")
    for split in ("train", "test"):
        for name in ("cat", "dog"):
            at = tmp_path / "links" / split / name
            at.mkdir(parents=True)
            for i in range(3):
                (at / f"{name}{i}.png").symlink_to(tmp_path / "pool" / "train" / name / f"{i}.png")

    def labels() -> list[int]:
        return decoded(open_rows("folder", tmp_path / "links", "train"), 8, tmp_path / "cache").labels.tolist()

    assert labels() == [0, 0, 0, 1, 1, 1]
    (tmp_path / "links/train/cat/cat2.png").rename(tmp_path / "links/train/dog/cat2.png")
    assert labels() == [0, 0, 1, 1, 1, 1]


def test_hidden_files_and_folders_are_no_images_and_no_classes(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "train/.ipynb_checkpoints").mkdir()
    (tmp_path / "train/cat/._0.png").write_bytes(b"no image")
    (tmp_path / "train/cat/.hidden").mkdir()
    (tmp_path / "train/cat/0.png").rename(tmp_path / "train/cat/.hidden/0.png")
    rows = open_rows("folder", tmp_path, "train")
    assert (rows.classes, len(rows)) == (2, 11)


def test_folders_behind_links_are_read_and_none_twice(tmp_path: Path) -> None:
    write_folder(tmp_path / "pool")
    for name in ("cat", "dog"):
        at = tmp_path / "links" / "train" / name
        at.mkdir(parents=True)
        (at / "part").symlink_to(tmp_path / "pool" / "train" / name)
        (at / "round").symlink_to(at)
    rows = open_rows("folder", tmp_path / "links", "train")
    assert [row.label for row in rows] == [0] * 6 + [1] * 6


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path)
    closed = tmp_path / "train" / "cat"
    scan = os.scandir

    def refuse(path: Any) -> Any:
        if Path(path) == closed:
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(LeadlineError, match=f"{closed} cannot be read .Permission denied."):
        open_rows("folder", tmp_path, "train")

    def closed_to_us(path: Path) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", closed_to_us)
    with pytest.raises(LeadlineError, match=f"{tmp_path} cannot be read .Permission denied."):
        open_rows("cifar10", tmp_path, "train")


def test_deep_pixels_are_scaled_or_refused() -> None:
    ramp = np.arange(0, 65536, 256, dtype=np.uint16).reshape(16, 16)
    assert np.array_equal(np.asarray(decode(png(ramp), "x"))[..., 0], ramp >> 8)
    buffer = io.BytesIO()
    Image.fromarray(np.ones((4, 4), np.float32)).save(buffer, format="TIFF")
    with pytest.raises(LeadlineError, match=r"x is no image that can be decoded \(ValueError: its numbers are floats"):
        decode(buffer.getvalue(), "x")


def test_a_copy_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LeadlineError, match=f"{tmp_path}/no does not exist; give the folder of a copy of"):
        open_rows("cifar10", tmp_path / "no", "train")


@pytest.mark.parametrize("end", ["", "-0123456789abcdef"])
def test_shards_that_lack_or_come_twice(end: str, tmp_path: Path) -> None:
    write_parquet(tmp_path / "a" / f"train-00001-of-00005{end}.parquet", [png(noise(1)[0])], label=[1])
    with pytest.raises(LeadlineError, match=r"a has 1 of 5 train files by their names"):
        open_rows("cifar10", tmp_path, "train")
    write_cifar(tmp_path / "two" / "b")
    (tmp_path / "two" / "b" / "plain_text").rename(tmp_path / "two" / "c")
    write_cifar(tmp_path / "two")
    with pytest.raises(LeadlineError, match=r"train-\*.parquet is in .*c and in .*plain_text; give one of these"):
        open_rows("cifar10", tmp_path / "two", "train")


def test_decoded_once_and_again_when_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar(tmp_path / "data")
    counted = []
    decode = cache.decode
    monkeypatch.setattr(cache, "decode", lambda *args: counted.append(1) or decode(*args))
    monkeypatch.setenv("LEADLINE_CACHE", str(tmp_path / "cache"))
    assert cache_folder() == tmp_path / "cache"
    first = decoded(open_rows("cifar10", tmp_path / "data", "test"), 32)
    second = decoded(open_rows("cifar10", tmp_path / "data", "test"), 32)
    assert len(counted) == 12
    assert torch.equal(first.images, second.images)
    assert not list((tmp_path / "cache").glob("*.part"))
    write_cifar(tmp_path / "data", seed=1)
    os.utime(tmp_path / "data/plain_text/test-00000-of-00001.parquet", ns=(1, 1))
    third = decoded(open_rows("cifar10", tmp_path / "data", "test"), 32)
    assert not torch.equal(first.images, third.images)


def test_a_killed_decoding_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar(tmp_path / "data")
    rows = open_rows("cifar10", tmp_path / "data", "test")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(np, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            decoded(rows, 32, tmp_path / "cache")
    assert [file.suffix for file in (tmp_path / "cache").iterdir()] == [".lock"]
    assert len(decoded(rows, 32, tmp_path / "cache").labels) == 12


def test_what_a_kill_without_warning_left_is_removed_the_next_day(tmp_path: Path) -> None:
    write_cifar(tmp_path / "data")
    rows, root = open_rows("cifar10", tmp_path / "data", "test"), tmp_path / "cache"
    decoded(rows, 32, root)
    (name,) = (file.name for file in root.iterdir() if file.is_dir())
    shutil.rmtree(root / name)
    old, fresh = (root / f"{name}.{pid}.part" for pid in (1, 2))  # the second may be at work, where there are no locks
    for draft in (old, fresh):
        draft.mkdir()
        (draft / "pixels.npy").write_bytes(b"half")
    yesterday = time.time() - 2 * 86400
    os.utime(old, (yesterday, yesterday))
    reports: list[tuple[str, int, int | None]] = []
    with reporting(lambda *what: reports.append(what)):
        assert len(decoded(rows, 32, root).labels) == 12
        decoded(rows, 32, root)
    assert reports == [("decoding 12 images", done, 12) for done in range(12)]
    assert {file.name for file in root.iterdir() if file.is_dir()} == {name, fresh.name}


def test_a_corrupt_image_is_named(tmp_path: Path) -> None:
    pixels = [png(p) for p in noise(3)]
    file = tmp_path / "test-00000-of-00001.parquet"
    write_parquet(file, [pixels[0], pixels[1][:60], pixels[2]], label=[1, 2, 3])
    with pytest.raises(LeadlineError, match=f"row 1 of {file} is no image") as raised:
        decoded(open_rows("cifar10", tmp_path, "test"), 32, tmp_path / "cache")
    assert "\n" not in str(raised.value)
    write_folder(tmp_path / "f")
    bad = tmp_path / "f/val/dog/3.png"
    bad.write_bytes(b"")
    with pytest.raises(LeadlineError, match=f"{bad} is no image"):
        decoded(open_rows("folder", tmp_path / "f", "test"), 16, tmp_path / "cache")


@pytest.mark.parametrize("label", [10, -1, None])
def test_a_label_that_is_none_is_named(label: int | None, tmp_path: Path) -> None:
    pixels = [png(p) for p in noise(3)]
    for shard, labels in enumerate(([1, 2, 3], [4, label, 5])):
        write_parquet(tmp_path / f"test-{shard:05d}-of-00002.parquet", pixels, label=labels)
    line = f"row 1 of {tmp_path}/test-00001-of-00002.parquet has the label {label}; .* from 0 to 9"
    with pytest.raises(LeadlineError, match=line):
        decoded(open_rows("cifar10", tmp_path, "test"), 32, tmp_path / "cache")
    with pytest.raises(LeadlineError, match=f"row 4 of CIFAR-10 has the label {label}"):
        load_cifar10("test", tmp_path)


def test_true_and_false_are_no_labels(tmp_path: Path) -> None:
    file = tmp_path / "test-00000-of-00001.parquet"
    pq.write_table(pa.table({"img": [{"bytes": png(p), "path": None} for p in noise(2)], "label": [True, False]}), file)
    with pytest.raises(LeadlineError, match=f"row 0 of {file} has the label True"):
        list(open_rows("cifar10", tmp_path, "test"))


def test_labels_changed_in_the_cache_are_made_again(tmp_path: Path) -> None:
    write_cifar(tmp_path / "data")
    rows = open_rows("cifar10", tmp_path / "data", "test")
    before = decoded(rows, 32, tmp_path / "cache").labels.clone()
    (file,) = (tmp_path / "cache").rglob("labels.npy")
    np.save(file, np.full(12, 10))
    assert torch.equal(decoded(rows, 32, tmp_path / "cache").labels, before)


def test_files_without_encoded_images_or_rows(tmp_path: Path) -> None:
    paths = {"img": [{"path": "a.png"}] * 2, "label": [0, 1]}
    file = tmp_path / "test-00000-of-00001.parquet"
    pq.write_table(pa.table(paths), file)
    with pytest.raises(LeadlineError, match=f"row 0 of {file} has no encoded image: img is struct<path: string>"):
        list(open_rows("cifar10", tmp_path, "test"))
    pq.write_table(pa.table({"img": ["a.png"], "label": [0]}), file)
    with pytest.raises(LeadlineError, match="has no encoded image: img is string"):
        list(open_rows("cifar10", tmp_path, "test"))
    pq.write_table(pa.table(paths).slice(0, 0), file)
    for read in (lambda: open_rows("cifar10", tmp_path, "test"), lambda: load_cifar10("test", tmp_path)):
        with pytest.raises(LeadlineError, match=f"the test split of CIFAR-10 in {tmp_path} has no rows"):
            read()


def test_a_cache_that_is_cut_short_is_made_again(tmp_path: Path) -> None:
    write_cifar(tmp_path / "data")
    rows = open_rows("cifar10", tmp_path / "data", "test")
    whole = decoded(rows, 32, tmp_path / "cache").images.clone()
    packed = encoded(rows, tmp_path / "cache").read(11)
    for name in ("pixels.npy", "images.bin", "offsets.npy"):
        (file,) = (tmp_path / "cache").rglob(name)
        os.truncate(file, file.stat().st_size - 1)
        assert torch.equal(decoded(rows, 32, tmp_path / "cache").images, whole)
        assert encoded(rows, tmp_path / "cache").read(11) == packed
    for damaged in (tmp_path / "cache").rglob("labels.npy"):
        os.truncate(damaged, 0)
    assert decoded(rows, 32, tmp_path / "cache").labels.tolist() == [i % 10 for i in range(12)]
    assert encoded(rows, tmp_path / "cache").labels.tolist() == [i % 10 for i in range(12)]


def test_a_cache_of_another_user_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar(tmp_path / "data")
    rows = open_rows("cifar10", tmp_path / "data", "test")
    whole = decoded(rows, 32, tmp_path / "cache").images

    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("leadline.data.made_once._locked", refuse)
    assert torch.equal(decoded(rows, 32, tmp_path / "cache").images, whole)
    with pytest.raises(LeadlineError, match=r"images cannot be cached in .*Permission denied.*LEADLINE_CACHE"):
        encoded(rows, tmp_path / "cache")


def test_files_of_a_cache_are_on_the_disk_before_they_get_their_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cifar(tmp_path / "data")
    events: list[int | str] = []
    sync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: events.append(os.fstat(fd).st_ino) or sync(fd))
    monkeypatch.setattr(os, "rename", lambda *args: events.append("rename") or rename(*args))
    decoded(open_rows("cifar10", tmp_path / "data", "test"), 32, tmp_path / "cache")
    assert set(events[:-1]) == {
        file.stat().st_ino for file in (tmp_path / "cache").rglob("*.*n*") if file.suffix != ".lock"
    }
    assert events[-1] == "rename"


def test_what_else_can_be_wrong(tmp_path: Path) -> None:
    write_cifar(tmp_path / "data")
    with pytest.raises(LeadlineError, match="columns img, label; it must have img and fine_label"):
        list(open_rows("cifar100", tmp_path / "data", "test"))
    with pytest.raises(LeadlineError, match=r"no validation-\*.parquet"):
        open_rows("imagenet", tmp_path / "data", "test")
    with pytest.raises(LeadlineError, match="has no folder train"):
        open_rows("folder", tmp_path / "data", "train")
    with pytest.raises(LeadlineError, match=r"data\.path is not given"):
        open_rows("folder", None, "train")
    write_folder(tmp_path / "f")
    (tmp_path / "f/val/mouse").mkdir()
    with pytest.raises(LeadlineError, match=r"mouse is no class of .*train; the class folders"):
        open_rows("folder", tmp_path / "f", "test")
    (tmp_path / "f/train/mouse").mkdir()
    with pytest.raises(LeadlineError, match="mouse has no images; put some there, or remove the folder"):
        open_rows("folder", tmp_path / "f", "train")
    (tmp_path / "f/train/mouse").rmdir()
    with pytest.raises(LeadlineError, match="gone is no folder; give one with train and test"):
        open_rows("folder", tmp_path / "gone", "train")
    write_folder(tmp_path / "one", classes=("cat",))
    with pytest.raises(LeadlineError, match="train has one class, cat; it must hold a folder per class"):
        open_rows("folder", tmp_path / "one", "test")
    (tmp_path / "e/train").mkdir(parents=True)
    with pytest.raises(LeadlineError, match="has no images in class folders"):
        open_rows("folder", tmp_path / "e", "train")
    (tmp_path / "f/val/mouse").rmdir()
    with pytest.raises(LeadlineError, match=r"not like the images before it; give data\.image_size"):
        decoded(open_rows("folder", tmp_path / "f", "test"), None, tmp_path / "cache")
    (tmp_path / "file").write_text("")
    with pytest.raises(LeadlineError, match=r"cannot be cached in .*data\.cache=FOLDER"):
        decoded(open_rows("cifar10", tmp_path / "data", "test"), 32, tmp_path / "file" / "below")


@pytest.mark.parametrize("error", [TypeError("unsupported\noperand"), AssertionError()])
def test_whatever_a_damaged_file_makes_pil_raise_is_one_line(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(Image, "open", broken)
    with pytest.raises(
        LeadlineError, match=r"a.tif is no image that can be decoded \((Type|Assertion)Error: .*\); replace it"
    ):
        decode(b"II*", "a.tif")


def test_transparency_in_a_palette_is_nothing_to_talk_of(recwarn: pytest.WarningsRecorder) -> None:
    image = Image.fromarray(noise(1)[0]).convert("P")
    stream = io.BytesIO()
    image.save(stream, "PNG", transparency=b"\x00" * 256)
    assert decode(stream.getvalue(), "a.png").mode == "RGB"
    assert not recwarn.list


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar(tmp_path / "data")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(LeadlineError, match=r"No space left on device.*make room"):
        decoded(open_rows("cifar10", tmp_path / "data", "train"), 32, tmp_path / "cache")


def test_a_signal_while_an_image_is_decoded_is_no_fault_of_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise Stopped("SIGINT before the training began", 130)

    monkeypatch.setattr(Image, "open", interrupted)
    with pytest.raises(Stopped):
        decode(b"", "x")
