"""Which token goes where, and that none is ever printed."""

from __future__ import annotations

import itertools
import json
import pickle
from pathlib import Path

import pytest
from pydantic import ValidationError

from reshard.pipeline.errors import BadCredentials, BadPlace, BadSetting, CredentialScope, CredentialUnknown
from reshard.pipeline.places import Hub, parse_place
from reshard.pipeline.stores.credentials import DEFAULT_ENDPOINT, Credential, Credentials, Use, elsewhere

SECRET = "hf_verysecrettoken"
FILE = """
[[credential]]
namespace = "org"
env = "ORG_TOKEN"

[[credential]]
namespace = "org"
use = "write"
env = "ORG_WRITE_TOKEN"

[[credential]]
endpoint = "https://hub.example/"
file = "{file}"
"""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", "default")
    monkeypatch.setenv("ORG_TOKEN", "org")
    monkeypatch.setenv("ORG_WRITE_TOKEN", "org-write")
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    (tmp_path / "secret").write_text(f"{SECRET}\n")
    (tmp_path / "credentials.toml").write_text(FILE.format(file=tmp_path / "secret"))
    monkeypatch.setenv("RESHARD_CREDENTIALS", str(tmp_path / "credentials.toml"))


def token(found: Credential | None) -> str | None:
    return found.token.get_secret_value() if found else None


@pytest.mark.parametrize(
    ("endpoint", "namespace", "use", "expected"),
    [
        (DEFAULT_ENDPOINT, "somebody", "read", "default"),
        (DEFAULT_ENDPOINT, "org", "read", "org"),
        (DEFAULT_ENDPOINT, "org", "write", "org-write"),
        (DEFAULT_ENDPOINT, "Org", "write", "org-write"),  # a Hub knows no difference
        ("https://hub.example", "org", "write", SECRET),
        ("https://hub.example", "any", "read", SECRET),
        ("https://other.example", "org", "read", None),
    ],
)
def test_the_most_particular_entry_wins(endpoint: str, namespace: str, use: Use, expected: str | None) -> None:
    assert token(Credentials.from_env().find(endpoint, namespace, use)) == expected


def test_the_default_token_belongs_to_the_default_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://mine.example/")
    credentials = Credentials.from_env()
    assert token(credentials.find("https://mine.example", "a", "read")) == "default"
    assert credentials.find(DEFAULT_ENDPOINT, "a", "read") is None


def test_without_a_token_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.delenv("ORG_TOKEN")
    credentials = Credentials.from_env()
    assert credentials.find(DEFAULT_ENDPOINT, "a", "read") is None
    assert credentials.find(DEFAULT_ENDPOINT, "org", "read") is None


def test_a_rotated_token_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    credentials = Credentials.from_env()
    monkeypatch.setenv("ORG_TOKEN", "rotated")
    assert token(credentials.find(DEFAULT_ENDPOINT, "org", "read")) == "rotated"


def test_a_token_is_never_printed() -> None:
    credentials = Credentials.from_env()
    found = credentials.find("https://hub.example", "x", "read")
    assert found is not None
    assert SECRET not in f"{found} {found!r} {credentials!r} {vars(credentials)} {found.id}"


def test_equal_tokens_share_an_id_and_others_do_not() -> None:
    credentials = Credentials.from_env()
    ids = [
        found.id
        for found in (
            credentials.find(DEFAULT_ENDPOINT, "a", "read"),
            credentials.find(DEFAULT_ENDPOINT, "b", "write"),
            credentials.find(DEFAULT_ENDPOINT, "org", "read"),
        )
        if found
    ]
    assert ids[0] == ids[1] != ids[2] and len(ids) == 3
    assert pickle.loads(pickle.dumps(ids)) == ids  # noqa: S301


NAMED = """
[[credential]]
name = "team"
namespace = "org"
env = "TEAM_TOKEN"

[[credential]]
name = "team"
namespace = "team"
use = "write"
env = "TEAM_WRITE_TOKEN"

[[credential]]
namespace = "org"
env = "ORG_TOKEN"
"""


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Credentials:
    (tmp_path / "credentials.toml").write_text(NAMED)
    monkeypatch.setenv("TEAM_TOKEN", "team")
    monkeypatch.setenv("TEAM_WRITE_TOKEN", "team-write")
    return Credentials.from_env()


def test_a_name_gets_its_own_entries_and_the_one_that_serves(named: Credentials) -> None:
    assert token(named.find(DEFAULT_ENDPOINT, "org", "read", "team")) == "team"
    assert token(named.find(DEFAULT_ENDPOINT, "team", "write", "team")) == "team-write"
    assert token(named.find(DEFAULT_ENDPOINT, "org", "read")) == "team"  # of equal ones the first
    assert token(named.find(DEFAULT_ENDPOINT, "somebody", "read")) == "default"
    assert [known.scope for known in named.references()] == [
        " (team) for org", " (team) for team, write only", " for org", "",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("endpoint", "namespace", "use"),
    [
        (DEFAULT_ENDPOINT, "somebody", "read"),
        (DEFAULT_ENDPOINT, "team", "read"),
        ("https://other.example", "org", "read"),
        ("https://other.example", "team", "write"),
    ],
)
def test_a_name_is_good_for_nothing_that_its_entries_do_not_serve(
    named: Credentials, endpoint: str, namespace: str, use: Use
) -> None:
    with pytest.raises(CredentialScope) as refused:
        named.find(endpoint, namespace, use, "team")
    assert refused.value.facts["serves"] == f"{DEFAULT_ENDPOINT} for org; {DEFAULT_ENDPOINT} for team, write only"
    assert f"{use} access to {namespace} on {endpoint}" in str(refused.value)


def test_a_name_that_is_not_there_names_those_that_are(named: Credentials) -> None:
    with pytest.raises(CredentialUnknown, match=r"no credential other \(available: team\)$"):
        named.find(DEFAULT_ENDPOINT, "org", "read", "other")
    with pytest.raises(CredentialUnknown, match="available: none with a name"):
        Credentials().find(DEFAULT_ENDPOINT, "org", "read", "team")


def test_only_a_job_is_told_of_the_worker_whose_credentials_lack_a_name(named: Credentials) -> None:
    with pytest.raises(CredentialUnknown) as refused:
        named.find(DEFAULT_ENDPOINT, "org", "read", "other")
    entry = 'a [[credential]] with `name = "other"`'
    use = "use an available credential, or"
    assert refused.value.next_step == f"{use} add {entry}, then run the same command again"
    refused.value.facts["job"] = "pkgd"
    assert refused.value.next_step == f"{use} ask the operator to add {entry}, then run `reshard retry pkgd`"
    assert "worker" not in str(refused.value)


def test_a_named_token_that_is_not_there_is_replaced_by_no_other(
    named: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TEAM_TOKEN")
    with pytest.raises(BadCredentials, match="credential team: TEAM_TOKEN has no token"):
        named.find(DEFAULT_ENDPOINT, "org", "read", "team")
    assert token(named.find(DEFAULT_ENDPOINT, "org", "read")) == "org"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (f"[[credential]]\nenv = 'A'\nname = '{SECRET}'", "[[credential]] 1, name: use the name of a credential"),
        ("[[credential]]\nenv = 'A'\n[[credential]]\nenv = 'A'\nname = 'a b'", "[[credential]] 2, name: "),
        ("[[credentials]]\nenv = 'A'", "credentials: only [[credential]] tables are allowed"),
        (f"[credential]\nenv = '{SECRET}'", "credential: only [[credential]] tables are allowed"),
        (f"credential = ['{SECRET}']", "[[credential]] 1: must be a mapping"),
        (f"[[credential]]\nenv = 'A'\n[hub]\ntoken = '{SECRET}'", "hub: only [[credential]] tables are allowed"),
        ("[[credential]]\nnamespace = 'x'", "needs either `env` or `file`"),
        ("[[credential]]\nenv = 'A'\nfile = 'b'", "needs either `env` or `file`"),
        (f"[[credential]]\nenv = 'A'\ntoken = '{SECRET}'", "token: unknown name"),
        ("[[credential]]\nenv = 'A'\nuse = 'both'", "use: must be 'read' or 'write'"),
        ("[[credential]", "not TOML"),
        (f"# {SECRET} \udcff", "not UTF-8"),
        (None, "No such file"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, why: str
) -> None:
    file = tmp_path / "bad.toml"
    if text is not None:
        file.write_bytes(text.encode(errors="surrogateescape"))
    monkeypatch.setenv("RESHARD_CREDENTIALS", str(file))
    with pytest.raises(BadCredentials) as refused:
        Credentials.from_env()
    assert why in str(refused.value) and str(file) in str(refused.value)
    assert SECRET not in f"{refused.value!r} {refused.value.__cause__!r} {refused.value.to_dict()}"


UNSENDABLE = [b"hf_a b", b"\xef\xbb\xbfhf_a", b"hf_\xc3\xa9", b"hf_\xff", b"hf_\x00"]


@pytest.mark.parametrize(
    ("where", "token"),
    # huggingface_hub takes line breaks out of what `hf auth login` wrote.
    [("file", b"hf_a\nhf_b"), *itertools.product(("file", "login"), UNSENDABLE)],
)
def test_a_token_that_no_header_carries_is_refused_and_never_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, token: bytes
) -> None:
    (tmp_path / "token").write_bytes(token)
    (tmp_path / "own.toml").write_text(f"[[credential]]\nfile = '{tmp_path}/token'\n" if where == "file" else "")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv("RESHARD_CREDENTIALS", str(tmp_path / "own.toml"))
    credentials = Credentials.from_env()
    with pytest.raises(BadCredentials, match="a space, a line break or a character outside ASCII") as refused:
        credentials.find(credentials.default_endpoint, "x", "read")
    assert "hf_" not in f"{refused.value!r} {refused.value.__cause__!r} {refused.value.to_dict()}"
    assert "copy the token again" in refused.value.next_step


def test_a_relative_secret_file_lies_by_the_file_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "credentials.toml").write_text(FILE.format(file="secret"))
    for folder, said in ((tmp_path, "credentials.toml"), (tmp_path / "elsewhere", "../credentials.toml")):
        monkeypatch.chdir(folder)
        monkeypatch.setenv("RESHARD_CREDENTIALS", said)
        assert token(Credentials.from_env().find("https://hub.example", "x", "read")) == SECRET


def test_a_secret_file_that_is_gone_is_named(tmp_path: Path) -> None:
    credentials = Credentials.from_env()
    (tmp_path / "secret").unlink()
    with pytest.raises(BadCredentials, match="secret"):
        credentials.find("https://hub.example", "x", "read")


@pytest.mark.parametrize("key", ["env", "file"])
def test_a_token_in_place_of_its_reference_is_never_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    (tmp_path / "pasted.toml").write_text(f"[[credential]]\nname = 'team'\n{key} = '{SECRET}'\n")
    monkeypatch.setenv("RESHARD_CREDENTIALS", str(tmp_path / "pasted.toml"))
    with pytest.raises(BadCredentials, match=f" in `{key}`") as refused:
        Credentials.from_env().find(DEFAULT_ENDPOINT, "org", "read", "team")
    assert "`env` (the name of a variable) or `file` (a path)" in refused.value.next_step
    assert SECRET not in f"{refused.value!r} {refused.value.__cause__!r} {refused.value.to_dict()}"


@pytest.mark.parametrize(
    ("entry", "how"),
    [
        ("env = 'NOT_THERE'", "set NOT_THERE (RESHARD_CREDENTIALS refers to it, and it is not set)"),
        ("env = 'BLANK'", "set BLANK (RESHARD_CREDENTIALS refers to it, and it is empty)"),
        ("env = 'hf_verysecrettoken'", "put the name of a variable into `env` in RESHARD_CREDENTIALS, where a token"),
        ("file = 'empty'", "put the token into {folder}/empty (RESHARD_CREDENTIALS refers to it, and it is empty)"),
        ("env = 'NOT_THERE'\nnamespace = 'other'", "add a [[credential]] for {hub} to the RESHARD_CREDENTIALS file"),
        ("env = 'NOT_THERE'\nnamespace = 'org'", "set NOT_THERE (RESHARD_CREDENTIALS refers to it, and it is not set)"),
        ("env = 'NOT_THERE'\nuse = 'write'", "add a [[credential]] for {hub} to the RESHARD_CREDENTIALS file"),
    ],
)
def test_a_call_without_a_token_is_told_of_the_entry_that_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str, how: str
) -> None:
    hub = "https://hub.example"
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "own.toml").write_text(f"[[credential]]\nendpoint = '{hub}'\n{entry}\n")
    monkeypatch.setenv("RESHARD_CREDENTIALS", str(tmp_path / "own.toml"))
    monkeypatch.setenv("BLANK", " ")
    assert Credentials.from_env().find(hub, "org", "read") is None
    for of_org in ("org/model", "hf://buckets/org/runs"):
        assert elsewhere(hub, of_org, "read")["sign_in"].startswith(how.format(folder=tmp_path, hub=hub))
    assert elsewhere(DEFAULT_ENDPOINT, "org/model", "read") == {}


@pytest.mark.parametrize("endpoint", ["127.0.0.1:8080", "hub.example", "ftp://hub.example", "https://", "http://a:b"])
def test_an_endpoint_that_is_no_url_is_a_bad_setting(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    with pytest.raises(BadSetting, match=f"HF_ENDPOINT={endpoint}: not a URL"):
        Credentials.from_env()


@pytest.mark.parametrize("endpoint", ["https://me:secret@hub.example", "me:secret@hub.example", "ftp://me:secret@x"])
def test_a_password_in_the_endpoint_is_refused_and_never_printed(
    monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    with pytest.raises(BadSetting) as refused:
        Credentials.from_env()
    assert "secret" not in json.dumps(refused.value.to_dict()) and "HF_TOKEN" in str(refused.value)


def test_a_password_in_a_credentials_endpoint_is_refused_and_never_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "credentials.toml"
    file.write_text('[[credential]]\nendpoint = "https://me:secret@hub.example"\nenv = "X"\n')
    monkeypatch.setenv("RESHARD_CREDENTIALS", str(file))
    with pytest.raises(BadCredentials) as refused:
        Credentials.from_env()
    assert "secret" not in json.dumps(refused.value.to_dict())


def test_a_password_in_the_endpoint_of_a_request_is_refused_and_never_printed() -> None:
    with pytest.raises(ValidationError, match="without spaces, user name or password") as refused:
        Hub(repo="user/repo", endpoint="https://me:secret@hub.example")
    assert "secret" not in str(refused.value)


def test_a_password_in_a_place_is_refused_and_never_printed() -> None:
    with pytest.raises(BadPlace) as refused:
        parse_place("https://me:secret@hub.example/user/repo")
    assert "secret" not in json.dumps(refused.value.to_dict())


def test_what_only_reads_finds_for_a_target_what_it_does_for_a_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [("read", "R"), ("write", "W")]
    text = "".join(f'[[credential]]\nendpoint = "https://mine.example"\nuse = "{u}"\nenv = "{e}"\n' for u, e in entries)
    (tmp_path / "c.toml").write_text(text)
    for name, value in (("RESHARD_CREDENTIALS", str(tmp_path / "c.toml")), ("R", "reads"), ("W", "writes")):
        monkeypatch.setenv(name, value)
    credentials = Credentials.from_env()
    uses: tuple[Use, ...] = ("read", "write")
    assert [token(credentials.find("https://mine.example", "a", use)) for use in uses] == ["reads", "writes"]
    assert [token(credentials.reading().find("https://mine.example", "a", use)) for use in uses] == ["reads", "reads"]
