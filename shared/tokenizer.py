"""The tokenizer of a real model: ids of a text or a conversation, and text again, whole or as it streams."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import tokenizers
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.bpe import check_text, from_alphabet
from shared.default_model import resolve
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


def read_template(folder: Path) -> str:
    """The chat template from its own file, or from tokenizer_config.json: one, or a list with a default."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = read_settings(folder, "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if template is None:
        raise InvalidRequestError("messages", folder.name, "sent to a model that has a chat template")
    return template


def model_folder(model: str | Path) -> Path:
    """A folder as it is; the name of a model is resolved, which may fetch it."""
    return Path(model) if Path(model).is_dir() else resolve(model)


def load_library(folder: Path) -> tokenizers.Tokenizer:
    """The tokenizers library with the model's tokenizer.json; it neither cuts nor pads texts."""
    try:
        library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises plain Exception
        raise ModelLoadError(f"cannot read {folder / 'tokenizer.json'}: {error}") from error
    library.no_truncation()
    library.no_padding()
    return library


def is_byte_token(token: str) -> bool:
    """SentencePiece writes a byte that is no token of its own as `<0x0A>`."""
    return re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token) is not None


class Tokenizer:
    """The tokenizer of a model, by name or folder. `eos_token_ids` are all ids that end an answer."""

    def __init__(self, model: str | Path):
        self.folder = model_folder(model)
        self.library = load_library(self.folder)
        self.vocab_size = self.library.get_vocab_size()  # the model's embedding may have more rows
        self.special_tokens = read_special_tokens(self.folder)
        self.bos_token_id = self.token_id(self.special_tokens.get("bos_token"))
        self.eos_token_id = self.token_id(self.special_tokens.get("eos_token"))
        own_eos = [] if self.eos_token_id is None else [self.eos_token_id]
        self.eos_token_ids = tuple(dict.fromkeys(read_eos_ids(self.folder) + own_eos))
        added = self.library.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.is_byte_level = isinstance(self.library.decoder, tokenizers.decoders.ByteLevel)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text. Some models put special tokens around it, as transformers does by default."""
        return self.library.encode(check_text(text), add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids, all at once; bytes that are no character become U+FFFD."""
        return self.library.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def detokenizer(self, skip_special_tokens: bool = True) -> IncrementalDetokenizer:
        """A fresh detokenizer, for the tokens of one answer."""
        return IncrementalDetokenizer(self, skip_special_tokens)

    def token_id(self, token: str | None) -> int | None:
        return None if token is None else self.library.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token adds to a text; empty for an id that the vocabulary does not have."""
        token = self.library.id_to_token(token_id) or ""
        if self.is_byte_level:
            return from_alphabet(token)
        return bytes([int(token[3:5], 16)]) if is_byte_token(token) else token.replace("▁", " ").encode()

    def token_text(self, token_id: int) -> str:
        """One token on its own, for showing; a part of a character becomes U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    @cached_property
    def chat_template(self) -> ChatTemplate:
        return ChatTemplate(read_template(self.folder), self.special_tokens)

    def apply_chat_template(self, messages: Any, add_generation_prompt: bool = True, **options: Any) -> str:
        """The conversation as the one text that the model was trained on."""
        return self.chat_template.render(messages, add_generation_prompt, **options)

    def encode_chat(self, messages: Any, add_generation_prompt: bool = True, **options: Any) -> list[int]:
        """Ids of a conversation; the template has written every special token already."""
        text = self.apply_chat_template(messages, add_generation_prompt, **options)
        return self.encode(text, add_special_tokens=False)


class ChatTemplate:
    """The small Jinja program of a model that writes a conversation as one text, run as transformers does."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]):
        self.source, self.special_tokens = source, dict(special_tokens)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        environment.globals["raise_exception"] = raise_template_error
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ModelLoadError(f"the chat template is not valid: {error}") from error

    def render(self, messages: Any, add_generation_prompt: bool = True, **options: Any) -> str:
        """With the generation prompt, the text ends where the assistant's answer begins."""
        given = {"messages": check_messages(messages), "add_generation_prompt": add_generation_prompt}
        always = {**self.special_tokens, "tools": None, "documents": None}
        try:
            return self._template.render({**always, **given, **options})
        except TemplateError as error:
            raise InvalidRequestError(
                "messages", messages, f"what the chat template takes ({error})"
            ) from error


def raise_template_error(message: str) -> None:
    raise TemplateError(message)


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

    The pieces joined are `tokenizer.decode(ids)`; a piece costs the same however long the text is.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self.tokenizer = tokenizer
        self.skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")  # holds the bytes of half a character
        self.last: list[int] = []  # SentencePiece: the token shown last, so that the next keeps its space
        self.held: list[int] = []  # SentencePiece: bytes whose meaning depends on what follows

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that nothing later can change, often empty."""
        added = b"" if token_id in self.skipped else self.tokenizer.token_bytes(token_id)
        if self.tokenizer.is_byte_level:
            return self.utf8.decode(added)
        if not added:
            return ""
        self.held.append(token_id)
        return "" if is_byte_token(self.tokenizer.library.id_to_token(token_id)) else self.release()

    def flush(self) -> str:
        """The end: half a character becomes U+FFFD, as in `decode`."""
        return self.utf8.decode(b"", final=True) if self.tokenizer.is_byte_level else self.release()

    def release(self) -> str:
        """The text of the held tokens as it reads after the last one shown."""
        shown = len(self.tokenizer.decode(self.last, skip_special_tokens=False))
        text = self.tokenizer.decode(self.last + self.held, skip_special_tokens=False)
        self.last, self.held = (self.held or self.last)[-1:], []
        return text[shown:]
