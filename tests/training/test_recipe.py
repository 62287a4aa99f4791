"""Recipes: what is wrong is one line that names the nearest valid key."""

from pathlib import Path

import pytest
from training_toys import toy_recipe
from typer.testing import CliRunner

from leadline.cli import app
from leadline.errors import LeadlineError
from leadline.training import load_recipe, parse_recipe
from leadline.training.recipe import Recipe, Section, TextData, VisionData

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
LEAST = {"model": {"name": "vit_tiny"}, "data": {"name": "digits"}, "length": 3}


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"schedul": {}}, "unknown key of a recipe 'schedul'; allowed: .*did you mean 'schedule'"),
        ({"lr": 1}, r"^unknown key of a recipe 'lr'; did you mean optimizer.lr\?$"),
        ({"every": 1}, r"did you mean checkpoint.every or watch.every or log.every\?$"),
        ({"schedule": {"warmpu": 3}}, "unknown key of schedule 'warmpu'; .*did you mean 'warmup'"),
        ({"data": {"name": "digits", "pth": "x"}}, "unknown key of data 'pth'; .*did you mean 'path'"),
        ({"data": {"name": "cifr10"}}, "unknown data.name 'cifr10'; .*did you mean 'cifar10'"),
        ({"data": {}}, "data.name is missing; allowed: cifar10"),
        ({"model": {}}, "model.name is missing"),
        ({"model": {"name": "vit_tny"}}, "unknown model 'vit_tny'; .*did you mean 'vit_tiny'"),
        ({"model": {"name": "vit_tiny", "dpeth": 3}}, "unknown key of model.* 'dpeth'; .*did you mean 'depth'"),
        ({"model": {"name": "vit_tiny", "drop_path": 0.1}}, "write regularise.drop_path instead"),
        ({"optimizer": {"eps": 1e-46}}, "optimizer.eps is 1e-46"),
        ({"optimizer": {"lr": 1e-50}}, "optimizer.lr is 1e-50"),
        ({"optimizer": {"lr": True}}, "optimizer: lr is true, which is no number"),
        ({"threads": True}, "recipe: threads is true, which is no number"),
        ({"data": {"name": "digits", "limit": False}}, "data: limit is false, which is no number"),
        ({"optimizer": {"lr": -1}}, "optimizer.lr is -1: input should be greater than or equal to 1e-30"),
        ({"optimizer": {"name": "adamm"}}, "unknown optimizer.name 'adamm'; allowed: adam, adamw"),
        ({"length": "10 %"}, "length: '10 %' is a share"),
        ({"length": "soon"}, "length: 'soon' is no span; write 5"),
        ({"schedule": {"name": "multi_step"}}, "schedule: name is 'multi_step' and there are no milestones"),
        (
            {"schedule": {"milestones": ["70 %"]}},
            r"schedule: name is 'cosine' and milestones \['70 %'\]; milestones belong",
        ),
        ({"batch": {"size": 10, "accumulate": 4}}, "batch: size is 10 and accumulate 4; accumulate must divide size"),
        ({"graph": True, "checkpointing": True}, "recipe: graph and checkpointing are both true"),
        ({"checkpoint": {"every": 0}}, "checkpoint.every: '0' must be above 0"),
        ({"optimizer": {"lr": float("nan")}}, "optimizer.lr is nan"),
        ({"optimizer": {"betas": [0.9]}}, r"optimizer.betas is \[0.9\]; it must have 2 values"),
        ({"augment": {"scale": [1, 0.1]}}, r"augment.scale: \[1.0, 0.1\] goes down"),
        ({"augment": {"scale": [0.5, 1.0]}}, "augment: scale is given and crop is not 'resized'"),
        ({"augment": {"crop": "resized", "padding": 2}}, "augment: padding is given and crop is not 'pad'"),
        ({"augment": {"mix_prob": 0.5}}, "augment: mix_prob is given and neither mixup nor cutmix is on"),
        ({"augment": {"mixup": 0.8, "switch_prob": 0.2}}, "augment: switch_prob is given and mixup and cutmix are not"),
        ({"optimizer": {"lr": 1e39}}, r"optimizer.lr is 1e\+39: input should be less than or equal to 1e\+30$"),
        (
            {"data": {"name": "digits", "std": [1e-60]}},
            "data.std.0 is 1e-60: input should be greater than or equal",
        ),
        ({"augment": {"crop": "resized", "scale": [0, 0]}}, r"augment.scale: \[0.0, 0.0\] leaves nothing of an image"),
        ({"schedule": {"start": 0.5}}, "schedule: start is given and there is no warmup, so it would do nothing"),
        ({"schedule": {"factor": 0.5}}, "schedule: factor is given and name is 'cosine'"),
        ({"schedule": {"name": "constant", "final": 0.5}}, "final is given and name is 'constant' without a cooldown"),
        ({"watch": {"entropy": True}}, "watch: entropy is given and every is 0"),
        ({"out": 7}, "out is 7; it must be text, put quotes around it"),
        ({"data": "digits"}, "^data is 'digits'; it has keys of its own, write data.KEY=value$"),
        ({"model": "vit_tiny"}, "^model is 'vit_tiny'; it has keys of its own, write model.KEY=value$"),
        ({"schedule": "cosine"}, "^schedule is 'cosine'; it has keys of its own"),
        ({"length": "1e12"}, "length: '1e12' is no span; write a number up to 1,000,000,000"),
        ({"schedule": {"warmup": "1e400"}}, "schedule.warmup: '1e400' is no span"),
        ({"seed": 2**63}, "seed is 9223372036854775808: input should be less than"),
        ({"model": {"name": "vit_tiny", "alpha": [0.5]}}, r"model.alpha is \[0.5\], which has the wrong type"),
        ({"model": {"name": "vit_tiny", "learnable_alpha": True}}, "is True, .*; it must be 'layer' or 'head'"),
        ({"model": {"name": "vit_tiny", "depth": 2.5}}, "model.depth is 2.5, .*; it must be a whole number"),
        ({"model": {"name": "vit_tiny", "de_escalation": 7}}, r"model.de_escalation \(tau\) is 7; it must lie in"),
    ],
)
def test_what_is_wrong_is_one_line(change, line):
    with pytest.raises(LeadlineError, match=line) as caught:
        parse_recipe({**LEAST, **change})
    assert "\n" not in str(caught.value)


def test_what_is_missing_is_named():
    with pytest.raises(LeadlineError, match="length is missing; every recipe needs model, data, length"):
        parse_recipe({"model": {"name": "vit_tiny"}, "data": {"name": "digits"}})


def test_settings_change_entries(tmp_path):
    for name in ("2026-11-16", "7", "007", "1.10", "20241116_1830", "12:30"):
        assert load_recipe(RECIPES / "smoke_digits.yaml", [f"out={name}"]).out == name
    settings = ["schedule.warmup=2 steps", "out=here", "model.depth=7", "optimizer.betas=[.8, .9]", "watch.every=1"]
    recipe = load_recipe(RECIPES / "smoke_digits.yaml", settings)
    assert recipe.schedule.warmup.text == "2 steps"
    assert recipe.out == "here"
    assert recipe.model_options()["depth"] == 7
    assert recipe.model_options()["dim"] == 64
    assert recipe.optimizer.betas == (0.8, 0.9)
    small = load_recipe(RECIPES / "smoke_digits.yaml", ["model.norm_eps=1e-5"])  # text, to YAML
    assert small.model_options()["norm_eps"] == 1e-5
    with pytest.raises(LeadlineError, match=r"model.alpha is -0.5; it must"):
        load_recipe(RECIPES / "smoke_digits.yaml", ["model.alpha=-.5"])
    assert load_recipe(RECIPES / "smoke_digits.yaml").out == str(Path("runs/smoke_digits"))
    for wrong in ("depth", "=3", "model.=3"):
        with pytest.raises(LeadlineError, match="is no setting; write key=value"):
            load_recipe(RECIPES / "smoke_digits.yaml", [wrong])


def test_a_folder_below_ones_own_is_written_short(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "short.yaml").write_text("{model: {name: vit_tiny}, data: {name: cifar10, path: ~/here}, length: 1}")
    recipe = load_recipe(tmp_path / "short.yaml", ["out=~/runs/a", "data.cache=~/cache"])
    assert (recipe.out, recipe.data.path, recipe.data.cache) == tuple(
        str(tmp_path / place) for place in ("runs/a", "here", "cache")
    )
    assert load_recipe(tmp_path / "short.yaml", ["data.path=~"]).data.path is None  # YAML's null


def test_a_recipe_survives_being_written_down():
    recipe = toy_recipe("x", schedule={"name": "multi_step", "milestones": ["70 %", "11 steps"]})
    assert parse_recipe(recipe.model_dump(mode="json")) == recipe


def test_files_that_are_no_recipes(tmp_path):
    (tmp_path / "list.yaml").write_text("- 1\n- 2\n")
    (tmp_path / "broken.yaml").write_text("model: {name: [\n")
    with pytest.raises(LeadlineError, match="holds no mapping"):
        load_recipe(tmp_path / "list.yaml")
    (tmp_path / "twice.yaml").write_text("optimizer: {lr: 2}\nmodel: {name: vit_tiny}\noptimizer: {name: adam}\n")
    with pytest.raises(LeadlineError, match=r"is not YAML: optimizer comes twice"):
        load_recipe(tmp_path / "twice.yaml")
    with pytest.raises(LeadlineError, match="is not YAML"):
        load_recipe(tmp_path / "broken.yaml")
    with pytest.raises(LeadlineError, match=r"did you mean 'broken.yaml'"):
        load_recipe(tmp_path / "brocken.yaml")
    with pytest.raises(LeadlineError, match="does not exist; give a recipe"):
        load_recipe(tmp_path / "nowhere" / "x.yaml")


@pytest.mark.parametrize("file", sorted(RECIPES.glob("**/*.yaml")), ids=lambda file: file.stem)
def test_our_recipes_are_valid(file):
    load_recipe(file)


def test_the_command_line_says_it_and_exits_with_2(monkeypatch, capsys):
    from leadline import cli

    monkeypatch.setattr("sys.argv", ["leadline", "train", str(RECIPES / "smoke_digits.yaml"), "optimizer.lrr=1"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert "did you mean 'lr'?" in said[0]


def test_help_has_an_example():
    said = CliRunner().invoke(app, ["train", "--help"]).output
    assert "Examples: leadline train" in " ".join(said.split())


def test_the_page_on_training_names_every_key():
    page = (RECIPES.parent / "docs" / "training.md").read_text()
    sections = [Recipe, VisionData, TextData]
    while sections:
        for name, field in sections.pop().model_fields.items():
            assert f"`{name}`" in page, name
            if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
                sections.append(field.annotation)


def test_a_merged_key_may_be_given_again(tmp_path):
    (tmp_path / "recipe.yaml").write_text(
        "model: {name: vit_tiny}\ndata: {name: digits}\nlength: 1\n"
        "optimizer: {<<: {lr: 0.1, weight_decay: 0.2}, lr: 0.3}\n"
    )
    optimizer = load_recipe(tmp_path / "recipe.yaml").optimizer
    assert (optimizer.lr, optimizer.weight_decay) == (0.3, 0.2)
