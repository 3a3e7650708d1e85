"""Chapter 04's figures: the capacity against live tensors, the filling cache on a tiny model."""

from __future__ import annotations

import pytest
import torch

from shared.kv_cache import KVCache, cached_logits, kv_bytes_per_token
from shared.lab.chapters import ch04
from shared.model import ModelConfig, Transformer


@pytest.mark.parametrize("name", ch04.SHAPES)
@pytest.mark.parametrize("dtype", ch04.BYTES)
def test_the_calculator_agrees_with_live_tensors(name, dtype):
    shape, torch_dtype = ch04.SHAPES[name], getattr(torch, dtype)
    cache = KVCache(shape.config(), 10, torch_dtype, "meta")
    live = sum(part.numel() * part.element_size() for part in (cache.keys, cache.values)) // 10
    assert ch04.token_bytes(shape, ch04.BYTES[dtype]) == live == kv_bytes_per_token(shape.config(), torch_dtype)


def test_the_explorer_counts_tokens_and_requests():
    explorer = ch04.capacity_explorer()
    explorer.fields["model"].value = "Qwen3-0.6B"
    explorer.fields["memory"].value = 1
    assert "114,688" in explorer.frame.value
    assert f"{2**30 // 114_688:,}" in explorer.frame.value
    assert f"{2**30 // 114_688 // 2048} requests of 2,048 tokens fit." in explorer.frame.value
    explorer.fields["length"].value = 8192
    assert "1 request of 8,192 tokens fits." in explorer.frame.value


class Letters:
    def encode(self, text):
        return [ord(c) % 60 for c in text]

    def decode(self, ids):
        return "".join(chr(65 + i) for i in ids)


@pytest.fixture(scope="module")
def stepper():
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=60, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, rms_norm_eps=1e-6, rope_theta=1e4, rope_scaling=None,
        max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    return ch04.cache_stepper(Transformer(config).eval(), Letters(), KVCache, cached_logits)


def test_the_first_step_writes_the_prompt_and_the_next_ones_one_slot(stepper):
    stepper.fields["prompt"].value = "abcd"
    stepper.step.click()
    assert "ran 4 positions" in stepper.frame.value and stepper.frame.value.count("written now") == 4
    stepper.step.click()
    assert "ran 1 position " in stepper.frame.value and stepper.frame.value.count("written now") == 1
    assert "Positions so far: 5; without a cache: 9." in stepper.frame.value


def test_a_prompt_that_is_too_long_is_refused_in_words(stepper):
    stepper.fields["prompt"].value = "x" * 40
    assert "the prompt has 40 tokens; this figure shows 1 to 24" in stepper.fields.error.value
    stepper.fields["prompt"].value = "abcd"
    assert "40 tokens" not in stepper.fields.error.value and "The cache is empty" in stepper.frame.value


def test_one_token_is_one_key(stepper):
    stepper.fields["prompt"].value = "a"
    stepper.step.click()
    assert "ran 1 position and its last token looked at 1 key." in stepper.frame.value
