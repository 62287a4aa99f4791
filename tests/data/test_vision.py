"""CIFAR-10 in the hub's layout: the same tensors from a folder and through ``datasets``."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from image_files import noise, png, write_parquet

from leadline.data.images import cifar as vision
from leadline.data.images.cifar import CIFAR10, load_cifar10, prepare
from leadline.errors import LeadlineError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
Image = pytest.importorskip("PIL.Image")


def write(file: Path, pixels: np.ndarray, labels: list[int]) -> None:
    """The hub's columns; PNG, so that every pixel is known."""
    encoded = []
    for image in pixels:
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, format="PNG")
        encoded.append({"bytes": buffer.getvalue(), "path": None})
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"img": encoded, "label": pa.array(labels, pa.int64())}), file)


@pytest.fixture
def pixels() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3), dtype=np.uint8)


@pytest.fixture
def folder(tmp_path: Path, pixels: np.ndarray) -> Path:
    write(tmp_path / "plain_text" / "test-00000-of-00001.parquet", pixels, [3, 1, 4, 1, 5])
    write(tmp_path / "plain_text" / "train-00000-of-00001.parquet", pixels[:2], [9, 2])
    return tmp_path


@pytest.mark.parametrize("inner", ["", "plain_text"])
def test_reads_the_folder_or_the_one_within(folder: Path, pixels: np.ndarray, inner: str) -> None:
    images, labels = load_cifar10("test", folder / inner)
    assert torch.equal(images, torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255)
    assert labels.tolist() == [3, 1, 4, 1, 5]
    assert load_cifar10("train", folder / inner).labels.tolist() == [9, 2]


def test_limit_and_several_files(folder: Path, pixels: np.ndarray) -> None:
    write(folder / "plain_text" / "test-00001-of-00001.parquet", pixels[:3], [7, 8, 9])
    assert load_cifar10("test", folder).labels.tolist() == [3, 1, 4, 1, 5, 7, 8, 9]
    images, labels = load_cifar10("test", folder, limit=6)
    assert labels.tolist() == [3, 1, 4, 1, 5, 7]
    assert images.shape == (6, 3, 32, 32)
    assert len(load_cifar10("test", folder, limit=100).labels) == 8


def test_through_datasets(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder in the hub's layout under the hub's name: what comes back is what the folder reader gives."""
    datasets = pytest.importorskip("datasets")
    load = datasets.load_dataset

    def local(name: str, split: str) -> object:
        assert name == CIFAR10
        features = datasets.Features({"img": datasets.Image(), "label": datasets.Value("int64")})
        files = str(folder / "plain_text" / f"{split}-00000-of-00001.parquet")
        return load("parquet", data_files=files, split="train", features=features, cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr(datasets, "load_dataset", local)
    for limit in (None, 3):
        ours, theirs = load_cifar10("test", folder, limit), load_cifar10("test", None, limit)
        assert torch.equal(ours.images, theirs.images)
        assert torch.equal(ours.labels, theirs.labels)


def test_missing_data_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")

    def offline(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(LeadlineError, match=f"{CIFAR10}.*--data FOLDER.*--embedded") as raised:
        load_cifar10()
    assert "\n" not in str(raised.value)
    with pytest.raises(LeadlineError, match=r"no test-\*.parquet in"):
        load_cifar10("test", tmp_path)


def test_bad_input(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(LeadlineError, match="unknown split 'valid'"):
        load_cifar10("valid", folder)
    with pytest.raises(LeadlineError, match="limit is 0"):
        load_cifar10("test", folder, 0)
    (tmp_path / "other").mkdir()
    pq.write_table(pa.table({"image": [1], "fine_label": [2]}), tmp_path / "other" / "test-other.parquet")
    with pytest.raises(LeadlineError, match="columns are image, fine_label"):
        load_cifar10("test", tmp_path / "other", 1)
    write_parquet(tmp_path / "odd" / "test-0.parquet", [png(noise(1)[0]), png(noise(1, 28)[0])], label=[0, 1])
    with pytest.raises(LeadlineError, match="row 1 of CIFAR-10 has 28 x 28 pixels"):
        load_cifar10("test", tmp_path / "odd")
    (folder / "plain_text" / "test-00000-of-00001.parquet").write_bytes(b"not parquet")
    with pytest.raises(LeadlineError, match="cannot be read as parquet"):
        load_cifar10("test", folder / "plain_text")


@pytest.mark.parametrize(("size", "channels"), [(64, 3), (16, 3), (48, 1)])
def test_prepare_is_torchvisions(size: int, channels: int) -> None:
    transforms = pytest.importorskip("torchvision.transforms.v2.functional")
    images = torch.rand(2, channels, 32, 32)
    expected = transforms.resize(images.expand(-1, 3, -1, -1), [size, size], antialias=True)
    expected = transforms.normalize(expected, list(vision.IMAGENET_MEAN), list(vision.IMAGENET_STD))
    torch.testing.assert_close(prepare(images, size), expected)
