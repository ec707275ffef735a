"""`reshard audit` as it is typed: a table, JSON and a page, and one line for what cannot be audited."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest

from reshard.pipeline.auditing.findings import next_command
from reshard.pipeline.places import parse_place
from reshard.pipeline.request import Options
from reshard.pipeline.sizes import SINGLE
from tests.cli.conftest import Run
from tests.hub.fixtures import Namespace
from tests.pipeline.auditing.planted import PLANTED, SECOND, catalog, files_of, model, publish


def test_an_audit_is_a_table_json_and_a_page_and_fails_if_a_model_is_wrong(
    reshard: Run, namespace: Namespace, tmp_path: Path
) -> None:
    env = {"HF_ENDPOINT": namespace.endpoint, "HF_TOKEN": namespace.token}
    publish(namespace, "source", files_of(*model()))
    publish(namespace, "good", files_of(*model()))
    publish(namespace, "short", PLANTED["file-short"](0))
    publish(namespace, "unsigned", PLANTED["unsigned"](0))
    hostile = PLANTED["tensors-added"](0)
    hostile = {path: data.replace(b"layer.2.bias", b"<b>\xe2\x80\xae&x</b>") for path, data in hostile.items()}
    publish(namespace, "hostile", hostile)
    file, report = tmp_path / "mirror.yaml", tmp_path / "audit.html"
    file.write_text(catalog(namespace, dict.fromkeys(("good", "short", "unsigned", "hostile"), "source")))

    done = reshard("audit", file, "--html", report, env=env)
    assert done.code == 6
    rows = [line.split()[:3] for line in done.out.splitlines() if line and not line.startswith(" ")]
    assert rows[:4] == [
        ["SEVERITY", "MODEL", "FINDINGS"],
        ["critical", namespace.repo("short"), "file-short"],
        ["error", namespace.repo("hostile"), "tensors-added"],
        ["warning", namespace.repo("unsigned"), "unsigned"],
    ]
    assert f"next: reshard run {namespace.repo('source')} --to {namespace.repo('short')}" in done.out
    counts = "4 models: critical 1, error 1, warning 1, no findings 1; from headers only; "
    assert re.search(rf"{re.escape(str(file))}: {counts}\d+ Hub calls\n$", done.out)
    error, hint = done.err.splitlines()[-2:]
    assert error.startswith(
        f"error[proof.audit]: {file}: 2 of 4 models failed the audit; the worst is {namespace.repo('short')}:"
    )
    assert hint.startswith("hint: use --json")

    page = report.read_text()
    assert "<script" not in page and "<b>" not in page and "\u202e" not in page
    assert "&lt;b&gt;" in page and html.escape(f"reshard run {namespace.repo('source')}") in page
    assert [kind for kind in ("file-short", "tensors-added", "unsigned") if f"<td>{kind}" in page] == [
        "file-short", "tensors-added", "unsigned",
    ]  # fmt: skip

    again = reshard("audit", file, "--json", env=env)
    audited, failed = again.documents
    assert (again.code, failed["error"]["code"]) == (6, "proof.audit")
    assert {name: audited[name] for name in ("result", "models", "critical", "errors", "warnings")} == {
        "result": "failed", "models": 4, "critical": 1, "errors": 1, "warnings": 1,
    }  # fmt: skip
    assert [entry["severity"] for entry in audited["entries"]] == ["critical", "error", "warning", None]
    assert audited["entries"][0]["source_by"] == "map"
    bare = reshard("audit", file, "--quiet", env=env)
    assert bare.out.splitlines() == [namespace.repo("short"), namespace.repo("hostile")]


def test_without_a_wrong_model_it_succeeds_and_a_sample_is_read_whole(
    reshard: Run, namespace: Namespace, tmp_path: Path
) -> None:
    env = {"HF_ENDPOINT": namespace.endpoint, "HF_TOKEN": namespace.token}
    publish(namespace, "source", files_of(*model()))
    for name in ("one", "two", "three"):
        publish(namespace, name, files_of(*model()))
    file = tmp_path / "mirror.yaml"
    file.write_text(catalog(namespace, dict.fromkeys(("one", "two", "three"), "source")))
    (first,) = reshard("audit", file, "--deep", "2", "--json", env=env).documents
    (again,) = reshard("audit", file, "--deep", "2", "--json", env=env).documents
    chosen = [entry["place"] for entry in first["entries"] if entry["deep"]]
    assert first["result"] == "passed" and len(chosen) == 2
    assert chosen == [entry["place"] for entry in again["entries"] if entry["deep"]]
    size = namespace.admin.files(chosen[0])[SECOND]["size"]
    # What is stored has the bytes of the others, too.
    namespace.admin.fault(f"GET /_cdn/models/{chosen[0]}/.*{SECOND}", "wrong_bytes", at=size - 1)
    done = reshard("audit", file, "--deep", "all", env=env)
    assert done.code == 6
    assert f"critical  {chosen[0]}" in done.out and "read every byte of 3 models" in done.out


def test_what_cannot_be_audited_is_one_line_with_its_exit_code(
    reshard: Run, namespace: Namespace, tmp_path: Path
) -> None:
    env = {"HF_ENDPOINT": namespace.endpoint, "HF_TOKEN": namespace.token}
    publish(namespace, "only", files_of(*model()))
    file = tmp_path / "mirror.yaml"
    file.write_text("name: mirror\nentries:\n- {repo: a/b, to: other/b}\n")
    (tmp_path / "broken.yaml").write_text("name: [")
    for typed, code, said in (
        (["nobody-of-this-name"], 2, "nobody-of-this-name has no models on"),
        ([namespace.name, "--against", file], 2, f"no entry in catalog mirror has a target that {namespace.name} owns"),
        ([namespace.name, "--against", tmp_path / "broken.yaml"], 2, f"{tmp_path}/broken.yaml, line 2"),
        ([namespace.name, "--against", tmp_path / "none.yaml"], 2, f"cannot read {tmp_path}/none.yaml"),
        ([namespace.name, "--against", "mistralai"], 2, "--against mistralai: use a catalog file, or a template"),
        ([file, "--against", file], 2, "names the sources itself; remove --against"),
        ([namespace.name, "--deep", "some"], 2, "--deep some: use all, or a number of models"),
        ([namespace.name, "--against", "x" * 300], 2, "use a catalog file, or a template"),
        (["x" * 300], 2, "xxx"),
        (["~nobody2/x"], 2, "~nobody2/x"),
        ([tmp_path / "none"], 3, f"cannot read folder {tmp_path}/none"),
    ):
        done = reshard("audit", *typed, env=env)
        assert (done.code, done.out) == (code, ""), typed
        error, hint = done.err.splitlines()[-2:]
        assert error.startswith("error[") and said in error, typed
        assert hint.startswith("hint: ")


@pytest.mark.parametrize(
    "options",
    [
        Options(size=SINGLE, dtype="bfloat16", dequantize=True, strict_dtype=True, manifest=False),
        Options(size=3300, ranks="pp4", align=4096, pack="layers", oversize="fail", ties="source"),
        Options(size=200_000_000, experts="separate", strip_prefix="model."),
    ],
)
def test_options_are_named_as_run_takes_them(reshard: Run, tmp_path: Path, options: Options) -> None:
    words = next_command("tensors-lost", parse_place("./out"), parse_place(tmp_path / "nowhere"), options).split()[1:]
    assert len(words) > 6
    done = reshard(*words)
    assert done.code == 3 and done.err.startswith("error[source.no_folder]: "), done.err


def test_a_report_that_cannot_be_written_ends_an_audit_before_it_begins(reshard: Run, tmp_path: Path) -> None:
    for file in (tmp_path / "nowhere" / "audit.html", tmp_path):
        done = reshard("audit", tmp_path, "--html", file)
        assert done.code == 4 and done.err.startswith(f"error[access.folder]: cannot write to {file}: "), done.err


def test_what_was_found_is_told_where_its_report_cannot_be_written(reshard: Run, tmp_path: Path) -> None:
    (tmp_path / "all" / "m").mkdir(parents=True)
    for path, data in PLANTED["file-short"](0).items():
        (tmp_path / "all" / "m" / path).write_bytes(data)
    done = reshard("audit", tmp_path / "all", "--html", "/dev/full")
    assert done.code == 4 and "file-short" in done.out, done.err
