"""GGUF files that tests write: small models of four architectures, with weights of any type, and a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from tokenizers import Tokenizer

from sparring.render.train_tokenizer import train_tokenizer

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
LAYERS, WIDTH, HEADS, KV_HEADS, HEAD, INNER, IDS = 2, 256, 8, 4, 32, 512, 512
TEXTS = ["Twelve hens and 34 cocks, 5.6 kg each: it's <b>fine</b>.\n\n    def f(x):\n        return x + 1\n"] * 4


def tokenizer_file(folder: Path) -> Path:
    """Write the tokenizer whose vocabulary the files have; return its tokenizer.json."""
    return train_tokenizer(TEXTS, IDS, folder) / "tokenizer.json"


def blocks(shape: tuple[int, int], kind: Type, seed: int) -> np.ndarray:
    """Draw weights of a type: numbers as they are, or blocks of random bytes whose scales are small numbers of float16."""
    drawn = np.random.default_rng(seed)
    if kind in (Type.F32, Type.F16, Type.BF16):
        values = drawn.normal(0, 0.05, shape).astype(np.float32)
        return gguf.quants.quantize(values, kind)
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    raw = drawn.integers(0, 256, (shape[0], shape[1] // elements, size), dtype=np.uint8)
    for place in SCALES[kind]:
        scale = drawn.uniform(0.0001, 0.001, raw.shape[:2]).astype(np.float16)
        raw[..., place : place + 2] = scale[..., None].view(np.uint8)
    return raw.reshape(shape[0], -1)


SCALES: Mapping[Type, tuple[int, ...]] = {
    **{kind: (0,) for kind in (Type.Q4_0, Type.Q5_0, Type.Q8_0, Type.IQ4_NL, Type.IQ4_XS)},
    **{kind: (0, 2) for kind in (Type.Q4_1, Type.Q5_1, Type.Q4_K, Type.Q5_K)},
    Type.Q2_K: (80, 82),
    Type.Q3_K: (108,),
    Type.Q6_K: (208,),
}
"""Places of the numbers of float16 in a block, in bytes (ggml-common.h)."""


def write_model(
    file: Path,
    arch: str = "llama",
    kind: Type = Type.Q8_0,
    *,
    settings: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    pre: str | None = "qwen2",
    tied: bool = True,
    head: int = HEAD,
    tokenizer: Mapping[str, Any] | None = None,
    without: Collection[str] = (),
) -> Path:
    """Write a model of `arch` whose matrices are of type `kind`; settings and tensors come on top, and what `tokenizer`
    says in the place of the vocabulary's own (`tokenizer.ggml.*`; None: left out). Settings of `without` are left out."""
    writer = gguf.GGUFWriter(file, arch)
    shape = {
        "block_count": LAYERS,
        "context_length": 512,
        "embedding_length": WIDTH,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": head,
        "attention.key_length": head,
        "attention.value_length": head,
        **({"attention.sliding_window": 64} if arch == "gemma3" else {}),
    }
    for key, value in {f"{arch}.{name}": value for name, value in shape.items()}.items():
        writer.add_float32(key, value) if isinstance(value, float) else writer.add_uint32(key, value)
    for key, value in (settings or {}).items():
        add = {float: writer.add_float32, str: writer.add_string, bool: writer.add_bool}.get(
            type(value), writer.add_uint32
        )
        add(key, value)
    for key in without:
        del writer.kv_data[0][key]
    if pre is not None:
        _add_tokenizer(writer, file.parent, pre)
    for key, value in (tokenizer or {}).items():
        writer.kv_data[0].pop(key, None)
        if value is not None:
            add = {list: writer.add_array, bool: writer.add_bool, str: writer.add_string}.get(type(value))
            (add or writer.add_uint32)(key, value)
    for seed, (name, (shape, each)) in enumerate(_layout(arch, kind, tied, head).items()):
        if len(shape) == 1:
            writer.add_tensor(name, 1 + np.random.default_rng(seed).normal(0, 0.1, shape).astype(np.float32))
        else:
            writer.add_tensor(name, blocks(shape, each, seed), raw_dtype=None if each is Type.F32 else each)
    for name, array in (tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _layout(arch: str, kind: Type, tied: bool, head: int) -> dict[str, tuple[tuple[int, ...], Type]]:
    layout: dict[str, tuple[tuple[int, ...], Type]] = {"token_embd.weight": ((IDS, WIDTH), kind)}
    for layer in range(LAYERS):
        rows = {"attn_q": (HEADS * head, WIDTH), "attn_k": (KV_HEADS * head, WIDTH), "attn_v": (KV_HEADS * head, WIDTH)}
        rows |= {"attn_output": (WIDTH, HEADS * head)}
        rows |= {"ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH), "ffn_down": (WIDTH, INNER)}
        vectors = {"attn_norm": WIDTH, "ffn_norm": WIDTH}
        if arch == "gemma3":
            vectors |= {"post_attention_norm": WIDTH, "post_ffw_norm": WIDTH}
        if arch in ("gemma3", "qwen3"):
            vectors |= {"attn_q_norm": head, "attn_k_norm": head}
        layout |= {f"blk.{layer}.{name}.weight": (shape, kind) for name, shape in rows.items()}
        layout |= {f"blk.{layer}.{name}.weight": ((size,), Type.F32) for name, size in vectors.items()}
        if arch == "qwen2":
            sizes = {"attn_q": HEADS * head, "attn_k": KV_HEADS * head, "attn_v": KV_HEADS * head}
            layout |= {f"blk.{layer}.{name}.bias": ((size,), Type.F32) for name, size in sizes.items()}
    layout["output_norm.weight"] = ((WIDTH,), Type.F32)
    return layout if tied else layout | {"output.weight": ((IDS, WIDTH), kind)}


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, pre: str) -> None:
    """Add the vocabulary of `tokenizer_file` and its added tokens, special ones as control."""
    made = tokenizer_file(folder / "tokenizer")
    backend, model = Tokenizer.from_file(str(made)), json.loads(made.read_text(encoding="utf-8"))["model"]
    added = backend.get_added_tokens_decoder()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([backend.id_to_token(id) for id in range(IDS)])
    kinds = {True: gguf.TokenType.CONTROL, False: gguf.TokenType.USER_DEFINED}
    writer.add_token_types([kinds[added[id].special] if id in added else gguf.TokenType.NORMAL for id in range(IDS)])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_eos_token_id(backend.token_to_id("<|im_end|>"))
    writer.add_pad_token_id(backend.token_to_id("<|endoftext|>"))
    template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    )
    writer.add_chat_template(template + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
