"""Watching training: the right steps, the right numbers, every sink, other people's loops."""

import csv
import json
import sys
import types

import pytest
import torch
from torch import nn

import leadline as ll
from leadline.errors import LeadlineError
from leadline.probing import CollapseError, Watcher, lightning_callback, probe, trainer_callback, watch
from leadline.probing.basic_recorder import basic_metrics

transformers = pytest.importorskip("transformers")


def gpt2(**options):
    config = transformers.GPT2Config(
        vocab_size=60,
        n_embd=32,
        n_layer=3,
        n_head=4,
        n_positions=32,
        initializer_range=0.1,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
        **options,
    )
    return transformers.GPT2LMHeadModel(config)


def ids(batch=2, tokens=11):
    return torch.randint(3, 60, (batch, tokens))


def hooks_of(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def train(model, watcher, steps, optimizer=None, **batch):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        batch = batch or {"input_ids": ids()}
        model(**batch, labels=batch["input_ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        watcher.step()
        if watcher.stop:
            break


@pytest.mark.parametrize("masked", [False, True])
def test_basic_metrics_are_the_metrics(masked):
    X = torch.randn(3, 9, 16) + 2
    X[0, 4] = 0
    mask = torch.ones(3, 9, dtype=torch.bool)
    if masked:
        mask[1, 5:] = False
        X[1, 5:] = torch.nan  # whatever stands there
    clean = X.masked_fill(~mask[..., None], 0)
    truth = [
        ll.metrics.token_similarity(clean, mask),
        ll.metrics.token_diversity(clean, mask),
        ll.metrics.token_cosine(clean, mask),
        clean.norm(dim=-1).sum(-1) / mask.sum(-1),
    ]
    got = basic_metrics(X, mask if masked else None)
    assert got.tolist() == pytest.approx([value.mean().item() for value in truth], rel=1e-5)


@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-30, 1e-22, 1e-3, 1e19, 1e37])
def test_basic_metrics_know_no_size(size):
    X = torch.randn(2, 9, 16, dtype=torch.float64) + 0.5
    X[0, 4] = 0
    X = (X * size).float()
    truth = [ll.metrics.token_similarity, ll.metrics.token_diversity, ll.metrics.token_cosine]
    values = basic_metrics(X, None)
    assert values[:3].tolist() == pytest.approx([metric(X.double()).mean().item() for metric in truth], rel=1e-5)
    assert values[3].item() == pytest.approx(X.double().norm(dim=-1).mean().item(), rel=1e-5)


def test_basic_metrics_of_nothing_and_of_nan():
    X = torch.randn(2, 9, 16)
    X[1] = 0  # a black image: its tokens are alike, the others' figures stay
    whole, alone = basic_metrics(X, None), basic_metrics(X[:1], None).tolist()
    assert whole.tolist() == pytest.approx([(alone[0] + 1) / 2, alone[1] / 2, alone[2] / 2, alone[3] / 2], rel=1e-5)
    for broken in (torch.nan, torch.inf):
        X[0, 3, 2] = broken
        assert basic_metrics(X, None)[:3].isnan().all()


def test_basic_diversity_keeps_digits_near_collapse():
    X = 1 + 1e-5 * torch.randn(2, 64, 32, dtype=torch.float64)
    exact = ll.metrics.token_diversity(X).mean().item()
    assert basic_metrics(X.float(), None)[1].item() == pytest.approx(exact, rel=1e-2)  # X itself has lost the rest


def test_rows_agree_with_a_probe_of_the_same_pass():
    model = gpt2().eval()
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[1, 7:] = 0
    batch = {"input_ids": ids(), "attention_mask": mask}
    report = probe(model, batch, trials=False)
    with watch(model, entropy=True) as watcher:
        model(**batch)
        rows = watcher.step()
    assert [row["layer"] for row in rows] == [0, 1, 2, 3]
    for row, layer in zip(rows, report.layers, strict=True):
        assert row["name"] == layer.name
        for metric in ("similarity", "diversity", "cosine", "norm"):
            assert row[metric] == pytest.approx(getattr(layer, metric), rel=1e-5), metric
        if layer.index:
            assert row["entropy"] == pytest.approx(sum(layer.entropy) / 4, rel=1e-5)


def test_every_kth_step_and_no_hooks_in_between():
    model, steps, hooks = gpt2(), [], []
    with watch(model, every=3, to=lambda rows: steps.append(rows[0]["step"])) as watcher:
        for _ in range(8):
            hooks.append(hooks_of(model) > 0)
            model(ids())
            watcher.step()
    assert steps == [0, 3, 6]
    assert hooks == [True, False, False, True, False, False, True, False]
    assert hooks_of(model) == 0


def test_training_goes_the_same_way_watched_or_not():
    weights = []
    for watched in (False, True):
        torch.manual_seed(3)
        model = gpt2()
        if watched:
            with watch(model, every=1, entropy=True) as watcher:
                train(model, watcher, 3, input_ids=torch.arange(3, 14)[None])
        else:
            idle = types.SimpleNamespace(step=lambda: None, stop=False)
            train(model, idle, 3, input_ids=torch.arange(3, 14)[None])
        weights.append(model.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_hooks_go_when_the_model_fails():
    model = gpt2()
    with watch(model, entropy=True), pytest.raises(IndexError):
        model(torch.full((1, 5), 999))
    assert hooks_of(model) == 0
    assert torch.overrides._len_torch_function_stack() == 0


def test_only_the_first_pass_of_a_step_counts():
    model = gpt2().eval()
    first, second = ids(), ids()
    alone = probe(model, first, trials=False).layers[-1].similarity
    with watch(model) as watcher:
        model(first)
        model(second)
        rows = watcher.step()
    assert len(rows) == 4
    assert rows[-1]["similarity"] == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    model = gpt2().train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    with watch(model, entropy=True) as watcher:
        model(ids(), labels=ids()).loss.backward()
        rows = watcher.step()
    assert len(rows) == 4
    assert rows[-1]["entropy"] is not None


@pytest.mark.parametrize("given", ["inside", "outside"])
def test_a_compiled_model_is_measured_and_stays_compiled(given):
    built, runs = [], []

    def backend(graph, _):
        built.append(graph)
        return lambda *args: (runs.append(graph), graph.forward(*args))[1]

    model = gpt2().eval()
    x = ids()
    truth = probe(model, x, trials=False).layers[-1].similarity
    compiled = torch.compile(model, backend=backend)
    compiled(x)
    graphs, once = len(built), len(runs)
    assert once > 0
    with watch(model if given == "inside" else compiled, every=2) as watcher:
        compiled(x)
        assert watcher.step()[-1]["similarity"] == pytest.approx(truth, rel=1e-5)
        assert len(runs) == once  # as written
        compiled(x)
        assert watcher.step() is None
        assert len(runs) == 2 * once  # compiled again, without compiling again
    assert len(built) == graphs
    torch._dynamo.reset()


def test_training_code_may_call_a_part_of_the_model():
    class Task(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = gpt2()

    task = Task()
    with watch(task) as watcher:
        task.net(ids())  # never task(...)
        assert len(watcher.step()) == 4
    ours = ll.create_model("gpt2_small", depth=2, dim=32, heads=4, vocab_size=60)
    with watch(ours) as watcher:
        ours.encode(ids())
        assert len(watcher.step()) == 3


def test_files_are_written_as_training_goes(tmp_path):
    model = gpt2()
    table, lines = tmp_path / "runs" / "depth.csv", tmp_path / "depth.jsonl"
    with watch(model, every=2, to=[table, str(lines)]) as watcher:
        train(model, watcher, 1)
        assert len(table.read_text().splitlines()) == 1 + 4  # there already
        train(model, watcher, 4)
    with watch(model, to=table) as watcher:  # goes on, without a second header
        train(model, watcher, 1)
    rows = list(csv.DictReader(table.open()))
    assert [int(row["step"]) for row in rows[::4]] == [0, 2, 4, 0]
    assert rows[1]["name"] == "transformer.h.0"
    parsed = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [row["similarity"] for row in parsed] == pytest.approx([float(row["similarity"]) for row in rows[:12]])


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model, measured = gpt2(), []
    with watch(model, every=1, to=[f"tensorboard:{tmp_path}", measured.append]) as watcher:
        train(model, watcher, 2)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    scalars = events.Scalars("depth/similarity/layer_003")
    assert [event.step for event in scalars] == [0, 1]
    assert [event.value for event in scalars] == pytest.approx([rows[3]["similarity"] for rows in measured])


def test_weights_and_biases_stand_in(monkeypatch):
    logged = []
    stand_in = types.SimpleNamespace(run=object(), log=logged.append)
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    with watch(gpt2(), to="wandb") as watcher:
        watcher.model(ids())
        watcher.step()
    assert logged[0]["depth/step"] == 0
    assert 0 <= logged[0]["depth/similarity/layer_003"] <= 1
    stand_in.run = None
    with pytest.raises(LeadlineError, match=r"wandb\.init"):
        watch(gpt2(), to="wandb")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(LeadlineError, match="not installed; run: pip install wandb"):
        watch(gpt2(), to="wandb")


def test_stopping_on_collapse():
    model = gpt2()
    with torch.no_grad():
        model.transformer.wpe.weight.add_(5)  # every token far away in one direction
    with watch(model, every=2, stop_at=0.9) as watcher:
        train(model, watcher, 6)
        assert watcher.stop
        assert watcher.at == 1  # known after step 0
    with watch(model, stop_at=0.9, raises=True) as watcher:
        model(ids())
        with pytest.raises(CollapseError, match=r"stop_at 0\.9"):
            watcher.step()
    assert hooks_of(model) == 0
    with watch(gpt2(), stop_at=0.9) as watcher:
        watcher.model(ids())
        watcher.step()
        assert not watcher.stop
    vanishing = ll.create_model("attention_only", dim=32, heads=2, depth=24, image_size=8, patch_size=2, num_classes=3)
    with torch.no_grad():
        for weight in vanishing.blocks.parameters():
            weight.mul_(0.1)
    with watch(vanishing, stop_at=0.9) as watcher:
        vanishing(torch.randn(2, 3, 8, 8))
        watcher.step()
        assert watcher.last[-1]["norm"] < 1e-20  # whose square is 0
        assert watcher.stop


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        row = torch.arange(3, 14) + i
        return {"input_ids": row, "labels": row}


def arguments(tmp_path, **options):
    return transformers.TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=2,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )


def test_transformers_trainer(tmp_path):
    pytest.importorskip("accelerate")
    model, steps = gpt2(), []
    callback = trainer_callback(every=2, to=lambda rows: steps.append((rows[0]["step"], len(rows))))
    trainer = transformers.Trainer(
        model,
        arguments(tmp_path, max_steps=5, gradient_accumulation_steps=2),
        train_dataset=Rows(),
        callbacks=[callback],
    )
    trainer.train()
    assert steps == [(0, 4), (2, 4), (4, 4)]
    assert hooks_of(model) == 0


def test_transformers_trainer_stops(tmp_path):
    pytest.importorskip("accelerate")
    model = gpt2()
    with torch.no_grad():
        model.transformer.wpe.weight.add_(5)
    callback = trainer_callback(every=2, stop_at=0.9)
    trainer = transformers.Trainer(model, arguments(tmp_path, max_steps=6), train_dataset=Rows(), callbacks=[callback])
    trainer.train()
    assert trainer.state.global_step == 1


def test_lightning_stand_in(monkeypatch):
    """The calls that Lightning's loop makes, by a stand-in; the module's training_step calls a part of it."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
            patch.setitem(sys.modules, name, None)
        with pytest.raises(LeadlineError, match="lightning, which is not installed"):
            lightning_callback()
    stand_in = types.ModuleType("lightning.pytorch")
    stand_in.Callback = type("Callback", (), {})
    monkeypatch.setitem(sys.modules, "lightning", types.ModuleType("lightning"))
    monkeypatch.setitem(sys.modules, "lightning.pytorch", stand_in)
    steps = []
    callback = lightning_callback(every=2, to=lambda rows: steps.append(rows[0]["step"]), stop_at=0.999)
    assert isinstance(callback, stand_in.Callback)
    module = nn.Module()
    module.net = gpt2()
    loop = types.SimpleNamespace(global_step=0, should_stop=False)
    callback.on_train_start(loop, module)
    for i in range(8):
        callback.on_train_batch_start(loop, module, None, i)
        module.net(ids())
        loop.global_step = (i + 1) // 2  # the gradients of two batches are one step
        callback.on_train_batch_end(loop, module, None, None, i)
    callback.on_train_end(loop, module)
    assert steps == [0, 2]
    assert not loop.should_stop


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every is 0"),
        ({"stop_at": 1.5}, "stop_at is 1.5"),
        ({"to": "depth.txt"}, "give a file that ends in .csv or .jsonl"),
        ({"blocks": "nothing.*"}, "names no module"),
    ],
)
def test_bad_options_are_one_clear_line(options, message):
    with pytest.raises(LeadlineError, match=message) as caught:
        Watcher(gpt2(), **options)
    assert "\n" not in str(caught.value)
