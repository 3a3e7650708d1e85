"""The fast bfloat16 path chooses the plain one's tokens, except between neighbours."""
from __future__ import annotations

import random

import pytest
import torch

from tools.bf16_agreement import agreement, disagreements


@pytest.mark.parametrize("variant", ["llama", "qwen3"])
def test_fast_and_plain_agree_in_bfloat16(variant, family):
    draw, model = random.Random(0), family(variant).model
    prompts = [[draw.randrange(3, 120) for _ in range(draw.randint(1, 60))] for _ in range(20)]
    found = agreement(model, prompts, 16)
    assert found["positions"] == 320 and not found["missing"]
    assert found["share_equal"]["plain and fast"] >= 0.9
    assert found["largest_margin_in_bf16_steps"] <= 4
    assert model.embed_tokens.weight.dtype == torch.float32


def test_a_difference_is_measured_in_steps():
    scores = torch.tensor([[1.0, 2.0, 1.75], [5.0, 0.0, 0.0]])
    (found,) = disagreements(3, scores, torch.tensor([1, 0]), torch.tensor([2, 0]))
    assert (found["prompt"], found["position"], found["margin"]) == (0, 3, 0.25)
    assert found["margin_in_bf16_steps"] == 16  # numbers from 2 to 4 lie 1/64 apart
