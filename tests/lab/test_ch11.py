"""Chapter 11's simulator, driven without a kernel, and what its checks, counts and measurements promise."""

from __future__ import annotations

import pytest
import torch

from shared.group import DistributedGroup
from shared.lab.chapters import ch11, ch11_measure, ch11_shards
from shared.lab.chapters.ch11_ranks import SHAPES, num_parameters, together
from shared.lab.evidence import evidence
from shared.model import CausalAttention, ModelConfig, Transformer
from shared.parallel import Shard, connect, load_shard
from tests.lab.stepping import assert_explains, assert_goes_back_and_resets, frames
from tests.runtime.ranks import group_of, save_model


def stepper(**inputs):
    made = ch11_shards.layer_stepper(Shard.of)
    for name, value in inputs.items():
        made.fields[name].value = value
    return made


# The simulator


def test_a_layer_ends_with_two_sums_and_all_weights_read():
    told = frames(stepper())
    assert len(told) == len(ch11_shards.OPERATIONS)
    assert "0 of 2 all-reduces, 0 bytes handed over" in told[4] and "1 of 2 all-reduces, 11,520 bytes" in told[5]
    assert "2 of 2 all-reduces, 23,040 bytes handed over by each rank" in told[-1]
    config = SHAPES["SmolLM2-135M"]
    with torch.device("meta"):
        layer = Transformer(config).layers[0]
    whole = sum(parameter.numel() for parameter in layer.parameters())
    shards = [Shard.of(config, rank, 2) for rank in range(2)]
    read = [sum(each.weights(shard) for each in ch11_shards.OPERATIONS) for shard in shards]
    assert sum(read) == whole + 2 * config.hidden_size  # both norms are read by both ranks
    assert f"{read[0]:,}" in told[-1] and f"{read[1]:,}" in told[-1]


def test_marks_say_what_a_rank_holds_without_colour():
    told = frames(stepper())
    assert "= whole [5, 576]" in told[0] and "/ part [5, 640]" in told[2] and "/ part [5, 320]" in told[2]
    assert "+ summand [5, 576]" in told[4] and "= whole" in told[5]


def test_one_rank_sends_nothing():
    told = frames(stepper(ranks="1"))
    assert all("it holds everything and sends nothing" in frame for frame in told)


def test_copies_and_uneven_heads_are_told():
    assert "3 heads are kept 6 times" in frames(stepper(ranks="6"))[0]
    assert "ranks have 3 to 6 of them" in frames(stepper())[0]
    assert "Fewer key-value heads" not in frames(stepper(model="Llama-3.1-8B", ranks="8"))[0]


@pytest.mark.parametrize(("name", "value", "words"), [
    ("ranks", "4", "num_key_value_heads=3, or a multiple"), ("ranks", "0", "Ranks: 0 is not between"),
    ("tokens", "x", "is not a whole number"),
])  # fmt: skip
def test_bad_input_is_explained(name, value, words):
    made = stepper(**{name: value})
    assert_explains(made, name, words, good="2")


def test_steps_go_back():
    assert_goes_back_and_resets(stepper())


def test_the_sum_of_more_tokens_and_smaller_numbers():
    assert "23,040 bytes handed over" in frames(stepper(tokens="10", dtype="bfloat16"))[-1]


# The counts that the exercise asks for are those of the runtime


class Counting(DistributedGroup):
    handed = 0

    def all_reduce(self, x):
        self.handed += x.nbytes
        return super().all_reduce(x)

    def all_gather(self, x):
        self.handed += x.nbytes
        return super().all_gather(x)


@pytest.mark.parametrize(("size", "tokens", "rows"), [(2, 7, 1), (4, 7, 7), (3, 1, 1)])
def test_the_bytes_of_the_exercise_are_those_that_ranks_hand_over(tmp_path, size, tokens, rows):
    folder = save_model(tmp_path, "Llama", vocab_size=131, num_key_value_heads=4)

    def work(rank, store):
        model, shard = load_shard(folder, rank, size)
        group = Counting(store, rank, size, torch.device("cpu"), 20.0)
        connect(model, shard, group)
        model.logits(model(torch.arange(tokens), torch.arange(tokens), CausalAttention())[:rows])
        return group.handed

    assert together(size, work) == [ch11.handed_over(2, 48, 131, size, tokens, rows, 4)] * size


def test_an_error_on_one_rank_reaches_the_caller():
    def work(rank, store):
        group_of(rank, 2, store)
        raise ValueError(f"rank {rank}")

    with pytest.raises(ValueError, match="rank"):
        together(2, work)


def test_the_shapes_have_the_sizes_that_their_names_say():
    counts = {name: num_parameters(config) for name, config in SHAPES.items()}
    assert counts["SmolLM2-135M"] == 134_515_008 and counts["Llama-3.1-8B"] == 8_030_261_248
    assert counts["Llama-3.1-70B"] == 70_553_706_496
    # Qwen's biases are left out
    assert 493_000_000 < counts["Qwen2.5-0.5B"] < 495_000_000


# Measurements and the model of links


def test_the_modelled_step_grows_with_slower_links_and_ends_at_the_memory():
    config: ModelConfig = SHAPES["Llama-3.1-70B"]
    parameters = num_parameters(config)
    alone = ch11_measure.modelled_step(parameters, config, 1, ch11_measure.LINKS[0])
    assert alone == pytest.approx(parameters * 2 / ch11_measure.MEMORY_BANDWIDTH)
    steps = [ch11_measure.modelled_step(parameters, config, 8, link) for link in ch11_measure.LINKS]
    assert steps == sorted(steps) and all(alone / 8 < step < alone for step in steps)


@pytest.mark.parametrize("rows", [1, 8])
def test_the_measured_batch_is_a_decode_step(rows):
    batch = ch11_measure.decode_batch(rows)
    assert batch.query_lens == (1,) * rows and len(set(batch.slot_mapping.tolist())) == rows
    times = ch11_measure.step_times("nothing", lambda batch: torch.zeros(1), rows, n=3)
    assert times.n == 3 and times.unit == "ms" and 0 <= times.low <= times.median <= times.high


def test_the_saved_evidence_of_this_chapter_is_complete():
    record = evidence("11_tensor_parallelism")
    assert record["command"] == "python -m shared.lab.chapters.ch11_measure" and len(record["results"]) == 6
    assert all(result["low"] <= result["median"] <= result["high"] for result in record["results"])
