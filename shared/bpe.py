"""Byte pair encoding from scratch: learn merges from a text, apply them, and take them back."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import regex

from shared.errors import InvalidRequestError

Pair = tuple[bytes, bytes]
Word = tuple[bytes, ...]  # a word as the tokens that spell it
WORDS = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


def check_text(text: Any, field: str = "prompt") -> str:
    """Text that has a UTF-8 form, or InvalidRequestError."""
    if not isinstance(text, str):
        raise InvalidRequestError(field, text, "a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        limit = f"valid Unicode (character {error.start} is half of a surrogate pair)"
        raise InvalidRequestError(field, text[error.start], limit) from error
    return text


def split_words(text: str) -> list[str]:
    """The pieces that no merge crosses: single digits, words with the space before them (GPT-2's rule)."""
    return [word for part in regex.split(r"(\p{N})", text) for word in WORDS.findall(part)]


def spell(word: str) -> Word:
    """A word as single bytes of its UTF-8 form."""
    return tuple(bytes([byte]) for byte in word.encode())


def count_pairs(words: Mapping[Word, int]) -> Counter[Pair]:
    """How often each two tokens stand side by side, given how often each word occurs."""
    pairs: Counter[Pair] = Counter()
    for word, times in words.items():
        for pair in pairwise(word):
            pairs[pair] += times
    return pairs


def merge_pair(word: Word, pair: Pair) -> Word:
    """Join each occurrence of the pair into one token, from the left."""
    merged, i = [], 0
    while i < len(word):
        size = 2 if word[i : i + 2] == pair else 1
        merged.append(b"".join(word[i : i + size]))
        i += size
    return tuple(merged)


def train_bpe(text: str, num_merges: int) -> list[Pair]:
    """Learn merges: time and again, join the most frequent pair (Sennrich et al., 2016)."""
    words = Counter(spell(word) for word in split_words(check_text(text)))
    merges: list[Pair] = []
    for _ in range(num_merges):
        pairs = count_pairs(words)
        if not pairs:
            break
        best = max(pairs, key=pairs.__getitem__)  # the pair seen first wins a tie
        words = Counter({merge_pair(word, best): times for word, times in words.items()})
        merges.append(best)
    return merges


class BytePairEncoder:
    """Byte-level BPE: text to ids and back, with the merges of `train_bpe` or of a real model.

    Without a vocabulary, the 256 bytes come first and then each merge, in order.
    """

    def __init__(
        self,
        merges: Sequence[Pair],
        vocab: Mapping[bytes, int] | None = None,
        special_tokens: Mapping[str, int] | None = None,
    ):
        tokens = dict.fromkeys([bytes([byte]) for byte in range(256)] + [a + b for a, b in merges])
        self.ranks = {pair: rank for rank, pair in enumerate(merges)}
        self.vocab = dict(vocab or {token: i for i, token in enumerate(tokens)})
        self.special_tokens = dict(special_tokens or {})
        self.token_of = {i: token for token, i in self.vocab.items()}
        self.token_of |= {i: token.encode() for token, i in self.special_tokens.items()}

    def merge_word(self, word: str) -> Word:
        """Apply merges to one word, always the one that was learned earliest."""
        tokens = tuple(
            byte for byte in spell(word) if byte in self.vocab
        )  # a few vocabularies lack rare bytes
        while len(tokens) > 1:
            first = min(pairwise(tokens), key=lambda pair: self.ranks.get(pair, math.inf))
            if first not in self.ranks:
                break
            tokens = merge_pair(tokens, first)
        return tokens

    def encode(self, text: str) -> list[int]:
        """Special tokens become their id wherever their text stands; all else is split and merged."""
        longest_first = sorted(self.special_tokens, key=len, reverse=True)
        border = f"({'|'.join(map(re.escape, longest_first))})" if longest_first else r"(?!)"
        ids: list[int] = []
        for part in re.split(border, check_text(text)):
            if part in self.special_tokens:
                ids.append(self.special_tokens[part])
            else:
                ids += [self.vocab[token] for word in split_words(part) for token in self.merge_word(word)]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Join the bytes, then read them as UTF-8; what is no character becomes U+FFFD."""
        return b"".join(self.token_of[i] for i in ids).decode(errors="replace")


def byte_alphabet() -> dict[str, int]:
    """The visible character that stands for each byte in a vocabulary file (GPT-2's table)."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(others)}


ALPHABET = byte_alphabet()


def from_alphabet(token: str) -> bytes:
    """`Ġthe` -> b" the". A token with any other character stands for itself."""
    if all(char in ALPHABET for char in token):
        return bytes(ALPHABET[char] for char in token)
    return token.encode()


def load_bpe(folder: str | Path) -> BytePairEncoder:
    """Our encoder with the vocabulary of a model folder whose tokenizer is byte-level BPE."""
    content = json.loads((Path(folder) / "tokenizer.json").read_text(encoding="utf-8"))
    special = {token["content"]: token["id"] for token in content["added_tokens"]}
    vocab = {from_alphabet(text): i for text, i in content["model"]["vocab"].items() if text not in special}
    pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in content["model"]["merges"])
    return BytePairEncoder([(from_alphabet(a), from_alphabet(b)) for a, b in pairs], vocab, special)
