"""GGUF files as checkpoint folders: weights bit for bit, tokenizer id by id, and what cannot be read refused by name."""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from refusals import refused_at
from safetensors.torch import load_file
from tokenizers import Tokenizer
from unit.model.gguf import written

from sparring.errors import BadInput
from sparring.model.gguf.cache import converted, gguf_file, write
from sparring.model.gguf.settings import REQUIRED, complete
from sparring.model.hub import local_folder, with_template
from sparring.model.load import load
from sparring.user_cache import user_cache


@pytest.fixture(autouse=True)
def cache(tmp_path):
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    yield
    os.environ.pop("XDG_CACHE_HOME") if before is None else os.environ.__setitem__("XDG_CACHE_HOME", before)


def _unpermuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo how llama.cpp's converter orders the rows of queries and keys: halves of a head interleaved (its `permute`)."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(2, 1).reshape(rows.shape)


def test_weights_are_the_file_s_blocks_dequantised(tmp_path):
    file = written.write_model(tmp_path / "m.gguf", "llama", Type.Q4_1, tied=False)
    weights = load_file(str(local_folder(str(file)) / "model.safetensors"))
    read = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in gguf.GGUFReader(file).tensors}
    layer = "model.layers.1."
    for name, expected in {
        "lm_head.weight": read["output.weight"],
        "model.embed_tokens.weight": read["token_embd.weight"],
        layer + "mlp.down_proj.weight": read["blk.1.ffn_down.weight"],
        layer + "input_layernorm.weight": read["blk.1.attn_norm.weight"],
        layer + "self_attn.q_proj.weight": _unpermuted(read["blk.1.attn_q.weight"], written.HEADS),
        layer + "self_attn.k_proj.weight": _unpermuted(read["blk.1.attn_k.weight"], written.KV_HEADS),
    }.items():
        assert torch.equal(weights[name], torch.from_numpy(np.array(expected))), name


@pytest.mark.parametrize("arch", written.ARCHITECTURES)
def test_every_architecture_computes_exactly(tmp_path, arch):
    model = load(local_folder(str(written.write_model(tmp_path / "m.gguf", arch))))
    assert model.module.config.head_dim == written.HEAD
    assert model.module.config.get_text_config().tie_word_embeddings


@pytest.mark.extra
@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.BF16, *written.SCALES], ids=lambda kind: kind.name)
@pytest.mark.parametrize("arch", written.ARCHITECTURES)
def test_weights_equal_the_library_s_own(tmp_path, arch, kind):
    import transformers

    head = 128 if arch == "qwen3" else 32  # the library takes 128 for this one, whatever the file says
    file = written.write_model(tmp_path / "m.gguf", arch, kind, head=head)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    ours = transformers.AutoModelForCausalLM.from_pretrained(local_folder(str(file)))
    expected = theirs.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    for name, tensor in ours.state_dict().items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("tied", [True, False])
def test_settings_are_those_that_the_library_reads_of_the_whole_file(tmp_path, tied):
    from transformers import AutoConfig
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    file = written.write_model(tmp_path / "m.gguf", tied=tied)
    theirs = load_gguf_checkpoint(str(file))["config"]
    ours = AutoConfig.from_pretrained(local_folder(str(file)))
    assert theirs["tie_word_embeddings"] is tied and {"pad_token_id", "eos_token_id"} <= theirs.keys()
    assert {key for key, value in theirs.items() if getattr(ours, key, None) != value} <= {"rope_theta"}


def test_the_tokenizer_gives_the_ids_that_its_own_file_gives(tmp_path):
    folder = local_folder(str(written.write_model(tmp_path / "m.gguf", "qwen2")))
    original = Tokenizer.from_file(str(tmp_path / "tokenizer" / "tokenizer.json"))
    ours = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "<|im_start|>user\n<think>It's 1234, naïve  Ünïcode\r\n\n\tx=+1</think><tool_call>{}</tool_call> 漢字 🙂<|im_end|>"
    assert ours.encode(text).ids == original.encode(text).ids
    assert ours.decode(ours.encode(text).ids, skip_special_tokens=True) == original.decode(original.encode(text).ids)
    special = {token.content: token.special for token in ours.get_added_tokens_decoder().values()}
    assert special["<|im_end|>"] and not special["<think>"]
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [
        ours.token_to_id("<|im_end|>")
    ]


def test_digits_are_taken_apart_where_the_split_says_so(tmp_path):
    folder = local_folder(str(written.write_model(tmp_path / "m.gguf", pre="smollm")))
    pieces = Tokenizer.from_file(str(folder / "tokenizer.json")).pre_tokenizer.pre_tokenize_str("in 1234")
    assert [piece for piece, _ in pieces] == ["in", "Ġ", "1", "2", "3", "4"]


def test_llama_3_s_scaled_positions_are_read(tmp_path):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
              "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
    config = LlamaConfig(head_dim=written.HEAD, rope_parameters=scaled)
    plain = 1 / 10000.0 ** (torch.arange(0, written.HEAD, 2) / written.HEAD)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    divisors = (plain / frequencies).numpy().astype(np.float32)
    file = written.write_model(tmp_path / "m.gguf", tensors={"rope_freqs.weight": divisors})
    read = json.loads((local_folder(str(file)) / "config.json").read_text())["rope_parameters"]
    assert read == scaled
    wrong = written.write_model(tmp_path / "w.gguf", tensors={"rope_freqs.weight": divisors * 2})
    with pytest.raises(BadInput, match="other divisors"):
        local_folder(str(wrong))


@pytest.mark.parametrize(
    ("said", "changes"),
    [
        ("'mamba'", {"arch": "mamba"}),
        ("llama.attention.scale", {"settings": {"llama.attention.scale": 0.5}}),
        ("llama.attention.layer_norm_rms_epsilon", {"settings": {"llama.attention.layer_norm_rms_epsilon": math.nan}}),
        ("llama.rope.freq_base", {"settings": {"llama.rope.freq_base": 0.0}}),
        ("rope.dimension_count 32", {"settings": {"llama.rope.dimension_count": 16}}),
        ("llama.block_count", {"settings": {"llama.block_count": 2**31}}),
        ("llama.context_length", {"settings": {"llama.context_length": 0}}),
        *(
            (f"'{kind}'", {"settings": {"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": 2.0}})
            for kind in ("longrope", "su", "llama3", "dynamic", "Linear")
        ),
        ("gemma3.attention.sliding_window", {"arch": "gemma3", "settings": {"gemma3.attention.sliding_window": 0}}),
        ("pattern 6", {"arch": "gemma3", "settings": {"gemma3.attention.sliding_window_pattern": 4}}),
        ("freq_base_swa 10000", {"arch": "gemma3", "settings": {"gemma3.rope.freq_base_swa": 5000.0}}),
        ("attention.value_length 64", {"settings": {"llama.attention.key_length": 64}}),
        ("blk.0.attn_sinks.weight", {"tensors": {"blk.0.attn_sinks.weight": np.zeros(8, np.float32)}}),
        ("'own-split'", {"pre": "own-split"}),
        ("a tokenizer in its head", {"pre": None}),
        ("a part of one", {"settings": {"split.count": 2}}),
        ("a part of one", {"settings": {"split.count": "2"}}),
        ("divisors above 0", {"tensors": {"rope_freqs.weight": np.zeros(16, np.float32)}}),
    ],
)
def test_unsupported_settings_and_weights_are_refused_by_name(tmp_path, said, changes):
    file = written.write_model(tmp_path / "m.gguf", **changes)
    with pytest.raises(BadInput) as refused:
        local_folder(str(file))
    assert said in str(refused.value) and str(file) in str(refused.value)
    assert not any((tmp_path / "cache" / "sparring" / "gguf").iterdir())


ROPE = "llama.rope.scaling."


def settings_of(scaling, **others):
    """Complete the settings of a model with these scaled positions."""
    config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 2, "rope_theta": 500.0, **others}
    complete(config, "llama", {f"{ROPE}{key}": value for key, value in scaling.items()}, None, "m.gguf")
    return config


@pytest.mark.parametrize("kind", ["linear", "yarn", None])
@pytest.mark.parametrize("factor", [0.0, -2.0, math.nan, math.inf, "4", True, [4.0], None])
def test_positions_are_scaled_by_a_number_above_0_alone(kind, factor):
    scaling = {"type": kind, "factor": factor}
    if kind or factor is not None:
        with refused_at("m.gguf", "a number above 0 as llama.rope.scaling.factor" if factor else "rope.scaling.factor"):
            settings_of({key: value for key, value in scaling.items() if value is not None})
    with refused_at("m.gguf", "original_context_length"):
        settings_of({"type": kind or "yarn", "factor": 4.0, "original_context_length": 0})


def test_scaled_positions_are_read_as_llama_cpp_reads_them():
    yarn = settings_of({"type": "yarn", "factor": 4.0, "original_context_length": 32})["rope_parameters"]
    assert yarn == {
        "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32
    }  # fmt: skip
    for scaling in ({"type": "linear", "factor": 4.0}, {"factor": 4.0}):
        assert settings_of(scaling)["rope_parameters"] == {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
    unscaled = settings_of({"type": "none", "factor": 4.0})
    assert "rope_parameters" not in unscaled and unscaled["rope_theta"] == 500.0
    config = {"model_type": "qwen2", "hidden_size": 64, "num_attention_heads": 2}
    complete(config, "qwen2", {}, None, "m.gguf")
    assert (config["rope_theta"], config["num_key_value_heads"]) == (10000.0, 2), "not the family's defaults"


@pytest.mark.parametrize("key", REQUIRED)
def test_settings_that_llama_cpp_requires_are_not_guessed(tmp_path, key):
    file = written.write_model(tmp_path / "m.gguf", "qwen2", without={f"qwen2.{key}"})
    with refused_at(str(file), f"qwen2.{key}, got none"):
        local_folder(str(file))


def test_spoilt_files_are_refused(tmp_path):
    whole = written.write_model(tmp_path / "m.gguf").read_bytes()
    for at, spoilt in enumerate(
        (whole[: len(whole) // 2], whole[:100], b"", b"PK" + whole[2:], whole[:4] + b"\0\0\0\x03" + whole[8:])
    ):
        file = tmp_path / f"spoilt-{at}.gguf"
        file.write_bytes(spoilt)
        with pytest.raises(BadInput, match=f"spoilt-{at}.gguf"):
            local_folder(str(file))


def test_weights_that_overlap_or_are_no_numbers_are_refused(tmp_path):
    whole = written.write_model(tmp_path / "m.gguf").read_bytes()
    query = next(tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors if "attn_q." in tensor.name)
    place = query.field.offset + sum(part.nbytes for part in query.field.parts[:-1])
    for said, at, changed in (("lie apart", place, bytes(8)), ("finite", query.data_offset, b"\xff" * 34)):
        file = tmp_path / "changed.gguf"
        file.write_bytes(whole[:at] + changed + whole[at + len(changed) :])
        with pytest.raises(BadInput, match=said):
            local_folder(str(file))


def test_only_unfinished_conversions_of_dead_processes_are_removed(tmp_path):
    file, out = written.write_model(tmp_path / "m.gguf"), tmp_path / "out" / "m"
    left, living = out.parent / ".m-abcdefgh", out.parent / ".m-ijklmnop"
    for folder in (left, living):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("half")
    lock = os.open(living, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    write(file, out)
    os.close(lock)
    assert sorted(folder.name for folder in out.parent.iterdir()) == [".m-ijklmnop", "m"]


def test_a_second_conversion_has_equal_sizes_and_times(tmp_path):
    file = written.write_model(tmp_path / "m.gguf")
    template = tmp_path / "own.jinja"
    template.write_bytes(b"\xef\xbb\xbf{{ messages }}")

    def made() -> list[tuple[str, str, int, int]]:
        folders = (local_folder(str(file)), with_template(local_folder(str(file)), str(template)))
        files = [(str(folder), each) for folder in folders for each in sorted(folder.iterdir())]
        return [(folder, each.name, each.stat().st_size, each.stat().st_mtime_ns) for folder, each in files]

    first = made()
    assert (Path(first[-1][0]) / "chat_template.jinja").read_text() == "{{ messages }}"
    shutil.rmtree(tmp_path / "cache")
    assert made() == first


def test_a_file_that_changed_since_it_was_seen_is_refused(tmp_path):
    file = written.write_model(tmp_path / "m.gguf")
    seen = file.stat()
    os.utime(file, ns=(seen.st_atime_ns, seen.st_mtime_ns + 1))
    with pytest.raises(BadInput, match="changed while it was read"):
        write(file, tmp_path / "out" / "m", seen)
    assert not any((tmp_path / "out").iterdir())


def test_a_tokenizer_beside_the_file_takes_its_place(tmp_path):
    file = written.write_model(tmp_path / "m.gguf", pre="own-split")
    beside = written.tokenizer_file(tmp_path / "tokenizer").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(beside)
    assert (local_folder(str(file)) / "tokenizer.json").read_bytes() == beside


def test_a_folder_is_read_by_its_only_file_and_converted_once(tmp_path, capsys):
    file = written.write_model(tmp_path / "m.gguf")
    folder = local_folder(str(tmp_path))
    changed = (folder / "model.safetensors").stat().st_mtime_ns
    assert local_folder(str(file)) == folder == converted(file)
    assert (folder / "model.safetensors").stat().st_mtime_ns == changed
    assert capsys.readouterr().err.count("converting") == 1
    (tmp_path / "other.gguf").write_bytes(b"")
    with pytest.raises(BadInput, match="2: m.gguf, other.gguf"):
        gguf_file(tmp_path)
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "m-00001-of-00002.gguf").write_bytes(b"")
    with pytest.raises(BadInput, match="a part of one"):
        gguf_file(tmp_path / "one")


def test_the_cache_does_not_move_with_the_working_directory(tmp_path):
    os.environ["XDG_CACHE_HOME"] = "relative"
    assert user_cache("gguf") == Path.home() / ".cache/sparring/gguf"
    os.environ["XDG_CACHE_HOME"] = str(tmp_path)
    assert user_cache("gguf") == tmp_path / "sparring/gguf"


def test_a_suffix_in_capitals_is_one(tmp_path):
    file = tmp_path / "M.GGUF"
    file.write_bytes(b"")
    assert gguf_file(file) == gguf_file(tmp_path) == file


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    file = written.write_model(tmp_path / "m.gguf")
    (tmp_path / "taken").write_text("")
    with pytest.raises(BadInput, match="XDG_CACHE_HOME"):
        write(Path(file), tmp_path / "taken" / "out")
