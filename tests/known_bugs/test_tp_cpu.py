"""Known faults of inference engines: weights, as far as they show on one device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.model import CausalAttention
from shared.weights import load_model
from tests.known_bugs.helpers import random_prompt
from tests.runtime.tiny import make_hf


def save(folder: Path, family: str, tied: bool, with_head: bool):
    """A checkpoint that says whether its embeddings are tied, and stores a head or not."""
    hf = make_hf(f"{family}-tied" if tied else family)
    hf.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors.pop("lm_head.weight", None)
    if with_head:
        tensors["lm_head.weight"] = hf.lm_head.weight.detach().clone()
    save_file(tensors, file, {"format": "pt"})
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is tied
    return hf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen2.5", "qwen3"])
@pytest.mark.parametrize(("tied", "with_head"), [(True, False), (True, True), (False, True)])
def test_b64_tied_and_untied_heads(tmp_path, family, tied, with_head, dtype):
    hf = save(tmp_path, family, tied, with_head)
    model = load_model(tmp_path, dtype)
    same = model.lm_head.weight.data_ptr() == model.embed_tokens.weight.data_ptr()
    assert same is tied
    if dtype is torch.float32:
        ids = torch.tensor(random_prompt(12))
        with torch.inference_mode():
            ours = model.logits(model(ids, torch.arange(12), CausalAttention()))
            torch.testing.assert_close(ours, hf(ids[None]).logits[0], atol=1e-4, rtol=1e-4)


def test_b64_a_missing_head_that_is_not_tied_is_an_error(tmp_path):
    from shared.errors import ModelLoadError

    save(tmp_path, "llama", False, with_head=False)
    with pytest.raises(ModelLoadError, match="lm_head.weight"):
        load_model(tmp_path)
