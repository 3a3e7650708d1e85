"""Chapter 01: tokens in colour, merges step by step, the checks of the exercises, the quiz."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from shared.bpe import BytePairEncoder, Pair, Word, count_pairs, merge_pair, spell, split_words, train_bpe
from shared.lab import Check, Choice, Explorer, Field, Question, Stepper, call, expect, expect_error, fail
from shared.lab.form import some_text
from shared.lab.machine import Measurement, timed
from shared.lab.markup import (
    ACCENT,
    LINE,
    MONO,
    QUIET,
    SHADE,
    TINT,
    Html,
    join,
    mono,
    note,
    table,
    tag,
    tokens,
    visible,
)
from shared.lab.texts import RIGHTS
from shared.tokenizer import Tokenizer

# Tokens of any text


@dataclass(frozen=True)
class Piece:
    """One token as it is drawn. `whole` is False where its bytes are only a part of a character."""

    token_id: int
    data: bytes
    whole: bool
    special: bool


def pieces_of(tokenizer: Tokenizer, ids: Sequence[int]) -> list[Piece]:
    pieces, pending = [], b""
    for token_id in ids:
        data = tokenizer.token_bytes(token_id)
        begins_clean = not pending
        pending = unfinished(pending + data)
        whole = begins_clean and not pending
        pieces.append(Piece(token_id, data, whole, token_id in tokenizer.special_ids))
    return pieces


def unfinished(data: bytes) -> bytes:
    """The bytes at the end that begin a character without ending it."""
    for size in (1, 2, 3):
        lead = data[-size:][:1]
        if lead >= b"\xc0" and len(data) >= size:
            wanted = 2 if lead < b"\xe0" else 3 if lead < b"\xf0" else 4
            return data[-size:] if size < wanted else b""
    return b""


def render_tokens(tokenizer: Tokenizer, text: str, form: str = "plain text") -> Html:
    """Each token in a box: its text, its id, its bytes; below, what the text costs."""
    chat = form == "chat message"
    ids = tokenizer.encode_chat([{"role": "user", "content": text}]) if chat else tokenizer.encode(text)
    pieces = pieces_of(tokenizer, ids)
    boxes = tag("div", join([_box(piece, i) for i, piece in enumerate(pieces)], " "),
                "display:flex;flex-wrap:wrap;gap:4px;margin:6px 0")
    size, plain = len(text.encode()), len(tokenizer.encode(text))
    words = f"{counted(len(ids), 'token')} for {counted(len(text), 'character')}, {counted(size, 'byte')}."
    words += f" The template adds {len(ids) - plain}." if chat else ""
    legend = ("Each box: text, id, bytes. A dashed box holds a part of a character, a double border marks a "
              "special token; · is a space, ⏎ a new line.")
    return join([tag("div", tag("strong", words), role="status"), boxes, note(legend)])


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _box(piece: Piece, index: int) -> Html:
    text = visible(piece.data.decode(errors="replace")) if piece.whole else "½"
    border = f"3px double {ACCENT}" if piece.special else f"1px {'solid' if piece.whole else 'dashed'} {LINE}"
    lines = [tag("div", text, "font-weight:600;white-space:pre"), tag("div", piece.token_id, QUIET),
             tag("div", piece.data.hex(" "), f"font-size:10px;{QUIET}")]
    style = (f"display:inline-block;font-family:{MONO};background:{(TINT, SHADE)[index % 2]};border:{border};"
             "border-radius:3px;padding:2px 6px;text-align:center;line-height:1.35")
    return tag("span", join(lines), style)


def token_explorer(tokenizer: Tokenizer) -> Explorer:
    """Type a text, see its tokens."""
    fields = [
        Field("text", "Text", "Grüße aus Köln 👋\nIn 2024 the rat ate 3.14 malts.", some_text(300), rows=3),
        Choice("form", "Sent as", "plain text", ("plain text", "chat message")),
    ]
    return Explorer(lambda inputs: render_tokens(tokenizer, inputs["text"], inputs["form"]), fields,
                    title="Tokens of your text")


# Merges, step by step

LEARN, APPLY = "learn merges from it", "encode it with the model's merges"


@dataclass(frozen=True)
class MergeState:
    """Words as they are spelled now, with how often each occurs, and the pairs that may be joined next.

    `candidates` are (pair, count) when learning and (pair, rank) when encoding, the chosen one first.
    """

    mode: str
    words: tuple[tuple[Word, int], ...]
    candidates: tuple[tuple[Pair, int], ...]
    done: tuple[Pair, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(word) * times for word, times in self.words)


def learning_states(text: str, count: Callable = count_pairs,
                    merge: Callable = merge_pair) -> Iterator[MergeState]:
    """What `train_bpe` does, one merge a state."""
    words, done = Counter(spell(word) for word in split_words(text)), ()
    while True:
        pairs = count(words)
        best = tuple(sorted(pairs.items(), key=lambda item: -item[1])[:5])  # a stable sort: first seen wins
        yield MergeState(LEARN, tuple(words.items()), best, done)
        if not best:
            return
        pair = best[0][0]
        words, done = Counter({merge(word, pair): times for word, times in words.items()}), (*done, pair)


def encoding_states(text: str, encoder: BytePairEncoder,
                    merge: Callable = merge_pair) -> Iterator[MergeState]:
    """What `encode` does, one merge a state, word after word."""
    spelled = [spell(word) for word in split_words(text)]
    words, done = [tuple(byte for byte in word if byte in encoder.vocab) for word in spelled], ()
    for place in range(len(words)):
        while True:
            known = {pair: encoder.ranks[pair] for pair in pairwise(words[place]) if pair in encoder.ranks}
            if not known and place < len(words) - 1:
                break
            best = tuple(sorted(known.items(), key=lambda item: item[1])[:5])
            yield MergeState(APPLY, tuple((word, 1) for word in words), best, done)
            if not best:
                return
            words[place], done = merge(words[place], best[0][0]), (*done, best[0][0])


def render_merges(state: MergeState, index: int) -> Html:
    learning = state.mode == LEARN
    head = f"{counted(state.num_tokens, 'token')} after {counted(len(state.done), 'merge')}."
    if state.done:
        left, right = state.done[-1]
        head += f" Joined: {shown(left)} + {shown(right)}."
    rows = [[mono(f"{shown(a)} + {shown(b)}"), number] for (a, b), number in state.candidates]
    caption = "Next: the most frequent pair; of equals, the one seen first." if learning else \
        "Next: the pair that was learned first."
    following = join([note(caption), table(["pair", "how often" if learning else "rank"], rows, lit=[0])])
    words = [_word(word, times, state, learning) for word, times in state.words[:24]]
    more = [note(f"and {len(state.words) - 24} more words")] if len(state.words) > 24 else []
    spelled = tag("div", join(words), "display:flex;flex-wrap:wrap;gap:0 14px")
    return join([tag("div", tag("strong", head), role="status"), spelled, *more,
                 following if rows else note("No pair is left to join.")])


def _word(word: Word, times: int, state: MergeState, learning: bool) -> Html:
    pair = state.candidates[0][0] if state.candidates else None
    next_ = {i + d for i, both in enumerate(pairwise(word)) if both == pair for d in (0, 1)}
    row = tokens([shown(token) for token in word], lit=next_)
    return tag("div", join([row, note(f"× {times}")]) if learning else row)


def shown(token: bytes) -> str:
    """A token as text, or its bytes in hexadecimal where it is a part of a character."""
    try:
        return visible(token.decode())
    except UnicodeDecodeError:
        return token.hex(" ")


def merge_stepper(encoder: BytePairEncoder, count: Callable = count_pairs,
                  merge: Callable = merge_pair) -> Stepper:
    """Step through learning from a text, or through encoding it; `count` and `merge` may be the reader's."""

    def make(inputs: Mapping[str, Any], seed: int) -> Iterator[MergeState]:
        if inputs["mode"] == LEARN:
            return learning_states(inputs["text"], count, merge)
        return encoding_states(inputs["text"], encoder, merge)

    fields = [
        Field("text", "Text", "the cat that ate the rat that ate the malt", some_text(200), rows=2),
        Choice("mode", "What to do", LEARN, (LEARN, APPLY)),
    ]
    return Stepper(make, render_merges, fields, seed=None, title="Merges, step by step")


# Measurements


def encode_times(encoder: BytePairEncoder, tokenizer: Tokenizer, n: int = 7) -> list[Measurement]:
    """Milliseconds to encode the same text of a few thousand characters, ours and the library's."""
    text = "\n".join(RIGHTS.values()) * 8
    return [timed(f"{name} encodes {len(text):,} characters", lambda encode=encode: encode(text), n)
            for name, encode in (("our encoder", encoder.encode), ("the library", tokenizer.encode))]


def main() -> None:
    """Measure and save: `python -m shared.lab.chapters.ch01`."""
    from shared.bpe import load_bpe
    from shared.lab.evidence import save_evidence

    tokenizer = Tokenizer("smollm2-135m")
    results = encode_times(load_bpe(tokenizer.folder), tokenizer)
    what = "time to encode one text, from scratch in Python and with the tokenizers library"
    print(save_evidence("01_tokenization", what, "python -m shared.lab.chapters.ch01", results).name)


# Exercises

FAMILIES = [(b"a", b"b"), (b"ab", b"ab"), (b"c", b"d"), (b"b", b"c"), (b"abab", b"cd"), (b"a", b"bc"),
            (b"ab", b"c")]  # two merges make abc; the earlier one counts


def judge_family(fn: Callable) -> None:
    for token in (b"ab", b"abab", b"ababcd", b"x", b"bc", b"abc"):
        expect(fn, (token, FAMILIES), family(token, FAMILIES))
    merges = train_bpe("This is the house that Jack built. This is the malt that lay in the house.", 60)
    for token in (b" house", b"This", b" that", b" "):
        expect(fn, (token, merges), family(token, merges), case=f"the token {token!r} of a trained list")


def family(token: bytes, merges: Sequence[Pair]) -> list[Pair]:
    made_by = {a + b: (a, b) for a, b in reversed(merges)}
    needed, todo = set(), [token]
    while todo:
        pair = made_by.get(todo.pop())
        if pair and pair not in needed:
            needed.add(pair)
            todo += pair
    return [pair for pair in merges if pair in needed]


def judge_fit(fn: Callable) -> None:
    for name, (messages, limit) in CONVERSATIONS.items():
        kept = call(fn, list(messages), limit, chat_cost, case=f"Case {name!r}:")
        want = fit(messages, limit, chat_cost)
        if not isinstance(kept, (list, tuple)):
            fail(f"Case {name!r}: your function returned {type(kept).__name__}, not a list of messages.")
        cost = chat_cost(list(kept)) if kept else 0
        if cost > limit:
            fail(f"Case {name!r}: what you keep costs {cost} tokens, over the limit of {limit}.")
        if list(kept) != want:
            fail(f"Case {name!r}: you keep {_roles(kept)}; expected {_roles(want)}.")
    question = [{"role": "user", "content": "one two three four"}]
    expect_error(fn, (question, 5, chat_cost), ValueError, case="a question that does not fit at all")


def _message(role: str, words: int) -> dict[str, str]:
    return {"role": role, "content": " ".join(["word"] * words)}


TURNS = [_message("user", 6), _message("assistant", 9), _message("user", 3), _message("assistant", 20),
         _message("user", 4)]
CONVERSATIONS = {
    "everything fits": (TURNS, 200),
    "the oldest turn must go": (TURNS, 70),
    "only the last message fits": (TURNS, 26),
    "a system message stays": ([_message("system", 8), *TURNS], 72),
    "a system message and the question": ([_message("system", 8), *TURNS], 24),
    "exactly at the limit": (TURNS[2:], 54),
}


def chat_cost(messages: Sequence[Mapping[str, str]]) -> int:
    """Tokens in a made-up template: 4 a message, 3 at the end, 12 for a missing system message."""
    start = 0 if messages and messages[0]["role"] == "system" else 12
    return start + 3 + sum(4 + len(message["content"].split()) for message in messages)


def fit(messages: Sequence[Mapping[str, str]], limit: int, count_tokens: Callable) -> list[Mapping[str, str]]:
    system = [message for message in messages[:1] if message["role"] == "system"]
    turns = list(messages[len(system) :])
    for start in range(len(turns)):
        if count_tokens(system + turns[start:]) <= limit:
            return system + turns[start:]
    raise ValueError("the last message alone is too long")


def _roles(messages: Sequence[Any]) -> str:
    roles = [str(message.get("role", "?")) if isinstance(message, Mapping) else "?" for message in messages]
    return f"{len(roles)} messages ({', '.join(roles)})" if roles else "nothing"


STREAMED = ["Hi 👋", "Grüße!", "naïve — done 🎉", "日本", "plain text in a few tokens", "a \ufffd", ""]


def judge_stream(fn: Callable) -> None:
    tokenizer = Tokenizer("smollm2-135m")
    for text in STREAMED:
        ids = tokenizer.encode(text)
        for cut in range(len(ids), -1, -1):
            name = f"{text!r}" + (f" cut after {cut} of {len(ids)} tokens" if cut < len(ids) else "")
            _judge_pieces(fn, tokenizer, ids[:cut], f"Case {name}:")


def _judge_pieces(fn: Callable, tokenizer: Tokenizer, ids: list[int], case: str) -> None:
    pieces = call(lambda: list(fn(tokenizer, list(ids))), case=case)
    if not all(isinstance(piece, str) for piece in pieces):
        fail(f"{case} a piece is no text: {pieces}.")
    joined, whole = "".join(pieces), tokenizer.decode(ids)
    if joined != whole:
        fail(f"{case} the pieces join to {joined!r}, but the whole text is {whole!r}.")
    if len(ids) > 2 and len(pieces) < 2 and whole.isascii():
        fail(f"{case} everything came in one piece; text that is final should come at once.")


CHECKS = {"01.1": Check(judge_family), "01.2": Check(judge_fit), "01.b": Check(judge_stream)}


# Quiz


def rows_of_embedding() -> int:
    """Built, not added up: a vocabulary with ten distinct merges and three special tokens."""
    merges = [(bytes([a]), bytes([a])) for a in range(10)]
    encoder = BytePairEncoder(merges, special_tokens={f"<{i}>": 300 + i for i in range(3)})
    return len(encoder.vocab) + len(encoder.special_tokens)


QUIZ = [
    Question(
        "A byte-level vocabulary has 10 merges, each giving another token, and 3 special tokens. How many "
        "rows does the model's embedding table need?",
        {
            "10": "Those are the merges alone. A text without any of these pairs needs rows for its bytes.",
            "13": "Merges and special tokens. The 256 bytes are tokens too; they make every text possible.",
            "266": "Bytes and merges. Special tokens are ids like all others, so they need rows as well.",
            "269": "256 bytes, 10 merges, 3 special tokens: each id is a row.",
        },
        compute=rows_of_embedding,
    ),
    Question(
        "A streamed answer shows nothing for two tokens and then 👋 at once. What happened?",
        {
            "The character is spread over three tokens":
                "Its four bytes lie in three tokens. Two of those are no character yet, so the detokenizer "
                "held their bytes until the third arrived.",
            "The first two were special tokens and were left out":
                "Special tokens add no text at all. Here text arrived late but complete, so those tokens "
                "carried bytes.",
            "The engine computed three tokens in one step":
                "One token comes out of each step. What waits is the text, not the computation.",
            "The network put three pieces into one packet":
                "That happens too, but you would see this without any network: the detokenizer returned "
                "an empty text twice.",
        },
        answer="The character is spread over three tokens",
    ),
    Question(
        "Two encoders give different ids for one text, and both decode to exactly that text. What follows?",
        {
            "Nothing: equal texts mean equal input for the model":
                "The model sees ids, never text. Other ids are other rows of the embedding table, and "
                "another input.",
            "At least one is wrong for this model":
                "The model was trained on one way to cut a text. Other cuts decode to the same bytes, and "
                "still are input that it has hardly ever seen.",
            "The vocabulary holds some token twice":
                "No need: the same bytes can be cut in many ways. `b`, `c` and `bc` are three tokens.",
        },
        answer="At least one is wrong for this model",
    ),
]

if __name__ == "__main__":
    main()
