"""Files of a model beside its weights: which travel, and what a server writes of what a peer sends."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from refusals import refused_at

from sparring.errors import BadInput, WeightsError
from sparring.weights import files


def written(folder: Path, **named: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in {"config.json": '{"model_type": "qwen3", "dtype": "float32"}', **named}.items():
        (folder / name.replace("_json", ".json")).write_text(text)
    return folder


def test_what_travels_is_a_fixed_list_without_weights_and_code(tmp_path: Path) -> None:
    folder = written(tmp_path, tokenizer_json="{}", generation_config_json="")
    for name in ("model.safetensors", "modeling_own.py", "notes.txt"):
        (folder / name).write_bytes(b"x")
    found = files.read(folder)
    assert found.keys() == {"config.json", "tokenizer.json"}
    assert files.contents(files.tensors(found)) == found


def test_a_folder_without_a_config_and_a_file_too_large_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"config\.json"):
        files.read(tmp_path)
    with (written(tmp_path) / "chat_template.jinja").open("wb") as file:
        file.truncate(files.MOST_BYTES["chat_template.jinja"] + 1)
    with refused_at(str(tmp_path / "chat_template.jinja"), "at most"):
        files.read(tmp_path)


def test_the_digest_is_of_the_model_not_of_how_it_was_saved(tmp_path: Path) -> None:
    one = files.digest(files.read(written(tmp_path / "a", tokenizer_json="{}")))
    saved = '{"torch_dtype": "bfloat16", "model_type": "qwen3", "transformers_version": "9"}'
    assert files.digest(files.read(written(tmp_path / "b", tokenizer_json="{}", config_json=saved))) == one
    for other in ({"tokenizer_json": "{ }"}, {"tokenizer_json": "{}", "config_json": '{"model_type": "llama"}'}):
        assert files.digest(files.read(written(tmp_path / "c", **other))) != one


CONFIG = {"config.json": torch.tensor([123, 125], dtype=torch.uint8)}


@pytest.mark.parametrize(
    ("hostile", "noun"),
    [
        ({"../config.json": CONFIG["config.json"]}, "only"),
        ({"/etc/passwd": CONFIG["config.json"]}, "only"),
        ({"config.json/": CONFIG["config.json"]}, "only"),
        ({"model.safetensors": CONFIG["config.json"]}, "only"),
        ({"modeling_own.py": CONFIG["config.json"]}, "only"),
        ({"tokenizer.json": torch.zeros(3)}, "bytes of tokenizer"),
        ({"tokenizer.json": torch.zeros(2, 2, dtype=torch.uint8)}, "bytes of tokenizer"),
        (
            {"chat_template.jinja": torch.empty(files.MOST_BYTES["chat_template.jinja"] + 1, dtype=torch.uint8)},
            "bytes of chat_template",
        ),
    ],
)
def test_nothing_else_is_taken_from_a_peer(hostile: dict[str, torch.Tensor], noun: str) -> None:
    with pytest.raises(WeightsError, match=noun):
        files.contents({**CONFIG, **hostile})
    with pytest.raises(WeightsError, match=r"config\.json"):
        files.contents({"tokenizer.json": CONFIG["config.json"]})


def test_no_file_is_written_through_a_link(tmp_path: Path) -> None:
    target, folder = tmp_path / "target", tmp_path / "own"
    folder.mkdir()
    (folder / "config.json").symlink_to(target)
    with pytest.raises(FileExistsError):
        files.write(files.contents(CONFIG), folder)
    (folder / "config.json").unlink()
    files.write(files.contents(CONFIG), folder)
    assert not target.exists() and (folder / "config.json").read_bytes() == b"{}"
    assert (folder / "config.json").stat().st_mode & 0o777 == 0o600
