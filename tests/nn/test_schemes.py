"""Every discretisation: against its formula, against the differential equation, and its gradients."""

import copy

import pytest
import torch

import leadline as ll
from leadline import LeadlineError
from leadline.nn import BlockConfig, HopfieldAttention, TransformerStack, schemes

IMPLICIT = [s for s in schemes.SCHEMES if s.startswith("backward-")]
EXPLICIT = [s for s in schemes.SCHEMES if s not in IMPLICIT]


def layer(scheme, alpha=0.5, alpha_prime=0.4, dim=6, heads=2, scale=1.0, **options):
    torch.manual_seed(3)
    module = HopfieldAttention(dim, heads, alpha, alpha_prime, scheme, **options).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(scale)
    return module


def tokens(B=2, N=4, dim=6, seed=0):
    return torch.randn(B, N, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def scores(module, x):
    q, k, _ = module.project(x)
    return q @ k.mT / module.head_dim**0.5


def attended(module, h, x):
    return module.proj((h.softmax(-1) @ module.project(x)[2]).transpose(1, 2).flatten(2))


def run(module, x, layers, mask=None):
    states, state, outputs = [], None, []
    for _ in range(layers):
        x, state = module(x, state, mask)
        outputs.append(x)
        states.append(state)
    return outputs, states


@pytest.mark.parametrize("start", ["zero", "scores"])
@pytest.mark.parametrize("scheme", schemes.SCHEMES)
def test_three_layers_by_hand(scheme, start):
    a, b = 0.7, 0.4
    module, x = layer(scheme, a, b, scale=0.8, start=start), tokens()
    visible, hidden = scheme.split("-")
    outputs, states = run(module, x, 3)
    h_before = h = x_before = None
    for n, (y, state) in enumerate(zip(outputs, states, strict=True)):
        S = scores(module, outputs[n - 1] if n else x)
        x_now = outputs[n - 1] if n else x

        def blend(old, new, n=n):
            if n == 0:
                return new if start == "scores" else (1 - b) * new
            return b * old + (1 - b) * new

        sign = {"central": -1, "central_as_printed": 1}
        if hidden == "backward":
            used = blend(h, scores(module, y) if visible == "backward" else S)
            h = used
        else:
            now = torch.zeros_like(S) if n == 0 else h
            euler = hidden == "forward" or n == 0
            new = blend(now, S) if euler else h_before + 2 * (1 - b) * (S + sign[hidden] * now)
            used = new if visible == "backward" else now
            h_before, h = now, new
        if visible in ("forward", "backward") or n == 0:
            want = a * x_now + (1 - a) * attended(module, used, y if visible == "backward" else x_now)
        else:
            want = x_before + 2 * (1 - a) * (attended(module, used, x_now) + sign[visible] * x_now)
        assert torch.allclose(y, want, atol=1e-12), n
        assert torch.allclose(state[0], h, atol=1e-12)
        x_before = x_now


@pytest.mark.parametrize("scheme", EXPLICIT)
def test_lagging_schemes_leave_the_last_queries_and_keys_without_gradient(scheme):
    stack = TransformerStack(BlockConfig(depth=3, dim=6, heads=2, ffn=0, attention="hopfield", scheme=scheme)).double()
    stack(tokens()).square().sum().backward()
    gradients = [block.attention.qkv.weight.grad[:12].abs().sum() for block in stack]
    lags = not scheme.endswith("-backward")
    assert gradients[0] > 0
    assert (gradients[-1] == 0) == lags


def exact(module, x, time, steps=2000):
    """Runge and Kutta's method on (45), (46) with h(0) = 0."""

    def velocity(x, h):
        return attended(module, h, x) - x, scores(module, x) - h

    h, dt = torch.zeros_like(scores(module, x)), time / steps
    for _ in range(steps):
        k1 = velocity(x, h)
        k2 = velocity(x + dt / 2 * k1[0], h + dt / 2 * k1[1])
        k3 = velocity(x + dt / 2 * k2[0], h + dt / 2 * k2[1])
        k4 = velocity(x + dt * k3[0], h + dt * k3[1])
        x = x + dt / 6 * (k1[0] + 2 * k2[0] + 2 * k3[0] + k4[0])
        h = h + dt / 6 * (k1[1] + 2 * k2[1] + 2 * k3[1] + k4[1])
    return x


def error(scheme, steps, x, time=1.0):
    weight = {"forward": lambda rho: 1 - rho, "backward": lambda rho: 1 / (1 + rho)}
    visible, hidden = (weight.get(kind, weight["forward"]) for kind in scheme.split("-"))
    rho = time / steps
    module = layer(scheme, visible(rho), hidden(rho), scale=STRONG)
    return (run(module, x, steps)[0][-1] - TRUTH).abs().max().item()


STRONG = 2.5  # weights large enough for the hidden state to matter
X0 = tokens(1)
with torch.no_grad():
    TRUTH = exact(layer("forward-forward", scale=STRONG), X0, 1.0)


@pytest.mark.parametrize("scheme", [s for s in schemes.SCHEMES if "printed" not in s])
def test_schemes_converge_to_the_differential_equation_at_their_order(scheme):
    """Order 1, and 2 where both derivatives are central: halving the step divides the error by 2, by 4.

    With a central visible step alone the order is 1 too, but its first-order part is so small here that the
    error still falls faster.
    """
    with torch.no_grad():
        coarse, fine = error(scheme, 80, X0), error(scheme, 160, X0)
    order = torch.tensor(coarse / fine).log2()
    if scheme == "central-central":
        assert abs(order - 2) < 0.05
    elif scheme.startswith("central-"):
        assert 0.95 < order < 2
    else:
        assert abs(order - 1) < 0.05
    assert fine < 0.005


@pytest.mark.parametrize("scheme", [s for s in schemes.SCHEMES if "printed" in s])
def test_the_printed_signs_do_not_converge(scheme):
    with torch.no_grad():
        coarse, fine = error(scheme, 80, X0), error(scheme, 160, X0)
    assert fine > 0.1
    assert fine > 0.95 * coarse  # no smaller with a smaller step


def test_central_differences_have_a_growing_root():
    """Without attention, x' = x_before - 2 rho x grows by rho + sqrt(1 + rho^2) a layer, either sign."""
    for scheme in ("central-backward", "central_as_printed-backward"):
        module = layer(scheme, alpha=0.5, scale=0.0)
        norms = [y.norm() for y in run(module, tokens(), 40)[0]]
        assert torch.isclose(norms[-1] / norms[-2], torch.tensor(0.5 + 1.25**0.5).double(), rtol=1e-6)


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scheme", IMPLICIT)
def test_implicit_gradients_equal_finite_differences(scheme, causal, dense, monkeypatch):
    if not dense:
        monkeypatch.setattr(schemes, "DENSE_UNKNOWNS", 0)
    module = layer(scheme, dim=4, causal=causal, tolerance=1e-13, learnable_alpha="head", learnable_alpha_prime="layer")
    names = list(dict(module.named_parameters()))

    def through(x, *values):
        parameters = dict(zip(names, values, strict=True))
        y, state = torch.func.functional_call(module, parameters, (x,))
        y, state = torch.func.functional_call(module, parameters, (y, state))
        return (y, *state)

    leaves = [value.detach().clone().requires_grad_() for value in module.parameters()]
    assert torch.autograd.gradcheck(through, (tokens(2, 3, 4).requires_grad_(), *leaves), atol=1e-6)


def test_dense_and_iterated_solutions_agree(monkeypatch):
    module, x = layer("backward-forward", causal=True, kv_heads=1), tokens()
    mask = torch.tensor([[True] * 4, [False] + [True] * 3])
    dense = run(module, x, 3, mask)[0][-1]
    monkeypatch.setattr(schemes, "DENSE_UNKNOWNS", 0)
    assert torch.allclose(run(module, x, 3, mask)[0][-1], dense, atol=1e-12)


@pytest.mark.parametrize("scheme", schemes.SCHEMES)
def test_causal_and_padding_invariance_in_every_scheme(scheme):
    """Within the solver's tolerance where there is one, exactly elsewhere."""
    module, x = layer(scheme, causal=True, scale=0.8), tokens(2, 6)
    mask = torch.tensor([[True] * 6, [False] * 2 + [True] * 4])
    tolerance = 1e-11 if scheme in IMPLICIT else 0
    want = run(module, x, 3, mask)[0][-1]
    for t in range(1, 6):
        changed = x.clone()
        changed[:, t:] = tokens(2, 6, seed=t)[:, t:]
        got = run(module, changed, 3, mask)[0][-1]
        assert (got - want)[:, :t][mask[:, :t]].abs().max() <= tolerance
    changed = torch.where(mask[..., None], x, tokens(2, 6, seed=9))
    assert (run(module, changed, 3, mask)[0][-1] - want)[mask].abs().max() <= tolerance


@pytest.mark.parametrize("scheme", ["backward-backward", "backward-forward"])
def test_a_sample_does_not_depend_on_its_batch(scheme, monkeypatch):
    monkeypatch.setattr(schemes, "DENSE_UNKNOWNS", 0)
    module, x = layer(scheme, tolerance=1e-3), tokens(3)
    x = x * torch.tensor([0.01, 1.0, 10.0], dtype=torch.float64)[:, None, None]  # these take different times
    together = run(module, x, 2)[0][-1]
    alone = torch.cat([run(module, x[i : i + 1], 2)[0][-1] for i in range(3)])
    assert torch.equal(together, alone) or (together - alone).abs().max() < 1e-13


def test_non_convergence_names_the_spectral_radius(monkeypatch):
    module, x = layer("backward-forward", alpha=0.1, scale=4.0), tokens()
    y, _ = module(x)  # one dense system: no iteration, no condition
    P = (module.alpha_prime.value * 0 + 0.6 * scores(module, x)).softmax(-1)
    assert torch.allclose(
        y, 0.1 * x + 0.9 * module.proj((P @ module.project(y)[2]).transpose(1, 2).flatten(2)), atol=1e-9
    )
    monkeypatch.setattr(schemes, "DENSE_UNKNOWNS", 0)
    with pytest.raises(LeadlineError, match=r"spectral radius of its map is about \d.*raise alpha"):
        module(x)
    # the radius named is that of y -> (1 - alpha) sum_h P_h y W_h
    columns = []
    zero = module.proj((P @ module.project(torch.zeros_like(x))[2]).transpose(1, 2).flatten(2))[:1]
    for i in range(24):
        unit = torch.zeros(1, 24, dtype=torch.float64)
        unit[0, i] = 1
        image = module.proj((P[:1] @ module.project(unit.view(1, 4, 6))[2]).transpose(1, 2).flatten(2)) - zero
        columns.append(0.9 * image.flatten())
    radius = torch.linalg.eigvals(torch.stack(columns, 1)).abs().max().item()
    with pytest.raises(LeadlineError) as error_info:
        module(x[:1])
    named = float(str(error_info.value).split("about ")[1].split(" ")[0])
    assert named == pytest.approx(radius, rel=0.05)
    module = layer("backward-backward", alpha=0.0, scale=30.0)
    with pytest.raises(LeadlineError, match="did not converge"):
        module(tokens())


@pytest.mark.parametrize("scheme", schemes.SCHEMES)
def test_usable_in_a_model_and_under_checkpointing(scheme):
    model = ll.create_model(
        "vit_tiny", depth=3, dim=6, heads=2, image_size=8, patch_size=4, num_classes=3,
        attention="hopfield", alpha=0.7, scheme=scheme,
    ).double().train()  # fmt: skip
    checkpointed = copy.deepcopy(model)
    checkpointed.blocks.activation_checkpointing = True
    pixels = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    for m in (model, checkpointed):
        m(pixels).square().sum().backward()
    for (name, plain), again in zip(model.named_parameters(), checkpointed.parameters(), strict=True):
        assert plain.grad is not None, name
        assert torch.allclose(plain.grad, again.grad, atol=1e-9), name


@pytest.mark.parametrize(
    ("call", "part"),
    [
        (lambda: layer("backward-backward", dropout=0.1), "has no fixed point under it"),
        (lambda: layer("forward-forward")(tokens(), (torch.zeros(1),)), "carries [(2, 2, 4, 4)] here"),
        (
            lambda: layer("central-central")(tokens(), (torch.zeros(2, 2, 4, 4),)),
            "carries [(2, 2, 4, 4), (2, 2, 4, 4), (2, 4, 6)] here",
        ),
        (lambda: layer("forward-forward")(tokens(), mask=torch.ones(2, 3) > 0), "mask has shape (2, 3)"),
        (lambda: layer("forward-forward")(tokens(), cache=ll.nn.LayerCache(4)), "generate with cache=False"),
        (lambda: BlockConfig(scheme="forward-forward"), "give attention='hopfield'"),
        (lambda: BlockConfig(attention="hopfield", scheme="up-down") and layer("up-down"), "unknown scheme 'up-down'"),
    ],
)
def test_bad_input_is_one_clear_line(call, part):
    with pytest.raises(LeadlineError) as error_info:
        call()
    assert part in str(error_info.value)
    assert "\n" not in str(error_info.value)
