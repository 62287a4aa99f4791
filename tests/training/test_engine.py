"""The loop against plain torch, and against itself when it is interrupted."""

import csv
import dataclasses
import io
import json
import math
import multiprocessing
import os
import signal
import time
import warnings

import pytest
import torch
from safetensors.torch import load_file
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from training_toys import CarryTask, Poisoned, ToyBatches, ToyTask, toy_recipe

import leadline as ll
from leadline.data.base import mix_seed
from leadline.errors import LeadlineError
from leadline.training import Stopped, checkpoint, find_checkpoint, train
from leadline.training.distributed import join
from leadline.training.engine import Run, prepare_step
from leadline.training.folder import alone
from leadline.training.logs import Listener, Logs
from leadline.training.optimizer import undecayed
from leadline.training.schedule import LearningRate


def log_of(out, name="log.csv"):
    with (out / name).open() as stream:
        clock = ("seconds", "samples_per_second")
        return [{k: float(v) for k, v in row.items() if k not in clock} for row in csv.DictReader(stream)]


def tensors_of(out):
    last = find_checkpoint(out, "last").folder
    return {
        f"{file.relative_to(last)}/{name}": tensor
        for file in sorted(last.rglob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def assert_same_run(one, other):
    first, second = tensors_of(one), tensors_of(other)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
    assert log_of(one) == log_of(other)
    assert log_of(one, "evaluation.csv") == log_of(other, "evaluation.csv")


def plain_loop(recipe, scaler=None, dtype=None):
    """The same run in a few lines of torch."""
    torch.manual_seed(recipe.seed)
    task = ToyTask(recipe, "cpu")
    model = task.make_model()
    spared = undecayed(model)
    groups = [
        {"params": [p for n, p in model.named_parameters() if n not in spared], "weight_decay": 0.1},
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


@pytest.mark.parametrize("name", ["adamw", "adam"])
def test_it_is_the_loop_one_would_write_in_torch(tmp_path, name):
    recipe = toy_recipe(
        tmp_path, model={"dropout": 0.1, "attention": "hopfield"}, regularise={"ema": 0.9, "drop_path": 0.1},
        optimizer={"name": name},
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


class Interrupted(ToyTask):
    """Sends this process a signal in the middle of a step."""

    at, number = 5, signal.SIGTERM

    def loss(self, model, batch, carry):
        if model.training and self.count == self.at:
            os.kill(os.getpid(), self.number)
        self.count += 1
        return super().loss(model, batch, carry)

    count = 0


FULL = {
    "model": {"dropout": 0.1, "attention": "hopfield", "learnable_alpha": "head"},
    "regularise": {"ema": 0.9, "drop_path": 0.2},
    "log": {"every": 5},
    "watch": {"every": "3 steps"},
}


@pytest.fixture
def with_a_terminal():
    """Under nohup the tests would begin with SIGHUP ignored, and a run keeps it so."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_a_signal_in_the_last_evaluation_loses_nothing_but_that(tmp_path):
    class Task(ToyTask):
        def evaluate(self, model, split="valid"):
            if split == "test":
                os.kill(os.getpid(), signal.SIGTERM)
            return super().evaluate(model, split)

    line = r"SIGTERM after the last step; saved in .*step-000012, run the same command again for its evaluation"
    with pytest.raises(Stopped, match=line) as at:
        train(toy_recipe(tmp_path / "torn"), make_task=Task)
    assert at.value.code == 143
    assert not (tmp_path / "torn" / "summary.json").exists()
    assert train(toy_recipe(tmp_path / "torn"), make_task=ToyTask)["steps"] == 12
    train(toy_recipe(tmp_path / "calm"), make_task=ToyTask)
    assert_same_run(tmp_path / "calm", tmp_path / "torn")


@pytest.mark.usefixtures("with_a_terminal")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_step_saves_and_the_same_run_goes_on(tmp_path, number):
    train(toy_recipe(tmp_path / "calm", **FULL), make_task=ToyTask)
    handlers = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)]
    recipe = toy_recipe(tmp_path / "torn", **FULL)
    task = type("Task", (Interrupted,), {"number": number})
    with pytest.raises(Stopped, match=f"{number.name} after step 6 of 12; saved in .*step-000006, run the same") as at:
        train(recipe, make_task=task)
    assert at.value.code == 128 + number
    assert [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)] == handlers
    train(recipe, make_task=ToyTask)
    assert_same_run(tmp_path / "calm", tmp_path / "torn")
    assert log_of_probe(tmp_path / "calm") == log_of_probe(tmp_path / "torn")


def test_a_run_under_nohup_goes_on_without_its_terminal(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        task = type("Task", (Interrupted,), {"number": signal.SIGHUP})
        assert train(toy_recipe(tmp_path), make_task=task)["steps"] == 12
    finally:
        signal.signal(signal.SIGHUP, before)


def test_two_processes_do_not_train_in_one_folder(tmp_path):
    class Twice(ToyTask):
        def loss(self, model, batch, carry):
            with pytest.raises(LeadlineError, match=r"another process is training in .*; wait for it"):
                train(toy_recipe(tmp_path), make_task=ToyTask)
            return super().loss(model, batch, carry)

    assert train(toy_recipe(tmp_path, length="4 steps"), make_task=Twice)["steps"] == 4
    assert train(toy_recipe(tmp_path, length="5 steps"), make_task=ToyTask)["steps"] == 5


def test_a_child_that_lives_on_does_not_hold_the_folder(tmp_path):
    def live(begun):
        begun.set()
        time.sleep(60)

    fork = multiprocessing.get_context("fork")
    begun = fork.Event()
    with alone(tmp_path):
        child = fork.Process(target=live, args=(begun,), daemon=True)
        child.start()
        assert begun.wait(60)
    with alone(tmp_path):
        assert child.is_alive()
    child.kill()


@pytest.mark.parametrize("gone", [BrokenPipeError(32, "Broken pipe"), OSError(5, "Input/output error")])
def test_a_run_goes_on_when_nobody_listens(tmp_path, gone):
    class Closed(io.StringIO):
        def write(self, text):
            raise gone

    console = Listener(file=Closed())
    assert train(toy_recipe(tmp_path), console=console, make_task=ToyTask)["steps"] == 12
    assert console.quiet


def test_a_log_that_is_no_log_is_no_obstacle(tmp_path):
    train(toy_recipe(tmp_path, length="8 steps"), make_task=ToyTask)
    (tmp_path / "log.csv").write_bytes(b"steps,x\n\xff\xfe,1\n")
    assert train(toy_recipe(tmp_path), make_task=ToyTask)["steps"] == 12


def test_a_disk_too_full_to_begin_with_is_one_line(tmp_path, monkeypatch):
    train(toy_recipe(tmp_path, length="8 steps"), make_task=ToyTask)

    def full(file, step):
        raise OSError(28, "No space left on device", str(file))

    monkeypatch.setattr("leadline.training.logs.cut", full)
    with pytest.raises(Stopped, match=r"No space left on device \(.*log.csv\); the last checkpoint: .*step-000008;"):
        train(toy_recipe(tmp_path), make_task=ToyTask)


def test_a_run_that_died_before_its_first_checkpoint_begins_again(tmp_path):
    class Dies(ToyTask):
        def loss(self, model, batch, carry):
            self.count = getattr(self, "count", 0) + 1
            if self.count == 3:
                raise SystemExit
            return super().loss(model, batch, carry)

    train(toy_recipe(tmp_path / "calm", **FULL), make_task=ToyTask)
    with pytest.raises(SystemExit):
        train(toy_recipe(tmp_path / "torn", **FULL), make_task=Dies)
    assert find_checkpoint(tmp_path / "torn") is None
    train(toy_recipe(tmp_path / "torn", **FULL), make_task=ToyTask)
    assert_same_run(tmp_path / "calm", tmp_path / "torn")
    assert log_of_probe(tmp_path / "calm") == log_of_probe(tmp_path / "torn")


def log_of_probe(out):
    return (out / "probe.csv").read_text()


def test_what_is_carried_goes_on_too(tmp_path):
    settings = {"batch": {"accumulate": 2}}
    train(toy_recipe(tmp_path / "calm", **settings), make_task=CarryTask)
    task = type("Task", (Interrupted, CarryTask), {"at": 9})
    with pytest.raises(Stopped):
        train(toy_recipe(tmp_path / "torn", **settings), make_task=task)
    assert find_checkpoint(tmp_path / "torn", "last").tensors("carry")["carry.0"].shape == (16, 2)
    train(toy_recipe(tmp_path / "torn", **settings), make_task=CarryTask)
    assert_same_run(tmp_path / "calm", tmp_path / "torn")


def test_a_truncated_checkpoint_costs_a_few_steps_and_nothing_else(tmp_path, capsys):
    train(toy_recipe(tmp_path / "calm"), make_task=ToyTask)
    train(toy_recipe(tmp_path / "torn", length="8 steps", schedule={"name": "constant"}), make_task=ToyTask)
    (tmp_path / "torn" / "step-000008" / "optimizer.safetensors").write_bytes(b"")
    recipe = toy_recipe(tmp_path / "torn", schedule={"name": "constant"})
    train(recipe, make_task=ToyTask)
    said = capsys.readouterr().err
    assert "step-000008 is damaged" in said.replace("\n", " ")
    train(toy_recipe(tmp_path / "other", schedule={"name": "constant"}), make_task=ToyTask)
    assert_same_run(tmp_path / "other", tmp_path / "torn")


def test_data_that_cannot_be_read_loses_nothing(tmp_path):
    class Batches(ToyBatches):
        def __call__(self, step, *rest, **options):
            if step == 7:
                raise LeadlineError("image 3 cannot be read")
            return super().__call__(step, *rest, **options)

    class Broken(ToyTask):
        def __init__(self, recipe, device, *rest):
            super().__init__(recipe, device, *rest)
            self.batches = Batches(recipe, device)

    with pytest.raises(LeadlineError, match="image 3 cannot be read"):
        train(toy_recipe(tmp_path / "torn"), make_task=Broken)
    assert find_checkpoint(tmp_path / "torn", "last").step == 7
    train(toy_recipe(tmp_path / "torn"), make_task=ToyTask)
    train(toy_recipe(tmp_path / "calm"), make_task=ToyTask)
    assert_same_run(tmp_path / "calm", tmp_path / "torn")


def test_a_full_disk_stops_the_run(tmp_path, monkeypatch):
    real, calls = checkpoint.save_file, []

    def full(tensors, file):
        calls.append(file)
        if len(calls) > 1:  # the optimizer's of the second checkpoint
            raise OSError(28, "No space left on device")
        real(tensors, file)

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(Stopped, match=r"could not be written to .*No space left on device.*step-000004 is intact"):
        train(toy_recipe(tmp_path, evaluate="12 steps"), make_task=ToyTask)
    assert find_checkpoint(tmp_path, "last").step == 4


def test_a_full_disk_met_by_a_log_stops_the_run(tmp_path, monkeypatch):
    real = Logs._write

    def full(self, name, row):
        if row["step"] == 7:
            raise OSError(28, "No space left on device", str(self.out / name))
        real(self, name, row)

    with monkeypatch.context() as patch:
        patch.setattr(Logs, "_write", full)
        with pytest.raises(
            Stopped, match=r"No space left on device \(.*log.csv\); the last checkpoint: .*step-000006;"
        ):
            train(toy_recipe(tmp_path / "torn"), make_task=ToyTask)
    train(toy_recipe(tmp_path / "torn"), make_task=ToyTask)
    train(toy_recipe(tmp_path / "calm"), make_task=ToyTask)
    assert_same_run(tmp_path / "calm", tmp_path / "torn")


def test_an_evaluation_that_cannot_be_made_loses_nothing(tmp_path):
    class Broken(ToyTask):
        def evaluate(self, model, split="valid"):
            raise LeadlineError("image 3 cannot be read")

    with pytest.raises(LeadlineError, match="image 3 cannot be read"):
        train(toy_recipe(tmp_path / "torn"), make_task=Broken)
    assert find_checkpoint(tmp_path / "torn", "last").step == 6
    with pytest.raises(LeadlineError, match="image 3 cannot be read"):  # it is owed, and made before the next step
        train(toy_recipe(tmp_path / "torn"), make_task=Broken)
    assert find_checkpoint(tmp_path / "torn", "last").step == 6
    train(toy_recipe(tmp_path / "torn"), make_task=ToyTask)
    train(toy_recipe(tmp_path / "calm"), make_task=ToyTask)
    assert_same_run(tmp_path / "calm", tmp_path / "torn")
    logs = [(tmp_path / run / "evaluation.csv").read_text() for run in ("calm", "torn")]
    assert logs[0] == logs[1]


def test_data_that_fail_at_once_leave_the_checkpoint_its_score(tmp_path):
    class Broken(ToyTask):
        left = 6

        def loss(self, model, batch, carry):
            if model.training:
                if not self.left:
                    raise LeadlineError("a data worker ended")
                self.left -= 1
            return super().loss(model, batch, carry)

    at_once = type("AtOnce", (Broken,), {"left": 0})
    for kind in (Broken, at_once):  # after the step that was evaluated and saved, and after resuming there
        with pytest.raises(LeadlineError, match="a data worker ended"):
            train(toy_recipe(tmp_path), make_task=kind)
        found = find_checkpoint(tmp_path, "best")
        assert found.step == 6
        assert found.state["score"] is not None


@pytest.mark.parametrize("what", ["Connection closed by peer", "recv: Connection reset by peer"])
def test_what_another_process_ended_is_one_line(tmp_path, what):
    run = Run(toy_recipe(tmp_path), join(toy_recipe(tmp_path)), Listener(), ToyTask)
    gone = RuntimeError(f"[gloo/pair.cc:534] {what} [127.0.0.1]:1234")
    with pytest.raises(RuntimeError, match=what), run._explained():
        raise gone
    run.processes = dataclasses.replace(run.processes, world=2)
    with pytest.raises(Stopped, match=r"another process .* ended; the last checkpoint: none"), run._explained():
        raise gone
    with pytest.raises(RuntimeError, match="out of memory"), run._explained():
        raise RuntimeError("out of memory")


@pytest.mark.parametrize("text", ["[]", "{}", "{"])
def test_a_damaged_summary_is_written_again(tmp_path, text):
    first = train(toy_recipe(tmp_path), make_task=ToyTask)
    (tmp_path / "summary.json").write_text(text)
    assert train(toy_recipe(tmp_path), make_task=ToyTask)["test_loss"] == first["test_loss"]
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 12


def test_a_run_whose_checkpoints_are_all_damaged_is_left_as_it_is(tmp_path):
    train(toy_recipe(tmp_path, length="8 steps", checkpoint={"best": False}), make_task=ToyTask)
    for folder in tmp_path.glob("step-*"):
        (folder / "optimizer.safetensors").write_bytes(b"")
    before = (tmp_path / "log.csv").read_text()
    with pytest.raises(
        LeadlineError, match=r"no checkpoint in .* is whole \(step-000004, step-000008\); to begin anew"
    ):
        train(toy_recipe(tmp_path), make_task=ToyTask)
    assert (tmp_path / "log.csv").read_text() == before
    assert (tmp_path / "step-000008" / "model.safetensors").is_file()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_divergence_names_the_step_and_the_layer(tmp_path, accumulate):
    recipe = toy_recipe(tmp_path, log={"every": 10}, batch={"accumulate": accumulate})
    with pytest.raises(Stopped, match=r"diverged at step 7: the output of patch is not finite; figures of .*diverg"):
        train(recipe, make_task=Poisoned)
    rows = list(csv.DictReader((tmp_path / "divergence.csv").open()))
    assert [row["name"] for row in rows] == ["input", "blocks.0", "blocks.1"]
    assert {row["step"] for row in rows} == {"7"}
    assert find_checkpoint(tmp_path, "last").step == 6  # evaluated there


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


def test_a_folder_belongs_to_one_recipe(tmp_path, capsys):
    first = train(toy_recipe(tmp_path), make_task=ToyTask)
    with pytest.raises(LeadlineError, match=r"another recipe: batch.size \(16 there, 8 now\), optimizer.lr \(0.003"):
        train(toy_recipe(tmp_path, batch={"size": 8}, optimizer={"lr": 1e-3}), make_task=ToyTask)
    with pytest.raises(LeadlineError, match=r"length is 6 steps and .* holds a checkpoint of step 12"):
        train(toy_recipe(tmp_path, length="6 steps"), make_task=ToyTask)
    assert "length: 12 steps" in (tmp_path / "recipe.yaml").read_text()  # what is refused leaves no trace
    assert train(toy_recipe(tmp_path, log={"every": 3}), make_task=ToyTask) == first
    assert "nothing to do" in capsys.readouterr().err.replace("\n", " ")
    assert train(toy_recipe(tmp_path, length="14 steps"), make_task=ToyTask)["steps"] == 14
    said = " ".join(capsys.readouterr().err.split())
    assert "length was 12 steps, and the schedule is now that of 14: the learning rate goes from" in said
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
