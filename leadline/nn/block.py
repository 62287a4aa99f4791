"""The one Transformer block: post-norm, pre-norm, skip-less or attention-only, with or without a cure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from leadline.errors import LeadlineError, check_choice
from leadline.nn.attention import HopfieldAttention
from leadline.nn.cache import LayerCache
from leadline.nn.de_escalation import DeEscalation
from leadline.nn.layers import MLP, DropPath, make_norm
from leadline.nn.options import check_options

SITES = ("block-end", "ffn-input", "attention-input")


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """Everything a stack of blocks can be. ``create_model`` takes each of these as an override."""

    depth: int = 12
    shared_layers: bool = False  # one block, applied depth times (ALBERT)
    dim: int = 192
    heads: int = 3
    kv_heads: int | None = None  # None: as many as heads
    head_dim: int | None = None  # None: dim / heads
    ffn: int | None = None  # hidden width of the MLP; None: 4 dim; 0: no MLP
    mlp: str = "gelu"  # "relu", "gelu", "gelu_tanh", "swiglu"
    norm: str = "pre"  # "pre" (TSE 19), "post" (TSE algorithm 1) or "none"
    norm_kind: str = "layer"  # "layer" or "rms"
    norm_eps: float = 1e-6
    skip: bool = True  # the outer skip connections
    gain: float = 1.0  # weight of the attention branch: TSE's alpha
    causal: bool = False
    qkv_bias: bool = True
    bias: bool = True  # of the other linear maps
    dropout: float = 0.0  # of what a branch adds
    hidden_dropout: float = 0.0  # of the hidden layer of the MLP
    attention_dropout: float = 0.0
    drop_path: float = 0.0  # at the last block, growing linearly from 0 at the first

    attention: str = "standard"  # or "hopfield"
    alpha: float | None = None  # None: 0.5 with Hopfield attention, 0 with standard attention
    alpha_prime: float | None = None  # likewise
    learnable_alpha: str | None = None  # None, "layer" or "head"
    learnable_alpha_prime: str | None = None
    start: str = "zero"
    scheme: str = "forward-backward"  # see leadline.nn.schemes
    formula: str = "softmax"  # see leadline.ops.attention_weights
    solver_tolerance: float | None = None  # of implicit schemes, relative; None: near rounding
    solver_steps: int = 200

    de_escalation: float = 0.0  # tau; 0: none
    de_escalation_at: str = "block-end"  # or "ffn-input", "attention-input"
    learnable_de_escalation: bool = False

    from_zero: ClassVar[tuple[str, ...]] = ("ffn",)

    def __post_init__(self) -> None:
        check_options(type(self), vars(self))
        check_choice("attention", self.attention, ("standard", "hopfield"))
        check_choice("norm", self.norm, ("pre", "post", "none"))
        check_choice("de_escalation_at", self.de_escalation_at, SITES)
        if self.attention == "standard":
            for name in ("alpha", "alpha_prime", "learnable_alpha", "learnable_alpha_prime"):
                if getattr(self, name):
                    raise LeadlineError(f"{name} is {getattr(self, name)!r}; give attention='hopfield' with it")
            for name, plain in (("scheme", "forward-backward"), ("start", "zero")):
                if getattr(self, name) != plain:
                    raise LeadlineError(f"{name} is {getattr(self, name)!r}; give attention='hopfield' with it")
        if self.learnable_de_escalation and not self.de_escalation:
            raise LeadlineError("learnable_de_escalation is true and de_escalation 0; give a tau to begin with")
        if self.shared_layers and self.drop_path:
            raise LeadlineError(f"drop_path is {self.drop_path}; shared layers are one block, set it to 0")
        if self.drop_path and not self.skip:
            raise LeadlineError(f"drop_path is {self.drop_path} and skip false; without skips no path can be dropped")
        if self.ffn == 0 and self.de_escalation and self.de_escalation_at == "ffn-input":
            raise LeadlineError("de_escalation_at is 'ffn-input' and ffn 0; there is no MLP to put it before")

    @property
    def strengths(self) -> tuple[float, float]:
        """alpha and alpha' in force."""
        default = 0.5 if self.attention == "hopfield" else 0.0
        return (
            default if self.alpha is None else self.alpha,
            default if self.alpha_prime is None else self.alpha_prime,
        )

    @property
    def causal_mean(self) -> bool:
        """Whether de-escalation takes the mean of the tokens before, and not of all."""
        return self.causal

    @property
    def attention_options(self) -> dict[str, Any]:
        """What every kind of attention takes from here."""
        alpha, alpha_prime = self.strengths
        same = ("dim", "heads", "start", "kv_heads", "head_dim", "learnable_alpha", "learnable_alpha_prime", "qkv_bias")
        options = {name: getattr(self, name) for name in same}
        return {**options, "alpha": alpha, "alpha_prime": alpha_prime, "dropout": self.attention_dropout}


def make_de_escalation(c: BlockConfig) -> DeEscalation | None:
    return DeEscalation(c.de_escalation, c.learnable_de_escalation, c.causal_mean) if c.de_escalation else None


class TransformerBlock(nn.Module):
    """Attention, then an MLP, each inside a skip connection and with a norm before or after it.

        post  x = LN(x + gain A(x)),   x = LN(x + F(x))          (TSE algorithm 1)
        pre   x = x + gain A(LN(x)),   x = x + F(LN(x))          (TSE 19)

    Without skips the ``x +`` is gone, without an MLP the second step, with norm "none" the LN.
    De-escalation acts on the stream x, skip included: at the block's end, or where the MLP or the
    attention takes x up.
    """

    def __init__(self, config: BlockConfig, drop_path: float = 0.0) -> None:
        super().__init__()
        c = self.config = config
        self.attention = HopfieldAttention(
            **c.attention_options,
            scheme=c.scheme,
            causal=c.causal,
            bias=c.bias,
            formula=c.formula,
            tolerance=c.solver_tolerance,
            max_steps=c.solver_steps,
        )
        hidden = 4 * c.dim if c.ffn is None else c.ffn
        self.mlp = MLP(c.dim, hidden, c.mlp, c.bias, c.hidden_dropout) if hidden else None
        with_norm = c.norm != "none"
        self.norm1 = make_norm(c.norm_kind, c.dim, c.norm_eps) if with_norm else nn.Identity()
        self.norm2 = make_norm(c.norm_kind, c.dim, c.norm_eps) if with_norm and hidden else nn.Identity()
        self.de_escalation = make_de_escalation(c)
        self.dropout = nn.Dropout(c.dropout)
        self.drop_path = DropPath(drop_path)

    def forward(
        self,
        x: Tensor,
        state: tuple[Tensor, ...] | None = None,
        mask: Tensor | None = None,
        *,
        rope: tuple[Tensor, Tensor] | None = None,
        cache: LayerCache | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """x (B, N, d) -> (x (B, N, d), state); see ``HopfieldAttention`` for the arguments."""
        pre = self.config.norm == "pre"
        x = self._de_escalate("attention-input", x, mask, cache)
        y, state = self.attention(self.norm1(x) if pre else x, state, mask, rope=rope, cache=cache)
        return self._after_attention(x, y, lambda site, x: self._de_escalate(site, x, mask, cache)), state

    def _after_attention(self, x: Tensor, y: Tensor, de_escalate: Callable[[str, Tensor], Tensor]) -> Tensor:
        """The rest of the block, from the stream x and what attention made of it."""
        pre = self.config.norm == "pre"
        x = self._join(x, y if self.config.gain == 1 else self.config.gain * y)
        x = x if pre else self.norm1(x)
        if self.mlp is not None:
            x = de_escalate("ffn-input", x)
            x = self._join(x, self.mlp(self.norm2(x) if pre else x))
            x = x if pre else self.norm2(x)
        return de_escalate("block-end", x)

    def _join(self, x: Tensor, branch: Tensor) -> Tensor:
        branch = self.dropout(branch)
        return x + self.drop_path(branch) if self.config.skip else branch

    def _de_escalate(self, site: str, x: Tensor, mask: Tensor | None, cache: LayerCache | None) -> Tensor:
        if self.de_escalation is None or self.config.de_escalation_at != site:
            return x
        return self.de_escalation(x, mask, cache)


class TransformerStack(nn.ModuleList):
    """``depth`` blocks, the state handed from one to the next; ``layers()`` goes through them.

    ``activation_checkpointing`` recomputes each block in the backward pass. State is an argument and a
    result of every block, so the gradients are exactly those of the plain run.
    """

    activation_checkpointing = False

    def __init__(self, config: BlockConfig) -> None:
        last = max(config.depth - 1, 1)
        blocks = 1 if config.shared_layers else config.depth
        super().__init__(TransformerBlock(config, config.drop_path * i / last) for i in range(blocks))
        self.depth = config.depth
        self.head_dim = config.dim // config.heads if config.head_dim is None else config.head_dim

    def layers(self) -> Iterator[TransformerBlock]:
        """The block of every layer in turn: ``depth`` of them, all the same one when they are shared."""
        for i in range(self.depth):
            yield cast(TransformerBlock, self[i % len(self)])

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        rope: tuple[Tensor, Tensor] | None = None,
        cache: Sequence[LayerCache] | None = None,
    ) -> Tensor:
        """x (B, N, d) -> (B, N, d)."""
        state: tuple[Tensor, ...] | None = None
        for i, block in enumerate(self.layers()):
            layer_cache = None if cache is None else cache[i]
            if self.activation_checkpointing and self.training:
                x, state = checkpoint(block, x, state, mask, rope=rope, cache=layer_cache, use_reentrant=False)
            else:
                x, state = block(x, state, mask, rope=rope, cache=layer_cache)
        return x
