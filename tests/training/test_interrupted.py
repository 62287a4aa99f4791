"""Runs that are ended from outside, or by their data or their disk, and go on: nothing is lost."""

import csv
import dataclasses
import io
import json
import multiprocessing
import os
import signal
import time

import pytest
from rich.console import Console
from training_toys import CarryTask, ToyBatches, ToyTask, assert_same_run, toy_recipe

from leadline.data.text import store as text_store
from leadline.errors import LeadlineError
from leadline.training import Stopped, find_checkpoint, loop, parse_recipe, train
from leadline.training.distributed import join
from leadline.training.run_folder import checkpoint
from leadline.training.run_folder.folder import hold
from leadline.training.run_folder.logs import Listener, Logs
from leadline.training.stop import StopPoll, StopRequest


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


@pytest.fixture
def on_text(tmp_path):
    """The recipe of a step on a text of its own, with its cache and the folder of the run."""
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text("by the mark, and deep\n" * 20)
    data = {"name": "text", "path": str(tmp_path), "tokenizer": "bpe", "vocab_size": 260, "tokens": 8}
    tree = {"model": {"name": "gpt2_small", "depth": 1, "dim": 8, "heads": 1}, "length": "1 steps", "device": "cpu"}
    data["cache"] = str(tmp_path / "cache")
    return lambda out: parse_recipe({**tree, "data": data, "batch": {"size": 4}, "out": str(tmp_path / out)})


def test_a_signal_before_the_first_step_is_one_line_and_leaves_no_half_of_a_cache(tmp_path, on_text, monkeypatch):
    def asked_to_stop(_):
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(text_store, "count_words", asked_to_stop)
        with pytest.raises(Stopped, match=r"^SIGTERM before the training began; run the same command again$") as at:
            train(on_text("run"))
    assert at.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert not list((tmp_path / "cache").glob("*.part"))
    assert train(on_text("run"))["steps"] == 1


@pytest.mark.parametrize("terminal", [True, False])
def test_what_is_made_of_the_data_is_told_once(tmp_path, on_text, terminal):
    told = []
    for out in ("first", "second"):
        console = Console(file=io.StringIO(), force_terminal=terminal, width=300)
        train(on_text(out), console=console)
        told.append(console.file.getvalue())
    for what in ("making a bpe vocabulary", f"tokenising {tmp_path / 'train.txt'}"):
        assert what in told[0]
        assert what not in told[1]
        assert told[0].count(f"{what}, once\n") == (not terminal)


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
    with hold(tmp_path):
        child = fork.Process(target=live, args=(begun,), daemon=True)
        child.start()
        assert begun.wait(60)
    with hold(tmp_path):
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

    monkeypatch.setattr("leadline.training.run_folder.logs.cut", full)
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


def test_a_damaged_checkpoint_takes_no_place_among_those_that_are_kept(tmp_path):
    constant = {"schedule": {"name": "constant"}, "evaluate": "100 %", "checkpoint": {"every": "4 steps", "keep": 1}}
    train(toy_recipe(tmp_path, length="8 steps", **{**constant, "checkpoint": {"every": "4 steps"}}), make_task=ToyTask)
    (tmp_path / "step-000008" / "optimizer.safetensors").write_bytes(b"")
    with pytest.raises(Stopped, match=r"SIGTERM after step 6 of 12; saved in .*step-000006") as at:
        train(toy_recipe(tmp_path, **constant), make_task=type("Task", (Interrupted,), {"at": 1}))
    assert at.value.code == 143
    assert find_checkpoint(tmp_path, "last").step == 6
    assert {path.name for path in tmp_path.glob("*step-*")} == {"step-000006", "damaged-step-000008"}
    train(toy_recipe(tmp_path, **constant), make_task=ToyTask)
    train(toy_recipe(tmp_path / "calm", **constant), make_task=ToyTask)
    assert_same_run(tmp_path / "calm", tmp_path)


def test_a_longer_run_that_stops_in_its_last_evaluation_is_not_finished(tmp_path):
    constant = {"schedule": {"name": "constant"}}

    class Task(ToyTask):
        def evaluate(self, model, split="valid"):
            if split == "test":
                os.kill(os.getpid(), signal.SIGTERM)
            return super().evaluate(model, split)

    short = train(toy_recipe(tmp_path, length="8 steps", **constant), make_task=ToyTask)
    with pytest.raises(Stopped, match="after the last step"):
        train(toy_recipe(tmp_path, **constant), make_task=Task)
    assert not (tmp_path / "summary.json").exists()  # the shorter run's is no longer true
    long = train(toy_recipe(tmp_path, **constant), make_task=ToyTask)
    assert (short["steps"], long["steps"]) == (8, 12)
    assert long["test_loss"] != short["test_loss"]
    (tmp_path / "summary.json").write_text(json.dumps(short))
    assert train(toy_recipe(tmp_path, **constant), make_task=ToyTask)["steps"] == 12


def test_a_run_made_shorter_to_where_it_stopped_is_evaluated_there(tmp_path):
    """Its checkpoint was saved by the signal, between two evaluations."""
    constant = {"schedule": {"name": "constant"}, "checkpoint": {"every": "100 %"}}

    class Task(Interrupted):
        at = 7

    with pytest.raises(Stopped, match="after step 8 of 12"):
        train(toy_recipe(tmp_path / "cut", **constant), make_task=Task)
    cut = train(toy_recipe(tmp_path / "cut", length="8 steps", **constant), make_task=ToyTask)
    calm = train(toy_recipe(tmp_path / "calm", length="8 steps", **constant), make_task=ToyTask)
    assert_same_run(tmp_path / "calm", tmp_path / "cut")
    assert cut["best"] == calm["best"]


def test_columns_that_a_probe_gains_do_not_spoil_its_log(tmp_path):
    constant = {"schedule": {"name": "constant"}}
    train(toy_recipe(tmp_path, length="4 steps", watch={"every": "2 steps"}, **constant), make_task=ToyTask)
    with_entropy = {"every": "2 steps", "entropy": True}
    train(toy_recipe(tmp_path, length="8 steps", watch=with_entropy, **constant), make_task=ToyTask)
    train(toy_recipe(tmp_path, length="12 steps", watch={"every": "2 steps"}, **constant), make_task=ToyTask)
    with (tmp_path / "probe.csv").open(newline="") as file:
        head, *rows = csv.reader(file)
    assert {len(row) for row in rows} == {len(head)}
    step, entropy = head.index("step"), head.index("entropy")
    assert {int(row[step]) for row in rows} == {0, 2, 4, 6, 8, 10, 12}
    assert {int(row[step]) for row in rows if row[entropy]} == {6, 8}


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
    real, calls = checkpoint.save_tensors, []

    def full(tensors, file):
        calls.append(file)
        if len(calls) > 1:  # the optimizer's of the second checkpoint
            raise OSError(28, "No space left on device")
        real(tensors, file)

    monkeypatch.setattr(checkpoint, "save_tensors", full)
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
def test_what_another_process_ended_is_one_line(tmp_path, what, monkeypatch):
    class Broken(ToyTask):
        """Fails as it is made, where processes already talk to each other."""

        error = RuntimeError(f"[gloo/pair.cc:534] {what} [127.0.0.1]:1234")

        def __init__(self, *_):
            raise self.error

    recipe = toy_recipe(tmp_path)
    with pytest.raises(RuntimeError, match=what):
        train(recipe, make_task=Broken)
    two = dataclasses.replace(join(recipe), world=2)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "join", lambda recipe: two)
        with pytest.raises(Stopped, match=r"another process .* ended; the last checkpoint: none"):
            train(recipe, make_task=Broken)
        patch.setattr(Broken, "error", RuntimeError("out of memory"))
        with pytest.raises(RuntimeError, match="out of memory"):
            train(recipe, make_task=Broken)


def test_several_processes_hear_of_a_signal_within_seconds(monkeypatch):
    """However slow their steps are; where they are fast, they do not ask each other at every one."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    class Two:
        world, asked = 2, 0
        signal = None

        def gather(self, mine):
            self.asked += 1
            return [mine, (self.signal, mine[1])]

    for pace, expected in ((3.0, 10), (0.5, 3), (0.01, 1)):  # of ten steps, after the first of which they ask
        two = Two()
        poll = StopPoll(StopRequest(), two, 0)
        for done in range(1, 11):
            now[0] += pace
            assert poll(done, waiting=False) is None
        assert two.asked == expected
        two.signal = signal.SIGTERM
        while poll(done := done + 1, waiting=False) is None:
            now[0] += pace
        assert (done - 11) * pace <= 2 + pace
        assert poll(done + 1, waiting=True) is signal.SIGTERM  # where they wait anyway


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
