"""Known faults of inference engines: from tokens to text and back."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from shared.bpe import byte_alphabet
from shared.errors import InvalidRequestError
from shared.request import RequestLimits
from shared.tokenizer import Tokenizer
from tests.known_bugs.helpers import END, ask, fixed, saying
from tests.runtime.tiny import VOCAB, ScriptedRunner, drain, make_engine, run

TEXTS = [
    "engine. It is",
    "  two  spaces",
    " leading",
    "trailing ",
    "Hi 👍🏽 du",
    "日本 語",
    "a\n b",
    "",
    "é è",
]


def sentencepiece(kind: str) -> tokenizers.Tokenizer:
    """Words carry the space before them as ▁, and bytes without a token of their own are <0x..>."""
    words = ["▁engine", ".", "▁It", "▁is", "▁", "▁two", "▁a", *"abcdeghilnoprstuw"]
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("<|im_end|>", 0.0)]
    pieces += [(f"<0x{byte:02X}>", -10.0) for byte in range(256)] + [
        (word, -1.0 - len(word) / 10) for word in words
    ]
    library = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    if kind == "metaspace":
        library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        library.decoder = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")]
        )
    else:
        library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        library.decoder = decoders.Sequence([
            decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0),
        ])  # fmt: skip
    library.add_special_tokens(["<unk>", "<s>", "<|im_end|>"])
    return library


def byte_level() -> tokenizers.Tokenizer:
    """One token a byte, after the special ones."""
    special = ["<unk>", "<s>", "<|im_end|>"]
    library = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate([*special, *byte_alphabet()])}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(special)
    return library


@pytest.fixture(scope="module", params=["metaspace", "replace", "bytes"])
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp(request.param)
    library = byte_level() if request.param == "bytes" else sentencepiece(request.param)
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    return Tokenizer(folder)


def engine_saying(tokenizer: Tokenizer, ids: list[int]):
    size = tokenizer.vocab_size
    engine = make_engine(runner=ScriptedRunner(ids, size, tokenizer.eos_token_id), tokenizer=tokenizer)
    engine.limits = RequestLimits(size, engine.limits.max_model_len)
    return engine


def assert_streams(tokenizer: Tokenizer, ids: list[int]) -> None:
    """Every prefix of what is streamed is a prefix of decoding at once, and the end is the whole."""
    detokenizer, shown = tokenizer.detokenizer(), ""
    for k, token in enumerate(ids, start=1):
        shown += detokenizer.push(token)
        assert tokenizer.decode(ids[:k]).startswith(shown)
    assert shown + detokenizer.flush() == tokenizer.decode(ids)


@pytest.mark.parametrize("text", TEXTS)
def test_b01_spaces_survive_one_token_at_a_time(tokenizer, text):
    ids = tokenizer.encode(text)
    assert_streams(tokenizer, ids)
    if ids:
        asked = ask(engine_saying(tokenizer, ids), prompt=[5], max_tokens=len(ids))
        assert asked.text == tokenizer.decode(ids) == "".join(asked.deltas)
    if text == "engine. It is":
        assert tokenizer.decode(ids) == text


@fixed
@given(data=st.data())
def test_b01_any_tokens_stream_to_their_whole_text(tokenizer, data):
    assert_streams(tokenizer, data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12)))


@pytest.mark.parametrize("character", ["é", "語", "👍", "👍🏽"])
def test_b02_a_character_cut_by_the_length_is_one_mark_in_both_modes(tokenizer, character):
    """The policy is decode's: text == decode(ids), whose unfinished character is U+FFFD."""
    before = tokenizer.encode("Hi ")
    whole = tokenizer.encode("Hi " + character)
    for cut in range(len(before), len(whole)):
        asked = ask(engine_saying(tokenizer, whole), prompt=[5], max_tokens=cut)
        assert asked.text == "".join(asked.deltas) == tokenizer.decode(whole[:cut])
        assert asked.text.startswith("Hi") and asked.why == "length"
    if tokenizer.is_byte_level and len(character) == 1:
        cut = ask(engine_saying(tokenizer, whole), prompt=[5], max_tokens=len(before) + 1)
        assert cut.text == "Hi \ufffd"


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_b03_the_last_token_is_kept_when_the_length_ends_it(tokenizer, max_tokens):
    ids = tokenizer.encode("abcd")[:4]
    asked = ask(engine_saying(tokenizer, ids), prompt=[5], max_tokens=max_tokens)
    assert asked.ids == ids[:max_tokens] and asked.why == "length"
    assert asked.text == tokenizer.decode(ids[:max_tokens])


@pytest.mark.parametrize("skip", [True, False])
def test_b04_the_end_token_is_not_text(tokenizer, skip):
    ids = tokenizer.encode("ab")
    asked = ask(engine_saying(tokenizer, ids), prompt=[5], max_tokens=20, skip_special_tokens=skip)
    assert asked.ids == [*ids, tokenizer.eos_token_id] and asked.why == "stop"
    assert asked.text == tokenizer.decode(ids)


def test_b04_a_special_token_in_the_middle_shows_only_on_request():
    says = ("a", "<special>", "b")
    assert ask(saying(*says)).text == "ab"
    assert ask(saying(*says), skip_special_tokens=False).text == "a<special>b"
    shown = ask(saying(*says), skip_special_tokens=False, include_stop_str_in_output=True)
    assert shown.text == "a<special>b<|im_end|>" and shown.ids[-1] == END


def test_b05_the_last_id_of_the_vocabulary_is_a_token_and_the_next_is_not():
    engine = saying("a", "b")
    assert ask(engine, prompt=[VOCAB - 1]).text == "ab"
    for bad in (VOCAB, -1, 2**40, True, 1.0, "5", None):
        with pytest.raises(InvalidRequestError) as refused:
            engine.add_request("bad", [5, bad, 6])
        assert refused.value.field == "prompt_token_ids" and isinstance(refused.value, ValueError)
        assert not engine.has_unfinished_requests() and not engine.scheduler.waiting
        assert run(engine, [[VOCAB - 1]], None) and not drain(engine)


@pytest.mark.parametrize("option", ["stop_token_ids", "logit_bias"])
def test_b05_ids_in_options_are_checked_too(option):
    engine = saying("a", "b")
    values = {VOCAB - 1: 1.0}, {VOCAB: 1.0}
    good, bad = values if option == "logit_bias" else map(list, values)
    assert ask(engine, **{option: good}).text == "ab"
    with pytest.raises(InvalidRequestError, match=option):
        ask(engine, **{option: bad})
    assert ask(engine).text == "ab"
