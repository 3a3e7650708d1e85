"""Chapter 06: the checks of the exercises, the quiz. The simulator is in ch06_life, times in ch06_measure."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from shared.lab import Check, Question, call, expect, fail
from shared.output import Detokenizer, OutputText, first_stop, held_length
from shared.request import Request
from shared.sampling_params import SamplingParams

# Exercises


def judge_client(fn: Callable) -> None:
    for case, (sent, chunks, num_tokens) in STREAMS.items():
        expect(fn, (sent, chunks, num_tokens), client_times(sent, chunks, num_tokens), case=case, tolerance=1e-9)


STREAMS = {
    "one token a chunk": (10.0, [(10.5, "The"), (10.6, " sea"), (10.75, " is")], 3),
    "an empty first chunk": (0.0, [(0.25, ""), (1.0, "The"), (1.5, " sea")], 2),
    "several tokens in a chunk": (2.0, [(2.5, "The sea is"), (3.0, " a vast"), (4.0, " realm")], 8),
    "an empty chunk at the end": (0.0, [(1.0, "Red"), (1.5, "\n"), (9.0, "")], 3),
    "an empty chunk in a pause": (0.0, [(1.0, "Red"), (3.0, ""), (4.0, "\n"), (4.5, "Blue")], 5),
    "one token": (5.0, [(6.5, "Yes")], 1),
    "one chunk, several tokens": (5.0, [(6.5, "Yes, sir")], 3),
    "no text at all": (5.0, [(6.0, "")], 1),
    "no chunk": (5.0, [], 0),
}


def client_times(sent: float, chunks: Sequence[tuple[float, str]], num_tokens: int
                 ) -> tuple[float | None, float | None, float | None]:
    times = [time for time, text in chunks if text]
    if not times:
        return None, None, None
    between = (times[-1] - times[0]) / (num_tokens - 1) if num_tokens > 1 else None
    pause = max((late - early for early, late in pairwise(times)), default=None)
    return times[0] - sent, between, pause


def judge_kept(fn: Callable) -> None:
    for case, (texts, stops) in ANSWERS.items():
        expect(fn, (texts, stops), kept(texts, stops), case=case)


ANSWERS = {
    "no stop string comes": (["1", ".", " Red"], ["\n\n"]),
    "the stop string is spread over two tokens": (["colors", ":", "\n", "\n", "Red"], ["\n\n"]),
    "the stop string begins inside a token": (["The", " END", "ING"], ["END"]),
    "the stop string is a whole token": (["Paris", ".", " The"], ["."]),
    "the answer begins with the stop string": (["\n", "\n", "Red"], ["\n\n"]),
    "two stop strings, the second is complete first": (["x", "yz", "-", "end"], ["end", "z"]),
    "a long one begins first, a short one is complete first": (["xa", "bc", "d"], ["abcd", "bc"]),
    "two are complete at once": (["so", " abc", "x"], ["bc", "abc"]),
    "a token without text": (["Red", "", "\n", "Blue"], ["\nB"]),
    "no stop strings": (["a", "b", ""], []),
    "nothing was generated": ([], ["x"]),
}


def kept(texts: Sequence[str], stops: Sequence[str]) -> tuple[str, int]:
    whole_text = "".join(texts)
    hit = first_stop(whole_text, stops)
    text = whole_text if hit is None else whole_text[: hit[0]]
    lengths = [len("".join(texts[:count])) for count in range(len(texts) + 1)]
    return text, next(count for count, length in enumerate(lengths) if length >= len(text))


PIECES = {
    "UNO, DUE, TRE with a stop string that never completes": (["UNO", " DUE", " TRE"], "TRE\nAAAAAAAA"),
    "a list with the stop string at its end": (["1", ".", " Red", "\n", "2", ".", " Blue"], "\n3."),
    "the stop string over two tokens": (["are", ":", "\n", "\n", "Red"], "\n\n"),
    "no piece can begin the stop string": (["a", "b", "c", "d", "e", "f"], "ENDOFTEXT"),
    "false starts": (["x", "aa", "a", "ab", "z", "aac"], "aab!"),
    "pieces without text": (["H", "", "i", ""], "!!"),
    "the stop string first": (["END", " of"], "END"),
    "nothing": ([], "END"),
}


def judge_streamed(fn: Callable) -> None:
    runs = {case: _watch(fn, pieces, stop, f"Case {case!r}:") for case, (pieces, stop) in PIECES.items()}
    for case, (pieces, stop) in PIECES.items():
        want, got = "".join(shown_after(pieces, stop)), "".join(text for _, text in runs[case])
        if got != want:
            fail(f"Case {case!r}: your pieces join to {got!r}; expected {want!r}.")
    for case, yielded in runs.items():
        if any(not text for _, text in yielded):
            fail(f"Case {case!r}: an empty piece was sent.")
    for case, (pieces, stop) in PIECES.items():
        _judge_lateness(case, pieces, stop, runs[case])


def _watch(fn: Callable, pieces: Sequence[str], stop: str, where: str) -> list[tuple[int, str]]:
    """What the reader's generator yields, each with the number of pieces taken by then."""
    taken = 0

    def source() -> Iterator[str]:
        nonlocal taken
        for piece in pieces:
            taken += 1
            yield piece

    yielded = call(lambda: [(taken, text) for text in fn(source(), stop)], case=where)
    if not all(isinstance(text, str) for _, text in yielded):
        fail(f"{where} what was yielded is no text: {[text for _, text in yielded]}.")
    return yielded


def _judge_lateness(case: str, pieces: Sequence[str], stop: str, yielded: Sequence[tuple[int, str]]) -> None:
    for count in range(1, len(pieces) + 1):
        want = "".join(shown_after(pieces[:count], stop, ended=False))
        got = "".join(text for taken, text in yielded if taken <= count)
        if count < len(pieces) and len(got) < len(want):
            fail(f"Case {case!r}: after {count} pieces {got!r} was shown; {want!r} is late, no stop string "
                 "can begin there.")


def shown_after(pieces: Sequence[str], stop: str, ended: bool = True) -> Iterator[str]:
    """The text that each piece makes safe to show, and the rest when the pieces have ended."""
    text = OutputText(Pieces(pieces), [stop])
    before = 0
    for index in range(len(pieces)):
        hit = text.push(index)
        yield text.text[before:]
        before = len(text.text)
        if hit:
            return
    if ended:
        text.finish()
        yield text.text[before:]


class Pieces(Detokenizer):
    """A detokenizer for texts given one by one: token i is pieces[i]."""

    def __init__(self, pieces: Sequence[str]):
        self.pieces = pieces

    def push(self, token_id: int) -> str:
        return self.pieces[token_id]

    def flush(self) -> str:
        return ""


def text_faults(make_text: Callable, count: int, seed: int = 6) -> tuple[int, int]:
    """Random answers in random pieces, against `cut_whole`: faults, and answers that a stop string ended."""
    draw, faults, stopped = random.Random(seed), 0, 0
    for _ in range(count):
        pieces = ["".join(draw.choices("abc", k=draw.randint(0, 3))) for _ in range(draw.randint(0, 8))]
        stops = ["".join(draw.choices("abc", k=draw.randint(1, 4))) for _ in range(draw.randint(0, 3))]
        want, answer, hit = cut_whole("".join(pieces), stops), make_text(Pieces(pieces), stops), None
        for index in range(len(pieces)):
            hit = answer.push(index)
            faults += not want.startswith(answer.text)  # something was shown that must be taken back
            if hit:
                break
        if not hit:
            answer.finish()
        faults += answer.text != want
        stopped += hit is not None
    return faults, stopped


def cut_whole(text: str, stops: Sequence[str]) -> str:
    """The plainest reference: look at one more character at a time until some stop string is complete."""
    for end in range(len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            return text[: end - max(map(len, hits))]
    return text


CHECKS = {"06.1": Check(judge_client), "06.2": Check(judge_kept), "06.b": Check(judge_streamed)}


# Quiz


def held_of_caa() -> int:
    return held_length("caa", ["aab", "b!"])


def reason_of_a_tie() -> str:
    """The fifth token of five is the end token."""
    request = Request("tie", [7], SamplingParams(max_tokens=5), 5, eos_token_ids=frozenset([2]))
    return [request.append(token) for token in (9, 9, 9, 9, 2)][-1] or "none"


def positions_after_preemption() -> int:
    """30 prompt tokens, 12 output tokens, and no cache."""
    request = Request("back", [7] * 30, SamplingParams(max_tokens=20), 20)
    for _ in range(12):
        request.append(9)
    return request.num_tokens - request.num_computed_tokens


QUIZ = [
    Question(
        "A request has the stop strings `aab` and `b!`. Its text so far ends in `caa`. How many characters "
        "must be held back?",
        {
            "0": "No stop string is complete, but `aa` may become `aab` with the next token, and it would "
                 "have to be taken back.",
            "1": "One `a` could begin `aab`, but `aa` can as well. If its first `a` is shown and `b` follows, "
                 "that `a` must be taken back.",
            "2": "`aa` is the longest end of the text with which a stop string begins.",
            "3": "`c` is in no stop string. Text that cannot belong to one is shown at once.",
        },
        compute=held_of_caa,
    ),
    Question(
        "`max_tokens` is 5, and the fifth token is the model's end token. What is `finish_reason`?",
        {
            "stop": "The model ended its answer, so it is complete. The limit was reached too, but it cut "
                    "nothing off.",
            "length": "That would tell the caller that something is missing, and a client may ask for the "
                      "rest of an answer that is complete.",
            "abort": "Only a caller who gives up ends a request in this way.",
            "error": "Both ways to end are ordinary. An error means that the engine could not go on.",
        },
        compute=reason_of_a_tie,
    ),
    Question(
        "A request with 30 prompt tokens has produced 12 tokens when its cache is taken away. How many "
        "positions does the model run when the request comes back?",
        {
            "1": "That is a step of a request whose other tokens are all in the cache. Here the cache is empty.",
            "12": "The output has to be run again, but so has the prompt: its keys and values are gone as well.",
            "30": "The prompt alone would forget the answer so far, and the text would begin anew.",
            "42": "All known tokens, in one run, and then the thirteenth token is chosen as if nothing had "
                  "happened.",
        },
        compute=positions_after_preemption,
    ),
]
