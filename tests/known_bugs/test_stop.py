"""Known faults of inference engines: when an answer ends, and what text is left of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import InvalidRequestError
from shared.sampling_params import SamplingParams
from tests.known_bugs.helpers import (
    END,
    EOT,
    PIECES,
    SPECIAL,
    PieceTokenizer,
    ask,
    cached_engine,
    fixed,
    forced,
    greedy,
    oracle,
    plain_stop,
    random_prompt,
    saying,
    tiny,
)
from tests.runtime.tiny import VOCAB, drain, make_engine

S1 = 9


@pytest.mark.parametrize("ending", ["<|im_end|>", " length"])
@pytest.mark.parametrize("stop", [["TRE\nAAAAAAAA"], ["UNO DUE TRE!"], ["TREX", "E!", "DUE TRE DUE"]])
def test_b06_text_held_for_a_stop_string_is_shown_at_the_end(stop, ending):
    options = {"max_tokens": 3} if ending == " length" else {}
    asked = ask(saying("UNO", " DUE", " TRE", ending), stop=stop, **options)
    assert asked.text == "UNO DUE TRE"
    assert asked.why == ("length" if options else "stop") and asked.last.stop_reason is None


def test_b06_an_aborted_request_shows_what_was_held():
    engine = saying("UNO", " DUE", " TRE", "!")
    engine.add_request("a", [5], greedy(stop=[" DUE TRE?"]))
    for _ in range(3):
        engine.step()
    assert engine.abort("a").outputs[0].text == "UNO DUE TRE"


@pytest.mark.parametrize("skip", [True, False])
def test_b07_a_special_stop_token_takes_no_ordinary_text_with_it(skip):
    asked = ask(saying("a", "b", "c", "<special>"), stop_token_ids=[SPECIAL], skip_special_tokens=skip)
    assert asked.text == "abc" and asked.why == "stop" and asked.last.stop_reason == SPECIAL
    assert asked.ids[-1] == SPECIAL


def test_b07_an_ordinary_stop_token_takes_only_itself():
    asked = ask(saying("a", "bcd", "e"), stop_token_ids=[PIECES.index("<special>") + 1 + 26])
    assert asked.text == "a" and asked.why == "stop"
    shown = ask(saying("a", "bcd", "e"), stop_token_ids=[31], include_stop_str_in_output=True)
    assert shown.text == "abcd" and shown.last.stop_reason == 31


def forced_engine(*token_ids: int, **parts):
    tokenizer = PieceTokenizer([*PIECES, *map(chr, range(97, 123)), *["?"] * 97], eos_token_ids=(END, EOT))
    return make_engine(runner=forced(*token_ids), tokenizer=tokenizer, **parts)


@pytest.mark.parametrize("temperature", [0, 0.01])
@pytest.mark.parametrize("wanted", [END, EOT, S1])
@pytest.mark.parametrize("min_tokens", [0, 1, 5, 8])
def test_b08_min_tokens_holds_back_every_end(wanted, min_tokens, temperature):
    asked = ask(forced_engine(wanted, 7), stop_token_ids=[S1], min_tokens=min_tokens, max_tokens=8,
                temperature=temperature, seed=1)  # fmt: skip
    assert not {END, EOT, S1} & set(asked.ids[:min_tokens])
    if min_tokens < 8:
        assert len(asked.ids) == min_tokens + 1 and asked.ids[-1] == wanted and asked.why == "stop"
    else:
        assert len(asked.ids) == 8 and asked.why == "length"


def test_b08_the_other_ends_do_not_slip_in_when_one_is_held_back():
    asked = ask(forced_engine(END, EOT, S1, 7), stop_token_ids=[S1], min_tokens=5, max_tokens=8)
    assert asked.ids == [7] * 5 + [END]


def test_b08_a_logit_bias_does_not_bring_an_end_back():
    asked = ask(forced_engine(7), min_tokens=5, max_tokens=8, logit_bias={END: 100.0})
    assert asked.ids == [7] * 5 + [END]


@pytest.mark.parametrize("prompt_length", [1, 5, 10])
def test_b09_min_tokens_does_not_count_the_prompt(prompt_length):
    asked = ask(forced_engine(END, 7), prompt=[6] * prompt_length, min_tokens=5, max_tokens=20)
    assert len(asked.ids) >= 5 and asked.ids == [7] * 5 + [END]


@pytest.mark.parametrize("stop_string", ["aa", "aaaa"])
def test_b09_a_stop_string_waits_for_min_tokens_too(stop_string):
    asked = ask(forced_engine(5), stop=[stop_string], min_tokens=5, max_tokens=20)
    assert len(asked.ids) in (5, 6) and asked.why == "stop"


@pytest.mark.parametrize("wanted", [END, EOT])
def test_b10_ignore_eos_ignores_every_end_of_the_model(wanted):
    asked = ask(forced_engine(wanted), ignore_eos=True, max_tokens=7)
    assert asked.ids == [wanted] * 7 and asked.why == "length"
    own = ask(forced_engine(wanted), ignore_eos=True, stop_token_ids=[wanted], max_tokens=7)
    assert own.ids == [wanted] and own.why == "stop"


@pytest.mark.parametrize(
    ("says", "options", "why", "stop_reason"),
    [
        (("a", "<|im_end|>"), {"max_tokens": 9}, "stop", None),
        (("a", "b", "c", "d"), {"max_tokens": 3}, "length", None),
        (("a", "b", "<|im_end|>"), {"max_tokens": 3}, "stop", None),
        (("a", "bc", "d"), {"stop": ["bc"]}, "stop", "bc"),
        (("a", "b", "c"), {"stop": ["c"], "max_tokens": 3}, "stop", "c"),
        (("a", "b", "c"), {"stop": ["cd"], "max_tokens": 3}, "length", None),
        (("a", "b", "<special>"), {"stop_token_ids": [SPECIAL], "max_tokens": 3}, "stop", SPECIAL),
        (("a", "b", "<|im_end|>"), {"stop": ["ab"], "max_tokens": 2}, "stop", "ab"),
    ],
)  # fmt: skip
def test_b11_the_reason_is_the_one_that_ended_it(says, options, why, stop_reason):
    asked = ask(saying(*says), **options)
    assert (asked.why, asked.last.stop_reason) == (why, stop_reason)


def test_b11_the_length_of_the_model_is_a_length():
    assert ask(saying("a", "b", "c", "d", max_model_len=5), prompt=[5, 6], max_tokens=None).why == "length"


@pytest.mark.parametrize("bad", [VOCAB, VOCAB + 5, -1])
@pytest.mark.parametrize("first", ["good", "bad"])
def test_b12_an_unknown_stop_token_is_refused_and_disturbs_nobody(bad, first):
    alone = oracle(tiny(), random_prompt(6), greedy())
    engine = cached_engine(tiny())

    def add_bad():
        with pytest.raises(InvalidRequestError, match="stop_token_ids"):
            engine.add_request("A", random_prompt(5), greedy(stop_token_ids=[bad], min_tokens=3))

    if first == "bad":
        add_bad()
    engine.add_request("B", random_prompt(6), greedy())
    if first == "good":
        add_bad()
    assert drain(engine)["B"].outputs[0].token_ids == alone


def test_b12_min_tokens_masks_only_its_own_row():
    engine = forced_engine(END, 7)
    engine.add_request("A", [5], greedy(min_tokens=3, stop_token_ids=[S1]))
    engine.add_request("B", [5], greedy())
    done = drain(engine)
    assert done["A"].outputs[0].token_ids == [7, 7, 7, END] and done["B"].outputs[0].token_ids == [END]


@pytest.mark.parametrize("stop", [["ENDOFTEXT"], ["zz", "yy"], []])
def test_b13_text_that_cannot_start_a_stop_is_shown_at_once(stop):
    asked = ask(saying(*"abcdefghij"), stop=stop, max_tokens=10)
    assert asked.deltas == list("abcdefghij")


def test_b13_only_what_may_start_the_stop_is_held():
    asked = ask(saying("a", "xE", "N", "x", "b"), stop=["ENDOFTEXT"], max_tokens=5)
    assert asked.deltas == ["a", "x", "", "ENx", "b"]


def test_b14_a_stop_string_inside_a_token_cuts_the_text():
    """The engine's half; that the server passes it on is tested with the server."""
    says = ("It", " once", " was ", "a", "b", "c", "d", "e", "f", "g")
    asked = ask(saying(*says), stop=["was"])
    assert asked.text == "It once " and asked.why == "stop" and len(asked.ids) == 3
    assert ask(saying(*says), stop="was", include_stop_str_in_output=True).text == "It once was"


@fixed
@given(
    text=st.text("ab", min_size=1, max_size=12), data=st.data(),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)  # fmt: skip
def test_b06_b13_b14_any_cut_into_tokens_gives_the_same_text(text, stops, data):
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(text) - 1)))))
    pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)]) if i < j]
    asked = ask(saying(*pieces), stop=stops, max_tokens=20)
    cut = plain_stop(text, stops)
    assert asked.text == (text if cut is None else cut)
    assert (asked.last.stop_reason is None) == (cut is None)


def test_parameters_that_do_not_exist_are_an_error():
    with pytest.raises(TypeError):
        SamplingParams(stops=["a"])


@pytest.mark.parametrize("bad", [dict(stop_token_ids=[VOCAB]), dict(max_tokens=1000, ignore_eos=True)])
def test_b12_a_refused_request_does_not_change_what_the_engine_draws(bad):
    """A request without a seed gets the same one, whoever was refused before it."""
    draws = []
    for refused in (None, bad):
        engine = make_engine(runner=forced(others=10.0), num_blocks=20, max_model_len=2000)
        if refused:
            with pytest.raises(InvalidRequestError):
                engine.add_request("A", [5], SamplingParams(**refused))
        draws.append(ask(engine, temperature=1.0, max_tokens=10).ids)
    assert draws[0] == draws[1]
