"""The tokenizer of a real model: ids of a text or a conversation, and text again, whole or as it streams."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.bpe import check_text, from_alphabet
from shared.errors import InvalidRequestError, ModelLoadError

ROLES = ("system", "user", "assistant", "tool")


def read_settings(folder: Path, name: str) -> dict[str, Any]:
    """A JSON file of a model folder; empty if the folder has none."""
    try:
        content = json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot read {folder / name}: {error}") from error
    return content if isinstance(content, dict) else {}


def read_special_tokens(folder: Path) -> dict[str, str]:
    """The tokens with a role, like {"bos_token": "<|im_start|>"}, from either file that may name them."""
    named = read_settings(folder, "special_tokens_map.json") | read_settings(folder, "tokenizer_config.json")
    texts = {key: value["content"] if isinstance(value, dict) else value for key, value in named.items()
             if key.endswith("_token")}  # fmt: skip
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def read_eos_ids(folder: Path) -> list[int]:
    """The end tokens that the model's own settings name: one id, a list, or none."""
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        named = read_settings(folder, name).get("eos_token_id")
        ids += [] if named is None else named if isinstance(named, list) else [named]
    return ids


class Tokenizer:
    """The tokenizer of a model, by name or folder, on the tokenizers library.

    `eos_token_ids` are all ids that end an answer. `vocab_size` counts tokens; a model may have more rows.
    """

    def __init__(self, model: str | Path):
        self.folder = model_folder(model)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        except Exception as error:  # the library raises plain Exception
            raise ModelLoadError(f"cannot read {self.folder / 'tokenizer.json'}: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.special_tokens = read_special_tokens(self.folder)
        self.bos_token, self.eos_token = map(self.special_tokens.get, ("bos_token", "eos_token"))
        self.bos_token_id, self.eos_token_id = map(self.token_id, (self.bos_token, self.eos_token))
        own_eos = [] if self.eos_token_id is None else [self.eos_token_id]
        self.eos_token_ids = tuple(dict.fromkeys(read_eos_ids(self.folder) + own_eos))
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size = self._tokenizer.get_vocab_size()
        self.is_byte_level = isinstance(self._tokenizer.decoder, tokenizers.decoders.ByteLevel)
        self._chat_template: ChatTemplate | None = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text. Some models put special tokens around a plain prompt, as transformers does."""
        return self._tokenizer.encode(check_text(text), add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids, all at once; bytes that are no character become U+FFFD."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_id(self, token: str | None) -> int | None:
        """The id of a token by its name in the vocabulary."""
        return None if token is None else self._tokenizer.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token adds to the text; empty for an id that the vocabulary does not have."""
        token = self._tokenizer.id_to_token(token_id) or ""
        if self.is_byte_level:
            return from_alphabet(token)
        return bytes([int(token[3:5], 16)]) if self.is_byte(token_id) else token.replace("▁", " ").encode()

    def is_byte(self, token_id: int) -> bool:
        """Whether the token is a byte written as `<0x0A>`, SentencePiece's way out for rare characters."""
        return re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", self._tokenizer.id_to_token(token_id) or "") is not None

    def token_text(self, token_id: int) -> str:
        """One token on its own, for showing; part of a character becomes U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    def apply_chat_template(self, messages: Any, add_generation_prompt: bool = True, **options: Any) -> str:
        """The conversation as the one text that the model was trained on."""
        self._chat_template = self._chat_template or ChatTemplate(self.folder, self.special_tokens)
        return self._chat_template.render(messages, add_generation_prompt, **options)

    def encode_chat(self, messages: Any, add_generation_prompt: bool = True, **options: Any) -> list[int]:
        """Ids of a conversation; the template has already written every special token."""
        text = self.apply_chat_template(messages, add_generation_prompt, **options)
        return self.encode(text, add_special_tokens=False)

    def detokenizer(self, skip_special_tokens: bool = True) -> IncrementalDetokenizer:
        """A fresh detokenizer for the tokens of one answer."""
        return IncrementalDetokenizer(self, skip_special_tokens)


def model_folder(model: str | Path) -> Path:
    """A folder as it is; the name of a model goes through `weights.resolve`, which may fetch it."""
    from shared.weights import resolve

    return Path(model) if Path(model).is_dir() else resolve(model)


class ChatTemplate:
    """The small Jinja program of a model that writes a conversation as one text, run as transformers does."""

    def __init__(self, folder: Path, special_tokens: Mapping[str, str]):
        self.special_tokens = dict(special_tokens)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        environment.globals["raise_exception"] = raise_template_error
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(read_template(folder))
        except TemplateError as error:
            raise ModelLoadError(f"the chat template of {folder} is not valid: {error}") from error

    def render(self, messages: Any, add_generation_prompt: bool = True, **options: Any) -> str:
        """With the generation prompt, the text ends where the assistant's answer begins."""
        given = {"messages": check_messages(messages), "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(
                {**self.special_tokens, "tools": None, "documents": None, **given, **options}
            )
        except TemplateError as error:
            raise InvalidRequestError(
                "messages", messages, f"what the chat template takes ({error})"
            ) from error


def raise_template_error(message: str) -> None:
    raise TemplateError(message)


def read_template(folder: Path) -> str:
    """The template from its own file, or else from tokenizer_config.json (one, or a list with a default)."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = read_settings(folder, "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if template is None:
        raise InvalidRequestError("messages", folder.name, "sent to a model that has a chat template")
    return template


def check_messages(messages: Any) -> Sequence[Mapping[str, Any]]:
    """A list of {"role": ..., "content": ...}, or InvalidRequestError naming the part that is wrong."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise InvalidRequestError("messages", messages, "a list of at least one message")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidRequestError(f"messages[{i}]", message, "a dict with role and content")
        for key in ("role", "content"):
            check_text(message.get(key), f"messages[{i}].{key}")
        if message["role"] not in ROLES:
            raise InvalidRequestError(f"messages[{i}].role", message["role"], f"one of {', '.join(ROLES)}")
    return messages


class IncrementalDetokenizer:
    """Text of one answer, token by token: `push` returns what is final, and what it held comes with `flush`.

    The pieces joined are `tokenizer.decode(ids)`, and a piece costs the same however long the text is.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")  # holds the bytes of half a character
        self._last: list[int] = []  # SentencePiece: a token already shown, so that the next keeps its space
        self._held: list[int] = []  # SentencePiece: bytes whose meaning depends on what follows

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that nothing later can change, often empty."""
        token = b"" if token_id in self._skipped else self._tokenizer.token_bytes(token_id)
        if self._tokenizer.is_byte_level:
            return self._utf8.decode(token)
        if not token:
            return ""
        self._held.append(token_id)
        return "" if self._tokenizer.is_byte(token_id) else self._release()

    def flush(self) -> str:
        """The end: half a character becomes U+FFFD, as in `decode`."""
        return self._utf8.decode(b"", final=True) if self._tokenizer.is_byte_level else self._release()

    def _release(self) -> str:
        shown = len(self._tokenizer.decode(self._last, skip_special_tokens=False))
        text = self._tokenizer.decode(self._last + self._held, skip_special_tokens=False)
        self._last, self._held = (self._held or self._last)[-1:], []
        return text[shown:]
