"""Crops, boxes, resizing and normalisation, against torchvision on one image at a time."""

import pytest
import torch

from leadline.data.images.augment import Draws, Normalise, crop, draw, random_boxes, resize

transforms = pytest.importorskip("torchvision.transforms.v2.functional")


def test_crop_and_flip_are_torchvisions() -> None:
    images = torch.randint(0, 256, (6, 3, 9, 9), dtype=torch.uint8)
    draws = draw(6, (9, 9), torch.Generator().manual_seed(1), flip=True, padding=2)
    assert draws.flip is not None
    assert draws.corner is not None
    assert 0 < draws.flip.sum() < 6
    found = crop(images, draws, 2)
    for image, flip, (top, left), ours in zip(images, draws.flip, draws.corner.tolist(), found, strict=True):
        expected = transforms.crop(transforms.pad(image, [2, 2]), top, left, 9, 9)
        assert torch.equal(ours, transforms.horizontal_flip(expected) if flip else expected)
    assert crop(images, Draws(), 2) is images


@pytest.mark.parametrize(("pixels", "size"), [(12, 30), (32, 12), (17, 17)])
def test_boxes_are_resized_as_torchvision_does(pixels: int, size: int) -> None:
    images = torch.randint(0, 256, (5, 3, pixels, pixels), dtype=torch.uint8)
    box = random_boxes(torch.rand(4, 5, 10), (pixels, pixels), (0.2, 1.0), (0.75, 4 / 3))
    flip = torch.tensor([True, False, True, False, False])
    found = resize(images, size, box, flip) / 255
    for image, (top, left, height, width), mirror, ours in zip(images, box.int().tolist(), flip, found, strict=True):
        expected = transforms.resized_crop(image / 255, top, left, height, width, [size, size], antialias=True)
        torch.testing.assert_close(ours, transforms.horizontal_flip(expected) if mirror else expected)
    torch.testing.assert_close(resize(images, size)[0] / 255, transforms.resize(images[0] / 255, [size, size]))


def test_boxes_have_the_wanted_area_and_shape() -> None:
    """Moments of area and log ratio over many draws, and every box lies inside."""
    boxes = random_boxes(torch.rand(4, 20000, 10), (200, 200), (0.3, 0.5), (0.5, 2.0))
    top, left, height, width = boxes.unbind(-1)
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + height <= 200).all()
    assert (left + width <= 200).all()
    area = height * width / 200**2
    assert abs(area.mean() - 0.4) < 0.003
    assert area.min() > 0.28
    assert abs((width / height).log().mean()) < 0.01
    assert abs(top.mean() - (200 - height).mean() / 2) < 1
    reached = (top + height == 200).float().mean()
    assert reached > 0.005  # the last place too


@pytest.mark.parametrize("ratio", [(17.0, 20.0), (100.0, 200.0), (0.01, 0.02)])
def test_a_box_has_at_least_a_pixel(ratio: tuple[float, float]) -> None:
    boxes = random_boxes(torch.rand(4, 20, 10), (8, 8), (0.5, 1.0), ratio)
    assert (boxes[:, 2:] >= 1).all()
    assert resize(torch.ones(20, 3, 8, 8), 4, boxes).isfinite().all()


def test_where_no_box_fits_the_middle_is_taken() -> None:
    none = torch.ones(4, 2, 10) * 0.999  # all of the area, twice as wide as high: never fits
    boxes = random_boxes(none, (32, 32), (1.0, 1.0), (2.0, 2.0))
    assert boxes.tolist() == [[8, 0, 16, 32]] * 2
    assert random_boxes(none, (64, 32), (1.0, 1.0), (1.0, 1.0)).tolist() == [[16, 0, 32, 32]] * 2


def test_normalise() -> None:
    images = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    mean, std = (0.1, 0.5, 0.7), (0.2, 0.3, 0.4)
    found = Normalise(mean, std, torch.device("cpu"))(images)
    torch.testing.assert_close(found, transforms.normalize(images.float() / 255, list(mean), list(std)))
