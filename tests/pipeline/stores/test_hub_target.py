"""A repository as a target: what is created, who may write, and what becomes of a commit whose answer is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from huggingface_hub import HfApi

from reshard.pipeline.errors import (
    HubError,
    HubQuota,
    HubRefused,
    HubUnreachable,
    NoPullRequest,
    NoWriteAccess,
    ReadOnlyMirror,
    SourceNotFound,
    TargetConflict,
    TargetGone,
    TargetHidden,
    TargetMoved,
    TargetNotFound,
    TokenMissing,
    TokenRefused,
    UsageError,
)
from reshard.pipeline.limits import ANSWER_MAX, ATTEMPTS
from reshard.pipeline.places import Hub, parse_place
from reshard.pipeline.protocols import Addition, AnswerLost, Change, HeadMoved
from reshard.pipeline.request import Options
from reshard.pipeline.stores.connect import Context, open_source, open_target
from reshard.pipeline.stores.hub_target import HubTarget
from reshard.pipeline.tensors import StoredFile
from tests.hub.admin import HubAdmin
from tests.hub.fixtures import Namespace
from tests.pipeline.stores.conftest import Impatient, MakeSource, MakeTarget, noise, read

SMALL = Change("Small", "digest d1", (Addition("x.json", content=b"{}"),), ())

NO_ANSWER: list[dict[str, object]] = [  # to what was carried out
    {"action": "lost_response"},
    {"action": "truncate_head", "after": 12, "fin": True},
    {"action": "truncate_head", "after": 60, "fin": False},
]


@pytest.fixture
def repo(namespace: Namespace, hub: HubAdmin) -> str:
    """A repository that is there already."""
    repo = namespace.repo("there")
    hub.create_repo(repo)
    hub.put_files(repo, {"README.md": b"# theirs"})
    return repo


def target_at(repo: str, context: Context, **options: object) -> HubTarget:
    target = open_target(Hub(repo=repo), Options.model_validate({"transport": "http", **options}), context)
    assert isinstance(target, HubTarget)
    return target


def calls(hub: HubAdmin, pattern: str) -> int:
    return sum(pattern in f"{line['method']} {line['path']}" for line in hub.log())


# --------------------------------------------------------------------------------------------------------- creating


@pytest.mark.parametrize("private", [True, False])
def test_a_missing_repo_is_created_as_visible_as_it_was_asked_for(
    context: Context, namespace: Namespace, hub: HubAdmin, private: bool
) -> None:
    target = target_at(namespace.repo("new"), context)
    head = target.prepare(private)
    assert target.state().visibility == ("private" if private else "public")
    assert head == hub.head(namespace.repo("new"))


def test_a_repo_that_is_there_keeps_its_visibility(context: Context, repo: str) -> None:
    target = target_at(repo, context)
    target.prepare(private=True)
    assert target.state().visibility == "public"


def test_looking_creates_nothing(context: Context, namespace: Namespace, hub: HubAdmin) -> None:
    target = target_at(namespace.repo("new"), context)
    assert not target.state().exists
    assert calls(hub, "POST") == 0


def test_a_repo_whose_creation_got_no_answer_is_there(context: Context, namespace: Namespace, hub: HubAdmin) -> None:
    hub.fault("POST /api/repos/create", "lost_response", times=1)
    assert target_at(namespace.repo("new"), context).prepare(private=True) == hub.head(namespace.repo("new"))


def test_a_missing_branch_begins_at_the_head_of_main(context: Context, repo: str, hub: HubAdmin) -> None:
    target = target_at(repo, context, branch="small-files")
    assert target.state().exists and target.state().head is None
    head = target.prepare(private=False)
    assert head == hub.head(repo)
    commit = target.commit(SMALL, head)
    assert hub.head(repo) == head and target.head() == commit
    assert "x.json" in hub.files(repo, "small-files") and "x.json" not in hub.files(repo)


def test_a_branch_begins_where_it_was_planned_though_main_moves_on(context: Context, repo: str, hub: HubAdmin) -> None:
    target, main = target_at(repo, context, branch="small-files"), hub.head(repo)
    rule = hub.fault(r"POST .*/branch/small-files", "hold", times=1)
    with ThreadPoolExecutor() as aside:
        head = aside.submit(target.prepare, private=False)
        hub.wait_for_fault(rule, waiting=1)
        hub.put_files(repo, {"later.txt": b"x"})
        hub.release(rule)
    assert head.result() == main != hub.head(repo)


def test_a_branch_may_be_named_with_the_place(context: Context, repo: str) -> None:
    target = open_target(Hub(repo=repo, revision="v2"), Options(), context)
    assert target.branch == "v2"
    with pytest.raises(UsageError):
        open_target(Hub(repo=repo, revision="v2"), Options(branch="v3"), context)


# ---------------------------------------------------------------------------------------------------------- refusals


def test_no_token(context: Context, repo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setenv("HF_ENDPOINT", context.credentials.default_endpoint)
    with pytest.raises(TokenMissing) as refused:
        target_at(repo, context).prepare(private=True)
    assert f"writing to {repo}" in str(refused.value)
    assert "run `hf auth login` or set HF_TOKEN, then run" in refused.value.next_step
    refused.value.facts["job"] = "abc123"  # on a worker, which has no one to sign in
    assert "set HF_TOKEN or RESHARD_CREDENTIALS on the worker" in refused.value.next_step
    assert "hf auth login" not in refused.value.next_step


def test_another_hub_is_given_its_token_by_a_credentials_file(
    context: Context, namespace: Namespace, repo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.example")
    there = parse_place(f"{namespace.endpoint}/{repo}")
    assert isinstance(there, Hub)
    with pytest.raises(TokenMissing) as refused:
        open_target(there, Options(), Context.from_env()).prepare(private=True)
    with pytest.raises(SourceNotFound) as hidden:
        open_source(parse_place(f"{namespace.endpoint}/{namespace.repo('none')}"), Context.from_env())
    for error in (refused.value, hidden.value):
        assert "RESHARD_CREDENTIALS file (HF_TOKEN is only sent to https://hub.example)" in error.next_step
        assert "hf auth login" not in error.next_step


def test_a_token_that_the_hub_does_not_know(context: Context, repo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    with pytest.raises(TokenRefused):
        target_at(repo, context).state()


@pytest.mark.parametrize("there", [True, False])
def test_somebody_elses_namespace(context: Context, hub: HubAdmin, namespace: Namespace, there: bool) -> None:
    hub.create_user("stranger")
    if there:
        hub.create_repo("stranger/model")
    with pytest.raises(NoWriteAccess, match=f"the token of {namespace.name} does not have write access to stranger/"):
        target_at("stranger/model" if there else "stranger/new", context).prepare(private=True)


@pytest.mark.parametrize("role", ["read", "fineGrained"])
def test_a_token_that_only_reads(
    context: Context, repo: str, hub: HubAdmin, namespace: Namespace, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    token = hub.create_token(namespace.name, role=role, scopes={namespace.name: "read"})
    monkeypatch.setenv("HF_TOKEN", token)
    head = hub.head(repo)
    with pytest.raises(NoWriteAccess) as refused:
        target_at(repo, context).prepare(private=True)
    make = "the token is read-only: create one with write access"
    assert refused.value.next_step == f"{make} ({namespace.endpoint}/settings/tokens)"
    assert hub.head(repo) == head


def test_with_a_token_that_only_reads_somebody_elses_repository_takes_no_pull_request(
    context: Context, hub: HubAdmin, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", hub.create_token(namespace.name, role="read"))
    hub.create_user("stranger")
    hub.create_repo("stranger/model", visibility="public")
    for pr in (False, True):
        target = target_at("stranger/model", context, pr=pr)
        with pytest.raises(NoWriteAccess) as refused:
            target.prepare(private=True)
            target.request("d1", "Title", "digest d1")
        assert "read-only: create one with write access, from an account that can write" in refused.value.next_step
        assert "--pr" not in refused.value.next_step


def test_where_a_pull_request_is_refused_none_is_offered(context: Context, hub: HubAdmin) -> None:
    hub.create_user("stranger")
    hub.create_repo("stranger/model", visibility="public")
    with pytest.raises(NoWriteAccess) as refused:
        target_at("stranger/model", context).prepare(private=True)
    assert "--pr" in refused.value.next_step
    target = target_at("stranger/model", context, pr=True)
    target.prepare(private=True)
    hub.fault("POST /api/models/stranger/model/discussions", "status", status=403)
    with pytest.raises(NoWriteAccess) as refused:
        target.request("d1", "Title", "digest d1")
    assert "use a token with write access" in refused.value.next_step
    assert "--pr" not in refused.value.next_step


@pytest.mark.parametrize("call", ["preupload", "objects/batch", "commit"])
def test_where_what_a_pull_request_needs_is_refused_none_is_offered(
    proposal: HubTarget, hub: HubAdmin, call: str
) -> None:
    goal = proposal.request("d1", "Title", "digest d1")
    hub.fault(f"POST .*/{call}", "status", status=403)
    steps: dict[str, Callable[[], object]] = {
        "preupload": lambda: proposal.carry([], proposal.at(proposal.head()), "t", SMALL.additions),
        "objects/batch": lambda: proposal.holds([StoredFile("m.bin", 5, sha256="0" * 64)]),
        "commit": lambda: goal.commit(SMALL, goal.head()),
    }
    with pytest.raises(NoWriteAccess) as refused:
        steps[call]()
    assert "choose another target" in refused.value.next_step and "--pr" not in refused.value.next_step


def test_where_the_hub_does_not_say_whose_a_token_is_it_is_this_token(context: Context, hub: HubAdmin) -> None:
    hub.create_user("stranger")
    hub.fault("GET /api/whoami-v2", "status", status=404)
    with pytest.raises(NoWriteAccess, match="the token does not have write access to stranger/"):
        target_at("stranger/new", context).prepare(private=True)


def test_nobody_is_asked_whose_a_token_is_that_may_write(context: Context, namespace: Namespace, hub: HubAdmin) -> None:
    target_at(namespace.repo("new"), context).prepare(private=True)
    assert calls(hub, "whoami") == 0


def test_an_account_that_cannot_be_reached_leaves_access_unchecked(
    context: Context, namespace: Namespace, hub: HubAdmin
) -> None:
    hub.fault("GET /api/whoami-v2", "reset")
    may, why = target_at(namespace.repo("new"), context).leave(False)
    assert may is None and why.startswith(f"cannot reach {namespace.endpoint}")


def test_checking_access_leaves_no_trace(context: Context, repo: str, hub: HubAdmin) -> None:
    before = hub.state(repo)
    target_at(repo, context).prepare(private=True)
    assert hub.state(repo) == before


def test_a_full_storage(context: Context, repo: str, hub: HubAdmin) -> None:
    target = target_at(repo, context)
    target.prepare(private=True)
    hub.settings(storage_full=[repo])
    batch = target.sink("t").batch([])
    writer = batch.open("a.bin", 5)
    writer.write(memoryview(b"12345"))
    writer.finish()
    with pytest.raises(HubQuota, match=repo):
        batch.seal()
    batch.abort()


def test_a_pull_request_needs_a_repo(context: Context, namespace: Namespace, hub: HubAdmin) -> None:
    target = target_at(namespace.repo("new"), context, pr=True)
    for needs in (target.state, partial(target.prepare, private=True)):
        with pytest.raises(TargetNotFound, match=f"not found on {namespace.endpoint}: {namespace.repo('new')}"):
            needs()
    assert calls(hub, "POST") == 0


def test_a_pull_request_that_is_not_there_is_no_branch_to_create(
    context: Context, repo: str, namespace: Namespace, hub: HubAdmin
) -> None:
    target, new = (target_at(one, context, branch="refs/pr/7") for one in (repo, namespace.repo("new")))
    for look in (target.state, partial(target.prepare, private=True)):
        with pytest.raises(NoPullRequest, match=f"{repo} has no pull request 7"):
            look()
    with pytest.raises(TargetNotFound, match="repository not found"):
        new.prepare(private=True)
    assert calls(hub, "POST") == 0


def test_a_branch_that_went_away_is_a_conflict(context: Context, repo: str, namespace: Namespace) -> None:
    target = target_at(repo, context, branch="gone")
    target.prepare(private=True)
    HfApi(endpoint=namespace.endpoint, token=namespace.token).delete_branch(repo, branch="gone")
    with pytest.raises(TargetConflict, match="gone no longer exists"):
        target.head()


def test_a_repository_that_went_away_is_a_conflict_and_no_pull_request(
    context: Context, repo: str, namespace: Namespace
) -> None:
    target = target_at(repo, context)
    head = target.prepare(private=True)
    HfApi(endpoint=namespace.endpoint, token=namespace.token).delete_repo(repo)
    for needs in (target.head, lambda: list(target.history(head, None)), lambda: target.commit(SMALL, head)):
        with pytest.raises(TargetGone, match="it was deleted, or the token can no longer see it") as gone:
            needs()
        assert "run the same command again" in gone.value.next_step and "--pr" not in gone.value.next_step


# ------------------------------------------------------------------------------------------------------- one commit


@pytest.mark.parametrize("fault", NO_ANSWER)
def test_a_commit_whose_answer_is_lost_may_stand(
    context: Context, repo: str, hub: HubAdmin, fault: dict[str, Any]
) -> None:
    target = target_at(repo, context)
    base = target.prepare(private=True)
    hub.fault("POST .*/commit/main", times=1, **fault)
    with pytest.raises(AnswerLost):
        target.commit(SMALL, base)
    assert [c.message for c in target.history(target.head(), base)] == ["digest d1"]


@pytest.mark.parametrize(
    "fault",
    [
        {"action": "reset"},
        {"action": "status", "status": 502},
        {"action": "status", "status": 200, "body": "<html>"},  # a proxy's
        {"action": "status", "status": 200, "body": "{}"},
        {"action": "status", "status": 200, "body": " " * (ANSWER_MAX + 1)},
    ],
    ids=["reset", "502", "a page", "no commit", "too long"],
)
def test_a_commit_without_an_answer_is_never_sent_again_unseen(
    context: Context, repo: str, hub: HubAdmin, fault: dict[str, Any]
) -> None:
    target = target_at(repo, context)
    base = target.prepare(private=True)
    hub.fault("POST .*/commit/main", times=1, **fault)
    with pytest.raises(AnswerLost):
        target.commit(SMALL, base)
    assert calls(hub, "/commit/main") == 1 and target.head() == base
    assert target.commit(SMALL, base) == target.head()


def test_a_commit_that_was_turned_away_for_its_rate_is_sent_again(
    context: Context, repo: str, hub: HubAdmin, pace: Impatient
) -> None:
    target = target_at(repo, context)
    base = target.prepare(private=True)
    hub.fault("POST .*/commit/main", "status", status=429, headers={"Retry-After": "3"}, times=2)
    assert target.commit(SMALL, base) == hub.head(repo)
    assert pace.slowed == [3.0, 3.0] and pace.refusals == 2


def test_of_two_who_commit_on_one_head_one_wins(context: Context, repo: str, hub: HubAdmin) -> None:
    target = target_at(repo, context)
    base = target.prepare(private=True)
    winner = hub.put_files(repo, {"theirs.txt": b"1"})
    with pytest.raises(HeadMoved):
        target.commit(SMALL, base)
    assert hub.head(repo) == winner and "x.json" not in hub.files(repo)


def test_a_refused_commit_says_what_the_hub_said(context: Context, repo: str) -> None:
    target = target_at(repo, context)
    base = target.prepare(private=True)
    with pytest.raises(HubRefused, match="invalid path"):
        target.commit(Change("t", "", (Addition("../x", content=b""),), ()), base)


# ---------------------------------------------------------------------------------------------------------- renamed


def rename(repo: str, to: str, namespace: Namespace) -> None:
    HfApi(endpoint=namespace.endpoint, token=namespace.token).move_repo(repo, to)


@pytest.mark.parametrize("early", [True, False])
def test_a_commit_goes_to_the_new_name(
    context: Context, repo: str, hub: HubAdmin, namespace: Namespace, early: bool
) -> None:
    """Whether the head was read before it was renamed or after; the parent is still the guard."""
    target, new = target_at(repo, context), namespace.repo("renamed")
    base = hub.head(repo)
    if early:
        rename(repo, new, namespace)
        assert target.head() == base
    else:
        target.head()
        rename(repo, new, namespace)
    commit = target.commit(SMALL, base)
    assert hub.head(new) == commit == target.head() and read(target.at(commit), "x.json") == b"{}"
    with pytest.raises(HeadMoved):
        target.commit(SMALL, base)


@pytest.mark.parametrize("early", [True, False])
def test_no_commit_leaves_the_namespace(
    context: Context, repo: str, hub: HubAdmin, namespace: Namespace, early: bool
) -> None:
    """Although this token may write there: nobody said that this job may."""
    target, team = target_at(repo, context), f"{namespace.name}-team"
    base = target.head()
    hub.create_org(team, {namespace.name: "admin"})
    rename(repo, f"{team}/there", namespace)
    with pytest.raises(TargetMoved, match=f"{team}/there"):
        if early:
            target.head()
        else:
            target.commit(SMALL, base)
    assert hub.head(f"{team}/there") == base


def test_what_the_hub_refuses_is_told_with_its_id_of_the_request(context: Context, repo: str, hub: HubAdmin) -> None:
    hub.fault("POST .*/commit/main", "status", status=418)
    with pytest.raises(HubRefused, match=r"\(request hub-\d+\)") as refused:
        target_at(repo, context).commit(SMALL, hub.head(repo))
    assert refused.value.facts["request_id"] in str(refused.value)


def test_what_is_no_id_of_a_request_is_not_repeated(context: Context, repo: str, hub: HubAdmin) -> None:
    hub.fault("POST .*/commit/main", "status", status=418, headers={"X-Request-Id": "a word; and another"})
    with pytest.raises(HubRefused) as refused:
        target_at(repo, context).commit(SMALL, hub.head(repo))
    assert "another" not in str(refused.value) and "request_id" not in refused.value.facts


def test_an_id_of_a_request_is_no_word_of_why_it_was_refused(context: Context, repo: str, hub: HubAdmin) -> None:
    hub.fault("POST .*/commit/main", "status", status=403, headers={"X-Request-Id": "storage-7"})
    with pytest.raises(NoWriteAccess):
        target_at(repo, context).commit(SMALL, hub.head(repo))


def test_a_rename_in_circles_ends(context: Context, repo: str, hub: HubAdmin) -> None:
    hub.fault("POST .*/commit/main", "status", status=307, headers={"Location": "/again"})
    with pytest.raises(HubError, match="307"):
        target_at(repo, context).commit(SMALL, hub.head(repo))
    assert calls(hub, "/commit/main") == ATTEMPTS


def test_the_hubs_own_client_sees_what_we_committed(context: Context, repo: str, namespace: Namespace) -> None:
    target = target_at(repo, context)
    base = target.prepare(private=True)
    weights = noise(2_000_000)
    batch = target.sink("t").batch([])
    writer = batch.open("model.safetensors", len(weights))
    writer.write(memoryview(weights))
    writer.finish()
    [stored] = batch.seal()
    commit = target.commit(
        Change("T", "M", (Addition(stored.path, stored=stored), Addition("c.json", content=b"{}")), ("README.md",)),
        base,
    )
    api = HfApi(endpoint=namespace.endpoint, token=namespace.token)
    theirs = {f.path: (f.size, f.lfs and f.lfs.sha256) for f in api.list_repo_tree(repo) if hasattr(f, "size")}
    ours = {path: (file.size, file.sha256) for path, file in target.at(commit).files().items()}
    assert ours == theirs and "README.md" not in ours and ours["model.safetensors"][1] == stored.sha256
    first = api.list_repo_commits(repo)[0]
    assert (first.commit_id, first.title, first.message) == (commit, "T", "M")
    assert [c.id for c in target.history(commit, None)] == [c.commit_id for c in api.list_repo_commits(repo)]


def test_a_long_history_is_fetched_as_far_as_it_is_read(context: Context, repo: str, hub: HubAdmin) -> None:
    base = hub.head(repo)
    commits = [hub.put_files(repo, {"n.txt": str(n).encode()}) for n in range(12)]
    hub.settings(commits_page=5)
    hub.log(reset=True)
    target = target_at(repo, context)
    assert next(iter(target.history(commits[-1], None))).id == commits[-1]
    assert calls(hub, "/commits/") == 1
    assert [c.id for c in target.history(commits[-1], base)] == commits[::-1]


# ---------------------------------------------------------------------------------------------------- pull requests


@pytest.fixture
def proposal(context: Context, repo: str) -> HubTarget:
    target = target_at(repo, context, pr=True)
    target.prepare(private=True)
    return target


def test_a_pull_request_carries_the_commit_and_main_stays(
    proposal: HubTarget, repo: str, hub: HubAdmin, namespace: Namespace
) -> None:
    base = proposal.head()
    goal = proposal.request("d1", "Small files", "digest d1")
    commit = goal.commit(SMALL, goal.head())
    goal.show()
    assert goal.branch == "refs/pr/1" and goal.head() == commit
    assert hub.head(repo) == base and read(goal.at(commit), "x.json") == b"{}"
    details = HfApi(endpoint=namespace.endpoint, token=namespace.token).get_discussion_details(repo, 1)
    assert (details.title, details.status, details.is_pull_request) == ("Small files", "open", True)


def test_a_pull_request_of_ours_is_found_again(proposal: HubTarget, hub: HubAdmin) -> None:
    hub.settings(discussions_page=2)
    for n in range(5):
        proposal.request(f"other{n}", f"Other {n}", f"digest other{n}")
    first = proposal.request("d1", "Small files", "digest d1")
    assert proposal.request("d1", "Small files", "digest d1").branch == first.branch
    assert proposal.request("other0", "x", "y").branch == "refs/pr/1"


@pytest.mark.parametrize("fault", [*NO_ANSWER, {"action": "reset"}])
def test_a_pull_request_whose_creation_got_no_answer_is_looked_for(
    proposal: HubTarget, repo: str, hub: HubAdmin, fault: dict[str, Any]
) -> None:
    hub.fault("POST .*/discussions", times=1, **fault)
    goal = proposal.request("d1", "Small files", "digest d1")
    assert goal.branch == "refs/pr/1"
    assert next(proposal.api.pull_requests(repo, proposal.api.whoami().name))[0] == 1


@pytest.mark.parametrize("status", [404, 405, 501])
def test_a_hub_that_lists_no_pull_requests_takes_one_all_the_same(
    proposal: HubTarget, hub: HubAdmin, status: int
) -> None:
    hub.fault(r"GET .*/discussions(\?|$)", "status", status=status)
    goal = proposal.request("d1", "Small files", "digest d1")
    assert goal.branch == "refs/pr/1"
    assert any("does not list pull requests" in note for note in proposal.notes)
    goal.commit(SMALL, goal.head())


def test_where_none_are_listed_a_pull_request_without_an_answer_is_not_opened_twice(
    proposal: HubTarget, hub: HubAdmin
) -> None:
    hub.fault(r"GET .*/discussions(\?|$)", "status", status=404)
    hub.fault("POST .*/discussions", "lost_response", times=1)
    with pytest.raises(HubRefused, match="it cannot list pull requests: look there before trying again"):
        proposal.request("d1", "Small files", "digest d1")
    assert calls(hub, "POST") == 1


def test_a_hub_that_takes_no_writes_is_a_read_only_mirror(context: Context, repo: str, hub: HubAdmin) -> None:
    target, new = target_at(repo, context), target_at(f"{repo}-new", context)
    base = target.prepare(private=True)
    hub.fault("POST /api/", "status", status=405)
    for write in (lambda: new.prepare(private=True), lambda: target.commit(SMALL, base)):
        with pytest.raises(ReadOnlyMirror, match="is a read-only mirror") as refused:
            write()
        assert "publish to the Hub itself" in refused.value.next_step


@pytest.mark.parametrize("filtered", [True, False])
def test_somebody_elses_pull_request_with_our_digest_is_not_ours(
    proposal: HubTarget, repo: str, hub: HubAdmin, namespace: Namespace, filtered: bool
) -> None:
    """Not even when the Hub lists everybody's, whomever it was asked for."""
    hub.settings(discussions_by_author=filtered)
    other = hub.create_user(f"{namespace.name}-copycat")
    HfApi(endpoint=namespace.endpoint, token=other.token).create_pull_request(repo, "Mine", description="digest d1")
    assert proposal.request("d1", "Small files", "digest d1").branch == "refs/pr/2"


def test_a_closed_pull_request_is_not_committed_to(proposal: HubTarget, repo: str, namespace: Namespace) -> None:
    first = proposal.request("d1", "Small files", "digest d1")
    number = int(first.branch.rpartition("/")[2])
    HfApi(endpoint=namespace.endpoint, token=namespace.token).change_discussion_status(repo, number, "closed")
    assert proposal.request("d1", "Small files", "digest d1").branch == "refs/pr/2"


def test_a_pull_request_to_somebody_elses_repo(context: Context, hub: HubAdmin) -> None:
    hub.create_user("owner")
    hub.create_repo("owner/model")
    head = hub.head("owner/model")
    target = target_at("owner/model", context, pr=True)
    target.prepare(private=True)
    goal = target.request("d1", "Small files", "digest d1")
    weights = noise(1_000_000)
    batch = goal.sink("t").batch([])
    writer = batch.open("m.bin", len(weights))
    writer.write(memoryview(weights))
    writer.finish()
    [stored] = batch.seal()
    commit = goal.commit(Change("T", "M", (Addition("m.bin", stored=stored),), ()), goal.head())
    assert read(goal.at(commit), "m.bin") == weights and hub.head("owner/model") == head


# --------------------------------------------------------------------------------------------------------- carrying


@pytest.fixture
def carrying(hub_source: MakeSource, hub_target: MakeTarget, hub: HubAdmin) -> Iterator[tuple[MakeSource, HubTarget]]:
    target = hub_target()
    target.prepare(private=True)
    assert isinstance(target, HubTarget)
    yield hub_source, target


def test_objects_that_the_repo_has_are_not_moved(carrying: tuple[MakeSource, HubTarget], hub: HubAdmin) -> None:
    make, target = carrying
    source = make({"spm.model": noise(2_000_000, 9)})
    file = source.files()["spm.model"]
    target.carry([file], source, "t1")
    hub.log(reset=True)
    assert target.carry([file], source, "t2") == [Addition("spm.model", stored=file)]
    assert sum(line["up"] for line in hub.log()) < 10_000 and calls(hub, "_cdn") == 0


def test_a_text_that_the_targets_attributes_call_large_becomes_an_object(
    carrying: tuple[MakeSource, HubTarget], folder_source: MakeSource, hub: HubAdmin
) -> None:
    _, target = carrying
    hub.put_files(target.place.repo, {".gitattributes": b"*.json filter=lfs diff=lfs merge=lfs -text\n"})
    source = folder_source({"config.json": b"{}", "notes.txt": b"n"})
    config, notes = target.carry(list(source.files().values()), source, "t1")
    assert config.stored and config.content is None and notes.content == b"n"


def test_a_commit_holds_so_many_bytes_of_small_files_and_the_rest_are_objects(
    carrying: tuple[MakeSource, HubTarget], folder_source: MakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, target = carrying
    monkeypatch.setattr("reshard.pipeline.stores.hub_target.INLINE_MAX", 100_000)
    source = folder_source({**{f"{n}.txt": b"%d" % n * 40_000 for n in range(4)}, "z.json": b"{}"})
    made = target.carry(list(source.files().values()), source, "t1")
    assert [one.path for one in made if one.content is not None] == ["0.txt", "1.txt", "z.json"]
    commit = target.commit(Change("T", "M", tuple(made), ()), target.head())
    assert {path: read(target.at(commit), path) for path in source.files()} == {
        path: read(source, path) for path in source.files()
    }


def test_an_unreachable_hub_while_preparing(context: Context, namespace: Namespace, hub: HubAdmin) -> None:
    hub.fault(".", "reset")
    with pytest.raises(HubUnreachable):
        target_at(namespace.repo("new"), context).prepare(private=True)


def test_a_target_that_the_token_may_not_see_is_named_as_such(
    namespace: Namespace, hub: HubAdmin, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = namespace.repo("hidden")
    hub.create_repo(repo, visibility="private")
    hub.fault(f"GET /api/models/{repo}", "status", status=404, headers={"X-Error-Code": "RepoNotFound"})
    target = open_target(Hub(repo=repo), Options(transport="http"), context)
    with pytest.raises(TargetHidden) as refused:
        target.prepare(private=True)
    assert "pull request" not in refused.value.next_step and refused.value.exit_code == 4
