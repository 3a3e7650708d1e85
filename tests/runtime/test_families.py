"""The model against transformers: every family and option that we read, from the folder to the logits."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch

from shared.errors import ModelLoadError
from shared.model import CausalAttention, ModelConfig, RotaryEmbedding, Transformer
from shared.weights import load_model, read_config
from tests.runtime.tiny import LLAMA3_ROPE, SHAPE, VARIANTS

IDS = torch.randint(0, SHAPE["vocab_size"], (150,), generator=torch.Generator().manual_seed(3))
LLAMA_3_2 = dict(
    architectures=["LlamaForCausalLM"], vocab_size=128256, hidden_size=2048, intermediate_size=8192,
    num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, head_dim=64, rms_norm_eps=1e-5,
    rope_theta=500000.0, max_position_embeddings=131072, tie_word_embeddings=True,
    rope_scaling=dict(factor=32.0, high_freq_factor=4.0, low_freq_factor=1.0,
                      original_max_position_embeddings=8192, rope_type="llama3"),
)  # fmt: skip


@torch.inference_mode()
def logits(model: Transformer, ids: torch.Tensor = IDS) -> torch.Tensor:
    return model.logits(model(ids, torch.arange(len(ids)), CausalAttention()))


def rewritten(folder, target, change):
    """A copy of a model folder with another config.json: `change(dict)` edits it in place."""
    shutil.copytree(folder, target)
    config = read_config(folder)
    change(config)
    (target / "config.json").write_text(json.dumps(config))
    return target


def as_transformers_4_wrote_it(config: dict) -> None:
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype")


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant, family):
    tiny = family(variant)
    with torch.inference_mode():
        expected = tiny.hf(IDS[None]).logits[0]
    assert expected.std() > 0.5  # far from the tolerance
    torch.testing.assert_close(logits(tiny.model), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_config_as_transformers_4_wrote_it(variant, family, tmp_path):
    tiny = family(variant)
    old = load_model(rewritten(tiny.folder, tmp_path / "old", as_transformers_4_wrote_it))
    assert old.config == tiny.model.config or variant == "llama3-rope"
    assert torch.equal(logits(old), logits(tiny.model))


def test_rope_scaling_under_its_oldest_key(family, tmp_path):
    def change(config):
        as_transformers_4_wrote_it(config)
        config["rope_scaling"]["type"] = config["rope_scaling"].pop("rope_type")

    tiny = family("llama3-rope")
    assert torch.equal(logits(load_model(rewritten(tiny.folder, tmp_path / "o", change))), logits(tiny.model))


def test_keys_that_old_configs_lack(family, tmp_path):
    def change(config):
        as_transformers_4_wrote_it(config)
        for key in ("head_dim", "attention_bias", "mlp_bias", "rope_theta", "rope_scaling", "tie_word_embeddings"):
            config.pop(key, None)

    tiny = family("llama-head-dim-null")
    assert torch.equal(logits(load_model(rewritten(tiny.folder, tmp_path / "o", change))), logits(tiny.model))


def test_every_option_reaches_the_logits(family):
    """Two variants that differ in one option differ in their logits, so no comparison above is empty."""
    for one, other in (("llama", "llama3-rope"), ("llama", "llama-rope-theta"), ("llama", "llama-biases")):
        state = family(one).model.state_dict()
        changed = Transformer(family(other).model.config).eval()
        changed.load_state_dict(state | {k: v for k, v in family(other).model.state_dict().items() if k not in state})
        assert (logits(changed) - logits(family(one).model)).abs().max() > 0.01, other


def test_tied_embeddings_are_one_tensor(family):
    for variant in VARIANTS:
        model = family(variant).model
        tied = model.lm_head.weight.data_ptr() == model.embed_tokens.weight.data_ptr()
        assert tied == VARIANTS[variant][1].get("tie_word_embeddings", False), variant


def test_head_dim_is_read_not_derived(family):
    attention = family("llama").model.layers[0].self_attn
    assert attention.q_proj.weight.shape == (64, 48) and attention.k_proj.weight.shape == (32, 48)
    assert family("llama-head-dim-null").model.config.head_dim == 12
    qwen3 = ModelConfig.from_dict({**LLAMA_3_2, "architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024,
                                   "num_attention_heads": 16, "head_dim": 128})  # fmt: skip
    assert qwen3.head_dim == 128 and qwen3.qk_norm
    assert ModelConfig.from_dict({**LLAMA_3_2, "head_dim": None}).head_dim == 64


@pytest.mark.parametrize("factor, low, high, original", [(32, 1, 4, 8192), (8, 1, 4, 8192), (4, 2, 3, 64)])
def test_llama3_frequencies_equal_transformers(factor, low, high, original):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = dict(rope_type="llama3", factor=float(factor), low_freq_factor=float(low),
                   high_freq_factor=float(high), original_max_position_embeddings=original)  # fmt: skip
    theirs = LlamaConfig(head_dim=64, rope_parameters={**scaling, "rope_theta": 500000.0})
    expected, attention_factor = ROPE_INIT_FUNCTIONS["llama3"](theirs, "cpu")
    ours = RotaryEmbedding(ModelConfig.from_dict({**LLAMA_3_2, "rope_scaling": scaling})).inv_freq
    torch.testing.assert_close(ours, expected, atol=0, rtol=1e-6)
    assert attention_factor == 1.0
    plain = RotaryEmbedding(ModelConfig.from_dict({**LLAMA_3_2, "rope_scaling": None})).inv_freq
    long_waves = 2 * math.pi / plain > original / low
    assert long_waves.any() and (ours[long_waves] < plain[long_waves] / (factor * 0.99)).all()


def test_positions_beyond_the_original_length_are_scaled(family):
    """The comparison with transformers covers positions past the length that llama3 scaling starts from."""
    assert len(IDS) > 2 * LLAMA3_ROPE["original_max_position_embeddings"]


def test_rotary_angles_stay_in_float32(family, tmp_path):
    rotary = load_model(family("llama").folder, dtype=torch.bfloat16).to(torch.bfloat16).rotary
    cos, sin = rotary(torch.tensor([1857]))
    assert cos.dtype == sin.dtype == torch.float32
    angle = 1857 * 10000.0 ** (-2 / 16)
    assert abs(cos[0, 0, 1].item() - math.cos(angle)) < 1e-3 and abs(sin[0, 0, 1].item() - math.sin(angle)) < 1e-3


def test_bfloat16_is_as_close_as_bfloat16_gets(family):
    tiny = family("qwen3")
    half = logits(load_model(tiny.folder, dtype=torch.bfloat16)).float()
    exact = logits(tiny.model)
    assert half.dtype == torch.float32 and 0 < (half - exact).abs().mean() < 0.05 * exact.std()


# What we do not have is an error, never a silent approximation


@pytest.mark.parametrize("architectures", [["MistralForCausalLM"], ["Qwen2MoeForCausalLM"], [], None])
def test_another_architecture_is_refused(architectures):
    with pytest.raises(ModelLoadError, match="architectures.*LlamaForCausalLM"):
        ModelConfig.from_dict({**LLAMA_3_2, "architectures": architectures})


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "longrope"])
@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize("where", ["rope_scaling", "rope_parameters"])
def test_another_rope_type_is_refused(kind, key, where):
    with pytest.raises(ModelLoadError, match=f"{kind}.*llama3"):
        ModelConfig.from_dict({**LLAMA_3_2, where: {key: kind, "factor": 2.0}})


def test_a_sliding_window_is_refused():
    config = {**LLAMA_3_2, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 64}
    assert ModelConfig.from_dict({**config, "use_sliding_window": False}).qkv_bias
    with pytest.raises(ModelLoadError, match="use_sliding_window"):
        ModelConfig.from_dict({**config, "use_sliding_window": True})


def test_another_activation_is_refused():
    assert ModelConfig.from_dict({**LLAMA_3_2, "hidden_act": "silu"})
    with pytest.raises(ModelLoadError, match="hidden_act.*gelu"):
        ModelConfig.from_dict({**LLAMA_3_2, "hidden_act": "gelu"})


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_attention_heads", "intermediate_size"])
def test_a_config_that_lacks_a_size_names_it(key, family, tmp_path):
    with pytest.raises(ModelLoadError, match=f"config.json.*{key}"):
        load_model(rewritten(family("llama").folder, tmp_path / "cut", lambda config: config.pop(key)))


def test_rope_scaling_that_lacks_a_number_names_it():
    scaling = {k: v for k, v in LLAMA_3_2["rope_scaling"].items() if k != "low_freq_factor"}
    with pytest.raises(ModelLoadError, match="low_freq_factor"):
        ModelConfig.from_dict({**LLAMA_3_2, "rope_scaling": scaling})
