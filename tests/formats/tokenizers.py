"""Small tokenizers of every kind that models come with, trained where they are needed and saved as the Hub has them."""

from __future__ import annotations

import io
import json
from functools import cache
from pathlib import Path

import sentencepiece
from tokenizers import Tokenizer
from tokenizers.implementations import BertWordPieceTokenizer, ByteLevelBPETokenizer

VOCABULARY = 400  # pieces; 256 of them are bytes where a tokenizer falls back to those
TEXT = Path(__file__).parents[2] / "LICENSE"  # a text that is there and does not change


@cache
def _sentencepiece(kind: str, byte_fallback: bool, pad: int, bos: int, eos: int, unk: int) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.read_text().splitlines()),
        model_writer=model,
        model_type=kind,
        vocab_size=VOCABULARY,
        byte_fallback=byte_fallback,
        pad_id=pad,
        bos_id=bos,
        eos_id=eos,
        unk_id=unk,
        minloglevel=2,
    )
    return model.getvalue()


def _config(folder: Path, tokenizer_class: str, **more: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": tokenizer_class, **more}))


def t5(folder: Path) -> None:
    """``spiece.model`` alone, as T5's first repositories have it."""
    (folder / "spiece.model").write_bytes(_sentencepiece("unigram", False, 0, -1, 1, 2))
    _config(folder, "T5Tokenizer", extra_ids=0, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def llama(folder: Path) -> None:
    """``tokenizer.model`` with bytes to fall back to."""
    (folder / "tokenizer.model").write_bytes(_sentencepiece("bpe", True, -1, 1, 2, 0))
    _config(folder, "LlamaTokenizer", add_bos_token=True, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@cache
def _bytes_bpe() -> Tokenizer:
    made = ByteLevelBPETokenizer()
    made.train_from_iterator(TEXT.read_text().splitlines(), VOCABULARY, special_tokens=["<|endoftext|>"])
    return made


def gpt2(folder: Path) -> None:
    """``vocab.json`` and ``merges.txt``."""
    _bytes_bpe().save_model(str(folder))
    _config(folder, "GPT2Tokenizer", bos_token="<|endoftext|>", eos_token="<|endoftext|>", unk_token="<|endoftext|>")


def fast(folder: Path) -> None:
    """``tokenizer.json`` and nothing that says more."""
    _bytes_bpe().save(str(folder / "tokenizer.json"))
    _config(folder, "PreTrainedTokenizerFast", eos_token="<|endoftext|>")


@cache
def _wordpiece() -> str:
    made = BertWordPieceTokenizer()
    made.train_from_iterator(TEXT.read_text().splitlines(), VOCABULARY)
    vocabulary = sorted(made.get_vocab().items(), key=lambda item: item[1])
    return "".join(f"{piece}\n" for piece, _ in vocabulary)


def bert(folder: Path) -> None:
    """``vocab.txt``."""
    (folder / "vocab.txt").write_text(_wordpiece())
    _config(folder, "BertTokenizer", do_lower_case=True)
