"""Chapter 02's figures, driven without a kernel; its counts against torch's own; what its texts promise."""

from __future__ import annotations

import re

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from shared.lab.chapters import ch02, ch02_inside
from shared.lab.evidence import evidence
from shared.model import CausalAttention, Transformer
from shared.tokenizer import Tokenizer
from shared.weights import load_model

CATS = "The cat sat. The dog ran. The cat"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer("smollm2-135m")


@pytest.fixture(scope="module")
def model() -> Transformer:
    return load_model()


@pytest.fixture
def small() -> Transformer:
    torch.manual_seed(0)
    return Transformer(ch02.small_config(head_dim=20))


def plain(markup: str) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", str(markup)).split())


@pytest.mark.parametrize("num_tokens", [1, 5, 17])
@pytest.mark.parametrize("changes", ch02.SHAPES.values(), ids=ch02.SHAPES)
def test_operations_are_what_torch_counts_and_what_the_exercise_wants(changes, num_tokens):
    torch.manual_seed(0)
    model = Transformer(ch02.small_config(**changes))
    with FlopCounterMode(display=False) as counter:
        run = ch02.record(model, CausalAttention(), list(range(num_tokens)))
    products = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    assert run.operations - run.attention_operations == products
    assert run.operations == ch02.prefill_operations(model.config, num_tokens)


def test_attention_is_counted_as_two_products_over_the_square(small):
    q, k, v = (torch.randn(1, 4, 7, 20) for _ in range(3))
    with FlopCounterMode(display=False) as counter:
        (q @ k.transpose(2, 3)) @ v
    run = ch02.record(small, CausalAttention(), list(range(7)))
    assert run.attention_operations == counter.get_total_flops() * small.config.num_hidden_layers


def test_recorded_shapes_are_those_of_the_pass_and_hooks_are_gone(small):
    run = ch02.record(small, CausalAttention(), [3, 4, 5])
    stages = {stage.name: stage for stage in run.stages}
    assert stages["embed_tokens"].output == (3, 48)
    assert stages["layers.1.self_attn.q_proj"].weight == (80, 48)
    assert stages["layers.1.attention"].inputs == ((3, 4, 20), (3, 2, 20), (3, 2, 20))
    assert stages["lm_head"].inputs == ((1, 48),) and stages["lm_head"].output == (1, 128)
    assert run.stages[0].name == "embed_tokens" and run.stages[-1].name == "lm_head"
    assert not any(module._forward_hooks for module in small.modules())
    weights = sum(weight.numel() for weight in small.parameters() if weight.dim() == 2)
    multiplied = [stage.weight for stage in run.stages if stage.weight and stage.operations]
    assert sum(rows * columns for rows, columns in multiplied) == weights - small.embed_tokens.weight.numel()


def test_bytes_between_are_inputs_and_outputs(small):
    run = ch02.record(small, CausalAttention(), [3, 4, 5])
    down = next(stage for stage in run.stages if stage.name == "layers.0.mlp.down_proj")
    assert down.bytes_between == 4 * 3 * (96 + 48)


def test_attention_weights_give_what_attention_gives():
    torch.manual_seed(0)
    q, k, v = torch.randn(6, 4, 8), torch.randn(6, 2, 8), torch.randn(6, 2, 8)
    weights = ch02_inside.attention_weights(q, k)  # [heads, T, T]
    assert torch.allclose(weights.sum(-1), torch.ones(4, 6), atol=1e-5) and not weights.triu(1).any()
    out = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(2, 1))
    assert torch.allclose(out, CausalAttention()(0, q, k, v), atol=1e-5)


def test_the_inspector_steps_one_layer_in_full_and_the_others_whole(model, tokenizer):
    stepper = ch02.shape_inspector(model, CausalAttention(), tokenizer)
    assert plain(stepper.frame.value).startswith("embed_tokens: each id picks its row")
    stepper.end.click()
    last = plain(stepper.frame.value)
    assert last.startswith("lm_head:") and "Layers run besides layer 0: 29." in last
    assert len(stepper.frames) == 2 + 10 + 29 + 2 and stepper.step.disabled
    stepper.back.click()
    stepper.back.click()
    assert plain(stepper.frame.value).startswith("layers.29: the whole of layer 29")
    total = ch02.prefill_operations(model.config, len(tokenizer.encode("The capital of France is")))
    assert f"So far {total:,} operations" in last


def test_the_inspector_follows_its_fields(model, tokenizer):
    stepper = ch02.shape_inspector(model, CausalAttention(), tokenizer)
    stepper.fields["layer"].value = 7
    stepper.go(9)  # two stages, seven whole layers, then layer 7
    assert plain(stepper.frame.value).startswith("layers.7.input_layernorm:")
    stepper.reset.click()
    stepper.fields["text"].value = "Hi there you"
    assert "[3, 576]" in plain(stepper.frame.value)
    stepper.fields["text"].value = "word " * 30
    assert "24 tokens" in plain(stepper.fields.error.value)


def test_the_heads_that_the_chapter_names_do_what_it_says(model, tokenizer):
    ids = tokenizer.encode(CATS)
    seen = ch02.record(model, CausalAttention(), ids, keep_weights=True).seen
    wanted = {(11, 1): len(ids) - 2, (2, 4): 1, (17, 5): 2}
    for (layer, head), place in wanted.items():
        top = seen[layer][head, -1].topk(2)
        assert int(top.indices[0]) == place and float(top.values[0] - top.values[1]) > 0.05
    shares = torch.stack([weights[:, -1, 0] for weights in seen.values()])
    assert float((shares - 0.5).abs().min()) > 1e-4  # the printed count of heads stands on no knife's edge


def test_percents_of_the_static_figure_are_not_close_to_a_rounding_edge(model, tokenizer):
    ids = tokenizer.encode(CATS)
    weights = ch02.record(model, CausalAttention(), ids, keep_weights=True).seen[17][5].double()
    shown = weights[torch.ones_like(weights, dtype=torch.bool).tril()]
    for scale in (100, 60):  # percent, and the tint's two digits
        assert float(((shown * scale) % 1 - 0.5).abs().min()) > 1e-4


def test_the_explorer_shows_any_layer_and_head(model, tokenizer):
    explorer = ch02.attention_explorer(model, CausalAttention(), tokenizer)
    assert "looks most at “·sat” at position 2" in plain(explorer.frame.value)
    explorer.fields["layer"].value, explorer.fields["head"].value = 11, 1
    assert "looks most at “·The” at position 8" in plain(explorer.frame.value)
    last = explorer.frame.value
    explorer.fields["text"].value = "word " * 30
    assert explorer.frame.value == last and "24 tokens" in plain(explorer.fields.error.value)
    explorer.fields["text"].value = "<b>x</b>"
    assert "<b>" not in explorer.frame.value and "looks most at" in plain(explorer.frame.value)


def test_figures_run_the_readers_own_attention(small):
    class Characters:
        def encode(self, text):
            return [ord(char) for char in text]

        def token_text(self, token_id):
            return chr(token_id)

    called = []

    def nothing(layer, q, k, v):
        called.append(layer)
        return torch.zeros_like(q)

    ch02.attention_explorer(small, nothing, Characters(), text="abc", layer=1, head=3)
    assert called == [0, 1]
    ch02.shape_inspector(small, nothing, Characters()).end.click()
    assert len(called) == 4


def test_times_and_the_roofline(small):
    results = ch02.prefill_times(small, CausalAttention(), (1, 4), n=3)
    assert [result.n for result in results] == [3, 3]
    assert all(0 < result.low <= result.median <= result.high for result in results)
    assert ch02.roofline([0.5, 200.0], [5.0, 90.0], [1, 512], 20.0, 100.0).startswith(b"\x89PNG")


def test_the_saved_evidence_of_this_chapter_is_complete():
    record = evidence("02_prefill")
    assert record["command"] == "python -m shared.lab.chapters.ch02" and len(record["results"]) == 8
    assert all(result["low"] <= result["median"] <= result["high"] for result in record["results"])
