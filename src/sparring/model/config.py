"""Settings of a model in a recipe: its source and its numerics. Torch-free."""

from __future__ import annotations

from typing import Literal

import msgspec

DType = Literal["float32", "bfloat16"]
Numerics = Literal["exact", "fast"]


class InitConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A Qwen3-architecture causal LM from random weights."""

    hidden_size: int = 128
    """Width of the residual stream."""
    num_layers: int = 4
    """Number of decoder layers."""
    num_heads: int = 4
    """Number of query heads."""
    num_kv_heads: int = 2
    """Number of key/value heads; divides `num_heads`."""
    head_dim: int = 32
    """Size of one head; even, because of rotary embeddings."""
    intermediate_size: int = 384
    """Width of the gated MLP."""
    max_positions: int = 2048
    """Longest sequence in tokens."""
    tie_embeddings: bool = True
    """Use the embedding matrix as LM head."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    initializer_range: float = 0.02
    """Standard deviation of the random weights."""
    vocab_size: int = 2048
    """Number of ids of the tokenizer that is trained for the model."""
    tokenizer: str | None = None
    """Checkpoint whose tokenizer and chat format the model uses, as a student uses its teacher's; None: a tokenizer of
    `vocab_size` ids is trained."""
    digits: int = 1
    """Maximum number of digits in one token of the trained tokenizer. Qwen has 1; a tiny model copies numbers more
    reliably in pairs."""

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads ({self.num_kv_heads}) must divide num_heads ({self.num_heads})")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, got {self.head_dim}")
        if self.digits < 1:
            raise ValueError(f"digits must be at least 1, got {self.digits}")
        if not 2 <= self.max_positions <= 1 << 24:
            raise ValueError(f"max_positions must be 2 to {1 << 24}, got {self.max_positions}")
        if self.rope_theta <= 0 or self.initializer_range <= 0:
            raise ValueError(
                f"rope_theta and initializer_range must be above 0, got {self.rope_theta} and {self.initializer_range}"
            )


STACKED = ("gate_up_proj", "down_proj")
"""Parameters that hold the matrices of all experts of a layer, in the order in which they are applied."""


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Low-rank adaptation (Hu et al., arXiv 2106.09685): a linear layer W x becomes W x + scale * B (A x), and only A
    and B are trained. There is no dropout: the trained policy is the one that sampled."""

    rank: int = 16
    """Rows of A and columns of B."""
    alpha: float = 32.0
    """scale = alpha / rank."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Linear layers by the end of their name, such as ["q_proj", "v_proj"]; "all-linear": all but the head; "default":
    the default of the PEFT library, the query and value projections."""
    target_parameters: tuple[str, ...] = ()
    """Stacked matrices of experts by the end of their name: ["experts.gate_up_proj", "experts.down_proj"] for all.
    Every expert has factors of its own."""
    rslora: bool = False
    """scale = alpha / sqrt(rank) (rank stabilisation, arXiv 2312.03732)."""

    @property
    def scale(self) -> float:
        """Return the factor on B (A x)."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank must be at least 1, got {self.rank}")
        if not self.alpha > 0:
            raise ValueError(f"alpha must be above 0, got {self.alpha}")
        named = isinstance(self.target_modules, str)
        if named and self.target_modules not in ("all-linear", "default"):
            raise ValueError(
                f"target_modules must be a list of names, all-linear or default, got {self.target_modules!r}"
            )
        if not self.target_modules and not self.target_parameters:
            raise ValueError(
                "target_modules must name at least one linear layer, or target_parameters experts, got none"
            )


class ServedConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Server of a model. The model's checkpoint is still needed, for its tokenizer and chat format."""

    kind: Literal["openai", "remote", "chat"] = "openai"
    """openai: an OpenAI-compatible server that reads and returns token ids, such as vLLM; remote: `sparring serve`;
    chat: any server of chat completions, text only, for a judge or a teacher whose traces are imitated."""
    url: str
    """`http://host:port`, or `unix:path` for a socket; for openai including the path up to `/v1`."""
    api_key_env: str = ""
    """Environment variable with the server's key; empty: none. A user and a password are given as `Basic
    dXNlcjpwYXNzd29yZA==`; in the URL they are refused."""
    served_model: str = ""
    """Name of the model on an openai server; empty: the server's only model."""

    def __post_init__(self) -> None:
        if not self.url:
            raise ValueError("url must be given, got none")
        if self.kind == "chat" and not self.served_model:
            raise ValueError("served_model must be given for a chat server, got none")


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One `[models.<name>]` section: a checkpoint folder or hub name, or a fresh model."""

    path: str | None = None
    """Folder or hub name of a Hugging Face causal LM, or a GGUF file (extra `gguf`); None: a fresh model from
    `init`."""
    init: InitConfig | None = None
    """Shape of a fresh model; None: the model is loaded from `path`."""
    dtype: DType = "float32"
    """Number format of forward passes and generation; the trainer keeps float32 masters either way."""
    numerics: Numerics = "exact"
    """exact: the log-probabilities of trainer and engine are equal to the bit, or the model is refused; fast: the
    fastest functions, without that guarantee."""
    renderer: str = "auto"
    """Renderer, which converts messages to tokens: a name of the `renderers` library, `template` (the checkpoint's own
    chat template), or auto."""
    template: str | None = None
    """File with a Jinja chat template that replaces the checkpoint's own, for example for a model whose template
    ignores tools; None: the checkpoint's template."""
    thinking: bool = False
    """Let the model think before it answers, if its format supports thoughts; the renderers `hy3` and `inkling` get an
    effort instead (`high` and 0.9, or none). `sparring check` reports formats that always begin a thought."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward pass instead of keeping its activations."""
    served: ServedConfig | None = None
    """Server of a teacher or judge that runs elsewhere; None: an engine of this run, with the settings of
    `[engine]`."""
    lora: LoraConfig | None = None
    """Adapters to train while the weights are frozen; None: the weights are trained."""

    def __post_init__(self) -> None:
        if self.served is not None and self.served.kind == "chat" and self.path is None and self.init is None:
            return  # text alone: it needs no tokenizer here
        if (self.path is None) == (self.init is None):
            given = "neither" if self.path is None else "both"
            raise ValueError(f"exactly one of `path` and `init` (the shape of a fresh model), got {given}")
        if self.template is not None and self.path is None:
            raise ValueError("template belongs to a checkpoint (`path`), got one for a fresh model")
        if self.template is not None and self.renderer not in ("auto", "template"):
            raise ValueError(f"renderer must be auto or template beside a template, got {self.renderer!r}")
