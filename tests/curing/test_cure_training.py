"""Training cured models: checkpointing, Trainer, adapters, compilation, processes, devices and dtypes."""

import copy
import io

import cure_zoo as zoo
import pytest
import torch
import torch.distributed as dist
import transformers as T
from torch import nn
from torch.utils.checkpoint import checkpoint

import leadline as ll
from leadline.curing import Ramp, cure, uncure
from leadline.errors import LeadlineError

ALL = {"alpha": 0.3, "alpha_prime": 0.6, "de_escalation": 0.7}
CHECKPOINTED = (zoo.gpt2, zoo.llama, zoo.mistral, zoo.bert, zoo.vit, zoo.deit)


def largest_error(got, want):
    assert got.keys() == want.keys()
    assert any(gradient.abs().max() > 0 for gradient in want.values())
    return max((got[name] - want[name]).abs().max() / want[name].abs().max().clamp(min=1) for name in want)


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("make", CHECKPOINTED)
def test_checkpointed_gradients_are_the_plain_ones(make, every):
    model, inputs = zoo.without_dropout(cure(make(), **ALL)).train(), zoo.inputs_for(make)
    plain = zoo.gradients(model, inputs)
    model.gradient_checkpointing_enable(every_n_layers=every)
    assert largest_error(zoo.gradients(model, inputs), plain) <= 1e-5
    again = zoo.gradients(model, inputs)  # a second pass starts with a carrier of its own
    assert largest_error(again, plain) <= 1e-5


def test_the_scores_carry_gradient_from_layer_to_layer():
    """Against a numerical derivative in float64, through the queries of the first layer."""
    model = zoo.without_dropout(cure(zoo.gpt2(), alpha=0.3, alpha_prime=0.6).double()).train()
    model.gradient_checkpointing_enable()
    inputs, weight = zoo.inputs_for(zoo.gpt2), model.transformer.h[0].attn.c_attn.weight
    gradient = zoo.gradients(model, inputs)["transformer.h.0.attn.c_attn.weight"][2, 5]
    with torch.no_grad():
        values = []
        for step in (1e-5, -2e-5):
            weight[2, 5] += step
            values.append(zoo.result(model, inputs).square().sum())
    assert abs((values[0] - values[1]) / 2e-5 - gradient) <= 1e-5 * max(1, abs(gradient))


def test_timm_checkpointing():
    model, inputs = cure(zoo.timm_vit(), **ALL).train(), zoo.inputs_for(zoo.timm_vit)
    plain = zoo.gradients(model, inputs)
    model.set_grad_checkpointing()
    assert largest_error(zoo.gradients(model, inputs), plain) <= 1e-5


@pytest.mark.parametrize("make", CHECKPOINTED)
def test_reentrant_checkpointing_is_refused(make):
    model, inputs = cure(make(), alpha_prime=0.5).train(), zoo.inputs_for(make)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(LeadlineError, match="reentrant"):
        zoo.gradients(model, inputs)


@pytest.mark.parametrize("make", [zoo.gpt2, zoo.timm_vit])
def test_reentrant_checkpointing_by_hand_is_refused(make):
    model, inputs = zoo.without_dropout(cure(make(), alpha_prime=0.5)).train(), zoo.inputs_for(make)
    blocks = model.blocks if make is zoo.timm_vit else model.transformer.h
    for i in range(len(blocks)):

        def run(x, *args, forward=blocks[i].forward, **kwargs):
            return checkpoint(lambda x: forward(x, *args, **kwargs), x, use_reentrant=True)

        blocks[i].forward = run
    with pytest.raises(LeadlineError, match="reentrant"):
        zoo.gradients(model, inputs)


def test_shared_layers_recomputed_by_hand_are_refused():
    model, inputs = zoo.without_dropout(cure(zoo.albert(), alpha_prime=0.5)).train(), zoo.inputs_for(zoo.albert)
    group = model.encoder.albert_layer_groups[0]
    plain = group.forward
    group.forward = lambda *args, **kwargs: checkpoint(plain, *args, use_reentrant=False, **kwargs)
    with pytest.raises(LeadlineError, match="shared layers"):
        zoo.gradients(model, inputs)


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, i):
        ids = torch.arange(i, i + 6) % 28 + 3
        return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def test_trainer_with_a_ramp(tmp_path):
    model = zoo.without_dropout(cure(zoo.gpt2(), **ALL))
    ramp = Ramp(model, steps=4)
    options = T.TrainingArguments(
        output_dir=tmp_path, per_device_train_batch_size=2, max_steps=6, learning_rate=5e-3, report_to=[], use_cpu=True,
        gradient_checkpointing=True, save_steps=3, logging_steps=1, disable_tqdm=True,
    )  # fmt: skip
    seen = []

    class Watch(T.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append(ramp.strengths)

    trainer = T.Trainer(model, options, train_dataset=Texts(), callbacks=[ramp.callback(), Watch()])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    assert [pytest.approx(pair) for pair in seen] == [(0.3 * s, 0.6 * s) for s in (0.25, 0.5, 0.75, 1, 1, 1)]
    half_way = T.GPT2Config.from_pretrained(tmp_path / "checkpoint-3").leadline
    assert (half_way["alpha"], half_way["alpha_prime"]) == pytest.approx((0.225, 0.45))


@pytest.mark.parametrize("make", [zoo.gpt2, zoo.bert, zoo.albert, zoo.timm_vit])
def test_ramp(make):
    plain, inputs = make(), zoo.inputs_for(make)
    strengths = {"alpha": 0.4, "alpha_prime": 0.6, "start": "scores"}
    start, end = zoo.result(plain, inputs), zoo.result(cure(copy.deepcopy(plain), **strengths), inputs)
    middle = zoo.result(cure(copy.deepcopy(plain), alpha=0.2, alpha_prime=0.3, start="scores"), inputs)
    model = cure(plain, **strengths)
    ramp = Ramp(model, steps=2)
    assert (zoo.result(model, inputs) - start).abs().max() <= 1e-4
    assert ramp.step() == pytest.approx((0.2, 0.3))
    assert (zoo.result(model, inputs) - middle).abs().max() <= 1e-6
    state = ramp.state_dict()
    ramp.step()
    assert torch.equal(zoo.result(model, inputs), end)
    assert ramp.step() == (0.4, 0.6)
    ramp.load_state_dict(state)
    assert (zoo.result(model, inputs) - middle).abs().max() <= 1e-6
    uncure(model)
    assert torch.equal(zoo.result(model, inputs), start)


def test_ramp_of_our_own_model(tmp_path):
    options = {"dim": 12, "heads": 3, "depth": 2, "vocab_size": 31, "max_tokens": 9}
    model, ids = ll.create_model("gpt2_small", **options).eval(), torch.randint(31, (2, 7))
    plain = model(ids)
    ramp = Ramp(cure(model, alpha=0.4, alpha_prime=0.6), steps=2)
    assert torch.equal(model(ids), plain)
    ramp.step()
    model.save(tmp_path)
    half_way = ll.load(tmp_path)
    assert half_way.config.strengths == (0.2, 0.3)
    assert torch.equal(half_way(ids), model(ids))


def test_ramp_refuses():
    with pytest.raises(LeadlineError, match="is not cured"):
        Ramp(zoo.gpt2(), steps=3)
    with pytest.raises(LeadlineError, match="steps is 0"):
        Ramp(cure(zoo.gpt2(), alpha=0.5), steps=0)
    with pytest.raises(LeadlineError, match="nothing to ramp"):
        Ramp(cure(zoo.gpt2(), de_escalation=0.5), steps=3)


class LoRA(nn.Module):
    """A low-rank adapter as PEFT puts it in the place of a linear map."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def adapted(make):
    model = make().requires_grad_(False)
    blocks = model.model.layers if make is zoo.llama else model.encoder.layer
    for block in blocks:
        places = (block.self_attn, "q_proj", "o_proj") if make is zoo.llama else (block.attention.output, "dense")
        for name in places[1:]:
            setattr(places[0], name, LoRA(getattr(places[0], name)))
    return model


def merged(model):
    """The same weights without adapters."""
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, LoRA):
                with torch.no_grad():
                    child.base.weight += child.up.weight @ child.down.weight
                setattr(module, name, child.base)
    return model


@pytest.mark.parametrize("make", [zoo.llama, zoo.bert])
def test_adapters_before_and_after_the_cure(make):
    inputs, model = zoo.inputs_for(make), adapted(make)
    want = zoo.result(cure(merged(model), **ALL), inputs)
    cured = cure(copy.deepcopy(model), **ALL)
    assert (zoo.result(cured, inputs) - want).abs().max() <= 1e-4
    assert set(zoo.gradients(cured, inputs)) == {n for n, p in model.named_parameters() if p.requires_grad}

    class Wrapper(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, **kwargs):
            return self.inner(**kwargs)

    assert (zoo.result(cure(Wrapper(model), **ALL), inputs) - want).abs().max() <= 1e-4


SHALLOW = {zoo.gpt2: {"n_layer": 2}, zoo.timm_vit: {"depth": 2}}


@pytest.mark.parametrize("make", [zoo.gpt2, zoo.llama, zoo.bert, zoo.albert, zoo.vit, zoo.timm_vit])
def test_compiled_equals_eager(make):
    model = cure(make(**SHALLOW.get(make, {"num_hidden_layers": 2})), **ALL)
    inputs = zoo.inputs_for(make)
    if make is zoo.llama:
        inputs["use_cache"] = False
    zoo.without_dropout(model)
    want, gradients = zoo.result(model, inputs), zoo.gradients(model, inputs)
    torch._dynamo.reset()
    full = make is not zoo.gpt2  # a cache that takes up sums breaks the graph
    compiled = torch.compile(model, backend="aot_eager", fullgraph=full)
    assert (zoo.result(compiled, inputs) - want).abs().max() <= 1e-5
    got = {name.removeprefix("_orig_mod."): g for name, g in zoo.gradients(compiled, inputs).items()}
    unused = {name for name in got if name not in gradients}  # compiled code gives zeros instead of nothing
    assert all("pooler" in name and not got.pop(name).any() for name in unused)
    assert largest_error(got, gradients) <= 1e-5
    with pytest.raises(LeadlineError, match="cure it first, then compile"):
        cure(compiled, **ALL)


def test_distributed(tmp_path):
    model, inputs = zoo.without_dropout(cure(zoo.gpt2(), **ALL)).train(), zoo.inputs_for(zoo.gpt2)
    plain = zoo.gradients(model, inputs)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        parallel = nn.parallel.DistributedDataParallel(model)
        got = {name.removeprefix("module."): g for name, g in zoo.gradients(parallel, inputs).items()}
    finally:
        dist.destroy_process_group()
    assert largest_error(got, plain) <= 1e-5


@pytest.mark.parametrize("make", [zoo.gpt2, zoo.bert])
def test_device_map(make, tmp_path):
    """Layers whose weights lie on disk, and are loaded by the hooks of accelerate when the layer runs."""
    accelerate = pytest.importorskip("accelerate")
    model, inputs = make(), zoo.inputs_for(make)
    want = zoo.result(cure(copy.deepcopy(model), **ALL), inputs)
    blocks = "transformer.h" if make is zoo.gpt2 else "encoder.layer"
    layers = [f"{blocks}.{i}" for i in range(4)]
    places = {name: "disk" if name in layers[1:3] else "cpu" for name, _ in model.named_modules() if name in layers}
    top = [name for name, _ in model.named_children() if not blocks.startswith(name)]
    inside = [
        f"{blocks.split('.')[0]}.{name}" for name, _ in model.get_submodule(blocks.split(".")[0]).named_children()
    ]
    places |= dict.fromkeys([*top, *(name for name in inside if name != blocks)], "cpu")
    model = accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=tmp_path, force_hooks=True)
    assert any(parameter.is_meta for parameter in model.parameters())
    assert (zoo.result(cure(model, **ALL), inputs) - want).abs().max() <= 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", zoo.TEXT_MODELS + zoo.IMAGE_MODELS)
def test_half_precision(make, dtype):
    model, inputs = make(), zoo.inputs_for(make)
    want = zoo.result(cure(copy.deepcopy(model), **ALL), inputs)
    half = cure(model.to(dtype), **ALL)
    cast = {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}
    got = zoo.result(half, cast)
    assert got.dtype == dtype
    scale = want.abs().max()
    assert (got.float() - want).abs().max() <= (0.06 if dtype == torch.bfloat16 else 0.01) * scale
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = zoo.result(cure(uncure(half).float(), **ALL), inputs)
    assert (mixed.float() - want).abs().max() <= 0.06 * scale


@pytest.mark.parametrize("make", zoo.TEXT_MODELS + zoo.IMAGE_MODELS)
def test_copies_and_pickles_are_cured_models_of_their_own(make):
    model, inputs = cure(make(), **ALL), zoo.inputs_for(make)
    want = zoo.result(model, inputs)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert torch.equal(zoo.result(twin, inputs), want)
        assert (zoo.result(uncure(twin), inputs) - want).abs().max() > 1e-3
        assert torch.equal(zoo.result(model, inputs), want)
