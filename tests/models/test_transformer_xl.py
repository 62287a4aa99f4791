"""Transformer-XL: its size, its formulas, its memory, and what it must not know."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import leadline as ll

V, SIZES = 23, {"depth": 3, "dim": 12, "heads": 3, "ffn": 20, "vocab_size": 23, "cutoffs": (7, 15), "memory_length": 99}
NORMS = ["post", "pre"]
ATTENTION = [{}, {"attention": "hopfield"}, {"attention": "hopfield", "alpha": 0.0, "start": "scores", "kv_heads": 1}]
CURES = [{}, *({"de_escalation": 0.9, "de_escalation_at": s} for s in ("ffn-input", "block-end", "attention-input"))]
COMBINATIONS = list(itertools.product(NORMS, ATTENTION, CURES))


def build(**options):
    torch.manual_seed(1)
    model = ll.create_model("transformer_xl_base", **{**SIZES, **options}).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def text(batch=2, tokens=11):
    return torch.randint(V, (batch, tokens), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(("options", "size"), [({}, 151_107_538), ({"depth": 60, "ffn": 820}, 200_987_338)])
def test_has_the_published_number_of_parameters(options, size):
    with torch.device("meta"):
        model = ll.create_model("transformer_xl_base", **options)
    assert sum(parameter.numel() for parameter in model.parameters()) == size


def literal(model, ids, memories, memory_length):
    """One text, one segment, from the paper's formulas: every score by itself, in loops.

    memories  per layer a list of the vectors that layer took in before; returned longer.
    """
    c, width = model.config, model.config.dim // model.config.heads
    alpha, alpha_prime = c.strengths
    x = [model.token.weight[i] * math.sqrt(c.dim) for i in ids]
    carried = {}
    for layer, block in enumerate(model.blocks):
        norm1 = lambda t, n=block.norm1: F.layer_norm(t, (c.dim,), n.weight, n.bias, 1e-5)  # noqa: E731
        norm2 = lambda t, n=block.norm2: F.layer_norm(t, (c.dim,), n.weight, n.bias, 1e-5)  # noqa: E731
        pre = c.norm == "pre"
        past = memories[layer][-memory_length:] if memory_length else []
        memories[layer] = past + x
        taken = [norm1(t) for t in x] if pre else x
        seen = ([norm1(t) for t in past] if pre else past) + taken
        W_q, W_k, W_v = block.attention.qkv.weight.chunk(3)
        W_r, W_o = block.attention.relative.weight, block.attention.proj.weight
        after = []
        for i, E_i in enumerate(taken):
            heads = []
            for h in range(c.heads):
                at = slice(h * width, (h + 1) * width)
                scores = []
                for j in range(len(past) + i + 1):
                    back = len(past) + i - j
                    R = torch.zeros(c.dim, dtype=torch.float64)
                    for k in range(0, c.dim, 2):
                        R[k], R[k + 1] = (f(back / 10_000 ** (k / c.dim)) for f in (math.sin, math.cos))
                    content, place = W_k[at] @ seen[j], W_r[at] @ R
                    S = (W_q[at] @ E_i) @ content + (W_q[at] @ E_i) @ place + model.u[h] @ content + model.v[h] @ place
                    S = S / math.sqrt(width)
                    if alpha_prime:
                        before = carried.get((h, i, j))
                        start = S if c.start == "scores" else (1 - alpha_prime) * S
                        S = start if before is None else alpha_prime * before + (1 - alpha_prime) * S
                        carried[h, i, j] = S
                    scores.append(S)
                weights = torch.stack(scores).softmax(0)
                heads.append(sum(w * (W_v[at] @ seen[j]) for j, w in enumerate(weights)))
            y = alpha * E_i + (1 - alpha) * (W_o @ torch.cat(heads))
            after.append(x[i] + y if pre else norm1(x[i] + y))
        fed = after
        if c.de_escalation:  # of this segment alone: the first one
            fed = []
            for t, token in enumerate(after):
                mean = sum(after[:t]) / t if t else torch.zeros_like(token)
                fed.append(token - c.de_escalation * mean)
        mlp = lambda t, m=block.mlp: m.fc2.weight @ (m.fc1.weight @ t + m.fc1.bias).relu() + m.fc2.bias  # noqa: E731
        x = [t + mlp(norm2(t)) if pre else norm2(t + mlp(t)) for t in fed]
    x = torch.stack(x)
    return F.layer_norm(x, (c.dim,), model.norm.weight, model.norm.bias, 1e-5) if pre else x


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("attention", [{}, {"attention": "hopfield"}, {"attention": "hopfield", "start": "scores"}])
@pytest.mark.parametrize("memory_length", [0, 3, 9])
def test_is_what_the_papers_formulas_say(norm, attention, memory_length):
    model = build(norm=norm, memory_length=memory_length, depth=2, **attention)
    ids, memory, memories = text(1, 9), None, [[], []]
    with torch.no_grad():
        for part in ids.split(4, dim=1):
            ours, memory = model.encode(part, memory)
            assert torch.allclose(ours[0], literal(model, part[0], memories, memory_length), atol=1e-12)


def test_de_escalation_is_what_the_formula_says():
    model = build(depth=2, de_escalation=0.7)
    ids = text(1, 6)
    with torch.no_grad():
        assert torch.allclose(model.encode(ids)[0][0], literal(model, ids[0], [[], []], 9), atol=1e-12)


@pytest.mark.parametrize(("norm", "attention", "cure"), COMBINATIONS)
def test_with_memory_it_equals_the_concatenated_segments(norm, attention, cure):
    model, ids, memory, parts = build(norm=norm, **attention, **cure), text(), None, []
    for part in ids.split((3, 1, 5, 2), dim=1):
        out, memory = model(part, memory)
        parts.append(out)
    assert torch.allclose(torch.cat(parts, 1), model(ids)[0], atol=1e-12)
    assert all(not tensor.requires_grad for tensor in memory)


@pytest.mark.parametrize("cure", [{}, {"de_escalation": 0.9}])
def test_a_short_memory_agrees_with_a_longer_one_only_where_it_must(cure):
    """With m tokens of memory the first segment and the first m tokens' worth of past are all that is seen."""
    short, long, ids = build(memory_length=4, **cure), build(**cure), text()
    first, memory = short(ids[:, :4])
    whole = long(ids)[0]
    assert torch.allclose(first, whole[:, :4], atol=1e-12)
    second, memory = short(ids[:, 4:8], memory)
    assert torch.allclose(second, whole[:, 4:8], atol=1e-12)  # all of the past still fits into the memory
    third, _ = short(ids[:, 8:], memory)
    assert not torch.allclose(third, whole[:, 8:], atol=1e-3)  # here it no longer does
    assert memory[0].shape == (2, 4, 12)


@pytest.mark.parametrize(("norm", "attention", "cure"), COMBINATIONS)
def test_no_output_depends_on_the_future(norm, attention, cure):
    model, ids = build(norm=norm, **attention, **cure), text()
    _, memory = model(ids[:, :4])
    late = ids[:, 4:]
    want = model(late, memory)[0]
    for t in range(1, late.shape[1]):
        changed = late.clone()
        changed[:, t:] = (changed[:, t:] + 1) % V
        got = model(changed, memory)[0]
        assert torch.equal(got[:, :t], want[:, :t])
        assert not torch.equal(got[:, t:], want[:, t:])


@pytest.mark.parametrize("site", ["ffn-input", "block-end", "attention-input"])
def test_the_leaky_form_leaks(site):
    model = build(de_escalation=0.9, de_escalation_at=site, de_escalation_form="leaky")
    ids = text()
    changed = ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % V
    difference = (model(changed)[0] - model(ids)[0]).abs()
    assert (difference[:, :-1].amax(-1) > 1e-6).all()  # every earlier token has been told about the last one


def test_the_leaky_form_is_the_printed_one():
    """TSE (21) takes the mean over the tokens of the segment out of what enters the FFN."""
    model = build(depth=1, de_escalation=1.0, de_escalation_form="leaky")
    seen = []
    model.blocks[0].mlp.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model(text())
    assert seen[0].mean(1).abs().max() < 1e-12


def test_samples_do_not_know_each_other():
    model, ids = build(attention="hopfield", de_escalation=0.9), text(3)
    _, memory = model(ids[:, :5])
    together = model(ids[:, 5:], memory)[0]
    for i in range(3):
        alone = model(ids[i : i + 1, 5:], tuple(tensor[i : i + 1] for tensor in memory))[0]
        assert torch.allclose(alone[0], together[i], atol=1e-12)


def test_the_loss_is_the_mean_of_the_targets_log_probabilities():
    model, ids = build(), text()
    targets = text(2, 12)[:, 1:]
    logs, _ = model(ids)
    loss, _ = model(ids, None, targets)
    each, _ = model.token_loss(ids, targets)
    assert torch.allclose(each, -logs.gather(-1, targets[..., None])[..., 0], atol=1e-12)
    assert torch.allclose(loss, each.mean(), atol=1e-12)


def test_carried_scores_reach_the_memory_and_the_relative_biases():
    """The scores of memory keys and those from u and v are in the state that the next layer reads."""
    model = build(attention="hopfield", depth=2)
    ids = text()
    _, memory = model(ids[:, :4])
    states = []
    original = model.blocks[1].attention.forward
    model.blocks[1].attention.forward = lambda x, state, **o: (states.append(state), original(x, state, **o))[1]
    model(ids[:, 4:], memory)
    assert states[0][0].shape == (2, 3, 7, 11)
    with torch.no_grad():
        model.u.zero_()
        model.v.zero_()
    model(ids[:, 4:], memory)
    assert not torch.allclose(states[0][0], states[1][0])


def test_activation_checkpointing_changes_nothing():
    results = []
    for wanted in (False, True):
        model = build(attention="hopfield", de_escalation=0.9).train()
        model.blocks.activation_checkpointing = wanted
        ids = text()
        _, memory = model(ids[:, :4])
        loss, _ = model(ids[:, 4:-1], memory, ids[:, 5:])
        loss.backward()
        results.append([loss, *(parameter.grad for parameter in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("options", [{}, {"attention": "hopfield", "de_escalation": 0.9}])
def test_a_block_is_one_graph(options):
    """``compile: blocks`` of a recipe: no break in the graph, and the same numbers."""
    model, ids = build(**options), text()
    memory = model(ids[:, :4])[1]
    want = model(ids[:, 4:], memory)[0]
    torch.compiler.reset()
    for block in model.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    assert torch.allclose(model(ids[:, 4:], memory)[0], want, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"attention": "hopfield", "de_escalation": 0.9}])
def test_cached_generation_equals_uncached(options):
    model, ids = build(**options), text(2, 5)
    want = model.generate(ids, 9, cache=False)
    assert torch.equal(model.generate(ids, 9), want)
    assert want.shape == (2, 14)
    stop = int(want[0, 7])
    for row, free in zip(model.generate(ids, 9, stop=stop).tolist(), want.tolist(), strict=True):
        end = free.index(stop, 5) if stop in free[5:] else len(free)
        assert row == (free[:end] + [stop] * 14)[: len(row)]


def uneven():
    """A memory of which one layer is shorter."""
    first, *rest = build()(text())[1]
    return (first[:, 1:], *rest)


@pytest.mark.parametrize(
    ("call", "part"),
    [
        (lambda: build(causal=False), "must not see the future"),
        (lambda: build(de_escalation_form="leaky"), "without de_escalation"),
        (lambda: build(de_escalation=1.0, de_escalation_form="all"), "unknown de_escalation_form 'all'"),
        (lambda: build(attention="hopfield", scheme="forward-forward"), "takes 'forward-backward' with 'softmax'"),
        (lambda: build(memory_length=-1), "memory_length is -1"),
        (lambda: build()(text(), ()), "memory holds 0 tensors"),
        (lambda: build()(text(), uneven()), "this model and batch take"),
        (lambda: build()(text() + 1000), "ids go from"),
        (lambda: build()(text(), build()(text(3))[1]), "this model and batch take 3 of shape (2, tokens, 12)"),
        (lambda: build(de_escalation=1.0, de_escalation_form="leaky").generate(text(), 1), "sees the future"),
        (lambda: build().generate(text(), 0), "max_new_tokens is 0"),
        (lambda: build()(torch.zeros(1, 0, dtype=torch.long)), "integers (batch, tokens)"),
    ],
)
def test_bad_input_is_one_clear_line(call, part):
    with pytest.raises(ll.LeadlineError) as error:
        call()
    assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_can_be_probed_cured_and_saved(tmp_path):
    model = build().float()
    report = ll.probe(model, text(), trials=False)
    assert len(report.layers) == 4
    ll.cure(model, alpha=0.5, alpha_prime=0.3, de_escalation=0.4)
    cured = model(text())[0]
    same = ll.create_model(
        "transformer_xl_base",
        **{**SIZES, "attention": "hopfield", "alpha": 0.5, "alpha_prime": 0.3, "de_escalation": 0.4},
        de_escalation_at=model.config.de_escalation_at,
    ).eval()
    same.load_state_dict(model.state_dict())
    assert torch.equal(same(text())[0], cured)
    model.save(tmp_path)
    assert torch.equal(ll.load(tmp_path)(text())[0], cured)


def test_a_leaky_model_is_probed_cured_and_uncured_bit_for_bit(tmp_path):
    """The form stays what the configuration says; tau 0 takes the leak out with it."""
    deep = {"depth": 40, "dim": 32, "heads": 4, "ffn": 8, "max_tokens": 16, "init": "xavier", "gain": 3.0}
    model = ll.create_model(
        "transformer_xl_base", **{**SIZES, **deep}, de_escalation=0.1, de_escalation_form="leaky"
    ).eval()
    before = model(text())[0]
    assert ll.probe(model, text()).verdict.kind == "collapse"  # so cures were tried
    assert torch.equal(model(text())[0], before)
    ll.cure(model, de_escalation=0.5)
    cured, memory = model(text())
    assert len(memory) == model.config.depth  # the causal form would remember the tokens at its place too
    model.save(tmp_path)
    assert torch.equal(ll.load(tmp_path)(text())[0], cured)
    ll.uncure(model)
    assert torch.equal(model(text())[0], before)
    ll.cure(model, de_escalation=0.0)
    assert (model.config.de_escalation, model.config.de_escalation_form) == (0.0, "causal")
    other = text().clone()
    other[:, -1] = (other[:, -1] + 1) % V
    assert torch.equal(model(other)[0][:, :-1], model(text())[0][:, :-1])


def test_dropout_of_the_hidden_layer_is_the_published_one():
    """Linear, ReLU, dropout, Linear, dropout."""
    block = build(hidden_dropout=0.5, dropout=0.0).blocks[0].train()
    x = torch.randn(50, 12, dtype=torch.float64)
    hidden = F.relu(block.mlp.fc1(x))
    torch.manual_seed(5)
    found = block.mlp(x)
    torch.manual_seed(5)
    torch.testing.assert_close(found, block.mlp.fc2(F.dropout(hidden, 0.5)))
    torch.testing.assert_close(block.eval().mlp(x), block.mlp.fc2(hidden))
