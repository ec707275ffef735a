"""What a tokenizer does to difficult text; runs in a fork of `server`, on folders that strangers filled."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer

from reshard.pipeline.text import counted
from reshard.pipeline.verifying.child.model import cleaned
from reshard.pipeline.verifying.tokenizer_files import tokenizer_files

# Each line is something on which two tokenizers that seem the same were seen, or could be expected, to part ways.
TEXTS = (
    "",
    " ",
    "   three before, two after  ",
    "tabs\tand\r\nline ends\n\n\nof all kinds\r",
    "The quick brown fox; THE QUICK BROWN FOX; tHe qUiCk",
    "don't can't we'll I'd — “quoted” ‘text’ …",
    "é e\u0301 ﬁ ﬃ Å Å ½ ① ㎏ ｆｕｌｌ ｗｉｄｔｈ",
    "İstanbul ıI ß ẞ ΣΊΣΥΦΟΣ ǅ",
    "日本語のテキスト、中文文本。한국어 텍스트 각",
    "نص عربي مع تَشْكِيل \u202eעברית\u202c",
    "ภาษาไทยไม่มีช่องว่าง हिन्दी க்ஷ",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪 ☺ ☺️",
    "zero\u200bwidth\u200djoiner\ufeffmark soft\u00adhyphen nbsp\u00a0ideographic\u3000space",
    "\x00\x01\x1b[31m\x7f \ufffd \U0010ffff \ue000",
    "0 1 12 123 1234 12345 3.14159 1,000,000 0x1F 1e-10 ²³",
    "def f(x):\n    return {'a': [x ** 2, x // 3]}  # comment\n\t\tif x != y: pass",
    "https://example.org/a/b?c=d&e=%20#f user@example.org C:\\path\\file.txt",
    "<s> </s> <pad> <unk> <mask> <|endoftext|> <|im_start|>user<|im_end|> [CLS] [SEP] [MASK] [INST] <<SYS>>",
    "<s><s></s> word</s>word <unk>word ▁underscore Ġbyte ##piece @@",
    "a" * 300 + " " + "ab" * 150,
    "\\n \\u0041 &amp; <br/> {{ template }} {% raw %}",
)
OWN_TOKENS = 100  # of its own tokens that a tokenizer is asked for before it counts as knowing no text
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Hello </s> <|im_end|>\n"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "2+2?"},
]


def tokenizers(folders: list[str], scratch: Path) -> dict[str, str]:
    """The verdict on the tokenizer of one folder, or on the second one's against the first one's."""
    loaded = [_load(Path(folder), scratch / str(number)) for number, folder in enumerate(folders)]
    first, last = loaded[0], loaded[-1]
    if isinstance(first, str):
        return {"result": "inconclusive", "reason": f"the tokenizer does not load without remote code: {first}"}
    if isinstance(last, str):
        return {"result": "failed", "reason": f"the source's tokenizer loads, but the output's does not: {last}"}
    if len(loaded) == 1:
        return {"result": "loads" if _knows_text(first) else "inconclusive", "reason": f"it {_loads_as(first)}"}
    # A wrapper adds to what `tokenizer.json` does, so only likes are compared.
    if isinstance(first, Tokenizer) != isinstance(last, Tokenizer):
        which = "source" if isinstance(first, Tokenizer) else "output"
        return {"result": "failed", "reason": f"only the {which}'s tokenizer needs remote code"}
    behaviour = zip(_behaviour(first), _behaviour(last), strict=True)
    settings = zip(*map(_settings, folders), strict=True) if isinstance(first, Tokenizer) else ()
    for (facet, before), (_, after) in chain(behaviour, settings):
        if before != after:
            return {"result": "failed", "reason": f"different {facet}: {before!r:.120} became {after!r:.120}"}
    if not _knows_text(first):
        return {"result": "inconclusive", "reason": f"nothing to compare with: the source's {_loads_as(first)}"}
    return {"result": "equal_behaviour", "reason": f"same ids, decoding and special tokens for {len(TEXTS)} texts"}


def _load(folder: Path, scratch: Path) -> Any:
    """The tokenizer, by its class or else by ``tokenizer.json`` alone; the reason as str where neither works.

    It is loaded from a folder with links to its own files only: the loader would otherwise look at all the others.
    """
    scratch.mkdir()
    for name in tokenizer_files(path.name for path in folder.iterdir())[""]:
        (scratch / name).symlink_to(folder / name)
    config = folder / "config.json"
    if config.is_file():
        # The class of some tokenizers follows from the model's type.
        (scratch / "config.json").write_text(json.dumps(cleaned(json.loads(config.read_text()))))
    try:
        return AutoTokenizer.from_pretrained(scratch, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # noqa: BLE001 - a hundred tokenizer classes, each with its own ways to say no
        reason = " ".join(str(error).split())[:300]
    try:
        return Tokenizer.from_file(str(scratch / "tokenizer.json"))
    except Exception:  # noqa: BLE001 - the library raises bare Exception
        return reason or "no reason given"


def _loads_as(tokenizer: Any) -> str:
    how = f"loads as {type(tokenizer).__name__}"
    if _knows_text(tokenizer):
        return how
    return f"{how}, but has no ids for text: none of its {counted(len(tokenizer.get_vocab()), 'token')} is a word"


def _knows_text(tokenizer: Any) -> bool:
    """Whether text becomes tokens of a vocabulary, and not only special ones: classes load without its file, too.

    A tokenizer of proteins knows no English, so what its own tokens decode to is text, too.
    """
    added = _added(tokenizer)
    own = [number for number in tokenizer.get_vocab().values() if number not in added]
    texts = (*TEXTS, *(tokenizer.decode([number]) for number in own[:OWN_TOKENS]))
    return any(
        number is not None and number not in added and any(map(str.isalnum, tokenizer.decode([number])))
        for text in texts
        for number in _plain_ids(tokenizer, text)
    )


def _added(tokenizer: Any) -> set[int]:
    """The ids of tokens that are none of the vocabulary's: specials, placeholders, what the config adds."""
    if isinstance(tokenizer, Tokenizer):
        return set(tokenizer.get_added_tokens_decoder())
    return {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}


def _plain_ids(tokenizer: Any, text: str) -> list[int | None]:
    """The ids of ``text`` alone; by the lower way in, as some classes take only tables or boxes by the upper one."""
    if isinstance(tokenizer, Tokenizer):
        return list(tokenizer.encode(text, add_special_tokens=False).ids)
    return list(tokenizer.convert_tokens_to_ids(tokenizer.tokenize(text)))


def _behaviour(tokenizer: Any) -> Iterator[tuple[str, Any]]:
    """Facet by facet, in an order that depends on nothing but the corpus."""
    definition = _definition(tokenizer)  # before calls change its settings for truncation and padding
    yield "vocabulary", tokenizer.get_vocab()
    if isinstance(tokenizer, Tokenizer):
        for text in TEXTS:
            ids = tokenizer.encode(text).ids
            yield f"ids of {text!r:.60}", ids
            yield f"decoding of {text!r:.60}", tokenizer.decode(ids, skip_special_tokens=False)
    else:
        yield "special tokens", tokenizer.special_tokens_map
        yield "added tokens", {number: str(token) for number, token in tokenizer.added_tokens_decoder.items()}
        yield "maximum input length", tokenizer.model_max_length
        yield "padding or truncation side", (tokenizer.padding_side, tokenizer.truncation_side)
        yield "input names", tokenizer.model_input_names
        for text in TEXTS:
            ids = tokenizer(text)["input_ids"]
            yield f"ids of {text!r:.60}", ids
            yield f"ids of {text!r:.60} without special tokens", tokenizer(text, add_special_tokens=False)["input_ids"]
            yield f"pair ids of {text!r:.60}", tokenizer(text, "and more")["input_ids"]
            yield f"decoding of {text!r:.60}", tokenizer.decode(ids)
            yield f"decoding of {text!r:.60} without special tokens", tokenizer.decode(ids, skip_special_tokens=True)
        yield "chat template", tokenizer.chat_template
        yield "output of the chat template", _templated(tokenizer)
    yield from definition


def _definition(tokenizer: Any) -> list[tuple[str, Any]]:
    """What it is made of as loaded, of which a sample of texts shows only part: normalizer, truncation, token flags."""
    backend = tokenizer if isinstance(tokenizer, Tokenizer) else getattr(tokenizer, "backend_tokenizer", None)
    parts = json.loads(backend.to_str()) if isinstance(backend, Tokenizer) else {}
    return [(f"{name} in its definition", part) for name, part in sorted(parts.items())]


def _settings(folder: str) -> Iterator[tuple[str, Any]]:
    """What only a wrapper of remote code would read: nothing here behaves by it, so what it says is compared."""
    for name in SETTINGS:
        path = Path(folder, name)
        content: Any = path.read_text(errors="replace") if path.is_file() else None
        with suppress(ValueError, TypeError, RecursionError):
            content = json.loads(content)
        yield f"content of {name}", content


def _templated(tokenizer: Any) -> str:
    if not tokenizer.chat_template:
        return "none"
    try:
        return str(tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # noqa: BLE001 - templates raise what they like; the same refusal is the same behaviour
        return f"raises {type(error).__name__}: {error}"
