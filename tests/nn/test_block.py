"""The one block: every form against its formula, and exactness under checkpointing and compilation."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F

from leadline import LeadlineError
from leadline.nn import BlockConfig, Positions, TransformerBlock, TransformerStack, residual
from leadline.nn.config import RULES
from leadline.nn.layers import MLP, DropPath, make_norm

SMALL = {"depth": 3, "dim": 12, "heads": 3, "ffn": 20}


def config(**options):
    return BlockConfig(**{**SMALL, **options})


@pytest.mark.parametrize("norm", ["pre", "post", "none"])
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize(
    ("ffn", "site"),
    [(20, None), (20, "block-end"), (20, "ffn-input"), (20, "attention-input"), (0, "block-end"), (0, None)],
)
def test_every_form_by_hand(norm, skip, ffn, site):
    options = {"de_escalation": 0.6, "de_escalation_at": site} if site else {}
    block = TransformerBlock(config(norm=norm, skip=skip, ffn=ffn, gain=0.8, attention="hopfield", **options)).double()
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    y, state = block(x)

    def less(z, where):
        return z - 0.6 * z.mean(1, keepdim=True) if where == site else z

    def join(z, branch):
        return z + branch if skip else branch

    def before(n, z):
        return n(z) if norm == "pre" else z

    def after(n, z):
        return n(z) if norm == "post" else z

    z = less(x, "attention-input")
    attended, h = block.attention(before(block.norm1, z))
    z = after(block.norm1, join(z, 0.8 * attended))
    if ffn:
        z = less(z, "ffn-input")
        z = after(block.norm2, join(z, block.mlp(before(block.norm2, z))))
    assert torch.allclose(y, less(z, "block-end"), atol=1e-12)
    assert torch.equal(state[0], h[0])


@pytest.mark.parametrize("kind", ["relu", "gelu", "gelu_tanh", "swiglu"])
def test_mlp_kinds(kind):
    mlp, x = MLP(4, 7, kind), torch.randn(3, 4)
    if kind == "swiglu":
        hidden = F.silu(x @ mlp.gate.weight.T + mlp.gate.bias) * (x @ mlp.fc1.weight.T + mlp.fc1.bias)
    else:
        act = {"relu": torch.nn.ReLU(), "gelu": torch.nn.GELU(), "gelu_tanh": torch.nn.GELU("tanh")}[kind]
        hidden = act(x @ mlp.fc1.weight.T + mlp.fc1.bias)
    assert torch.allclose(mlp(x), hidden @ mlp.fc2.weight.T + mlp.fc2.bias, atol=1e-6)


def test_norm_kinds():
    x = torch.randn(3, 8)
    rms = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    assert torch.allclose(make_norm("rms", 8, 1e-3)(x), rms, atol=1e-6)
    layer = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-3).sqrt()
    assert torch.allclose(make_norm("layer", 8, 1e-3)(x), layer, atol=1e-6)


def test_drop_path_drops_samples_and_keeps_the_mean():
    drop, x = DropPath(0.25), torch.ones(4000, 2, 3)
    out = drop(x)
    kept = out[:, 0, 0] != 0
    assert abs(kept.float().mean() - 0.75) < 0.03
    assert torch.allclose(out[kept], x[kept] / 0.75)
    assert (out[~kept] == 0).all()
    assert torch.equal(drop.eval()(x), x)
    rates = [block.residual1.drop_path.rate for block in TransformerStack(config(drop_path=0.2))]
    assert rates == pytest.approx([0, 0.1, 0.2])


def test_every_rule_of_the_configuration_has_its_entry():
    assert set(residual.RULES) == set(RULES)
    assert all(type(TransformerBlock(config(norm=name)).residual2) is rule for name, rule in residual.RULES.items())


def test_stack_carries_the_state_from_block_to_block():
    stack = TransformerStack(config(attention="hopfield", alpha=0.2, alpha_prime=0.7, start="scores")).double()
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    y, state = x, None
    for block in stack:
        y, state = block(y, state)
    assert torch.equal(stack(x), y)
    without, state = x, None
    for block in stack:
        without, _ = block(without, None)
    assert not torch.allclose(without, y)


@pytest.mark.parametrize("learnable", [None, "head"])
def test_checkpointed_gradients_are_the_plain_ones(learnable):
    options = {"learnable_alpha": learnable, "learnable_alpha_prime": learnable}
    stack = TransformerStack(config(attention="hopfield", depth=4, de_escalation=0.5, causal=True, **options)).double()
    checkpointed = copy.deepcopy(stack)
    checkpointed.activation_checkpointing = True
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    grads = []
    for module in (stack, checkpointed):
        leaf = x.clone().requires_grad_()
        module(leaf).square().sum().backward()
        grads.append([leaf.grad, *(p.grad for p in module.parameters())])
    for plain, again in zip(*grads, strict=True):
        assert torch.allclose(plain, again, rtol=1e-6, atol=1e-6)


def test_compiled_gradients_are_the_plain_ones():
    stack = TransformerStack(
        config(attention="hopfield", de_escalation=0.5, causal=True, learnable_alpha_prime="layer")
    )
    compiled = torch.compile(copy.deepcopy(stack), fullgraph=True)
    x, mask = torch.randn(2, 5, 12), torch.tensor([[True] * 5, [False] * 2 + [True] * 3])
    grads = []
    for module in (stack, compiled):
        leaf = x.clone().requires_grad_()
        module(leaf, mask)[mask].square().mean().backward()
        grads.append([leaf.grad, *(p.grad for p in module.parameters())])
    for plain, again in zip(*grads, strict=True):
        assert torch.allclose(plain, again, rtol=1e-5, atol=1e-6)


def test_positions():
    x, at = torch.zeros(1, 4, 6), torch.arange(4)
    learned = Positions("learned", 9, 6, 2)
    assert torch.equal(learned(x, at)[0][0], learned.table.weight[:4])
    assert learned.limit == 9
    assert Positions("sinusoidal", 9, 6, 2)(x, at)[0][0, 0].tolist() == [0, 1] * 3
    assert Positions("none", 9, 6, 2)(x, at) == (x, None)
    cos, sin = Positions("rotary", 9, 6, 2)(x, at)[1]
    assert torch.allclose(cos[0, :, 0], at.double().cos())
    assert torch.allclose(sin[0, :, 0], at.double().sin())
    with pytest.raises(LeadlineError, match="unknown positions 'polar'"):
        Positions("polar", 9, 6, 2)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"norm": "middle"}, "unknown norm 'middle'"),
        ({"norm_kind": "batch"}, "unknown norm_kind 'batch'"),
        ({"attention": "linear"}, "unknown attention 'linear'"),
        ({"mlp": "gleu"}, "did you mean 'gelu'?"),
        ({"alpha": 0.5}, "give attention='hopfield'"),
        ({"start": "scores"}, "start is 'scores'; give attention='hopfield' with it"),
        ({"learnable_de_escalation": True}, "de_escalation 0; give a tau to begin with"),
        ({"learnable_alpha_prime": "head"}, "give attention='hopfield'"),
        ({"depth": 0}, "depth is 0"),
        ({"heads": -1}, "heads is -1"),
        ({"de_escalation": 1.5}, "de_escalation (tau) is 1.5"),
        ({"skip": 3}, "skip is 3, which has the wrong type; it must be true or false"),
        ({"ffn": "abc"}, "it must be a whole number"),
        ({"norm_eps": float("nan")}, "norm_eps is nan, which has the wrong type; it must be a finite number"),
        ({"dropout": 2}, "dropout is 2; it must lie in [0, 1)"),
        ({"head_dim": 0}, "head_dim is 0; it must be at least 1"),
        ({"de_escalation_at": "start"}, "unknown de_escalation_at 'start'"),
        ({"de_escalation": 1.0, "de_escalation_at": "ffn-input", "ffn": 0}, "there is no MLP"),
        ({"drop_path": 1.0}, "drop_path is 1.0"),
    ],
)
def test_bad_options_are_one_clear_line(options, part):
    with pytest.raises(LeadlineError) as error:
        TransformerStack(config(**options))
    assert part in str(error.value)
    assert "\n" not in str(error.value)


FORMS = list(
    itertools.product(
        [{}, {"attention": "hopfield"}, {"attention": "hopfield", "kv_heads": 1, "start": "scores"}],
        [{}, *({"de_escalation": 1.0, "de_escalation_at": s} for s in ("block-end", "ffn-input", "attention-input"))],
        [{"norm": "pre"}, {"norm": "post"}, {"norm": "pre", "skip": False}],
    )
)


@pytest.mark.parametrize(("attention", "cure", "form"), FORMS)
def test_a_causal_stack_never_sees_the_future(attention, cure, form):
    """Exactly, in float64, with padding on the left, and padding changes nothing either."""
    stack = TransformerStack(config(causal=True, **attention, **cure, **form)).double()
    x, mask = torch.randn(2, 6, 12, dtype=torch.float64), torch.ones(2, 6, dtype=torch.bool)
    mask[1, :2] = False
    y = stack(x, mask)
    for t in range(1, 6):
        changed = x.clone()
        changed[:, t:] = torch.randn(2, 6 - t, 12, dtype=torch.float64)
        assert torch.equal(stack(changed, mask)[:, :t][mask[:, :t]], y[:, :t][mask[:, :t]])
    changed = x.clone()
    changed[~mask] = torch.randn(2, 12, dtype=torch.float64)
    assert torch.equal(stack(changed, mask)[mask], y[mask])
