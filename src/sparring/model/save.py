"""Writing of weights as a plain Hugging Face folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import save_torch_state_dict, snapshot_download
from transformers.core_model_loading import revert_weight_conversion

from sparring.model.library import NonTextParts, class_of, head_of, text_model
from sparring.model.padding import write_padding

NAMED_TEMPLATES = "additional_chat_templates"
"""Folder of chat templates by name, as transformers writes it."""
COPIED = (".json", ".jinja", ".txt", ".model", ".py")


def save(model_state: Mapping[str, torch.Tensor], source_path: str | Path, out_path: str | Path) -> Path:
    """Write weights with the config, generation config, tokenizer and chat template of `source_path`, and, for a
    multimodal model, the weights of its vision and audio parts. Return the folder; the class that loaded `source_path`,
    mostly `AutoModelForCausalLM`, loads it.

    Args:
        model_state: parameters by Hugging Face name, tied weights once, all of one dtype.
        source_path: folder of the original model, or hub name of a model in the local cache.
        out_path: folder to write; created if missing.
    """
    source = Path(source_path)
    if not source.is_dir():
        source = Path(snapshot_download(str(source_path), local_files_only=True))
    out = Path(out_path)
    out.mkdir(parents=True, exist_ok=True)
    for file in sorted(source.iterdir()):
        if (
            file.suffix in COPIED
            and not file.name.endswith(".index.json")
            and file.resolve() != (out / file.name).resolve()
        ):
            shutil.copyfile(file, out / file.name)
    if (named := source / NAMED_TEMPLATES).is_dir() and named.resolve() != (out / NAMED_TEMPLATES).resolve():
        shutil.copytree(named, out / NAMED_TEMPLATES, dirs_exist_ok=True)
    dtype = next(iter(model_state.values())).dtype
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    if "score.weight" in model_state:
        _describe_scalar(config, out)
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    state = {
        name: tensor.detach().cpu().contiguous()
        for name, tensor in {**model_state, **_non_text_parts(source, dtype)}.items()
    }
    on_disk = revert_weight_conversion(skeleton(source), state)
    save_torch_state_dict({name: _with_own_storage(tensor) for name, tensor in on_disk.items()}, out)
    share(out)
    return out


def share(folder: Path) -> None:
    """Give a folder's weight files, which safetensors lets only their owner read, the permissions of its config."""
    mode = next(folder.glob("*config.json")).stat().st_mode
    for file in folder.glob("*.safetensors"):
        file.chmod(mode)


def _describe_scalar(config: dict[str, Any], out: Path) -> None:
    """Describe a model with a scalar head in `config`. A new head gets a padding that no text contains; a loaded head
    keeps its padding, which decides where scores are read."""
    parsed = transformers.AutoConfig.from_pretrained(out)
    if head_of(parsed) == "scalar":
        return
    kind: Any = transformers.AutoModelForSequenceClassification._model_mapping[type(parsed)]
    config |= {"architectures": [kind.__name__], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    write_padding(out, config, parsed.get_text_config().vocab_size)


def _with_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a view of a larger storage, which safetensors cannot write: a separated expert, or a tensor of a mapped
    file."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _non_text_parts(source: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Read the vision and audio weights of a multimodal checkpoint. In the files' own dtype they are memory-mapped."""
    if text_model(empty := skeleton(source)) is empty.base_model:
        return {}
    module = class_of(empty.config).from_pretrained(source, dtype="auto")
    non_text = NonTextParts(module)
    tensors = {name: tensor for name, tensor in module.state_dict().items() if name in non_text}
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def skeleton(source: str | Path) -> transformers.PreTrainedModel:
    """Make transformers' module of a checkpoint without weights: it gives the layers, and the names of weights in
    files, where stacked experts are separate."""
    config = transformers.AutoConfig.from_pretrained(source)
    with torch.device("meta"):
        module: transformers.PreTrainedModel = class_of(config).from_config(config)
    return module
