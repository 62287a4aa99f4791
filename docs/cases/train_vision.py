"""Train the vision model of the worked case: timm's pre-norm Vision Transformer on CIFAR-100, minutes on one GPU.

python docs/cases/train_vision.py FOLDER_OF_CIFAR100 OUT --minutes 4

FOLDER_OF_CIFAR100 holds the hub's parquet files. OUT gets ``model.safetensors`` (half precision) and ``training.json``.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from leadline.data.images.cache import decoded
from leadline.data.images.sets import open_rows
from leadline.machine import versions

MEAN, STD = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
BATCH, EPOCHS, RATE, WARM_UP = 512, 100, 1e-3, 500


def make_model() -> torch.nn.Module:
    """A ViT-Tiny of timm for 32 x 32 pixels: 12 pre-norm blocks, width 192, 64 patches and a class token."""
    return timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=4, num_classes=100, drop_path_rate=0.1)


def normalised(images: Tensor) -> Tensor:
    """Bytes (n, 3, 32, 32) -> float32 pixels of mean 0 and deviation 1 by channel."""
    mean, std = (torch.tensor(values, device=images.device).view(1, 3, 1, 1) for values in (MEAN, STD))
    return (images.float() / 255 - mean) / std


def augmented(images: Tensor) -> Tensor:
    """Flips, crops out of a border of 4 pixels, and a random erased square of 12 pixels for every second image."""
    n = len(images)
    flip = torch.rand(n, device=images.device) < 0.5
    images = torch.where(flip[:, None, None, None], images.flip(-1), images)
    padded = F.pad(images, (4,) * 4)
    top, left = torch.randint(9, (2, n), device=images.device)
    side = torch.arange(32, device=images.device)
    rows, columns = top[:, None] + side, left[:, None] + side
    sample = torch.arange(n, device=images.device)[:, None, None, None]
    channel = torch.arange(3, device=images.device)[None, :, None, None]
    images = normalised(padded[sample, channel, rows[:, None, :, None], columns[:, None, None, :]])
    y, x = torch.randint(21, (2, n, 1), device=images.device)
    hole = ((side - y) % 64 < 12)[:, :, None] & ((side - x) % 64 < 12)[:, None, :]
    wanted = (torch.rand(n, device=images.device) < 0.5)[:, None, None]
    return images.masked_fill((hole & wanted)[:, None], 0.0)


def accuracy(model: torch.nn.Module, images: Tensor, labels: Tensor) -> float:
    """Share of images that the model labels rightly, in evaluation mode."""
    model.eval()
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        guesses = torch.cat([model(normalised(part)).argmax(-1) for part in images.split(2000)])
    model.train()
    return (guesses == labels).double().mean().item()


def main() -> None:
    """Train for the given time and save the weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=4.0, help="stop after this time, with the rate at 0")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    train, test = (decoded(open_rows("cifar100", options.data, split), None) for split in ("train", "test"))
    images, labels, test_images, test_labels = (t.cuda() for t in (*train, *test))
    model = make_model().cuda()
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, fused=True)
    compiled = torch.compile(model)
    per_epoch = len(labels) // BATCH
    began, step, share = time.perf_counter(), 0, 0.0
    curve = []
    while share < 1 and step < EPOCHS * per_epoch:
        if step % per_epoch == 0:
            order = torch.randperm(len(labels), device="cuda")
        index = order[(step % per_epoch) * BATCH : (step % per_epoch + 1) * BATCH]
        share = max(step / (EPOCHS * per_epoch), (time.perf_counter() - began) / (60 * options.minutes))
        rate = RATE * min(1, (step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * min(1, share)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(compiled(augmented(images[index])), labels[index], label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 200 == 0:
            curve.append({"step": step, "loss": loss.item(), "seconds": time.perf_counter() - began})
            print(curve[-1], flush=True)
        step += 1
    result = {
        "test_accuracy": accuracy(model, test_images, test_labels),
        "steps": step,
        "epochs": step / per_epoch,
        "seconds": time.perf_counter() - began,
        "device": torch.cuda.get_device_name(),
        "versions": versions("timm", "torchvision"),
        "curve": curve,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: t.half().cpu().contiguous() for name, t in model.state_dict().items()}, options.out / "model.safetensors"
    )
    (options.out / "training.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({name: value for name, value in result.items() if name != "curve"}))


if __name__ == "__main__":
    main()
