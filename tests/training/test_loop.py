"""The loop against plain torch, and against itself when it is interrupted."""

import csv
import json
import math
import warnings

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from training_toys import CarryTask, Poisoned, ToyBatches, ToyTask, assert_same_run, log_of, tensors_of, toy_recipe

import leadline as ll
from leadline.data.base import mix_seed
from leadline.errors import LeadlineError
from leadline.training import Stopped, find_checkpoint, train
from leadline.training.distributed import join
from leadline.training.loop import prepare_step
from leadline.training.optimizer import LearningRate, undecayed


def plain_loop(recipe, scaler=None, dtype=None):
    """The same run in a few lines of torch."""
    torch.manual_seed(recipe.seed)
    task = ToyTask(recipe, "cpu")
    model = task.make_model()
    spared, decay = undecayed(model), recipe.optimizer.weight_decay
    groups = [
        {"params": [p for n, p in model.named_parameters() if n not in spared], "weight_decay": decay},
        {"params": [p for n, p in model.named_parameters() if n in spared], "weight_decay": 0.0},
    ]
    kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[recipe.optimizer.name]
    optimizer = kind(groups, lr=recipe.optimizer.lr, foreach=False)
    rate = LearningRate(recipe.schedule, 1.0, 12, 6)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    average.update_parameters(model)  # it starts from the initial weights
    rows = []
    for step in range(12):
        torch.manual_seed(mix_seed(recipe.seed, step, 0))
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            loss, _, _ = task.loss(model, ToyBatches(recipe)(step), None)
        optimizer.zero_grad()
        (scaler.scale(loss) if scaler else loss).backward()
        if scaler:
            scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.regularise.clip)
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it does not see that the scaler stepped
            schedule.step()
        average.update_parameters(model)
        rows.append((loss.item(), norm.item()))
    return model, average.module, rows


def test_torch_is_left_as_it_was(tmp_path):
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    train(toy_recipe(tmp_path, precision="bf16", threads=1), make_task=ToyTask)
    assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == before


@pytest.mark.parametrize("decay", [0.1, 0.0])
@pytest.mark.parametrize("name", ["adamw", "adam"])
def test_it_is_the_loop_one_would_write_in_torch(tmp_path, name, decay):
    recipe = toy_recipe(
        tmp_path, model={"dropout": 0.1, "attention": "hopfield"}, regularise={"ema": 0.9, "drop_path": 0.1},
        optimizer={"name": name, "weight_decay": decay},
    )  # fmt: skip
    train(recipe, make_task=ToyTask)
    model, average, rows = plain_loop(recipe)
    for row, (loss, norm) in zip(log_of(tmp_path), rows, strict=True):
        assert row["loss"] == pytest.approx(loss, rel=1e-5)
        assert row["gradient_norm"] == pytest.approx(norm, rel=1e-4)
    last = find_checkpoint(tmp_path, "last").folder
    for ours, theirs in ((ll.load(last), model), (ll.load(last / "ema"), average)):
        for key, value in theirs.state_dict().items():
            torch.testing.assert_close(ours.state_dict()[key], value, rtol=1e-4, atol=2e-5)


def test_fp16_scales_the_loss_as_torchs_scaler_does(tmp_path, monkeypatch):
    monkeypatch.setattr("leadline.training.step.FIRST_SCALE", 2.0**21)  # too much at first: some steps are skipped
    monkeypatch.setattr("leadline.training.step.GROW_AFTER", 3)
    # without the bias of the keys: its gradient is rounding noise, which Adam makes large
    recipe = toy_recipe(tmp_path, precision="fp16", checkpoint={"every": "12 steps"}, model={"qkv_bias": False})
    train(recipe, make_task=ToyTask)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**21, growth_interval=3)
    model, _, _ = plain_loop(recipe, scaler, torch.float16)
    saved = find_checkpoint(tmp_path, "last")
    assert saved.state["scale"] == scaler.get_scale()
    assert saved.state["scale"] < 2.0**21
    for key, value in model.state_dict().items():
        torch.testing.assert_close(saved.tensors("model")[key], value, rtol=1e-4, atol=2e-5)
    updates = saved.tensors("optimizer")["step.head.weight"].item()
    assert 3 < updates < 12
    rows = log_of(tmp_path)
    assert sum(row["skipped"] for row in rows) == 12 - updates
    assert all(row["gradient_norm"] == math.inf if row["skipped"] else row["gradient_norm"] < 100 for row in rows)
    train(
        toy_recipe(tmp_path / "rare", precision="fp16", model={"qkv_bias": False}, log={"every": 12}), make_task=ToyTask
    )
    (row,) = log_of(tmp_path / "rare")
    kept = [row["gradient_norm"] for row in rows if not row["skipped"]]
    assert row["skipped"] == pytest.approx(1 - updates / 12)
    assert row["gradient_norm"] == pytest.approx(sum(kept) / len(kept), rel=1e-3)


def test_figures_that_a_checkpoint_did_not_know_begin_with_it(tmp_path):
    recipe = toy_recipe(tmp_path)
    processes = join(recipe)
    task = ToyTask(recipe, processes.device)
    step = prepare_step(recipe, task, task.make_model(), processes, LearningRate(recipe.schedule, 3e-3, 12, 6))
    step.names, step.sums = ["loss"], torch.tensor([5.0], dtype=torch.float64)
    step(0)
    assert step.names == ["loss", "gradient_norm", "accuracy"]
    assert 5 < step.sums[0] < 7
    assert 0 < step.sums[1] < 100


def test_accumulated_parts_are_one_batch(tmp_path):
    train(toy_recipe(tmp_path / "whole"), make_task=ToyTask)
    train(toy_recipe(tmp_path / "parts", batch={"accumulate": 4}), make_task=ToyTask)
    for one, other in zip(log_of(tmp_path / "whole"), log_of(tmp_path / "parts"), strict=True):
        assert one == pytest.approx(other, rel=2e-5)


def test_recomputed_activations_change_nothing(tmp_path):
    settings = {"model": {"dropout": 0.1, "attention": "hopfield"}}
    train(toy_recipe(tmp_path / "kept", **settings), make_task=ToyTask)
    train(toy_recipe(tmp_path / "again", checkpointing=True, **settings), make_task=ToyTask)
    assert_same_run(tmp_path / "kept", tmp_path / "again")


def test_bf16_keeps_weights_and_carried_scores(tmp_path):
    dtypes = []

    class Task(ToyTask):
        def make_model(self):
            model = super().make_model()
            for block in model.blocks:
                block.register_forward_hook(lambda module, args, output: dtypes.append(output[1][0].dtype))
            return model

    train(toy_recipe(tmp_path, precision="bf16", model={"attention": "hopfield"}), make_task=Task)
    assert {tensor.dtype for tensor in tensors_of(tmp_path).values()} == {torch.float32}
    assert set(dtypes) == {torch.float32}


@pytest.mark.parametrize("settings", [{}, {"batch": {"accumulate": 2}}, {"checkpointing": True}])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_weights_cast_all_at_once_are_those_of_autocast(tmp_path, monkeypatch, precision, settings):
    train(toy_recipe(tmp_path / "at_once", precision=precision, **settings), make_task=ToyTask)
    monkeypatch.setattr("leadline.training.copies.CAST", ())  # so that autocast casts all of them
    train(toy_recipe(tmp_path / "each", precision=precision, **settings), make_task=ToyTask)
    assert_same_run(tmp_path / "at_once", tmp_path / "each")


@pytest.mark.parametrize("accumulate", [1, 2])
def test_divergence_names_the_step_and_the_layer(tmp_path, accumulate):
    recipe = toy_recipe(tmp_path, log={"every": 10}, batch={"accumulate": accumulate})
    with pytest.raises(Stopped, match=r"diverged at step 7: the output of patch is not finite; figures of .*diverg"):
        train(recipe, make_task=Poisoned)
    rows = list(csv.DictReader((tmp_path / "divergence.csv").open()))
    assert [row["name"] for row in rows] == ["input", "blocks.0", "blocks.1"]
    assert {row["step"] for row in rows} == {"7"}
    assert find_checkpoint(tmp_path, "last").step == 6  # evaluated there


def test_the_figures_of_a_divergence_are_of_the_part_that_went_wrong(tmp_path):
    class Late(ToyTask):
        def loss(self, model, batch, carry):
            self.count = getattr(self, "count", -1) + 1
            pixels = batch["pixels"] * (float("nan") if self.count % 2 else 1.0)  # every second part
            return super().loss(model, {**batch, "pixels": pixels}, carry)

    with pytest.raises(Stopped, match="diverged at step 0: the output of patch is not finite; figures of"):
        train(toy_recipe(tmp_path, batch={"accumulate": 2}), make_task=Late)
    rows = list(csv.DictReader((tmp_path / "divergence.csv").open()))
    assert all(math.isnan(float(row["norm"])) for row in rows)


def test_a_divergence_without_figures_names_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr("leadline.training.divergence._watcher", lambda model, number: None)
    with pytest.raises(Stopped, match="diverged at step 7: the output of patch is not finite; the last checkpoint"):
        train(toy_recipe(tmp_path), make_task=Poisoned)
    assert not (tmp_path / "divergence.csv").exists()


def test_the_weights_before_the_bad_step_are_kept(tmp_path):
    """Nothing changes from the bad step on, though it is noticed only later."""
    recipe = toy_recipe(tmp_path / "bad", regularise={"ema": 0.9})
    steps = []
    for kind, count in ((Poisoned, 10), (ToyTask, 7)):
        torch.manual_seed(0)
        processes = join(recipe)
        task = kind(recipe, processes.device)
        step = prepare_step(recipe, task, task.make_model(), processes, LearningRate(recipe.schedule, 3e-3, 12, 6))
        for number in range(count):
            step(number)
        steps.append(step)
    bad, good = steps
    assert bad.failed() == 7
    assert good.failed() is None
    for one, other in zip(bad.weights.local, good.weights.local, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(bad.optimizer.state[one]["exp_avg"], good.optimizer.state[other]["exp_avg"])


def test_a_last_step_that_breaks_the_weights_is_noticed(tmp_path):
    """Its own loss was finite, and no step comes after it."""
    hot = {"optimizer": {"lr": 1e30}, "length": "1 step", "schedule": {"warmup": 0}}
    with pytest.raises(Stopped, match="diverged by step 1: the loss on the valid split is nan; the last"):
        train(toy_recipe(tmp_path, **hot), make_task=ToyTask)
    assert not (tmp_path / "summary.json").exists()
    assert find_checkpoint(tmp_path, "last") is None


def test_what_is_carried_goes_on_where_only_the_loss_scale_was_too_large(tmp_path, monkeypatch):
    """Such a step changes no weight, but it has read its part of the text."""
    monkeypatch.setattr("leadline.training.step.FIRST_SCALE", 2.0**40)
    recipe = toy_recipe(tmp_path, precision="fp16", batch={"size": 96})
    processes = join(recipe)
    task = CarryTask(recipe, processes.device)
    step = prepare_step(recipe, task, task.make_model(), processes, LearningRate(recipe.schedule, 3e-3, 12, 1))
    carried = []
    for number in range(3):
        step(number)
        assert step.skip == 1
        assert step.failed() is None
        carried.append(step.carry[0][0].clone())
    assert not torch.equal(carried[0], carried[1])
    assert not torch.equal(carried[1], carried[2])


def test_how_long_it_is_comes_first(tmp_path, capsys):
    train(toy_recipe(tmp_path), make_task=ToyTask)
    assert capsys.readouterr().err.startswith("12 steps, 2 epochs of 6\n")


def test_more_threads_than_cores_are_refused(tmp_path):
    with pytest.raises(LeadlineError, match=r"threads is 1024 and this machine has \d+ cores; give at most these"):
        train(toy_recipe(tmp_path, threads=1024), make_task=ToyTask)
    with pytest.raises(LeadlineError, match="threads is 100000: input should be less than or equal to 1024"):
        toy_recipe(tmp_path, threads=100000)


def test_what_was_told_to_others_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    train(toy_recipe(tmp_path, length="1 step", schedule={"warmup": 0}), make_task=ToyTask)
    said = " ".join(capsys.readouterr().err.split())
    assert "accelerate's mixed_precision is bf16; the recipe's precision counts, which is float32" in said
    monkeypatch.setenv("PMI_SIZE", "2")
    with pytest.raises(LeadlineError, match="PMI_SIZE is 2: MPI has started several processes"):
        train(toy_recipe(tmp_path / "mpi"), make_task=ToyTask)


def test_a_gradient_that_breaks_and_one_that_explodes(tmp_path):
    class Breaks(ToyTask):
        """sqrt at 0 has a finite value and no finite slope."""

        def make_model(self):
            model = super().make_model()
            model.blocks[1].mlp.fc2.register_forward_hook(lambda module, args, output: output + (output * 0).sqrt())
            return model

    class Explodes(ToyTask):
        def loss(self, model, batch, carry):
            loss, metrics, _ = super().loss(model, batch, carry)
            return loss * 1e9, metrics, None

    with pytest.raises(Stopped, match=r"diverged at step 0: the gradient of blocks.1.mlp.fc2.\w+ is not finite"):
        train(toy_recipe(tmp_path / "1"), make_task=Breaks)
    with pytest.raises(
        Stopped, match=r"diverged at step 0: gradients explode \(norm \S+, norm_limit is 1e\+06\), the largest is"
    ):
        train(toy_recipe(tmp_path / "2"), make_task=Explodes)


def test_weight_decay_spares_what_it_should():
    model = ll.create_model("deit_tiny", depth=1, attention="hopfield", learnable_alpha="layer", image_size=32)
    decayed = {name for name, _ in model.named_parameters()} - undecayed(model)
    assert decayed == {
        "patch.weight", "blocks.0.attention.qkv.weight", "blocks.0.attention.proj.weight", "blocks.0.mlp.fc1.weight",
        "blocks.0.mlp.fc2.weight", "head.weight", "distillation_head.weight",
    }  # fmt: skip
    model = ll.create_model("transformer_xl_base", depth=1, dim=20, ffn=8, vocab_size=9)
    decayed = {name for name, _ in model.named_parameters()} - undecayed(model)
    assert decayed == {
        "token.weight", "blocks.0.attention.qkv.weight", "blocks.0.attention.proj.weight",
        "blocks.0.attention.relative.weight", "blocks.0.mlp.fc1.weight", "blocks.0.mlp.fc2.weight",
    }  # fmt: skip


def test_float32_is_float32_whatever_the_process_had(tmp_path):
    class Seen(ToyTask):
        def loss(self, model, batch, carry):
            found.add((torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32))
            return super().loss(model, batch, carry)

    found, before = set(), torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.allow_tf32 = True  # torch's own choice
    try:
        train(toy_recipe(tmp_path, length="2 steps", schedule={"warmup": 0}), make_task=Seen)
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == ("medium", True)
    finally:
        torch.set_float32_matmul_precision(before)
    assert found == {("highest", False)}


def test_too_little_memory_is_one_line(tmp_path):
    class Greedy(ToyTask):
        def loss(self, model, batch, carry):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nSee documentation")

    with pytest.raises(Stopped, match=r"cpu has not enough memory .*last checkpoint: none yet; run again with") as held:
        train(toy_recipe(tmp_path), make_task=Greedy)
    assert held.value.code == 1


def test_names_with_brackets_are_printed_as_they_are(tmp_path, capsys):
    out = tmp_path / "vit[lr=1e-3][/b]"
    train(toy_recipe(out, length="8 steps"), make_task=ToyTask)
    train(toy_recipe(out), make_task=ToyTask)
    train(toy_recipe(out), make_task=ToyTask)
    said = capsys.readouterr().err.replace("\n", "")
    assert f"from {out}" in said
    assert f"{out} is finished" in said


def test_a_folder_belongs_to_one_recipe(tmp_path, capsys):
    first = train(toy_recipe(tmp_path), make_task=ToyTask)
    with pytest.raises(LeadlineError, match=r"another recipe: batch.size \(16 there, 8 now\), optimizer.lr \(0.003"):
        train(toy_recipe(tmp_path, batch={"size": 8}, optimizer={"lr": 1e-3}), make_task=ToyTask)
    with pytest.raises(LeadlineError, match=r"length is 6 steps and .* holds a checkpoint of step 12"):
        train(toy_recipe(tmp_path, length="6 steps"), make_task=ToyTask)
    assert "length: 12 steps" in (tmp_path / "recipe.yaml").read_text()  # what is refused leaves no trace
    assert train(toy_recipe(tmp_path, log={"every": 3}), make_task=ToyTask) == first
    said = capsys.readouterr().err.replace("\n", " ")
    assert "nothing to do" in said
    assert "going on" not in said
    assert train(toy_recipe(tmp_path, length="14 steps"), make_task=ToyTask)["steps"] == 14
    said = " ".join(capsys.readouterr().err.split())
    assert "length was 12 steps, and the schedule is now that of 14: the learning rate goes from" in said
    plain = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
    del plain["regularise"]["smoothing"]  # by a version that did not know it
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(plain))
    assert train(toy_recipe(tmp_path, length="15 steps"), make_task=ToyTask)["steps"] == 15
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**plain, "speed": 9}))
    with pytest.raises(LeadlineError, match=r"recipe.yaml is no recipe \(unknown key of a recipe 'speed'"):
        train(toy_recipe(tmp_path, length="16 steps"), make_task=ToyTask)
    (tmp_path / "recipe.yaml").write_text("")  # lost by a system that fell; the checkpoints know it
    with pytest.raises(LeadlineError, match=r"another recipe: seed \(0 there, 7 now\)"):
        train(toy_recipe(tmp_path, length="16 steps", seed=7), make_task=ToyTask)
    assert train(toy_recipe(tmp_path, length="16 steps"), make_task=ToyTask)["steps"] == 16


def test_what_a_run_leaves_behind(tmp_path):
    recipe = toy_recipe(tmp_path, regularise={"ema": 0.5}, watch={"every": "6 steps"}, log={"tensorboard": True})
    summary = train(recipe, make_task=ToyTask)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert summary["steps"] == 12
    assert summary["versions"]["torch"] == torch.__version__
    rows = list(csv.DictReader((tmp_path / "probe.csv").open()))
    assert [int(row["step"]) for row in rows[::3]] == [0, 6, 12]
    assert list((tmp_path / "tensorboard").iterdir())
    best = find_checkpoint(tmp_path)
    assert best.step == summary["best"]["step"]
    model = ll.load(find_checkpoint(tmp_path, "last").folder / "ema")
    with torch.no_grad():
        found = ToyTask(recipe, "cpu").evaluate(model)
    assert found["accuracy"] == summary["test_accuracy"]
    assert found["loss"] == pytest.approx(summary["test_loss"], rel=1e-6)


def test_tensorboard_has_every_row_of_a_run_that_went_on(tmp_path):
    settings = {"schedule": {"name": "constant"}, "log": {"tensorboard": True}}
    for length in ("4 steps", "8 steps"):
        train(toy_recipe(tmp_path, length=length, **settings), make_task=ToyTask)
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in board.Scalars("log/loss")] == list(range(1, 9))


def test_better_evaluations_need_not_be_saved(tmp_path):
    summary = train(
        toy_recipe(tmp_path, evaluate="3 steps", checkpoint={"every": "100 %", "best": False}), make_task=ToyTask
    )
    assert summary["best"] is not None
    assert [folder.name for folder in tmp_path.glob("step-*")] == ["step-000012"]


def test_compiled_blocks_are_compiled_once_and_give_the_same(tmp_path, monkeypatch):
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")  # without a C++ compiler
    plain = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, options: plain(self, backend=counter))
    settings = {"model": {"depth": 6}, "regularise": {"drop_path": 0.3}, "watch": {"every": "6 steps"}}
    train(toy_recipe(tmp_path / "plain", **settings), make_task=ToyTask)
    train(toy_recipe(tmp_path / "blocks", compile="blocks", **settings), make_task=ToyTask)
    assert 1 <= counter.frame_count <= 3  # not one for each of the 6: the first has no drop path
    for one, other in zip(log_of(tmp_path / "plain"), log_of(tmp_path / "blocks"), strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    assert (tmp_path / "blocks" / "probe.csv").is_file()


def test_a_recipe_with_a_graph_runs_without_a_gpu_and_says_so(tmp_path, capsys):
    train(toy_recipe(tmp_path / "plain", device="cpu"), make_task=ToyTask)
    assert "CUDA graph" not in capsys.readouterr().err
    train(toy_recipe(tmp_path / "graph", device="cpu", graph=True), make_task=ToyTask)
    assert "this run has 1 process(es) on cpu" in capsys.readouterr().err
    assert log_of(tmp_path / "graph") == log_of(tmp_path / "plain")


def test_what_cannot_be_is_refused_at_once(tmp_path):
    with pytest.raises(LeadlineError, match="'fsdp' and this is the only process"):
        train(toy_recipe(tmp_path, distributed="fsdp"), make_task=ToyTask)
    with pytest.raises(LeadlineError, match=r"batch.size is 128; the data set has fewer samples"):
        train(toy_recipe(tmp_path, batch={"size": 128}), make_task=ToyTask)
    with pytest.raises(LeadlineError, match="out is missing"):
        train(toy_recipe(tmp_path).model_copy(update={"out": None}), make_task=ToyTask)
    (tmp_path / "file").write_text("")
    with pytest.raises(LeadlineError, match="cannot be used"):
        train(toy_recipe(tmp_path / "file"), make_task=ToyTask)
    (tmp_path / "recipe.yaml").write_text("model: {name: vit\n  x: [1")
    with pytest.raises(LeadlineError, match=r"recipe.yaml cannot be read \(it is damaged\); give another out=$"):
        train(toy_recipe(tmp_path), make_task=ToyTask)
