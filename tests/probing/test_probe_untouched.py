"""A probe leaves the model as it was, needs the same memory for any number of batches, and refuses bad input."""

import gc
import weakref

import pytest
import torch
from torch import nn

import leadline as ll
from leadline.errors import LeadlineError
from leadline.ops.hopfield import dispatch
from leadline.probing import attention_capture, probe, statistics, watch
from leadline.report import DepthReport

transformers = pytest.importorskip("transformers")

TEXT = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "initializer_range": 0.1,
}


def bert(**options):
    return transformers.BertModel(transformers.BertConfig(**{**TEXT, **options}))


def ids(batch=2, tokens=11):
    return torch.randint(3, 60, (batch, tokens))


def hooks_of(model):
    return [
        len(getattr(module, place))
        for module in model.modules()
        for place in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_forward_hooks_with_kwargs")
    ]


def state_of(model):
    return (
        {name: tensor.clone() for name, tensor in model.state_dict().items()},
        [module.training for module in model.modules()],
        [parameter.requires_grad for parameter in model.parameters()],
        [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        torch.get_rng_state(),
        torch.backends.mha.get_fastpath_enabled(),
    )


def assert_same(before, after):
    assert before[0].keys() == after[0].keys()
    assert all(torch.equal(before[0][name], after[0][name]) for name in before[0])
    assert before[1:3] == after[1:3]
    assert all(
        (a is None) == (b is None) and (a is None or torch.equal(a, b))
        for a, b in zip(before[3], after[3], strict=True)
    )
    assert torch.equal(before[4], after[4])
    assert before[5] == after[5]


class BoomError(RuntimeError):
    pass


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_as_before(fails):
    model = transformers.BertForMaskedLM(transformers.BertConfig(**TEXT, hidden_dropout_prob=0.1)).train()
    model.bert.encoder.layer[1].eval()
    model.bert.embeddings.requires_grad_(False)
    batch = {"input_ids": ids(), "labels": ids()}
    model(**batch).loss.backward()
    user_hook = model.bert.encoder.layer[0].register_forward_hook(lambda *_: None)
    if fails:
        model.bert.encoder.layer[2].output.dense.register_forward_hook(_raise)
    before, hooks = state_of(model), hooks_of(model)
    if fails:
        with pytest.raises(LeadlineError, match=r"fails on this batch, input_ids \(2, 11\), .*: BoomError") as caught:
            probe(model, batch, loss="output.loss")
        assert isinstance(caught.value.__cause__, BoomError)
    else:
        probe(model, batch, loss="output.loss", heatmaps=True)
    assert_same(before, state_of(model))
    assert hooks_of(model) == hooks
    user_hook.remove()


def _raise(*_):
    raise BoomError


def test_outputs_and_hooks_after_trials_are_bit_for_bit_the_same():
    model = bert(num_hidden_layers=24, initializer_range=0.12).eval()
    x = ids()
    with torch.no_grad():
        before = model(x).last_hidden_state
    report = probe(model, x)
    assert report.verdict.trials  # it collapses, so cures were put in and taken out
    with torch.no_grad():
        assert torch.equal(model(x).last_hidden_state, before)
    assert not any(hooks_of(model))


@pytest.mark.parametrize("make", ["ours", "cured"])
def test_attention_runs_where_it_can_be_seen(make, monkeypatch):
    """A GPU would run the fused kernels, whose weights nobody sees; a probe asks for the reference instead.

    A probe runs its first batch twice, to learn the layouts and to measure.
    """
    asked = []
    monkeypatch.setattr(dispatch, "worth_trying", lambda backend, q: asked.append(backend))
    if make == "ours":
        model = ll.create_model("gpt2_small", depth=2, dim=32, heads=4, vocab_size=60, attention="hopfield").eval()
    else:
        model = ll.cure(bert(num_hidden_layers=2), alpha_prime=0.5).eval()
    model(ids())
    report = probe(model, ids(), trials=False)
    assert all(layer.entropy for layer in report.layers[1:])
    with watch(model, every=1, entropy=True) as watcher:
        model(ids())
        assert all(row["entropy"] for row in watcher.step()[1:])
    model(ids())
    assert asked == ["auto"] * 2 + ["reference"] * 6 + ["auto"] * 2


def test_progress_counts_blocks_batches_and_trials():
    steps = []
    model = bert(num_hidden_layers=24, initializer_range=0.12).eval()
    report = probe(model, [ids(), ids()], progress=lambda *step: steps.append(step))
    assert steps[:48] == [("measuring", i, 48) for i in range(1, 49)]
    total = 24 * (1 + len(report.verdict.trials))
    assert steps[48:] == [("trying cures", i, total) for i in range(1, total + 1)]
    steps.clear()
    probe(model, iter([ids()]), trials=False, progress=lambda *step: steps.append(step))
    assert steps[-1] == ("measuring", 24, None)  # a generator has no length
    steps.clear()
    shared = transformers.AlbertModel(transformers.AlbertConfig(**TEXT, embedding_size=8))
    probe(shared, ids(), trials=False, progress=lambda *step: steps.append(step))
    assert steps == [("measuring", 1, 1), ("measuring", 2, None), ("measuring", 3, None)]


@pytest.mark.parametrize("how", ["whole", "in place", "block"])
def test_compiled_models_run_uncompiled(how):
    built, runs = [], []

    def backend(graph, _):
        built.append(graph)
        return lambda *args: (runs.append(graph), graph.forward(*args))[1]

    model = bert().eval()
    x = ids()
    plain = probe(model, x, trials=False)
    compiled = model
    if how == "whole":
        compiled = torch.compile(model, backend=backend)
    elif how == "in place":
        model.compile(backend=backend)
    else:
        model.encoder.layer[1] = torch.compile(model.encoder.layer[1], backend=backend)
    with torch.no_grad():
        compiled(x)  # compiled code exists before the hooks do
    graphs, once = len(built), len(runs)
    assert once > 0
    report = probe(compiled, x, trials=False)
    assert (len(built), len(runs)) == (graphs, once)
    assert [layer.similarity for layer in report.layers] == pytest.approx([layer.similarity for layer in plain.layers])
    assert report.layers[2].entropy == pytest.approx(plain.layers[2].entropy)
    with torch.no_grad():
        compiled(x)
    assert (len(built), len(runs)) == (graphs, 2 * once)  # compiled as before
    torch._dynamo.reset()


def test_batches_are_averaged_per_sample():
    model = bert().eval()
    batches = [ids(2, 11), ids(1, 7), ids(3, 5)]
    report = probe(model, iter(batches), trials=False)
    singles = [probe(model, row[None], trials=False) for batch in batches for row in batch]
    assert report.settings["samples"] == 6
    assert report.settings["batches"] == 3
    for index, layer in enumerate(report.layers):
        for name in ("similarity", "cosine", "effective_rank", "rate", "norm"):
            if index or name != "rate":
                mean = sum(getattr(single.layers[index], name) for single in singles) / 6
                assert getattr(layer, name) == pytest.approx(mean, rel=1e-5), (index, name)
        assert sum(layer.cosines.counts) == sum(sum(single.layers[index].cosines.counts) for single in singles)
    heads = [[single.layers[1].delta[head] for single in singles] for head in range(4)]
    assert report.layers[1].delta == pytest.approx([sum(head) / 6 for head in heads], rel=1e-5)


def test_batches_are_not_kept():
    model = bert().eval()
    alive = []

    def stream():
        for _ in range(6):
            batch = ids()
            alive.append(weakref.ref(batch))
            yield batch
            del batch
            gc.collect()
            assert sum(ref() is not None for ref in alive) <= 2  # the first, for the trials, and the last

    report = probe(model, stream(), trials=False)
    assert report.settings["batches"] == 6
    few, many = (len(probe(model, [ids()] * count, trials=False).to_json()) for count in (1, 20))
    assert many < 1.2 * few


def test_attention_comes_in_bounded_chunks(monkeypatch):
    model = transformers.LlamaModel(transformers.LlamaConfig(num_key_value_heads=2, **TEXT)).eval()
    x = ids()
    whole = probe(model, x, trials=False)
    sizes = []
    softmax = torch.Tensor.softmax
    monkeypatch.setattr(
        attention_capture, "_CHUNK_NUMBERS", 3 * 11 * 32
    )  # three heads at a time, not a divisor of four
    monkeypatch.setattr(
        torch.Tensor, "softmax", lambda self, *a, **k: sizes.append(self.shape) or softmax(self, *a, **k)
    )
    parts = probe(model, x, trials=False)
    assert {size[1] for size in sizes} == {3, 1}
    for a, b in zip(whole.layers[1:], parts.layers[1:], strict=True):
        assert a.entropy == pytest.approx(b.entropy)
        assert a.omega == pytest.approx(b.omega)
        assert [head.counts for head in a.entropies] == [head.counts for head in b.entropies]


def test_cosines_come_in_bounded_chunks(monkeypatch):
    X = torch.randn(2, 17, 8)
    mask = torch.ones(2, 17, dtype=torch.bool)
    mask[1, 9:] = False
    whole, parts = statistics.CosineHistogram(), statistics.CosineHistogram()
    whole.add(X, mask)
    monkeypatch.setattr(statistics, "_CHUNK_PAIRS", 17 * 3)
    parts.add(X, mask)
    assert whole.distribution().counts == parts.distribution().counts
    unit = torch.nn.functional.normalize(X.double(), dim=-1)
    pairs = [float(unit[b, i] @ unit[b, j]) for b in (0, 1) for i in range(17 if b == 0 else 9) for j in range(i)]
    distribution = parts.distribution()
    assert sum(distribution.counts) == len(pairs)
    assert distribution.mean == pytest.approx(sum(pairs) / len(pairs), abs=1e-6)
    assert distribution.median == pytest.approx(sorted(pairs)[len(pairs) // 2], abs=0.02)
    counts = [
        sum(low <= value < high for value in pairs)
        for low, high in zip(distribution.edges, distribution.edges[1:], strict=False)
    ]
    assert sum(abs(a - b) for a, b in zip(counts, distribution.counts, strict=True)) <= 2  # rounding at an edge


def test_heatmaps_are_the_attention_of_the_first_sample():
    model = bert().eval()
    x = ids()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        truth = model(x, output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    report = probe(model, x, heatmaps=[2], trials=False)
    assert [(heatmap.layer, heatmap.head) for heatmap in report.heatmaps] == [(2, head) for head in range(4)]
    for heatmap in report.heatmaps:
        assert torch.allclose(torch.tensor(heatmap.weights), truth[1][0, heatmap.head], atol=1e-6)
    long = probe(model, ids(1, 150), heatmaps=True, trials=False)
    assert {heatmap.layer for heatmap in long.heatmaps} == {1, 2, 3}
    weights = torch.tensor(long.heatmaps[0].weights)
    assert weights.shape == (64, 64)
    assert torch.allclose(weights.sum(-1), torch.ones(64), atol=1e-5)


def test_a_report_survives_json_and_files(tmp_path):
    report = probe(bert(), ids(), heatmaps=True, trials=False)
    again = DepthReport.from_json(report.to_json())
    assert again == report
    report.save(tmp_path / "depth.json")
    assert DepthReport.from_json((tmp_path / "depth.json").read_text()) == report
    text = str(report)
    assert report.verdict.text in text
    assert "similarity" in text
    assert len(report.table(every_layer=True).rows) == 4
    with pytest.raises(LeadlineError, match="must end in"):
        report.save(tmp_path / "depth.doc")
    with pytest.raises(LeadlineError, match="no report"):
        DepthReport.from_json("{}")


class Plain(nn.Module):
    """No module of it is named after attention."""

    def __init__(self):
        super().__init__()
        self.steps = nn.ModuleDict({"one": nn.Linear(16, 16), "two": nn.Linear(16, 16)})

    def forward(self, x):
        return self.steps["two"](self.steps["one"](x))


def test_blocks_given_by_name_and_by_pattern():
    model = bert()
    report = probe(model, ids(), blocks=["encoder.layer.0", "encoder.layer.2"], trials=False)
    assert [layer.name for layer in report.layers] == ["input", "encoder.layer.0", "encoder.layer.2"]
    report = probe(Plain(), torch.randn(2, 5, 16), blocks="steps.*")
    assert len(report.layers) == 3
    assert report.layers[1].entropy is None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: probe(Plain(), torch.randn(2, 5, 16)), r"no blocks found in Plain: .* blocks="),
        (lambda: probe(bert(), ids(), blocks="encoder.layers.*"), "names no module of BertModel"),
        (lambda: probe(bert(), ids().to("meta")), "the batch is on meta and the model on cpu"),
        (lambda: probe(bert(), {"input_ids": ids().to("meta")}), "input_ids is on meta and the model on cpu"),
        (lambda: probe(bert().to("meta"), ids()), "meta device and has no weights"),
        (lambda: probe(bert(), [[ids(), ids(), ids()]]), "a batch is list; it must be a tensor or a mapping"),
        (lambda: probe(bert(), []), "inputs hold no batch"),
        (lambda: probe(bert(), 3), "inputs are int"),
        (lambda: probe(bert(), ids(2, 1)), "one token a sample"),
        (lambda: probe(bert(), ids(), mask=torch.ones(2, 5).long().fill_diagonal_(0)), r"mask has shape \(2, 5\)"),
        (lambda: probe(bert(), {"input_ids": ids(), "attention_mask": torch.zeros(2, 11)}), "without a real token"),
        (lambda: probe(bert(), ids(), mask=torch.ones(2, 1, 11, 11)), r"padding is given as \(samples, tokens\)"),
        (lambda: probe(bert(), ids(), loss="output.loss"), "the loss is NoneType"),
        (lambda: probe(bert(), ids(), loss=lambda output: output.last_hidden_state), "it must be one number"),
        (lambda: probe(bert().requires_grad_(False), ids(), loss=lambda o: o.sum()), "no block has a weight"),
        (lambda: probe(_with_nan(), ids()), "what leaves block 'encoder.layer.1' has NaN"),
        (lambda: probe(bert(), ids(), blocks="embeddings.word_embeddings"), "takes no tokens"),
        (lambda: probe("bert", ids()), "the model is a str"),
        (lambda: probe(bert(), ids()[:0]), r"the batch has shape \(0, 11\): nothing is in it"),
        (lambda: probe(bert(), ids()[:, :0]), r"the batch has shape \(2, 0\): nothing is in it"),
        (lambda: probe(bert(), ids().float()), r"fails on this batch, \(2, 11\) of float32: Expected tensor"),
        (lambda: probe(bert(), ids() + 60), r"fails on this batch, .* index out of range"),
        (lambda: probe(bert(), {"pixels": ids()}), r"fails on this batch, pixels \(2, 11\): You must specify"),
        (lambda: probe(bert(), ids(), heatmaps=[4], trials=False), r"heatmaps names layers \[4\]; .* 1 to 3"),
    ],
)
def test_bad_input_is_one_clear_line(call, message):
    with pytest.raises(LeadlineError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def _with_nan():
    model = bert()
    with torch.no_grad():
        model.encoder.layer[1].output.LayerNorm.bias[0] = torch.nan
    return model


def test_a_mask_by_hand_and_by_function():
    model = bert().eval()
    x = ids()
    mask = torch.ones(2, 11, dtype=torch.bool)
    mask[0, 8:] = False
    given = probe(model, x, mask=mask, trials=False)
    asked = probe(model, x, mask=lambda batch: mask, trials=False)
    hidden = model(x, output_hidden_states=True).hidden_states[2].detach()
    truth = ll.metrics.token_similarity(hidden, mask).mean().item()
    assert given.layers[2].similarity == pytest.approx(truth, abs=1e-6)
    assert given == asked
