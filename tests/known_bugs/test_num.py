"""Known faults of inference engines: attention, positions, number formats."""

from __future__ import annotations

import pytest
import torch

from shared.block_manager import BlockManager
from shared.model import ModelConfig, RotaryEmbedding, Transformer
from shared.prefix_cache import PrefixCachingBlockManager
from shared.sampling import Sampler
from shared.scheduler import SchedulerOutput
from tests.known_bugs.helpers import ask, cached_engine, greedy, oracle, random_prompt, tiny
from tests.runtime.tiny import drain, make_engine, make_hf, save_hf

LLAMA32 = dict(
    rope_type="llama3", rope_theta=500000.0, factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)  # fmt: skip


class Recorder:
    """The sampler, which keeps the scores it was given."""

    def __init__(self):
        self.logits, self.outputs, self.sample = [], [], Sampler()

    def __call__(self, logits, states):
        self.logits += list(logits.clone())
        self.outputs += [list(state.output_token_ids) for state in states]
        return self.sample(logits, states)


@pytest.mark.parametrize("manager", [BlockManager, PrefixCachingBlockManager])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e4])
@pytest.mark.parametrize("block_size", [4, 16])
def test_b50_chunks_never_read_what_is_not_written(manager, poison, block_size):
    scores = {}
    for chunk in (1, 7, 16, 50):
        recorder = Recorder()
        engine = make_engine(
            tiny(), allocator=manager(64, block_size), poison=poison, sampler=recorder, max_num_seqs=1,
            max_num_batched_tokens=chunk,
        )  # fmt: skip
        ask(engine, random_prompt(50), max_tokens=5, ignore_eos=True)
        scores[chunk] = torch.stack(recorder.logits)  # [5, vocab_size]
    for chunk, logits in scores.items():
        assert torch.isfinite(logits).all()
        torch.testing.assert_close(logits, scores[50], atol=1e-5, rtol=1e-5, msg=f"chunks of {chunk}")


@pytest.mark.parametrize("poison", [float("nan"), 1e4])
def test_b50_requests_of_one_batch_never_read_each_other(poison):
    engine = make_engine(tiny(), poison=poison, max_num_batched_tokens=16, num_blocks=128)
    for i in range(6):
        engine.add_request(str(i), random_prompt(3 + 9 * i, i), greedy())
    done = drain(engine)
    for i in range(6):
        assert done[str(i)].outputs[0].token_ids == oracle(tiny(), random_prompt(3 + 9 * i, i), greedy())


def config(**changes) -> ModelConfig:
    plain = dict(
        architectures=["LlamaForCausalLM"], vocab_size=64, hidden_size=64, intermediate_size=64,
        num_hidden_layers=1, num_attention_heads=2, rope_theta=10000.0,
    )  # fmt: skip
    return ModelConfig.from_dict(plain | changes)


def angles_in(dtype: torch.dtype) -> torch.Tensor:
    """A table built in a narrow format throughout: [positions, head_dim / 2]."""
    inv_freq = 10000.0 ** -(torch.arange(0, 32, 2).double() / 32)
    return torch.arange(2048).to(dtype)[:, None] * inv_freq.to(dtype)


@pytest.mark.parametrize("to", [torch.float32, torch.bfloat16, torch.float16])
def test_b51_rotary_angles_are_float32_whatever_the_model_is(to):
    model = Transformer(config()).to(to)
    cos, sin = model.rotary(torch.arange(2048))
    assert cos.dtype == sin.dtype == torch.float32
    exact = angles_in(torch.float64)
    assert float(exact[1857, 1]) == pytest.approx(1044.2678, abs=1e-4)
    assert (cos[:, 0, :16].double() - exact.cos()).abs().max() < 2e-4
    assert (sin[:, 0, :16].double() - exact.sin()).abs().max() < 2e-4


@pytest.mark.parametrize(
    ("dtype", "angle", "error"), [(torch.float16, 1045.0, 0.782), (torch.bfloat16, 1040.0, 1.997)]
)
def test_b51_what_a_narrow_table_would_do(dtype, angle, error):
    narrow = angles_in(dtype)
    assert float(narrow[1857, 1]) == angle
    worst = (narrow.double().cos() - angles_in(torch.float64).cos()).abs().max()
    assert float(worst) == pytest.approx(error, abs=3e-3)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_b52_llama3_scaling_equals_transformers(head_dim):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    hf = LlamaConfig(head_dim=head_dim, rope_parameters=LLAMA32, max_position_embeddings=131072)
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](hf, "cpu")
    ours = RotaryEmbedding(config(head_dim=head_dim, rope_scaling=LLAMA32, rope_theta=500000.0)).inv_freq
    torch.testing.assert_close(ours, expected, atol=0, rtol=1e-6)
    plain = RotaryEmbedding(config(head_dim=head_dim, rope_theta=500000.0)).inv_freq
    wavelengths = 2 * torch.pi / plain
    assert torch.allclose(ours[wavelengths > 8192], plain[wavelengths > 8192] / 32)
    assert torch.equal(ours[wavelengths < 8192 / 4], plain[wavelengths < 8192 / 4])


def test_b53_head_dim_is_its_own_number(tmp_path):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from shared.weights import load_model

    torch.manual_seed(0)
    hf = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=64, hidden_size=1024, intermediate_size=64, num_hidden_layers=1, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, initializer_range=0.2,
    )).eval()  # fmt: skip
    hf.save_pretrained(tmp_path)
    model = load_model(tmp_path)
    attention = model.layers[0].self_attn
    assert attention.q_proj.out_features == attention.o_proj.in_features == 2048
    assert attention.k_proj.out_features == 1024
    recorder = Recorder()  # the scale is 128 ** -0.5, or the scores would differ
    engine = make_engine(model, sampler=recorder)
    ask(engine, [t % 64 for t in random_prompt(20)], max_tokens=1)
    with torch.no_grad():
        expected = hf(torch.tensor([[t % 64 for t in random_prompt(20)]])).logits[0, -1]
    torch.testing.assert_close(recorder.logits[0], expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("changes", [{}, {"head_dim": None}])
def test_b53_without_a_head_dim_it_follows_from_the_heads(changes):
    assert config(hidden_size=96, num_attention_heads=4, **changes).head_dim == 24


def test_b53_null_head_dim_equals_transformers(tmp_path):
    from shared.weights import load_model

    model, hf = load_model(save_hf("llama-head-dim-null", tmp_path)), make_hf("llama-head-dim-null")
    recorder = Recorder()
    ask(make_engine(model, sampler=recorder), random_prompt(20), max_tokens=1)
    with torch.no_grad():
        expected = hf(torch.tensor([random_prompt(20)])).logits[0, -1]
    torch.testing.assert_close(recorder.logits[0], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("budget", [512, 4096])
def test_b54_only_wanted_positions_are_scored(budget):
    model, rows = tiny(vocab_size=32000), []
    engine = make_engine(
        model, num_blocks=40, block_size=128, max_model_len=4200, max_num_batched_tokens=budget
    )
    hook = model.lm_head.register_forward_pre_hook(lambda module, inputs: rows.append(len(inputs[0])))
    try:
        ask(engine, random_prompt(4096), max_tokens=2, ignore_eos=True)
    finally:
        hook.remove()
    assert rows == [0] * (4096 // budget - 1) + [1, 1]


def test_b54_one_row_for_each_request_that_samples():
    model, rows = tiny(), []
    engine = make_engine(model, max_num_batched_tokens=20)
    hook = model.lm_head.register_forward_pre_hook(lambda module, inputs: rows.append(len(inputs[0])))
    try:
        for i in range(3):
            engine.add_request(str(i), random_prompt(9, i), greedy(3, ignore_eos=True))
        drain(engine)
    finally:
        hook.remove()
    assert rows == [len(step.new_tokens) for step in engine.trace.steps] and max(rows) == 3


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3, "frequency_penalty": 1.0}])
@pytest.mark.parametrize("preempted", [False, True])
def test_b55_chunks_before_the_last_sample_nothing(options, preempted):
    recorder = Recorder()
    engine = cached_engine(tiny(), sampler=recorder, max_num_seqs=2, max_num_batched_tokens=8)
    engine.add_request("r", random_prompt(20), greedy(6, ignore_eos=True, **options))
    chunks = 0
    while not recorder.outputs:
        chunks += 1
        reports = engine.step()
        request = engine.scheduler.running[0]
        assert len(reports) == len(request.output_token_ids) == len(recorder.outputs) == (chunks == 3)
        assert not request.logprobs and request.times.first_token is None or chunks == 3
    if preempted:
        engine.scheduler._preempt(request, SchedulerOutput())
        engine.scheduler.allocator.reset_prefix_cache()
    answer = drain(engine)["r"].outputs[0].token_ids
    assert answer == oracle(tiny(), random_prompt(20), greedy(6, ignore_eos=True, **options))
    assert recorder.outputs == [answer[:i] for i in range(6)]  # each call saw one token more, none twice
