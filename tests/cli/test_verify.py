"""`reshard verify`, as a person types it, between folders and repositories of the Hub on loopback."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.cli.conftest import ROW, Run
from tests.hub.fixtures import Namespace


@pytest.fixture
def bare(model: Path) -> Path:
    """The model's weights alone: nothing that the reload child would have to import torch for."""
    for name in ("config.json", "tokenizer.json", "optimizer.pt"):
        (model / name).unlink()
    return model


@pytest.fixture
def cut(reshard: Run, bare: Path, tmp_path: Path) -> Path:
    """The weights in four files."""
    return cut_of(reshard, bare, tmp_path)


def cut_of(reshard: Run, model: Path, tmp_path: Path) -> Path:
    assert reshard("run", model, "--to", tmp_path / "out", "--size", "3300B").code == 0
    return tmp_path / "out"


def test_a_good_output_passes_and_says_what_was_looked_at(reshard: Run, model: Path, tmp_path: Path) -> None:
    cut = cut_of(reshard, model, tmp_path)
    done = reshard("verify", cut, "--against", model, "--deep")
    assert done.code == 0, done.err
    assert done.out.splitlines()[-1].endswith(": passed (1 skipped, of 8 checks)"), "the config names no known class"
    for name in ("index rules ", "same tensors ", "other files ", "class of model ", "tokenizer ", "same bytes "):
        assert name in done.out


def test_quiet_writes_one_word(reshard: Run, cut: Path) -> None:
    assert reshard("verify", cut, "--quiet").out == "passed\n"


def test_a_changed_element_ends_with_the_code_of_proof_and_its_place(reshard: Run, bare: Path, cut: Path) -> None:
    file = cut / "model-00003-of-00004.safetensors"
    content = bytearray(file.read_bytes())
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    last = max(header, key=lambda name: header[name].get("data_offsets", [0])[0])
    was = content[17 - ROW]
    content[17 - ROW] ^= 1
    file.write_bytes(content)
    assert reshard("verify", cut, "--against", bare).code == 0, "nothing but one byte is another"
    done = reshard("verify", cut, "--against", bare, "--deep")
    assert done.code == 6
    assert f"{last} has different bytes: element [17] is {was} (0x{was:02x}) in the source and {was ^ 1}" in done.out
    assert done.err.splitlines()[-2].startswith("error[proof.verify]: ")
    report, error = reshard("verify", cut, "--against", bare, "--deep", "--json").documents
    assert report["result"] == "failed"
    failed = [check["name"] for check in report["checks"] if check["result"] == "failed"]
    assert failed == ["same bytes", "published bytes"]
    assert error["error"]["facts"]["failed"] == 2


def test_a_missing_file_is_found_without_a_source(reshard: Run, cut: Path) -> None:
    (cut / "model-00002-of-00004.safetensors").unlink()
    done = reshard("verify", cut)
    assert done.code == 6
    assert "refers to a missing file: model-00002-of-00004.safetensors" in done.out


def test_two_repositories_are_compared_and_their_sha256s_held(
    reshard: Run, bare: Path, cut: Path, namespace: Namespace
) -> None:
    env = {"HF_ENDPOINT": namespace.endpoint, "HF_TOKEN": namespace.token}
    for name, folder in (("source", bare), ("output", cut)):
        namespace.admin.create_repo(namespace.repo(name))
        files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        namespace.admin.put_files(namespace.repo(name), files, lfs=[n for n in files if n.endswith(".safetensors")])
    source, output = namespace.repo("source"), namespace.repo("output")
    (report,) = reshard("verify", output, "--against", source, "--deep", "--json", env=env).documents
    assert report["result"] == "passed"
    (report,) = reshard("verify", output, "--deep", "--json", env=env).documents
    (stored,) = [check for check in report["checks"] if check["name"] == "stored bytes"]
    assert (stored["figures"]["files"], stored["figures"]["attested"]) == (4, 4)
    namespace.admin.fault("GET /_cdn/.*model-00003-of-00004", "wrong_bytes", at=1500)
    done = reshard("verify", output, "--against", source, "--deep", env=env)
    assert done.code == 6
    assert "model-00003-of-00004.safetensors at " in done.out and "does not match its checksum" in done.out


def test_a_folder_is_compared_with_a_repository(reshard: Run, bare: Path, cut: Path, namespace: Namespace) -> None:
    env = {"HF_ENDPOINT": namespace.endpoint, "HF_TOKEN": namespace.token}
    repo = namespace.repo("source")
    namespace.admin.create_repo(repo)
    namespace.admin.put_files(repo, {path.name: path.read_bytes() for path in bare.iterdir()})
    assert reshard("verify", cut, "--against", repo, "--deep", env=env).code == 0
    save_file({"other": np.zeros(10, np.uint8)}, cut / "model-00001-of-00004.safetensors", metadata={"format": "pt"})
    assert reshard("verify", cut, "--against", repo, env=env).code == 6


@pytest.mark.parametrize(
    ("typed", "named"),
    [
        (["--max-memory", "cpu=1GB"], "require --load"),
        (["--loader", "accelerate"], "require --load"),
        (["--load", "--memory", "much"], "--memory much"),
        (["--load", "--device-map", "nowhere.json"], "--device-map nowhere.json"),
        (["--load", "--device-map", "x", "--max-memory", "cpu=1GB"], "use a file, or one of auto"),
    ],
)
def test_how_to_load_is_looked_at_before_anything_is_read(
    typed: list[str], named: str, reshard: Run, cut: Path
) -> None:
    done = reshard("verify", cut, *typed)
    assert (done.code, named in done.err) == (2, True), done.err


@pytest.fixture
def headless(tmp_path: Path) -> Path:
    """A model whose head is in no file."""
    from transformers import LlamaConfig, LlamaForCausalLM

    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(**small, vocab_size=96)).save_pretrained(tmp_path / "headless")
    file = tmp_path / "headless" / "model.safetensors"
    kept = {name: array for name, array in load_file(file).items() if name != "lm_head.weight"}
    save_file(kept, file, metadata={"format": "pt"})
    return tmp_path / "headless"


WHERE = """
import os, sys
if "reshard.pipeline.verifying.child.server" in sys.orig_argv:
    open(os.environ["PYTHONPATH"] + "/seen", "w").write(os.getcwd())
"""


def test_a_model_on_made_up_parameters_is_inconclusive_and_the_last_line_says_so(
    reshard: Run, headless: Path, tmp_path: Path
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(WHERE)
    (tmp_path / "room").mkdir()
    (tmp_path / "map.json").write_text('{"": "disk"}')
    env = {"PYTHONPATH": str(tmp_path / "site"), "RESHARD_TMPDIR": str(tmp_path / "room")}
    done = reshard("verify", headless, "--load", "--device-map", "map.json", "--memory", "4GB", "-v", env=env)
    assert done.code == 0, done.err
    assert done.out.splitlines()[-1].endswith(
        ": inconclusive (2 inconclusive, of 3 checks); bytes not compared (use --deep)"
    )
    assert "1 parameter in no file, such as lm_head.weight" in done.out
    assert "blocks on disk: 1" in done.out
    assert Path((tmp_path / "site" / "seen").read_text()).parent == tmp_path / "room", "what it offloads lies there"


@pytest.mark.slow
def test_the_loader_and_its_memory_are_the_users_choice(reshard: Run, headless: Path) -> None:
    (facts,) = reshard("verify", headless, "--load", "--loader", "accelerate", "--json").documents
    assert facts["result"] == "inconclusive"
    assert facts["checks"][-1]["level"] == "loaded by accelerate, one forward pass"
    (facts,) = reshard("verify", headless, "--load", "--memory", "1MB", "--json").documents
    assert "used more than 1.0 MB of memory" in facts["checks"][-1]["reason"]
    assert reshard("verify", headless, "--quiet").out == "inconclusive\n"


def test_a_map_that_misses_a_parameter_names_it(reshard: Run, headless: Path, tmp_path: Path) -> None:
    (tmp_path / "map.json").write_text('{"model.layers": "cpu"}')
    done = reshard("verify", headless, "--load", "--device-map", "map.json")
    assert done.code == 2, done.err
    assert "no device for model.embed_tokens.weight" in done.err


def test_a_load_of_weights_alone_is_skipped_and_what_was_asked_for_did_not_pass(reshard: Run, cut: Path) -> None:
    done = reshard("verify", cut, "--load")
    assert done.code == 0, done.err
    assert "load            skipped" in done.out and "config.json" in done.out
    assert ": inconclusive (2 skipped, of 4 checks)" in done.out.splitlines()[-1]


def test_what_cannot_be_looked_at_is_an_error_of_its_own(reshard: Run, bare: Path, tmp_path: Path) -> None:
    assert reshard("verify", tmp_path / "nothing").code == 3
    (tmp_path / "empty").mkdir()
    done = reshard("verify", bare, "--against", tmp_path / "empty")
    assert done.code == 3
    assert "error[source.no_weights]" in done.err
