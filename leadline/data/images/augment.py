"""Augmentation on the device: crop, flip, resize and normalise a batch of images.

``draw`` draws the random numbers of a whole batch from one seed into ``Draws``; a part of the batch uses its rows.
The images of a step therefore depend on nothing but the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_ATTEMPTS = 10  # at a box of the wanted area and shape, as in torchvision and timm


@dataclass
class Draws:
    """Random numbers of a batch of B images, each (B, ...); None where an augmentation is off."""

    flip: Tensor | None = None  # bool
    corner: Tensor | None = None  # (B, 2), int64: top and left in the padded image
    box: Tensor | None = None  # (B, 4), float32: top, left, height, width

    def __getitem__(self, rows: Tensor | slice) -> Draws:
        return Draws(*(None if draw is None else draw[rows] for draw in (self.flip, self.corner, self.box)))


def draw(
    count: int,
    size: tuple[int, int],
    generator: torch.Generator,
    *,
    flip: bool,
    padding: int | None = None,
    scale: tuple[float, float] | None = None,
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> Draws:
    """Draw the random numbers for a batch, on the device of the generator.

    Args:
        count: Images of the batch.
        size: Height and width of an image.
        generator: Source of the numbers.
        flip: Whether to flip every second image on average.
        padding: Border in pixels for a crop of the original size. Excludes ``scale``.
        scale: Smallest and largest share of the area for a resized crop.
        ratio: Smallest and largest width over height for a resized crop.
    """
    device = generator.device
    draws = Draws()
    if flip:
        draws.flip = torch.rand(count, generator=generator, device=device) < 0.5
    if padding:
        draws.corner = torch.randint(2 * padding + 1, (count, 2), generator=generator, device=device)
    elif scale is not None:
        draws.box = random_boxes(
            torch.rand(4, count, _ATTEMPTS, generator=generator, device=device), size, scale, ratio
        )
    return draws


def random_boxes(
    uniform: Tensor, size: tuple[int, int], scale: tuple[float, float], ratio: tuple[float, float]
) -> Tensor:
    """Return boxes (B, 4) of top, left, height and width, drawn as RandomResizedCrop draws them.

    The first attempt that fits the image is taken. If none fits, the box is the middle of the image in the nearest
    allowed shape.

    Args:
        uniform: (4, B, attempts), uniform in [0, 1): area, shape, top and left.
        size: Height and width of an image.
        scale: Smallest and largest share of the area.
        ratio: Smallest and largest width over height.
    """
    height, width = size
    area = height * width * (scale[0] + (scale[1] - scale[0]) * uniform[0])
    low, high = (torch.tensor(float(r)).log().item() for r in ratio)
    aspect = (low + (high - low) * uniform[1]).exp()
    w, h = (area * aspect).sqrt().round(), (area / aspect).sqrt().round()
    fits = (w > 0) & (w <= width) & (h > 0) & (h <= height)
    top, left = ((side - part + 1) * u for side, part, u in ((height, h, uniform[2]), (width, w, uniform[3])))
    boxes = torch.stack((top.floor(), left.floor(), h, w), dim=-1)  # (B, attempts, 4)
    first = fits.int().argmax(-1)
    chosen = boxes[torch.arange(len(boxes), device=boxes.device), first]
    whole = width / height
    if whole < ratio[0]:
        h0, w0 = max(1, round(width / ratio[0])), width
    elif whole > ratio[1]:
        h0, w0 = height, max(1, round(height * ratio[1]))
    else:
        h0, w0 = height, width
    middle = _filled((height - h0) // 2, (width - w0) // 2, h0, w0, device=boxes.device)
    return torch.where(fits.any(-1)[:, None], chosen, middle)


def _filled(*numbers: int, device: torch.device) -> Tensor:
    """Return the numbers as a float32 tensor, without a copy from the host, which would wait for the device."""
    return torch.stack([torch.full((), float(number), device=device) for number in numbers])


def crop(images: Tensor, draws: Draws, padding: int) -> Tensor:
    """Cut images (n, C, H, W), uint8, out of their padded selves at ``draws.corner``, and flip them: same shape."""
    n, channels, height, width = images.shape
    if draws.corner is None and draws.flip is None:
        return images
    device = images.device
    rows, columns = (torch.arange(side, device=device).expand(n, -1) for side in (height, width))
    if draws.flip is not None:
        columns = torch.where(draws.flip[:, None], width - 1 - columns, columns)
    if draws.corner is not None:
        images = F.pad(images, (padding,) * 4)
        rows, columns = rows + draws.corner[:, :1], columns + draws.corner[:, 1:]
    sample = torch.arange(n, device=device)[:, None, None, None]
    channel = torch.arange(channels, device=device)[None, :, None, None]
    return images[sample, channel, rows[:, None, :, None], columns[:, None, None, :]]


def resize(images: Tensor, size: int, box: Tensor | None = None, flip: Tensor | None = None) -> Tensor:
    """Resize the box of each image, or all of it: (n, C, H, W) -> (n, C, size, size), float32.

    Bilinear and antialiased, with the weights of PIL and torch. Written as products of matrices, so that every image
    may have a box of its own.

    Args:
        images: (n, C, H, W).
        size: Pixels a side of the result.
        box: (n, 4), top, left, height and width; None: all of the image.
        flip: (n,), which results to mirror.
    """
    n, _, height, width = images.shape
    if box is None:
        box = _filled(0, 0, height, width, device=images.device).expand(n, 4)
    vertical = _weights(box[:, 0], box[:, 2], height, size)
    horizontal = _weights(box[:, 1], box[:, 3], width, size)
    if flip is not None:
        horizontal = torch.where(flip[:, None, None], horizontal.flip(1), horizontal)
    return vertical[:, None] @ images.float() @ horizontal[:, None].transpose(-1, -2)


def _weights(start: Tensor, length: Tensor, pixels: int, size: int) -> Tensor:
    """Return the share of each old pixel in each new one, (n, size, pixels), for box sides (n,)."""
    place = torch.arange(size, device=start.device) + 0.5
    scale = (length / size)[:, None, None]
    centre = start[:, None, None] + place[None, :, None] * scale
    pixel = torch.arange(pixels, device=start.device) + 0.5
    weights = (1 - (pixel - centre).abs() / scale.clamp(min=1)).clamp(min=0)
    inside = (pixel > start[:, None, None]) & (pixel < (start + length)[:, None, None])
    weights = weights * inside
    return weights / weights.sum(-1, keepdim=True)


class Normalise:
    """Maps pixels in [0, 255] to (pixels / 255 - mean) / std, float32, by channel."""

    def __init__(self, mean: Sequence[float], std: Sequence[float], device: torch.device) -> None:
        wide, deep = (torch.tensor(list(v), dtype=torch.float64).view(1, -1, 1, 1) for v in (mean, std))
        self.scale = (1 / (255 * deep)).float().to(device)
        self.shift = (-wide / deep).float().to(device)

    def __call__(self, images: Tensor) -> Tensor:
        return torch.addcmul(self.shift, images.float(), self.scale)
