"""Chapter 01's figures, driven without a kernel, and what its texts and measurements promise."""

from __future__ import annotations

import re

import pytest

from shared.bpe import BytePairEncoder, load_bpe, train_bpe
from shared.lab import evidence as evidence_module
from shared.lab.chapters import ch01
from shared.lab.evidence import evidence, evidence_lines, save_evidence
from shared.lab.machine import Measurement
from shared.lab.texts import RIGHTS, SCRIPTS, many_texts
from shared.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer("smollm2-135m")


@pytest.fixture(scope="module")
def encoder(tokenizer) -> BytePairEncoder:
    return load_bpe(tokenizer.folder)


def plain(markup: str) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", str(markup)).split())


def test_each_token_is_shown_with_id_and_bytes(tokenizer):
    text = plain(ch01.render_tokens(tokenizer, "Hi there"))
    ids = tokenizer.encode("Hi there")
    assert text.startswith("2 tokens for 8 characters, 8 bytes.") and "·there" in text
    for token_id in ids:
        assert f" {token_id} {tokenizer.token_bytes(token_id).hex(' ')}" in text


def test_parts_of_characters_and_special_tokens_are_marked_without_colour(tokenizer):
    pieces = ch01.pieces_of(tokenizer, tokenizer.encode("é 👋a<|im_end|>"))
    assert [piece.whole for piece in pieces] == [True, False, False, False, True, True]
    assert [piece.special for piece in pieces] == [False] * 5 + [True]
    markup = ch01.render_tokens(tokenizer, "👋<|im_end|>")
    assert "dashed" in markup and "double" in markup and "½" in markup


def test_a_chat_message_shows_what_the_template_adds(tokenizer):
    text = plain(ch01.render_tokens(tokenizer, "Hi", "chat message"))
    assert "31 tokens for 2 characters" in text and "The template adds 30." in text


def test_markup_in_a_text_stays_text(tokenizer):
    assert "<script>" not in ch01.render_tokens(tokenizer, "<script>x</script>")
    assert "<b>" not in ch01.render_merges(next(ch01.learning_states("<b> <b>")), 0)


@pytest.mark.parametrize("data, tail", [
    (b"", b""), (b"abc", b""), ("é".encode(), b""), (b"\xc3", b"\xc3"), (b"a\xf0\x9f\x91", b"\xf0\x9f\x91"),
    ("👋".encode(), b""), (b"\xe6\x97", b"\xe6\x97"), (b"\x80\x80", b""),
])  # fmt: skip
def test_unfinished_bytes(data, tail):
    assert ch01.unfinished(data) == tail


def test_the_explorer_follows_its_controls(tokenizer):
    explorer = ch01.token_explorer(tokenizer)
    explorer.fields["text"].value = "Bonjour"
    assert f"{len(tokenizer.encode('Bonjour'))} tokens for 7 characters" in plain(explorer.frame.value)
    explorer.fields["form"].value = "chat message"
    assert "The template adds" in plain(explorer.frame.value)
    last = explorer.frame.value
    explorer.fields["text"].value = ""
    assert explorer.frame.value == last and "characters" in explorer.fields.error.value
    explorer.fields["text"].value = "half \ud83d"
    assert "surrogate" in explorer.fields.error.value and explorer.frame.value == last


def test_stepping_through_learning_is_training(encoder):
    text = "the cat that ate the rat that ate the malt"
    states = list(ch01.learning_states(text))
    assert list(states[-1].done) == train_bpe(text, 1000)
    counts = [state.num_tokens for state in states]
    assert counts == sorted(counts, reverse=True) and counts[0] == len(text)


@pytest.mark.parametrize("text", ["Grüße aus Köln 👋", "In 2024 the rat", "x\x04y", "   ", "a"])
def test_stepping_through_encoding_is_encoding(encoder, text):
    last = list(ch01.encoding_states(text, encoder))[-1]
    assert [encoder.vocab[token] for word, _ in last.words for token in word] == encoder.encode(text)


def test_the_stepper_steps_back_resets_and_takes_own_text(encoder):
    stepper = ch01.merge_stepper(encoder)
    first = stepper.frame.value
    assert "0 merges" in plain(first) and "Next: the most frequent pair" in plain(first)
    stepper.step.click()
    second = stepper.frame.value
    assert "after 1 merge." in plain(second)
    stepper.end.click()
    assert "No pair is left to join." in plain(stepper.frame.value) and stepper.step.disabled
    stepper.slider.value = 1
    assert stepper.frame.value == second
    stepper.back.click()
    assert stepper.frame.value == first
    stepper.fields["text"].value = "ab ab"
    assert "5 tokens after 0 merges" in plain(stepper.frame.value)
    stepper.fields["mode"].value = ch01.APPLY
    assert "Next: the pair that was learned first" in plain(stepper.frame.value)
    stepper.reset.click()
    assert stepper.index == 0


def test_the_stepper_runs_the_readers_own_functions(encoder):
    from shared.bpe import count_pairs, merge_pair

    def count_backwards(words):
        return count_pairs({word: -times for word, times in words.items()})

    own = ch01.merge_stepper(encoder, count_backwards, merge_pair)
    own.step.click()
    usual = ch01.merge_stepper(encoder)
    usual.step.click()
    assert own.frame.value != usual.frame.value


def test_texts_are_many_different_and_the_same_each_time():
    texts = many_texts()
    assert texts == many_texts() and len(set(texts)) > 1000 and len(SCRIPTS) == 25
    joined = "".join(texts)
    assert all(any(chr(code) in joined for code in range(first, last + 1)) for first, last in SCRIPTS.values())
    assert all(text.encode() for text in RIGHTS.values())


def test_times_are_measured_with_count_and_spread(encoder, tokenizer):
    ours, library = ch01.encode_times(encoder, tokenizer, n=3)
    for result in (ours, library):
        assert result.n == 3 and 0 < result.low <= result.median <= result.high and result.unit == "ms"


def test_evidence_says_what_when_where_and_how(tmp_path, monkeypatch):
    monkeypatch.setattr(evidence_module, "FOLDER", tmp_path / "evidence")
    save_evidence("x", "a thing", "python -m thing", [Measurement("speed", 2.0, 1.0, 3.0, 5, "ms")])
    record = evidence("x")
    assert {"what", "command", "date", "machine", "results"} <= record.keys()
    assert "speed: 2.0 ms (median of 5, 1.0 to 3.0)" in evidence_lines("x")


def test_the_saved_evidence_of_this_chapter_is_complete():
    record = evidence("01_tokenization")
    assert record["command"] == "python -m shared.lab.chapters.ch01" and len(record["results"]) == 2
    assert all(result["low"] <= result["median"] <= result["high"] for result in record["results"])
