"""Files beside the weights: each is accounted for, or a finding; what is only argued to mean the same never passes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reshard.pipeline.check import Check
from reshard.pipeline.errors import DiskFull
from reshard.pipeline.limits import CONFIG_MAX
from reshard.pipeline.places import Folder, parse_place
from reshard.pipeline.request import Options, Request
from reshard.pipeline.reshard import run
from reshard.pipeline.stores.connect import Context
from reshard.pipeline.stores.folder.source import FolderSource, list_folder
from reshard.pipeline.verifying import meta_load, tokenizer
from reshard.pipeline.verifying.files import check_files
from reshard.pipeline.verifying.json_difference import json_difference
from reshard.pipeline.verifying.meta_load import MetaLoader
from reshard.pipeline.verifying.opened import UNCHANGED, OpenedSide
from reshard.pipeline.verifying.tokenizer import check_tokenizers
from tests.support.full_disk import files_of_at_most
from tests.support.models import add_friends, arrays, save_single

OTHER_WORDS = "spacing, key order or number format"
PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
CONFIG = {"model_type": "none-of-ours", "hidden_size": 8, "dtype": "float32", "scale": float("nan")}


def source_of(folder: Path) -> FolderSource:
    return FolderSource.open(Folder(path=str(folder)))


def compared(output: Path, source: Path) -> Check:
    theirs, ours = (OpenedSide.open(source_of(folder)) for folder in (source, output))
    return check_files(theirs, ours, UNCHANGED, True, lambda count: None)


def undecided(check: Check) -> str:
    """Why a check can neither pass nor fail."""
    assert (check.result, check.findings) == ("inconclusive", ())
    return check.reason


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """(output, source): a model with a processor and nothing that is text."""
    source, output = tmp_path / "source", tmp_path / "output"
    save_single(source, arrays(2, 400))
    write(source / "config.json", CONFIG)
    for name in PROCESSORS:
        write(source / name, {"image_mean": [0.5, 0.5, 0.5], "size": {"height": 32}})
    shutil.copytree(source, output)
    return output, source


def give_tokenizers(*folders: Path) -> None:
    for folder in folders:
        add_friends(folder)
        (folder / "tokenizer.model").write_bytes(b"pieces")


# ------------------------------------------------------------------------------------- processors and tokenizers


@pytest.mark.parametrize("text", [False, True], ids=["alone", "beside a tokenizer"])
@pytest.mark.parametrize("name", PROCESSORS)
def test_a_lost_or_changed_processor_is_a_finding(name: str, text: bool, pair: tuple[Path, Path]) -> None:
    output, source = pair
    if text:
        give_tokenizers(output, source)
    write(output / name, {"size": {"height": 32}, "image_mean": [0.5, 0.5, 0.5]})
    assert undecided(compared(output, source)) == f"{name} differs only in form: {OTHER_WORDS}"
    write(output / name, {"image_mean": [0.5, 0.5, 0.5], "size": {"height": 33}})
    assert compared(output, source).findings == (f"{name} differs: size.height was 32 and is 33",)
    (output / name).unlink()
    assert compared(output, source).findings == (f"{name} is missing",)


@pytest.mark.parametrize("name", ["tokenizer.model", "tekken.json", "vocab.json", "merges.txt", "source.spm"])
def test_a_vocabulary_that_its_loader_does_not_read_must_be_the_same(name: str, pair: tuple[Path, Path]) -> None:
    """Where `tokenizer.json` is there, behaviour says nothing of it."""
    output, source = pair
    give_tokenizers(output, source)
    for folder in pair:
        write(folder / name, '{"a": 0}')
    assert compared(output, source).result == "passed"
    write(output / name, '{"a": 1}')
    (finding,) = compared(output, source).findings
    assert finding.startswith(name)
    (output / name).unlink()
    assert compared(output, source).findings == (f"{name} is missing",)


def test_a_vocabulary_that_behaviour_proves_may_be_another_file(pair: tuple[Path, Path]) -> None:
    """A tokenizer of sentencepiece that was saved again has a `tokenizer.json` in its place."""
    output, source = pair
    for folder, name in ((source, "spiece.model"), (output, "tokenizer.json")):
        write(folder / name, "{}")
        write(folder / "tokenizer_config.json", {"tokenizer_class": "T5Tokenizer"})
    assert compared(output, source).result == "passed", "the check of tokenizers judges them"
    write(output / "spiece.model", "{ }")
    (finding,) = compared(output, source).findings
    assert finding.startswith("spiece.model"), "nobody has read the one that was added"


def test_what_is_left_of_no_tokenizer_is_compared_as_any_other_file(pair: tuple[Path, Path]) -> None:
    output, source = pair
    write(source / "special_tokens_map.json", {"eos_token": "</s>"})
    assert compared(output, source).findings == ("special_tokens_map.json is missing",)


def test_a_tokenizer_that_only_the_output_has_is_not_compared(pair: tuple[Path, Path], meta_loader: MetaLoader) -> None:
    output, source = pair
    give_tokenizers(output)
    (check,) = check_tokenizers(source_of(output), source_of(source), meta_loader, None)
    assert (check.result, check.reason) == ("inconclusive", "the source has no tokenizer to compare with")


@pytest.mark.parametrize(
    ("change", "result", "said"),
    [
        (lambda output: write(output / "tokenizer.json", {}), "inconclusive", "tokenizer.json differs: "),
        (
            lambda output: write(output / "added_tokens.json", {}),
            "inconclusive",
            "added_tokens.json is on one side",
        ),
        (lambda output: (output / "tokenizer.json").unlink(), "inconclusive", "tokenizer.json is on one side only"),
        (lambda output: [file.unlink() for file in output.glob("*token*")], "failed", "all of its files are missing"),
    ],
    ids=["changed", "added", "lost", "all lost"],
)
def test_a_tokenizer_whose_behaviour_nobody_can_look_at_passes_only_byte_for_byte(
    change: Callable[[Path], object], result: str, said: str, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where reshard is installed without torch and transformers."""
    output, source = pair
    give_tokenizers(output, source)
    monkeypatch.setattr(meta_load, "find_spec", lambda name: None)

    def tokenizer() -> Check:
        with closing(MetaLoader()) as without:
            return check_tokenizers(source_of(output), source_of(source), without, None)[0]

    assert tokenizer().result == "passed"
    change(output)
    check = tokenizer()
    assert check.result == result
    assert said in "; ".join([check.reason, *check.findings])


def test_a_tokenizer_that_is_too_large_to_load_is_compared_byte_for_byte(
    pair: tuple[Path, Path], meta_loader: MetaLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "TOKENIZER_MAX", 1000)
    output, source = pair
    give_tokenizers(output, source)
    for folder in pair:
        with (folder / "vocab.txt").open("wb") as file:
            file.truncate(1001)
    (check,) = check_tokenizers(source_of(output), source_of(source), meta_loader, None)
    assert check.result == "skipped"
    assert compared(output, source).result == "passed"
    write(output / "tokenizer.json", {})
    (finding,) = compared(output, source).findings
    assert finding.startswith("tokenizer.json differs: ")


# --------------------------------------------------------------------------------------------------------- added


@pytest.mark.parametrize(
    "name",
    [
        "adapter_config.json",
        "generation_config.json",
        "chat_template.jinja",
        "modeling_x.py",
        "quantize_config.json",
        "custom_generate/generate.py",
        "additional_chat_templates/rag.jinja",
        "tokenizer.json",
        "pytorch_model.bin",
        "tf_model.h5",
    ],
)
def test_what_loaders_read_must_not_be_added(name: str, pair: tuple[Path, Path]) -> None:
    output, source = pair
    write(output / name, "{}")
    assert compared(output, source).findings == (f"{name} is not in the source, and loaders read it",)


def test_an_added_adapter_is_named_with_its_weights(pair: tuple[Path, Path]) -> None:
    output, source = pair
    write(output / "adapter_config.json", {"peft_type": "LORA"})
    save_single(output, arrays(1, 80, prefix="lora"), "adapter_model.safetensors")
    named = [finding.split()[0] for finding in compared(output, source).findings]
    assert named == ["adapter_config.json", "adapter_model.safetensors"]


def test_what_no_loader_reads_is_named_and_does_not_pass(pair: tuple[Path, Path]) -> None:
    output, source = pair
    for name in ("README.md", "NOTES.txt", "eval/results.json", "eval/run.py", "training.json", "onnx/config.json"):
        write(output / name, "{}")
    check = compared(output, source)
    assert undecided(check).startswith("NOTES.txt is not in the source; eval/results.json is not in the source; ")
    assert check.figures["added"] == 5, "cards are their owners'"


def test_what_completes_a_source_without_a_config_is_named(pair: tuple[Path, Path]) -> None:
    """As `--config-from` does."""
    output, source = pair
    for name in ("config.json", *PROCESSORS):
        (source / name).unlink()
    check = compared(output, source)
    assert "config.json is not in the source" in undecided(check) and check.figures["added"] == 4


def test_a_publication_into_a_folder_that_was_not_empty_is_its_sources_equal(
    pair: tuple[Path, Path], tmp_path: Path, meta_loader: MetaLoader
) -> None:
    output, source = tmp_path / "target", pair[1]
    for name in ("README.md", "notes.txt", ".gitattributes", "images/x.png"):
        write(output / name, "the owner's")
    options = Options(size=1000, overwrite=True)
    request = Request(source=parse_place(str(source)), target=parse_place(str(output)), options=options)
    run(request, Context.from_env(), meta_loader=meta_loader)
    assert "images/x.png is not in the source; notes.txt is not in the source" in undecided(compared(output, source))
    for name in ("notes.txt", "images/x.png"):
        (output / name).unlink()
    check = compared(output, source)
    assert (check.result, check.reason) == ("passed", "README.md differs (ignored)")


@pytest.mark.parametrize("name", ["LICENSE", "LICENSE.md", "NOTICE", "USE_POLICY.md", "images/x.png", "notes.txt"])
def test_every_file_of_the_source_is_there_and_has_its_bytes(name: str, pair: tuple[Path, Path]) -> None:
    output, source = pair
    for folder in pair:
        write(folder / name, "as it was")
    assert compared(output, source).result == "passed"
    write(output / name, "as it is!")
    assert compared(output, source).findings == (f"{name} differs starting at byte 6",)
    (output / name).unlink()
    assert compared(output, source).findings == (f"{name} is missing",)


def test_files_of_tools_and_leftovers_of_the_source_are_not_missed(pair: tuple[Path, Path]) -> None:
    output, source = pair
    for name in (".gitattributes", ".DS_Store", ".env", "__pycache__/x.pyc"):
        write(source / name, "x")
    write(output / ".gitattributes", "y")
    assert compared(output, source).result == "passed"


def test_what_was_excluded_on_the_way_is_named_by_the_option(pair: tuple[Path, Path]) -> None:
    output, source = pair
    (output / PROCESSORS[0]).unlink()
    sides = [OpenedSide.open(source_of(folder)) for folder in (source, output)]
    assert check_files(*sides, Options(exclude=("pre*",)), True, lambda count: None).result == "passed"


def test_weights_of_the_source_that_a_copy_leaves_out_may_stay_as_they_are(pair: tuple[Path, Path]) -> None:
    output, source = pair
    for folder in pair:
        torch.save({"a": torch.ones(3)}, folder / "pytorch_model.bin")
    assert compared(output, source).result == "passed"
    torch.save({"a": torch.zeros(3)}, output / "pytorch_model.bin")
    (finding,) = compared(output, source).findings
    assert finding.startswith("pytorch_model.bin differs starting at byte")


def test_a_large_file_without_a_hash_is_compared_only_with_every_byte(pair: tuple[Path, Path]) -> None:
    sides = [OpenedSide.open(source_of(folder)) for folder in pair[::-1]]
    for folder in pair:
        with (folder / "images.bin").open("wb") as file:
            file.truncate(CONFIG_MAX + 1)
    sides = [OpenedSide.open(source_of(folder)) for folder in pair[::-1]]
    check = check_files(*sides, UNCHANGED, False, lambda count: None)
    assert undecided(check) == "images.bin was not compared (use --deep)"
    assert compared(*pair).result == "passed"


def test_a_large_file_with_another_hash_fails_without_being_read(pair: tuple[Path, Path]) -> None:
    sides = []
    for folder, letter in zip(pair[::-1], "ab", strict=True):
        with (folder / "images.bin").open("wb") as file:
            file.truncate(CONFIG_MAX + 1)
        hashes = {"images.bin": letter * 64}
        sides.append(OpenedSide.open(FolderSource(Folder(path=str(folder)), list_folder(folder), "c", hashes)))
        (folder / "images.bin").unlink()
    check = check_files(*sides, UNCHANGED, False, lambda count: None)
    assert check.findings == ("images.bin has a different hash",)


# ---------------------------------------------------------------------------------------------- configs by meaning


def without(key: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda config: {k: v for k, v in config.items() if k != key}


@pytest.mark.parametrize(
    "said",
    [
        {"torch_dtype": "float32"} | without("dtype")(CONFIG),
        CONFIG | {"torch_dtype": CONFIG["dtype"]},
        CONFIG | {"transformers_version": "9", "_name_or_path": "x"},
        CONFIG | {"text_config": {"transformers_version": "9", "torch_dtype": "float16", "layers": 2}},
    ],
    ids=["torch_dtype", "both", "version", "nested"],
)
def test_configs_that_mean_the_same_are_inconclusive_and_named(said: dict[str, Any], pair: tuple[Path, Path]) -> None:
    output, source = pair
    if "text_config" in said:
        write(source / "config.json", CONFIG | {"text_config": {"dtype": "float16", "layers": 2}})
    write(output / "config.json", json.dumps(said, indent=4))
    assert undecided(compared(output, source)).startswith("config.json differs only in form: ")


@pytest.mark.parametrize(
    ("was", "is_", "named"),
    [
        ({"use_cache": 1}, {"use_cache": True}, "use_cache was 1 and is true"),
        ({"a": [1, 0]}, {"a": [1, False]}, "a was [1, 0] and is [1, false]"),
        ({"a": {"b": 1}}, {"a.b": 1}, "a.b was 1 and is missing; a.b was missing and is 1"),
        ({"a": {}}, {}, "a was {} and is missing"),
        ({"x": {"y": {"n": 1}}}, {"x": {"y": {"n": 2}}}, "x.y.n was 1 and is 2"),
        ({"dtype": "float16"}, {"torch_dtype": "float32"}, 'dtype was "float16" and is "float32"'),
        (
            {"dtype": "float16"},
            {"dtype": "float16", "torch_dtype": "float32"},
            'torch_dtype was missing and is "float32"',
        ),
        ({"hidden_size": 32}, {"hidden_size": 32.0}, "hidden_size was 32 and is 32.0"),
        ({"sizes": [1, 2]}, {"sizes": [1, 2.0]}, "sizes was [1, 2] and is [1, 2.0]"),
        ([1], {}, "it was [1] and is missing"),
    ],
)
def test_what_means_something_else_is_named_by_its_keys(
    was: Any, is_: Any, named: str, pair: tuple[Path, Path]
) -> None:
    output, source = pair
    for folder, content in ((source, was), (output, is_)):
        write(folder / "generation_config.json", content)
    assert compared(output, source).findings == (f"generation_config.json differs: {named}",)


@pytest.mark.parametrize("content", [b"\xef\xbb\xbf{}", "{}".encode("utf-16"), b'{"a": "\xff"}', b"[" * 100_000])
def test_json_that_loaders_refuse_is_not_the_same(content: bytes, pair: tuple[Path, Path]) -> None:
    output, source = pair
    write(source / "generation_config.json", {})
    (output / "generation_config.json").write_bytes(content)
    (finding,) = compared(output, source).findings
    assert "not JSON that loaders can read" in finding
    (source / "generation_config.json").write_bytes(content)
    assert compared(output, source).result == "passed", "it is the source's own"


def test_a_vocabulary_may_have_any_word(pair: tuple[Path, Path]) -> None:
    output, source = pair
    for folder, words in ((source, ["dtype", "torch_dtype", "a"]), (output, ["torch_dtype", "dtype", "a"])):
        write(folder / "words.json", {word: number for number, word in enumerate(words)})
    (finding,) = compared(output, source).findings
    assert finding == "words.json differs: dtype was 0 and is 1; torch_dtype was 1 and is 0"


exact = st.none() | st.booleans() | st.integers() | st.text(max_size=3)


def documents(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=12,
    )


@given(documents(exact | st.floats()), st.booleans())
def test_whatever_it_says_it_says_the_same_as_itself(value: Any, config: bool) -> None:
    compact, indented = json.dumps(value), json.dumps(value, indent=1, sort_keys=True)
    assert json_difference(compact.encode(), indented.encode(), config=config) == (
        True,
        f"differs only in form: {OTHER_WORDS}",
    )


@given(documents(exact), documents(exact))
def test_two_documents_are_the_same_only_where_they_are_equal(one: Any, other: Any) -> None:
    first, second = (json.dumps(value, sort_keys=True) for value in (one, other))
    assert json_difference(first.encode(), second.encode(), config=False).same_meaning == (first == second)


def test_a_tokenizer_that_there_is_no_room_for_is_said_so(tmp_path: Path) -> None:
    write(tmp_path / "model" / "tokenizer.json", "x" * 3_000_000)
    with files_of_at_most(2_000_000), closing(MetaLoader()) as meta_loader, pytest.raises(DiskFull) as full:
        check_tokenizers(source_of(tmp_path / "model"), None, meta_loader, tmp_path)
    assert full.value.facts["needed"] == 3_000_000


@pytest.mark.parametrize(
    "name",
    ["consolidated.safetensors", "consolidated-00001-of-00001.safetensors", "consolidated.00.pth",
     "open_clip_model.safetensors"],
)  # fmt: skip
def test_added_weights_that_other_loaders_prefer_are_a_finding(name: str, pair: tuple[Path, Path]) -> None:
    output, source = pair
    save_single(output, arrays(2, 400, seed=5), name)
    assert f"{name} is not in the source, and loaders read it" in compared(output, source).findings


def test_a_cast_changes_the_config_beside_weights_and_no_other(tmp_path: Path) -> None:
    save_single(tmp_path / "source", arrays(2, 400))
    for folder in (".", "onnx"):
        write(tmp_path / "source" / folder / "config.json", CONFIG)
    asked = Options(dtype="float16")
    places = [parse_place(str(tmp_path / name)) for name in ("source", "output")]
    run(Request(source=places[0], target=places[1], options=asked), Context.from_env())
    theirs, ours = (OpenedSide.open(source_of(tmp_path / name)) for name in ("source", "output"))
    assert json.loads((tmp_path / "output" / "config.json").read_text())["dtype"] == "float16"
    assert check_files(theirs, ours, asked, True, lambda count: None).result == "passed"


def test_settings_that_reshard_wrote_may_not_be_lost(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    torch.save({"model": {"w": torch.zeros(3)}, "config": {"dim": 3}}, tmp_path / "source" / "pytorch_model.bin")
    places = [parse_place(str(tmp_path / name)) for name in ("source", "output")]
    run(Request(source=places[0], target=places[1], options=Options()), Context.from_env())
    assert compared(tmp_path / "output", tmp_path / "source").result == "passed"
    (tmp_path / "output" / "model.settings.json").unlink()
    assert compared(tmp_path / "output", tmp_path / "source").findings == ("model.settings.json is missing",)
    (tmp_path / "output" / "reshard.manifest.json").unlink()
    assert compared(tmp_path / "output", tmp_path / "source").findings == (), "other converters write none"
