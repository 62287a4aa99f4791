"""Batches as pure functions of the step: any number of processes, parts and workers, and timm's own augmentations."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_files import write_folder
from torch import Tensor

from leadline.data.base import mix_seed
from leadline.data.images.augment import Normalise
from leadline.data.images.batches import Sweep, VisionBatches
from leadline.data.images.cache import Pixels, encoded
from leadline.data.images.plan import ERASE, MIX, RAND_AUGMENT, Augmentation, Look
from leadline.data.images.sets import decode, open_rows
from leadline.errors import LeadlineError

timm_data = pytest.importorskip("timm.data")
CPU = torch.device("cpu")
LOOK = Look(8, (0.4, 0.5, 0.6), (0.2, 0.3, 0.4), 10)
FULL = Augmentation(
    flip=True, crop="resized", rand_augment="rand-m9-mstd0.5", erase=0.5, mixup=0.8, cutmix=1.0, smoothing=0.1
)


@pytest.fixture
def images() -> Pixels:
    generator = torch.Generator().manual_seed(3)
    pixels = torch.randint(0, 256, (50, 3, 12, 12), dtype=torch.uint8, generator=generator)
    return Pixels(pixels, torch.arange(50) % 10)


def make(images: Pixels, augmentation: Augmentation, look: Look = LOOK, **options: Any) -> VisionBatches:
    settings = {"batch": 12, "seed": 5, **options}
    return VisionBatches(images, torch.arange(0, 50), look, augmentation, **settings)


def whole(batches: VisionBatches, step: int, world: int = 1) -> list[Tensor]:
    """The global batch, put together from its parts."""
    parts = [
        batches(step, micro, rank=rank, world=world)
        for micro in range(batches.order.accumulate)
        for rank in range(world)
    ]
    return [torch.cat([part[name] for part in parts]) for name in ("pixels", "labels")]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_an_epoch_holds_every_image_once(images: Pixels) -> None:
    batches = make(images, Augmentation(), LOOK._replace(size=12))
    assert batches.steps_per_epoch == 4
    index = [batches.order.of_step(step).tolist() for step in range(8)]
    first, second = ([i for part in index[at : at + 4] for i in part] for at in (0, 4))
    assert len(set(first)) == 48
    assert first != second
    batch = batches(1)
    expected = Normalise(LOOK.mean, LOOK.std, CPU)(images.images[index[1]])
    torch.testing.assert_close(batch["pixels"], expected)
    assert batch["labels"].tolist() == [i % 10 for i in index[1]]


@pytest.mark.parametrize(
    "augmentation",
    [Augmentation(flip=True, crop="pad"), FULL, replace(FULL, cutmix=0.0, rand_augment=None)],
    ids=["crop", "all", "mixup"],
)
def test_parts_and_processes_see_the_same_global_batch(images: Pixels, augmentation: Augmentation) -> None:
    one = make(images, augmentation)
    alone = [whole(one, step) for step in (3, 4)]
    again = [whole(make(images, augmentation), step) for step in (4, 3)]  # in another order, anew
    assert same(alone[0], again[1])
    assert same(alone[1], again[0])
    assert not same(alone[0], alone[1])
    for accumulate, world in ((2, 1), (1, 2), (3, 2)):
        split = make(images, augmentation, accumulate=accumulate)
        assert same(whole(split, 3, world), alone[0]), (accumulate, world)
    assert not same(whole(make(images, augmentation, seed=6), 3), alone[0])


def test_workers_give_what_one_process_gives(images: Pixels) -> None:
    here, there = make(images, FULL), make(images, FULL, workers=2)
    for step in (0, 1, 2, 7, 3):  # 7 and 3: as after resuming
        assert same(whole(here, step), whole(there, step)), step


def test_the_global_generators_are_left_alone(images: Pixels) -> None:
    batches = make(images, FULL)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = random.random(), np.random.rand(), torch.rand(1)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    batches(0)
    assert (random.random(), np.random.rand(), torch.rand(1)) == expected


def test_rand_augment_is_timms(images: Pixels) -> None:
    batches = make(images, Augmentation(rand_augment="rand-m9-mstd0.5"), LOOK._replace(size=12))
    found = batches(2)["pixels"]
    settings = {"translate_const": 5, "img_mean": tuple(round(255 * x) for x in LOOK.mean)}
    theirs = timm_data.auto_augment.rand_augment_transform("rand-m9-mstd0.5", settings)
    for place, index in enumerate(batches.order.of_step(2).tolist()):
        seed = mix_seed(5, RAND_AUGMENT, 2, place)
        random.seed(seed), np.random.seed(seed & 0xFFFFFFFF)
        image = theirs(decode_array(images.images[index]))
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        torch.testing.assert_close(found[place], Normalise(LOOK.mean, LOOK.std, CPU)(pixels[None])[0])


def decode_array(image: Tensor) -> object:
    return pytest.importorskip("PIL.Image").fromarray(image.permute(1, 2, 0).numpy())


def test_mixing_and_erasing_are_timms(images: Pixels) -> None:
    plain = make(images, Augmentation(flip=True, crop="pad"))
    mixed = make(images, Augmentation(flip=True, crop="pad", erase=0.6, mixup=0.8, cutmix=1.0, smoothing=0.1))
    for step in range(4):
        pixels, labels = whole(plain, step)
        eraser = timm_data.random_erasing.RandomErasing(1.0, mode="pixel", device="cpu")
        chosen = torch.rand(12, generator=torch.Generator().manual_seed(mix_seed(5, ERASE, step))) < 0.6
        for place, image in enumerate(pixels):
            if chosen[place]:
                seed = mix_seed(5, ERASE, step, place)
                random.seed(seed), torch.manual_seed(seed)
                eraser(image)
        np.random.seed(mix_seed(5, MIX, step) & 0xFFFFFFFF)
        theirs = timm_data.Mixup(0.8, 1.0, label_smoothing=0.1, num_classes=10)
        assert same(whole(mixed, step), list(theirs(pixels, labels)))


def test_encoded_images_go_through_timms_transform(tmp_path: Path) -> None:
    write_folder(tmp_path)
    found = encoded(open_rows("folder", tmp_path, "train"))
    look, augmentation = Look(16, (0.4,) * 3, (0.2,) * 3, 2), Augmentation(flip=True, crop="resized")
    settings = {"batch": 4, "seed": 2}
    batches = VisionBatches(found, torch.arange(12), look, augmentation, **settings)
    pixels = batches(1)["pixels"]
    theirs = timm_data.create_transform(16, is_training=True, color_jitter=0.0, interpolation="bicubic", mean=look.mean,
                                        std=look.std)  # fmt: skip
    for place, index in enumerate(batches.order.of_step(1).tolist()):
        seed = mix_seed(2, RAND_AUGMENT, 1, place)
        random.seed(seed), np.random.seed(seed & 0xFFFFFFFF), torch.manual_seed(seed)
        torch.testing.assert_close(pixels[place], theirs(decode(*found.read(index))))
    full = replace(FULL, erase=0.0)
    alone = VisionBatches(found, torch.arange(12), look, full, **settings)
    shared = VisionBatches(found, torch.arange(12), look, full, accumulate=2, workers=1, **settings)
    assert same(whole(alone, 1), whole(shared, 1))


def test_a_corrupt_image_in_a_worker_is_one_line(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "train/dog/3.png").write_bytes(b"no image")
    found = encoded(open_rows("folder", tmp_path, "train"))
    look, crop = Look(16, (0.4,) * 3, (0.2,) * 3, 2), Augmentation(crop="resized")
    for workers in (0, 1):
        batches = VisionBatches(found, torch.arange(12), look, crop, batch=12, workers=workers)
        with pytest.raises(LeadlineError, match=r"dog/3\.png is no image") as raised:
            batches(0)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("world", [1, 3])
def test_a_sweep_counts_every_image_once(images: Pixels, world: int, tmp_path: Path) -> None:
    members = torch.arange(0, 50, 3)  # 17 of them
    seen: list[int] = []
    steps = set()
    for rank in range(world):
        batches = list(Sweep(images, members, LOOK._replace(size=12), CPU, 4, rank=rank, world=world))
        steps.add(len(batches))
        for pixels, labels, counts in batches:
            assert pixels.shape == (4, 3, 12, 12)
            seen += labels[counts].tolist()
    assert len(steps) == 1
    assert sorted(seen) == sorted((members % 10).tolist())


def test_a_sweep_of_encoded_images_is_timms_evaluation(tmp_path: Path) -> None:
    write_folder(tmp_path)
    found = encoded(open_rows("folder", tmp_path, "test"))
    look = Look(16, (0.4,) * 3, (0.2,) * 3, 2)
    theirs = timm_data.create_transform(16, interpolation="bicubic", crop_pct=0.875, mean=look.mean, std=look.std)
    for workers in (0, 1):
        pixels, labels, counts = (torch.cat(parts) for parts in zip(
            *Sweep(found, torch.arange(12), look, CPU, 5, workers=workers), strict=True))  # fmt: skip
        assert labels[counts].tolist() == [0] * 6 + [1] * 6
        for index, ours in enumerate(pixels[counts]):
            torch.testing.assert_close(ours, theirs(decode(*found.read(index))))


def test_no_bits_of_colour_are_black(images: Pixels) -> None:
    """timm asks PIL for 0 bits where magnitudes are small, or large and increasing."""
    for name in ("rand-m2-n1", "rand-m15-n1-inc1"):
        batches = make(images, Augmentation(rand_augment=name), batch=25)
        black = Normalise(LOOK.mean, LOOK.std, CPU)(torch.zeros(1, 3, 8, 8))[0]
        found = torch.cat([batches(step)["pixels"] for step in range(4)])
        assert sum(torch.equal(image, black) for image in found) >= 1


def test_what_cannot_be(images: Pixels, tmp_path: Path) -> None:
    with pytest.raises(LeadlineError, match="batch size is 64 and there are 50"):
        make(images, Augmentation(), batch=64)
    with pytest.raises(LeadlineError, match="take an even one"):
        make(images, Augmentation(mixup=0.8), batch=5)
    for name in ("m9", "rand-m9-foo", "rand-x3"):
        with pytest.raises(LeadlineError, match=rf"rand_augment is '{name}'; give .*rand-m9-mstd0\.5"):
            make(images, Augmentation(rand_augment=name))
    with pytest.raises(LeadlineError, match="need a multiple of 5"):
        make(images, Augmentation())(0, rank=0, world=5)
    grey = Pixels(images.images[:, :1], images.labels)
    with pytest.raises(LeadlineError, match="needs images in colour"):
        make(grey, Augmentation(rand_augment="rand-m9"), Look(12, (0.5,), (0.2,), 10))
    write_folder(tmp_path)
    found = encoded(open_rows("folder", tmp_path, "train"))
    for augmentation in (Augmentation(crop="pad"), Augmentation(flip=True)):
        with pytest.raises(LeadlineError, match=r"augment\.crop is"):
            VisionBatches(found, torch.arange(12), LOOK, augmentation, batch=4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(images: Pixels) -> None:
    """The same images as on the CPU where nothing is drawn, and parts that make up the whole where much is."""
    gpu = torch.device("cuda")
    plain = make(images, Augmentation(), device=gpu)(1)
    torch.testing.assert_close(plain["pixels"].cpu(), make(images, Augmentation())(1)["pixels"], rtol=1e-3, atol=1e-3)
    for workers in (0, 1):
        alone = whole(make(images, FULL, device=gpu), 3)
        state = torch.cuda.get_rng_state()
        parts = whole(make(images, FULL, device=gpu, accumulate=3, workers=workers), 3, 2)
        assert torch.equal(torch.cuda.get_rng_state(), state)
        torch.testing.assert_close(parts, alone)
    ends = [make(images, Augmentation(flip=True, crop="pad"), device=gpu)(step)["pixels"] for step in (2, 2, 3)]
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    "augmentation", [Augmentation(), Augmentation(flip=True, crop="pad"), FULL], ids=["none", "pad", "full"]
)
def test_no_batch_waits_for_the_gpu(images: Pixels, augmentation: Augmentation, accumulate: int) -> None:
    batches = make(images, augmentation, device=torch.device("cuda"), accumulate=accumulate, workers=1)
    for micro in range(accumulate):
        batches(0, micro)  # begins the workers and the epoch
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for micro in range(accumulate):
            batches(1, micro)
    finally:
        torch.cuda.set_sync_debug_mode("default")
