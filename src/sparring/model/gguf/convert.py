"""Conversion of a GGUF file into a checkpoint folder of transformers: config, float32 weights, tokenizer, chat template
and end ids.

transformers (`modeling_gguf_pytorch_utils`) maps settings, names and layouts; the `gguf` package dequantises the
blocks. Both are slower than reading a folder, so the result is cached: see `cache.converted`.
"""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from huggingface_hub import save_torch_state_dict
from transformers import modeling_gguf_pytorch_utils as library
from transformers.core_model_loading import revert_weight_conversion

from sparring.errors import BadInput, boundary, refusal
from sparring.model.gguf.lengths import check_head
from sparring.model.gguf.settings import FREQUENCIES, REQUIRED, check_positive, complete
from sparring.model.gguf.tokenizer import check_tokenizer, write_tokenizer
from sparring.model.library import class_of
from sparring.model.load import refuse_incomplete
from sparring.model.save import share

CAUSAL = ("llama", "qwen2", "qwen3", "gemma3")
"""Supported architectures (`general.architecture`): tests compare their converted weights with transformers' own."""
EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"


def convert(file: Path, other: Path | None, out: Path) -> None:
    """Write the checkpoint folder of a GGUF file into `out`, an empty folder. A tokenizer.json `other`, if given,
    replaces the file's tokenizer.

    Raises:
        BadInput: the file is no GGUF file, is truncated, split or of another byte order; its architecture, weight type
            or tokenizer is not supported; or a setting or weight has no place in the model.
    """
    where = str(file)
    check_head(file)
    with boundary(BadInput, where, "a whole GGUF file", "copy or download it again"):
        reader = gguf.GGUFReader(file)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    _check(reader, fields, where)
    rows = next((int(tensor.shape[1]) for tensor in reader.tensors if tensor.name == EMBEDDING), None)
    check_tokenizer(file, fields, rows, other)
    config = _config(reader, fields, where)
    with torch.device("meta"), boundary(BadInput, where, "settings that the library makes a model of", "take another"):
        module = class_of(config).from_config(config)
    state = _weights(file, reader, module)
    written = json.loads(config.to_json_string(use_diff=True)) | {
        "architectures": [type(module).__name__],
        "dtype": "float32",
    }
    written.pop("_name_or_path", None)
    (out / "config.json").write_text(json.dumps(written, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    write_tokenizer(file, fields, other, out, config.model_type)
    save_torch_state_dict(revert_weight_conversion(module, state), out)
    share(out)


def _check(reader: gguf.GGUFReader, fields: Mapping[str, Any], where: str) -> None:
    """Refuse a file whose head names an unsupported architecture, a part of a model, or overlapping weights."""
    placed = sorted((tensor.data_offset, tensor.data_offset + tensor.n_bytes, tensor.name) for tensor in reader.tensors)
    for (_, end, name), (begin, _, following) in pairwise(placed):
        if begin < end:
            remedy = "copy or download it again"
            raise refusal(where, "weights that lie apart", f"{following} inside of {name}", remedy)
    if fields.get("split.count", 1) not in (0, 1):
        raise refusal(where, "a whole model in one file", "a part of one", "merge it: llama-gguf-split --merge")
    arch = fields.get("general.architecture")
    if arch not in CAUSAL:
        remedy = "take the model's Hugging Face folder"
        raise refusal(where, f"an architecture that is read ({', '.join(CAUSAL)})", repr(arch), remedy)
    for key in REQUIRED:
        check_positive(fields.get(f"{arch}.{key}"), f"{arch}.{key}", where)
    there = {tensor.name.split(".")[1] for tensor in reader.tensors if tensor.name.startswith("blk.")}
    if (layers := fields.get(f"{arch}.block_count")) != len(there):
        expected = f"weights of as many layers as {arch}.block_count says, {layers}"
        raise refusal(where, expected, str(len(there)), "copy or download it again")


def _config(reader: gguf.GGUFReader, fields: Mapping[str, Any], where: str) -> Any:
    arch = fields["general.architecture"]
    with (
        tempfile.TemporaryFile() as short,
        boundary(BadInput, where, "settings that the library reads", "take the model's Hugging Face folder"),
    ):
        short.write(_settings(reader))
        short.flush()
        settings = library.load_gguf_checkpoint(f"/proc/self/fd/{short.fileno()}")["config"]
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    settings["tie_word_embeddings"] = OUTPUT not in tensors
    if EMBEDDING in tensors:
        settings["vocab_size"] = int(tensors[EMBEDDING].shape[1])  # a padded embedding has more rows than tokens
    complete(settings, arch, fields, tensors[FREQUENCIES].data if FREQUENCIES in tensors else None, where)
    settings.pop("_model_name_or_path", None)
    with boundary(BadInput, where, "settings that the library knows", "take the model's Hugging Face folder"):
        return transformers.AutoConfig.for_model(**settings)


def _settings(reader: gguf.GGUFReader) -> bytes:
    """Return the head of a file without vocabulary and weights, which transformers needs seconds to read."""
    lists = {name for name, field in reader.fields.items() if name.startswith("tokenizer.") and len(field.types) > 1}
    kept = [field for name, field in reader.fields.items() if name not in lists and not name.startswith("GGUF.")]
    head = struct.pack("<4sIQQ", b"GGUF", 3, 0, len(kept))
    return head + b"".join(part.tobytes() for field in kept for part in field.parts)


def _weights(file: Path, reader: gguf.GGUFReader, module: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the float32 weights of `module`, tied ones once. Raises BadInput if a tensor of the file has no place in
    the module, or a weight of the module is not in the file."""
    where, arch = str(file), reader.fields["general.architecture"].contents()
    kind: Callable[..., library.TensorProcessor] = library.TENSOR_PROCESSORS.get(arch, library.TensorProcessor)
    processor = kind(config=module.config.to_dict())
    placed = library.get_gguf_hf_weights_map(module, processor)
    for tensor in reader.tensors:
        if tensor.name not in placed and tensor.name != FREQUENCIES and "_exps." not in tensor.name:
            raise refusal(
                where, f"weights of a {arch} model alone", tensor.name, "take the model's Hugging Face folder"
            )
    read: dict[str, Any] = {"config": {}, "tensors": {}}
    with boundary(BadInput, where, "weights of types that the gguf package reads", "take another quantisation"):
        for tensor in reader.tensors:
            blocks = gguf.dequantize(tensor.data, tensor.tensor_type)
            if not np.isfinite(blocks).all():
                raise refusal(
                    where, "weights that are finite", f"NaN or infinity in {tensor.name}", "take another file"
                )
            result = processor.process(blocks, tensor.name, tensor_key_mapping=placed, parsed_parameters=read)
            if result.name in placed:
                read["tensors"][placed[result.name]] = torch.from_numpy(np.copy(result.weights))
    state = read["tensors"]
    expected = {name: tensor.shape for name, tensor in module.state_dict().items()}
    tied = set(module.all_tied_weights_keys) if module.config.tie_word_embeddings else set()
    wrong = [
        (name, state[name].shape, shape)
        for name, shape in expected.items()
        if name in state and state[name].shape != shape
    ]
    refuse_incomplete(where, set(expected) - set(state) - tied, wrong)
    return {name: tensor.float().contiguous() for name, tensor in state.items() if name in expected}
