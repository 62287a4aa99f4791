"""The recipes under recipes/ for images: they parse, build, and say what the papers and ``reproduce`` say."""

from pathlib import Path
from typing import Any

import pytest
import torch

from leadline.models import create_model
from leadline.papers import ENTRIES
from leadline.papers.hop import skipless
from leadline.papers.shared import vits
from leadline.papers.tse import fig6
from leadline.training.recipe import load_recipe, parse_recipe

RECIPES = Path(__file__).parents[2] / "recipes"
SETTINGS = {
    (entry.id, budget): entry.with_budget(budget).setting
    for entry in ENTRIES
    if entry.group == "trained"
    for budget in entry.budgets
}


def same(file: str, settings: list[str], expected: dict[str, Any]) -> None:
    """The recipe is the one that ``reproduce`` trains; what is logged and how often is its own."""
    ours = load_recipe(RECIPES / f"{file}.yaml", settings).model_dump(mode="json")
    theirs = parse_recipe(expected).model_dump(mode="json")
    for free in ("out", "log", "seed"):
        ours.pop(free), theirs.pop(free)
    ours_model, theirs_model = ours.pop("model"), theirs.pop("model")
    assert _close(ours, theirs), (ours, theirs)
    assert _built(ours_model) == _built(theirs_model)


def _close(a: Any, b: Any) -> bool:
    """Equal, numbers up to the digits that a recipe writes."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_close(a[key], b[key]) for key in a)
    if isinstance(a, float) and isinstance(b, float):
        return a == pytest.approx(b, rel=1e-5)
    return a == b


def _built(options: dict[str, Any]) -> Any:
    """What ``create_model`` makes of the options: defaults filled in, strengths in force."""
    with torch.device("meta"):
        config = create_model(**options, image_size=224, num_classes=10).config
    plain = {name: value for name, value in vars(config).items() if name not in ("alpha", "alpha_prime", "attention")}
    return plain, config.strengths


@pytest.mark.parametrize("budget", ["short", "full"])
@pytest.mark.parametrize(
    ("arm", "settings"),
    [
        ("de-escalated", []),
        ("post-norm", ["model.de_escalation=0", "optimizer.lr=5e-5"]),
        ("pre-norm", ["model.de_escalation=0", "model.norm=pre"]),
    ],
)
def test_depth_80(budget: str, arm: str, settings: list[str]) -> None:
    setting = SETTINGS["tse-fig6", budget]
    file = "tse_fig6" + "_short" * (budget == "short")
    same(file, settings, fig6.recipe(setting, arm, 0))


@pytest.mark.parametrize("budget", ["short", "full"])
@pytest.mark.parametrize(
    ("column", "settings"),
    [("both", []), ("standard", ["model.alpha=0", "model.alpha_prime=0"]), ("alpha' only", ["model.alpha=0"])],
)
def test_skipless(budget: str, column: str, settings: list[str]) -> None:
    setting = SETTINGS["hop-skipless", budget]
    expected = skipless.recipe(setting, skipless.Cell("trunc_normal", 4, column), 3e-4, 0, True)
    settings = [*settings, "model.depth=4", "optimizer.lr=3e-4"]
    same("skipless" + "_short" * (budget == "short"), settings, expected)


@pytest.mark.parametrize(("size", "file"), [("T", "tiny"), ("S", "small"), ("B", "base"), ("L", "large")])
@pytest.mark.parametrize(
    ("arm", "settings"),
    [("both", []), ("standard", ["model.attention=standard"]), (".7", ["model.alpha=.7", "model.alpha_prime=.7"])],
)
def test_table_3(size: str, file: str, arm: str, settings: list[str]) -> None:
    expected = vits.recipe(SETTINGS["hop-vit", "full"], size, arm, 0)
    same(f"hop_vit_{file}", settings, expected)
    for name in ("cifar100", "imagenet"):
        assert load_recipe(RECIPES / f"hop_vit_{file}.yaml", [*settings, f"data.name={name}"]).data.name == name


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        ("S", []),
        ("T", ["model.name=vit_tiny", "optimizer.lr=1e-3"]),
        ("B", ["model.name=vit_base", "optimizer.lr=3e-4", "length=3"]),
        ("L", ["model.name=vit_large", "optimizer.lr=1e-4", "length=2"]),
    ],
)
def test_short_vits(size: str, settings: list[str]) -> None:
    expected = vits.recipe(SETTINGS["hop-vit", "short"], size, "both", 0)
    expected["length"] = expected["length"].removesuffix(" epochs") if settings and size != "T" else expected["length"]
    same("hop_vit_short", settings, expected)


def test_table_3_in_numbers() -> None:
    """What the table prints, read off the recipes."""
    for name, (heads, depth, drop, batch, dim) in {
        "tiny": (3, 12, 0.1, 256, 192),
        "small": (6, 12, 0.2, 256, 384),
        "base": (12, 12, 0.2, 128, 768),
        "large": (16, 24, 0.3, 32, 1024),
    }.items():
        recipe = load_recipe(RECIPES / f"hop_vit_{name}.yaml")
        with torch.device("meta"):
            config = create_model(recipe.model.name, **recipe.model_options()).config
        assert (config.heads, config.depth, config.drop_path, config.dim) == (heads, depth, drop, dim)
        assert (config.image_size, config.patch_size, config.strengths) == (224, 16, (0.5, 0.5))
        assert recipe.batch.size == batch
        assert recipe.optimizer.eps == 1e-8
        assert recipe.optimizer.lr * recipe.schedule.start == pytest.approx(1e-6, rel=1e-5)
        assert recipe.optimizer.lr == pytest.approx(6.25e-5 * (batch / 256) ** 0.5, rel=1e-5)
        assert recipe.length.steps(1, 0) - recipe.schedule.cooldown.steps(1, 0) == 300
        assert recipe.schedule.warmup.steps(1, 0) == 20
        a = recipe.augment
        assert (a.rand_augment, a.erase, a.mixup, a.cutmix) == ("rand-m9-mstd0.5", 0.25, 0.8, 1.0)
        assert recipe.regularise.smoothing == 0.1
