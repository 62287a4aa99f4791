"""Small models of other libraries, with random weights everywhere, so that no weight of 0 or 1 hides a mistake."""

import timm
import torch
import transformers as T
from torch import nn

TEXT = {"vocab_size": 31}
ENCODER = {**TEXT, "num_hidden_layers": 4, "hidden_size": 12, "num_attention_heads": 3, "intermediate_size": 17}
DECODER = {
    **TEXT, "num_hidden_layers": 4, "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
IMAGE = {
    "num_hidden_layers": 4, "hidden_size": 12, "num_attention_heads": 3, "intermediate_size": 17, "image_size": 12,
    "patch_size": 4, "num_labels": 5,
}  # fmt: skip


def liven(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def gpt2(**options):
    settings = {
        "n_layer": 4, "n_embd": 12, "n_head": 3, "n_inner": 17, "vocab_size": 31, "n_positions": 40, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    return liven(T.GPT2LMHeadModel(T.GPT2Config(**{**settings, **options})))


def llama(**options):
    return liven(T.LlamaForCausalLM(T.LlamaConfig(**{**DECODER, **options})))


def mistral(**options):
    return liven(T.MistralForCausalLM(T.MistralConfig(**{**DECODER, "sliding_window": 4, **options})))


def bert(**options):
    return liven(T.BertModel(T.BertConfig(**{**ENCODER, "max_position_embeddings": 9, **options})))


def albert(**options):
    return liven(
        T.AlbertModel(T.AlbertConfig(**{**ENCODER, "embedding_size": 6, "max_position_embeddings": 9, **options}))
    )


def vit(**options):
    return liven(T.ViTForImageClassification(T.ViTConfig(**{**IMAGE, **options})))


def deit(**options):
    return liven(T.DeiTForImageClassificationWithTeacher(T.DeiTConfig(**{**IMAGE, **options})))


def timm_vit(**options):
    settings = {
        "img_size": 12, "patch_size": 4, "embed_dim": 12, "depth": 4, "num_heads": 3, "num_classes": 5,
        "mlp_ratio": 1.5,
    }  # fmt: skip
    return liven(timm.models.VisionTransformer(**{**settings, **options}))


TEXT_MODELS = (gpt2, llama, bert, albert)
IMAGE_MODELS = (vit, deit, timm_vit)


def padded_mask(kind, B=3, N=7):
    mask = torch.ones(B, N, dtype=torch.bool)
    if kind == "left":
        mask[0, :3] = mask[1, :1] = False
    elif kind == "right":
        mask[0, 4:] = mask[1, 6:] = False
    return mask


def inputs_for(make, padding="left"):
    """The arguments of a call."""
    if make in IMAGE_MODELS:
        pixels = torch.randn(2, 3, 12, 12)
        return {"x" if make is timm_vit else "pixel_values": pixels}
    return {"input_ids": torch.randint(3, 31, (3, 7)), "attention_mask": padded_mask(padding).long()}


def result(model, inputs):
    """Logits or last hidden states, of real tokens only."""
    output = model(**inputs)
    if not isinstance(output, torch.Tensor):
        output = output.logits if "logits" in output else output.last_hidden_state
    mask = inputs.get("attention_mask")
    return output if mask is None else output[mask.bool()]


def gradients(model, inputs):
    model.zero_grad()
    result(model, inputs).square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def without_dropout(model):
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout",):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def fingerprint(model):
    """Everything a cure could change."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")
    config = getattr(model, "config", None)
    return {
        "weights": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "modules": [(name, type(module), sorted(module.__dict__)) for name, module in model.named_modules()],
        "hooks": [[len(getattr(module, kind)) for kind in hooks] for module in model.modules()],
        "config": config.to_dict() if hasattr(config, "to_dict") else config,
        "attention": getattr(config, "_attn_implementation", None),
    }


def same(one, other):
    weights = all(torch.equal(one["weights"][name], other["weights"][name]) for name in one["weights"])
    return weights and all(one[part] == other[part] for part in one if part != "weights")
