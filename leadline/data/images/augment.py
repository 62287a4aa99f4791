"""What is done to a batch of images on the device it lies on: crop, flip, resize, normalise.

Nothing here is drawn by itself: ``Draws`` holds the random numbers of a whole batch, and a part of the batch uses its
part of them. The numbers come from one seed, so that the images of a step depend on nothing but the step.
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
    """Random numbers of a batch of B images, each (B, ...); None where they are not wanted."""

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
    """What a batch of ``count`` images of (height, width) needs, on the generator's device.

    padding  for a crop of the same size out of the image with that border; at most one of this and
    scale    for a box of this part of the area and of this range of width over height.
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
    """uniform (4, B, attempts) in [0, 1) -> boxes (B, 4): top, left, height, width, as RandomResizedCrop draws them.

    The first attempt that fits counts; if none does, the middle of the image in the nearest allowed shape.
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
    """These numbers, float32, without a copy from the host, which would wait for all that the device has to do."""
    return torch.stack([torch.full((), float(number), device=device) for number in numbers])


def crop(images: Tensor, draws: Draws, padding: int) -> Tensor:
    """images (n, C, H, W), uint8 -> the same shape: cut out of the padded image at ``draws.corner``, and flipped."""
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
    """images (n, C, H, W) -> (n, C, size, size), float32: the box of each image, or all of it, bilinear, antialiased.

    The weights are those of PIL's and torch's antialiased resizing; as a product of matrices they take a box per image.
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
    """start and length (n,) of a side of the boxes -> (n, size, pixels): the part of each pixel in each new one."""
    place = torch.arange(size, device=start.device) + 0.5
    scale = (length / size)[:, None, None]
    centre = start[:, None, None] + place[None, :, None] * scale
    pixel = torch.arange(pixels, device=start.device) + 0.5
    weights = (1 - (pixel - centre).abs() / scale.clamp(min=1)).clamp(min=0)
    inside = (pixel > start[:, None, None]) & (pixel < (start + length)[:, None, None])
    weights = weights * inside
    return weights / weights.sum(-1, keepdim=True)


class Normalise:
    """Pixels in [0, 255] -> (pixels / 255 - mean) / std, float32."""

    def __init__(self, mean: Sequence[float], std: Sequence[float], device: torch.device) -> None:
        wide, deep = (torch.tensor(list(v), dtype=torch.float64).view(1, -1, 1, 1) for v in (mean, std))
        self.scale = (1 / (255 * deep)).float().to(device)
        self.shift = (-wide / deep).float().to(device)

    def __call__(self, images: Tensor) -> Tensor:
        return torch.addcmul(self.shift, images.float(), self.scale)
