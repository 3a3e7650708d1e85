"""Our encoder against the library, `Tokenizer` against transformers, streamed against whole text."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from shared.bpe import BytePairEncoder, load_bpe, split_words, train_bpe
from shared.errors import InvalidRequestError, ModelLoadError
from shared.tokenizer import Tokenizer
from shared.weights import resolve

SAMPLES = [
    "The quick brown fox jumps over the lazy dog.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich",
    "Съешь ещё этих мягких французских булок", "Ξεσκεπάζω τὴν ψυχοφθόρα βδελυγμία", "דג סקרן שט בים מאוכזב",
    "نص حكيم له سر قاطع وذو شأن عظيم", "ऋषियों को सताने वाले दुष्ट राक्षसों",
    "我能吞下玻璃而不伤身体。", "いろはにほへと ちりぬるを", "키스의 고유조건은 입술끼리 만나야 하고",
    "เป็นมนุษย์สุดประเสริฐ", "ᚠᛇᚻ᛫ᛒᛦᚦ᛫ᚠᚱᚩᚠᚢᚱ", "👩‍👩‍👧‍👦 👍🏽 🇺🇳 ✨",
    "e\u0301 vs é, ﬁ, ½, ², Ⅷ, 一二三, ٣", "def f(x):\n\treturn x ** 2  # don't, we've, I'LL\r\n",
    "https://example.com/a?b=c&d=%20#e", "x" * 60, " " * 17, "\n\n\n \n",
]  # fmt: skip
WHITESPACE = [" ", "  ", "\t", "\n", "\r\n", "\u00a0", "\u3000", "\u2028", "\u200b", "\u0085"]
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>", "<|im_end", "<|im_start|><|im_end|>"]


def many_strings() -> list[str]:
    """More than a thousand strings: samples, neighbours with every kind of space, random text."""
    draw = random.Random(0)
    assigned = [chr(i) for i in range(0x110000) if unicodedata.category(chr(i)) not in ("Cn", "Cs", "Co")]
    strings = [
        "",
        *SAMPLES,
        *WHITESPACE,
        *SPECIAL,
        *map(chr, range(256)),
        "don't 'S 's",
        "2024-01-02 3.14159 ½ 10²",
    ]
    strings += [a + space + b for a, b in itertools.pairwise(SAMPLES) for space in WHITESPACE]
    strings += [text[:i] + special + text[i:] for text in SAMPLES for special in SPECIAL for i in (0, 3)]
    strings += ["".join(draw.choices(assigned, k=draw.randint(1, 30))) for _ in range(400)]
    strings += ["".join(draw.choices("ab 12\t\n.'!é\x00\x04", k=draw.randint(1, 40))) for _ in range(400)]
    return strings


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer("smollm2-135m")


@pytest.fixture(scope="module")
def reference():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(resolve("smollm2-135m"))


# Byte pair encoding from scratch


def test_training_learns_the_most_frequent_pair_first():
    assert train_bpe("aab aab aab xy", 2) == [(b"a", b"a"), (b"aa", b"b")]
    assert train_bpe("low lower lowest", 3)[:2] == [(b"l", b"o"), (b"lo", b"w")]


def test_training_stops_when_every_word_is_one_token():
    merges = train_bpe("abc abc", 1000)
    assert merges == train_bpe("abc abc", len(merges)) and len(merges) == 3  # "abc" and " abc" in full
    assert train_bpe("", 5) == train_bpe("a", 5) == []


def test_training_counts_words_as_often_as_they_occur():
    assert train_bpe("cd" + "\nab" * 3, 1) == [(b"a", b"b")]


def test_merges_apply_in_the_order_learned_and_never_cross_words():
    encoder = BytePairEncoder([(b"b", b"c"), (b"a", b"b"), (b"a", b"bc")])
    assert [encoder.token_of[i] for i in encoder.encode("abc ab")] == [b"abc", b" ", b"ab"]
    assert encoder.encode("aaa") == [97, 97, 97]
    assert BytePairEncoder([(b"a", b"a")]).encode("aaa") == [256, 97]


def test_more_merges_never_cost_more_tokens():
    text = " ".join(SAMPLES)
    merges = train_bpe(text, 300)
    lengths = [len(BytePairEncoder(merges[:n]).encode(text)) for n in (0, 50, 150, 300)]
    assert lengths[0] == len(text.encode()) and lengths == sorted(lengths, reverse=True)


@given(st.text(), st.text())
def test_own_vocabulary_round_trips_any_text(corpus, text):
    encoder = BytePairEncoder(train_bpe(corpus, 20), special_tokens={"<end>": 5000})
    assert encoder.decode(encoder.encode(text)) == text
    assert encoder.encode(text + "<end>")[-1] == 5000


def test_split_keeps_every_character():
    for text in many_strings():
        assert "".join(split_words(text)) == text


def test_ids_equal_the_tokenizers_library_on_many_scripts():
    folder = resolve("smollm2-135m")
    ours, library = load_bpe(folder), tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    strings = many_strings()
    assert len(set(strings)) > 1000
    wrong = [
        text for text in strings if ours.encode(text) != library.encode(text, add_special_tokens=False).ids
    ]
    assert wrong == []
    for text in strings:
        ids = ours.encode(text)
        assert ours.decode(ids) == library.decode(ids, skip_special_tokens=False)


def test_bytes_that_the_vocabulary_lacks_are_dropped_as_in_the_library(tokenizer):
    assert tokenizer.encode("!\x04!") == load_bpe(tokenizer.folder).encode("!\x04!") == tokenizer.encode("!!")


# The model's tokenizer


def test_tokenizer_equals_transformers(tokenizer, reference):
    strings = many_strings()
    assert [tokenizer.encode(text) for text in strings] == reference(strings)["input_ids"]
    for text in strings:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)
        assert tokenizer.decode(ids, skip_special_tokens=False) == reference.decode(ids)


def test_special_tokens_and_ids(tokenizer, reference):
    assert tokenizer.vocab_size == len(reference) == 49152
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2) and tokenizer.eos_token_ids == (2,)
    assert tokenizer.special_ids == set(reference.added_tokens_decoder)
    assert tokenizer.decode([19556, 2]) == "Hello"
    assert tokenizer.decode([19556, 2], skip_special_tokens=False) == "Hello<|im_end|>"


def test_token_bytes_join_to_the_text(tokenizer):
    for text in SAMPLES:
        assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()
    assert tokenizer.token_text(tokenizer.encode("👍")[0]) == "\ufffd"
    assert tokenizer.token_bytes(2) == b"<|im_end|>"
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""


def test_needs_neither_torch_nor_transformers():
    code = (
        "import sys; from shared.tokenizer import Tokenizer; Tokenizer('smollm2-135m').encode('a'); "
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.parametrize("text", [None, 3, b"bytes", ["a"], "half \ud83d a pair", "\udc00"])
def test_text_that_cannot_be_encoded_is_a_typed_error(tokenizer, text):
    for encode in (tokenizer.encode, load_bpe(tokenizer.folder).encode):
        with pytest.raises(InvalidRequestError) as caught:
            encode(text)
        assert caught.value.field == "prompt"


def test_folder_without_or_with_a_broken_tokenizer(tmp_path):
    for content in (None, "{", "[]"):
        if content:
            (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(ModelLoadError, match="tokenizer.json"):
            Tokenizer(tmp_path)


def save_tokenizer(library: tokenizers.Tokenizer, folder: Path, **files: dict) -> Tokenizer:
    """A model folder around a tokenizer made on the fly; `config={...}` writes config.json, and so on."""
    library.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return Tokenizer(folder)


def test_end_tokens_are_collected_from_all_settings(tmp_path):
    library = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "</s>": 2}, []))
    library.add_special_tokens(["</s>"])
    made = save_tokenizer(
        library, tmp_path, config={"eos_token_id": [1, 2]}, generation_config={"eos_token_id": [0, 1]},
        tokenizer_config={"eos_token": {"content": "</s>", "special": True}},
    )  # fmt: skip
    assert set(made.eos_token_ids) == {0, 1, 2} and len(made.eos_token_ids) == 3
    assert made.special_tokens == {"eos_token": "</s>"} and (made.eos_token_id, made.bos_token_id) == (
        2,
        None,
    )


def test_a_model_without_any_end_token(tmp_path):
    made = save_tokenizer(
        tokenizers.Tokenizer(models.BPE({"a": 0}, [])), tmp_path, config={"eos_token_id": None}
    )
    assert made.eos_token_ids == ()


def test_a_begin_token_goes_before_a_plain_prompt_but_not_before_a_chat(tmp_path):
    from transformers import PreTrainedTokenizerFast

    library = tokenizers.Tokenizer(models.BPE({"<s>": 0, "a": 1, "b": 2, "u": 3}, []))
    library.add_special_tokens(["<s>"])
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    settings_ = {
        "bos_token": "<s>", "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}",
    }  # fmt: skip
    made = save_tokenizer(library, tmp_path, tokenizer_config=settings_)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert made.encode("ab") == theirs("ab")["input_ids"] == [0, 1, 2]
    assert made.encode("ab", add_special_tokens=False) == [1, 2]
    chat = [{"role": "user", "content": "ab"}]
    assert made.encode_chat(chat) == theirs.apply_chat_template(chat, return_dict=False) == [0, 1, 2]


# The chat template

CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <b>&\n\n  there'\"  "}],
    [
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "Yes. 👍"},
        {"role": "user", "content": "\n"},
    ],
]
TEMPLATES = {
    "loop": """{% for m in messages %}
  {% if m.role == 'system' %}{% continue %}{% endif %}
    {{ m.content | trim }}
{% endfor %}{{ eos_token }}""",
    "json": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{% if tools is none %}none{% endif %}",
    "namespace": """{%- set ns = namespace(n=0) -%}
{%- for m in messages -%}{%- set ns.n = ns.n + 1 -%}{{ ns.n }}{{ m['content'] }}{%- endfor -%}
{%- if add_generation_prompt %}A:{{ enable_thinking if enable_thinking is defined }}{% endif %}""",
    "date": "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% endif %}{{ bos_token }}",
}


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("prompt", [True, False])
def test_chat_template_of_the_default_model_equals_transformers(tokenizer, reference, chat, prompt):
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=prompt)
    assert text == reference.apply_chat_template(chat, add_generation_prompt=prompt, tokenize=False)
    ids = reference.apply_chat_template(chat, add_generation_prompt=prompt, return_dict=False)
    assert tokenizer.encode_chat(chat, add_generation_prompt=prompt) == ids


@pytest.mark.parametrize("name", TEMPLATES)
def test_other_templates_equal_transformers(tmp_path, reference, tokenizer, name):
    (tmp_path / "tokenizer.json").write_bytes((tokenizer.folder / "tokenizer.json").read_bytes())
    settings_ = json.loads((tokenizer.folder / "tokenizer_config.json").read_text())
    for form in (TEMPLATES[name], [{"name": "default", "template": TEMPLATES[name]}]):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings_ | {"chat_template": form}))
        for chat in CHATS:
            expected = reference.apply_chat_template(
                chat,
                chat_template=TEMPLATES[name],
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=False,
            )
            assert Tokenizer(tmp_path).apply_chat_template(chat, enable_thinking=False) == expected


def test_a_template_may_refuse_or_be_missing_or_broken(tmp_path):
    library = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    with pytest.raises(InvalidRequestError, match="has a chat template"):
        save_tokenizer(library, tmp_path).apply_chat_template(CHATS[0])
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        Tokenizer(tmp_path).apply_chat_template(CHATS[0])
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ModelLoadError, match="chat template"):
        Tokenizer(tmp_path).apply_chat_template(CHATS[0])
    (tmp_path / "chat_template.jinja").write_text("{{ ''.__class__.__mro__ }}")
    with pytest.raises(InvalidRequestError, match="unsafe"):
        Tokenizer(tmp_path).apply_chat_template(CHATS[0])


USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize("messages, field", [
    (None, "messages"), ("hello", "messages"), ([], "messages"), (USER, "messages"), (["x"], "messages[0]"),
    ([USER, {"role": "user"}], "messages[1].content"), ([{"content": "x"}], "messages[0].role"),
    ([{"role": "robot", "content": "x"}], "messages[0].role"),
    ([{"role": 1, "content": "x"}], "messages[0].role"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    ([{"role": "user", "content": "\ud83d"}], "messages[0].content"),
])  # fmt: skip
def test_bad_messages_are_typed_errors(tokenizer, messages, field):
    with pytest.raises(InvalidRequestError) as caught:
        tokenizer.apply_chat_template(messages)
    assert caught.value.field == field


# Text as it streams


def sentencepiece(folder: Path, decoder) -> Tokenizer:
    """Leading-space markers, byte tokens, and special tokens: the shape of Llama 2's tokenizer."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    pieces += ["▁", "▁▁", "▁engine", "engine", ".", "▁It", "▁is", "ü", "▁ü", "."]
    library = tokenizers.Tokenizer(
        models.BPE({p: i for i, p in enumerate(dict.fromkeys(pieces))}, [], byte_fallback=True)
    )
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoder
    return save_tokenizer(library, folder)


LLAMA2_DECODER = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)
KINDS = {"byte-level": None, "metaspace": decoders.Metaspace(), "byte-fallback": LLAMA2_DECODER}


@pytest.fixture(scope="module", params=KINDS)
def any_tokenizer(request, tmp_path_factory, tokenizer) -> Tokenizer:
    decoder = KINDS[request.param]
    return sentencepiece(tmp_path_factory.mktemp("sp"), decoder) if decoder else tokenizer


def assert_streams(tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    """At every cut: what was shown is a prefix of the whole text, and the flush makes them equal."""
    detokenizer, shown = tokenizer.detokenizer(skip), ""
    for cut, token_id in enumerate(ids, 1):
        shown += detokenizer.push(token_id)
        whole = tokenizer.decode(ids[:cut], skip_special_tokens=skip)
        assert whole.startswith(shown)
        if cut % 7 == 0 or cut == len(ids):
            cut_short = tokenizer.detokenizer(skip)
            pieces = [cut_short.push(i) for i in ids[:cut]] + [cut_short.flush()]
            assert "".join(pieces) == whole and cut_short.flush() == ""
    assert shown + detokenizer.flush() == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(deadline=None, max_examples=150)
@given(data=st.data(), skip=st.booleans())
def test_random_ids_stream_to_the_whole_text(any_tokenizer, data, skip):
    low = st.integers(0, min(300, any_tokenizer.vocab_size) - 1)  # special tokens and single bytes
    high = st.integers(
        max(0, any_tokenizer.vocab_size - 12), any_tokenizer.vocab_size + 3
    )  # also ids of no token
    assert_streams(any_tokenizer, data.draw(st.lists(low | high, max_size=30)), skip)


@settings(deadline=None)
@given(text=st.text(max_size=40), skip=st.booleans())
@example(text="engine. It is 👩‍👩‍👧‍👦", skip=True)
def test_any_text_streams_to_the_whole_text(any_tokenizer, text, skip):
    assert_streams(any_tokenizer, any_tokenizer.encode(text), skip)


def test_spaces_survive_one_token_at_a_time(tmp_path):
    made = sentencepiece(tmp_path, decoders.Metaspace())
    ids = [made.token_id(t) for t in ("▁engine", ".", "▁It", "</s>", "▁is")]
    detokenizer = made.detokenizer()
    assert [detokenizer.push(i) for i in ids] == ["engine", ".", " It", "", " is"]


def test_a_character_is_held_until_it_is_whole(tokenizer):
    ids = tokenizer.encode("Hi 👍!")
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.push(i) for i in ids]
    assert "".join(pieces) == "Hi 👍!" and "👍" in pieces and not any("\ufffd" in piece for piece in pieces)


def test_a_cut_inside_a_character_gives_one_mark_at_the_end(tokenizer):
    ids = tokenizer.encode("Hi 👍")[:-1]
    detokenizer = tokenizer.detokenizer()
    assert "".join(map(detokenizer.push, ids)) == "Hi "
    assert detokenizer.flush() == "\ufffd" and tokenizer.decode(ids) == "Hi \ufffd"


def test_special_tokens_show_only_on_request(tokenizer):
    ids = [*tokenizer.encode("abc"), 2]
    assert "".join(map(tokenizer.detokenizer().push, ids)) == "abc"
    assert "".join(map(tokenizer.detokenizer(skip_special_tokens=False).push, ids)) == "abc<|im_end|>"


def test_a_push_costs_the_same_however_long_the_text_is(any_tokenizer, monkeypatch):
    decoded = []
    whole = Tokenizer.decode
    monkeypatch.setattr(
        Tokenizer,
        "decode",
        lambda self, ids, **options: decoded.append(len(ids)) or whole(self, ids, **options),
    )
    detokenizer, draw = any_tokenizer.detokenizer(), random.Random(1)
    for _ in range(3000):
        detokenizer.push(draw.randrange(256, min(300, any_tokenizer.vocab_size)))
    assert max(decoded, default=0) <= 16
