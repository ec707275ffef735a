"""Forms of jobs, catalogs and schedules: tried before they are saved, and never lost when they are refused."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path

import httpx2
import numpy as np
import pytest
from safetensors.numpy import save

from reshard.pipeline.places import Hub
from reshard.pipeline.request import Options, Request
from reshard.web.auth import Scope, add_token
from reshard.worker.followers.cursor import Cursor
from reshard.worker.followers.schedules import Schedules
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.leases import Leases
from tests.hub import HubProcess
from tests.support.models import save_single
from tests.support.procs import Broker, Machine, free_port
from tests.web.conftest import Site, signed_in, start
from tests.worker.conftest import Wakes, followed
from tests.worker.followers.builders import begin, definition, fail, finish, jobs, nightly

JOB = {"name": "nightly", "cron": "0 2 * * *", "tz": "Asia/Tokyo", "missed": "skip", "source": "a/b", "target": "us/b"}
SIZED = JOB | {"size": "200MB", "manifest": "on"}
CATALOG = definition(2).text
ZONE = '<p class="hint">Use a name such as Europe/Berlin, or UTC.</p>'


@pytest.fixture
def schedules(store: JobStore) -> Schedules:
    return Schedules(store)


@pytest.fixture
def leases(store: JobStore) -> Leases:
    return Leases(store, Wakes(), "worker-a")


def form(page: httpx2.Response) -> dict[str, str]:
    """What stands in the fields of a page's form, as a browser would send it."""
    found = {}
    for tag, told, rest in re.findall(r"<(input|textarea)( [^>]+)>((?:(?!<).)*)", page.text, re.DOTALL):
        said = {name: html.unescape(value) for name, value in re.findall(r'(\w+)="([^"]*)"', told)}
        if said.get("type") != "checkbox":
            found[said["name"]] = html.unescape(rest).removeprefix("\n") if tag == "textarea" else said["value"]
        elif " checked" in told:
            found[said["name"]] = "on"
    for name, options in re.findall(r'<select id="(\w+)".*?>(.*?)</select>', page.text, re.DOTALL):
        found[name] = (re.findall("<option selected>([^<]+)", options) or re.findall("<option>([^<]+)", options))[0]
    return found


def wrong(page: httpx2.Response) -> tuple[str, str]:
    """The field that is marked, and what is said beside it."""
    marked = re.findall(r'name="(\w+)" aria-describedby="wrong[^>]*aria-invalid="true"', page.text)
    (told,) = re.findall(r'<div class="problem"[^>]*><p>(.*?)</p>', page.text)
    return (marked or [""])[0], html.unescape(re.sub("<[^>]+>", "", told))


def test_a_schedule_is_added_edited_and_kept_as_it_was_said(site: Site, schedules: Schedules) -> None:
    more = {"dtype": "bfloat16", "include": "*.a *.b"}
    with signed_in(site) as client:
        assert client.post("/schedules", data=SIZED | more).url.path == "/schedules"
        kept = schedules.get("nightly").schedule
        assert kept.request and kept.request.asked_by == "acter"
        options = Options(size=200_000_000, dtype="bfloat16", include=("*.a", "*.b"))
        assert (kept.cron, kept.tz, kept.missed, kept.request.options) == ("0 2 * * *", "Asia/Tokyo", "skip", options)
        seen = client.get("/schedules").text
        assert seen.count(" 02:00 JST") == 5 and seen.count(" 17:00 UTC</time>") == 5
        filled = form(client.get("/schedules/nightly/edit"))
        assert filled.items() >= (SIZED | more).items() - {("name", "nightly")}
        assert client.post("/schedules/nightly", data=filled | {"cron": "0 3 * * *"}).url.path == "/schedules"
        assert schedules.get("nightly").schedule == kept.model_copy(update={"cron": "0 3 * * *"})


def test_an_edit_keeps_what_a_form_cannot_say(site: Site, schedules: Schedules) -> None:
    source = Hub(repo="a/b", revision="v1", endpoint="https://hub.example", credential="boss")
    rules = [{"^a": "b"}, {"c": "d"}]
    given = {"include": ("with a space",), "rename": rules, "strip_prefix": "a ", "config_from": source}
    options = Options.of(**given, manifest=False, size="3300B")
    target = Hub(repo="us/b", credential="ours")
    schedules.add(nightly(request=Request(source=source, target=target, options=options, asked_by="acter")))
    before = schedules.get("nightly").schedule
    with signed_in(site) as client:
        filled = form(client.get("/schedules/nightly/edit"))
        assert filled["source"] == filled["config_from"] == "https://hub.example/a/b/tree/v1"
        assert "manifest" not in filled
        client.post("/schedules/nightly", data=filled)
        assert schedules.get("nightly").schedule == before
        client.post("/schedules/nightly", data=filled | {"source": "c/d"})
        after = schedules.get("nightly").schedule.request
    assert after and (after.source, after.target, after.options) == (Hub(repo="c/d"), target, options)


def test_another_revision_is_read_with_the_same_credential_and_another_repository_is_not(
    site: Site, schedules: Schedules
) -> None:
    source = Hub(repo="a/b", revision="v1", credential="boss")
    config = Hub(repo="c/d", endpoint="https://hub.example", credential="lab")
    request = Request(source=source, target=Hub(repo="us/b"), options=Options(config_from=config), asked_by="acter")

    def edited(**typed: str) -> tuple[object, object]:
        schedules.add(nightly(request=request))
        with signed_in(site) as client:
            client.post("/schedules/nightly", data=form(client.get("/schedules/nightly/edit")) | typed)
        after = schedules.get("nightly").schedule.request
        schedules.remove("nightly")
        assert after
        return after.source, after.options.config_from

    at_v2 = edited(source="a/b@v2", config_from="https://hub.example/c/d/tree/v2")
    assert at_v2 == (source.at("v2"), config.at("v2"))
    assert edited(source="a/b", config_from="")[0] == source.at(None)
    elsewhere = edited(source="https://hub.example/a/b", config_from="c/d@v2")
    assert elsewhere == (Hub(repo="a/b", endpoint="https://hub.example"), Hub(repo="c/d", revision="v2"))


@pytest.mark.parametrize(
    ("sent", "field", "says"),
    [
        ({"cron": "0 3 * *"}, "cron", "“When” '0 3 * *' needs 5 fields, not 4."),
        ({"tz": "Mars/Base"}, "tz", "“Time zone” 'Mars/Base' is not a time zone on this machine."),
        ({"name": "My Own"}, "name", "“Name”: use at most 63 lowercase letters, digits, dots, - or _, starting with a"),
        ({"ranks": "ep1"}, "ranks", "“Ranks”: use ep or pp and a number from 2 to 9999, such as ep8."),
        ({"source": ""}, "source", "“Source”: the model is missing."),
        ({"target": "us/b/c"}, "target", "us/b/c: "),
        ({"target": "us/b@main"}, "target", "“Target”: a target cannot have a revision; use the option branch for a "),
        ({"size": "5Gb"}, "size", "“Maximum file size” 5Gb: Gb means bits, not bytes."),
        ({"rename": "- '(?=a)': b"}, "rename", "“Rename” of the form: rule 1: "),
        ({"source": "/etc/<b>"}, "source", "/etc/<b> is outside the folders that jobs are allowed to use here"),
    ],
)
@pytest.mark.parametrize("path", ["/schedules", "/new/schedules"])
def test_a_schedule_that_is_refused_comes_back_as_it_was_typed(
    site: Site, schedules: Schedules, sent: dict[str, str], field: str, says: str, path: str
) -> None:
    typed = {**SIZED, "exclude": "<b>\u202e*", **sent}
    with signed_in(site) as client:
        refused = client.post(path, data=typed)
    assert refused.status_code in {400, 403, 422} and "<b>" not in refused.text
    assert form(refused).items() >= typed.items()
    marked, told = wrong(refused)
    assert marked == field and told.startswith(says), told
    assert (ZONE in refused.text) == (field == "tz")
    assert schedules.all() == []


def test_a_name_that_is_taken_is_said_beside_it(site: Site, schedules: Schedules) -> None:
    schedules.add(nightly())
    with signed_in(site) as client:
        refused = client.post("/schedules", data=SIZED)
    assert (refused.status_code, *wrong(refused)) == (409, "name", "Schedule nightly already exists.")


@pytest.mark.parametrize("path", ["/catalogs", "/new/catalogs", "/schedules", "/new/schedules"])
def test_a_catalog_that_is_refused_comes_back_as_it_was_typed(site: Site, store: JobStore, path: str) -> None:
    text, sent = "\n name: x\r\nentrys:\t<b>\u202e\r\n", {"name": "x", "cron": "@daily"}
    with signed_in(site) as client:
        refused = client.post(path, data=sent | {"text": text, "at_once": "3"})
        assert refused.status_code == 400 and "<b>" not in refused.text
        assert form(refused)["text"] == text.replace("\r\n", "\n") and form(refused)["at_once"] == "3"
        assert wrong(refused)[0] == "text" and wrong(refused)[1].startswith("The catalog, line ")
        limited = client.post(path, data=sent | {"text": CATALOG, "at_once": "none"})
        assert limited.status_code == 400 and wrong(limited)[0] == "at_once"
    assert Cursor(store).names() == [] and Schedules(store).all() == []


def test_a_catalog_is_edited_and_scheduled_from_what_was_submitted(site: Site, store: JobStore) -> None:
    begin(Cursor(store), definition(2, at_once=3, max_failures=5))
    newer = CATALOG + "# more\n"
    with signed_in(site) as client:
        seen = client.get("/catalogs/mirror").text
        (edit,) = re.findall('href="(/new/catalogs[^"]+)"', seen)
        filled = form(client.get(edit))
        assert filled == {"text": CATALOG, "at_once": "3", "max_failures": "5", "max_bytes": ""}
        again = client.post("/catalogs", data=filled | {"text": CATALOG.replace("\n", "\r\n")})
        assert again.url.path == "/catalogs/mirror", "it is the very same, which is under way"
        busy = client.post("/catalogs", data=filled | {"text": newer})
        assert "its current run uses another version of the file" in busy.text and form(busy)["text"] == newer
        assert 'ancel it with <a href="/catalogs/mirror">Cancel</a>, or see <a' in busy.text
        (schedule,) = re.findall('href="(/new/schedules[^"]+)"', seen)
        filled = form(client.get(schedule)) | {"name": "nightly", "cron": "@daily"}
        assert client.post("/schedules", data=filled).url.path == "/schedules"
        kept = Schedules(store).get("nightly").schedule.catalog
        assert kept == definition(2, at_once=3, max_failures=5, asked_by="acter")
        client.post("/catalogs/mirror/cancel")
        assert client.post("/catalogs", data={"text": newer}).url.path == "/catalogs/mirror"
        newer_link = 'href="(/schedules/nightly/edit[^"]+)">Use the newer version'
        (take,) = re.findall(newer_link, client.get("/schedules").text)
        client.post("/schedules/nightly", data=form(client.get(take)))
        kept = Schedules(store).get("nightly").schedule.catalog
        assert kept and (kept.text, kept.at_once, kept.max_failures) == (newer, 8, None)
        assert client.get("/new/catalogs?catalog=none").status_code == 404
        assert client.get("/schedules/none/edit").status_code == 404


def test_only_who_may_act_has_buttons_and_no_other_site_uses_them(site: Site, schedules: Schedules) -> None:
    schedules.add(nightly())
    forms = ("/new/catalogs", "/new/schedules", "/new/schedules?catalog=", "/schedules/nightly/edit", "/plan")
    posted = {*forms, "/catalogs", "/schedules", "/schedules/nightly"} - {"/new/schedules?catalog="}
    with signed_in(site, "read") as client:
        for path in forms:
            main = client.get(path).text.partition("<main")[2]
            assert "<textarea" in main or 'name="source"' in main
            assert "<button" not in main and "Your token is read only" in main
        listed = client.get("/schedules").text + client.get("/catalogs").text
        assert "/edit" not in listed and 'href="/new' not in listed
        assert {client.post(path, data=SIZED).status_code for path in posted} == {403}
    with signed_in(site) as client:
        for path in posted:
            refused = client.post(path, data=SIZED, headers={"Sec-Fetch-Site": "cross-site"})
            assert refused.status_code == 403 and "access.cross_site" in refused.text
    assert [one.schedule for one in schedules.all()] == [nightly()]


def test_a_schedule_is_tried_before_it_is_kept(
    site: Site, schedules: Schedules, store: JobStore, tmp_path: Path
) -> None:
    save_single(tmp_path / "model", {f"{i}.w": np.zeros(1000, np.float32) for i in range(4)})
    typed = SIZED | {"source": str(tmp_path / "model"), "target": str(tmp_path / "out"), "size": "9kB"}
    with signed_in(site) as client:
        tried = client.post("/new/schedules", data=typed)
        assert tried.status_code == 200, tried.text
        assert (
            tried.text.count(" 02:00 JST") == 5 and "A job would be queued: " in tried.text and "2 files" in tried.text
        )
        assert form(tried).items() >= typed.items()
        assert schedules.all() == [] and store.recent() == []
        client.post("/schedules", data=typed)
        client.post("/schedules/nightly/run")
        again = client.post("/schedules/nightly/edit", data=form(tried) | {"tz": "UTC"})
        assert "still in progress" in again.text and again.text.count(" 02:00 UTC</td>") == 5
        assert schedules.get("nightly").schedule.tz == "Asia/Tokyo"


@pytest.fixture(scope="module")
def before_a_hub(tmp_path_factory: pytest.TempPathFactory, broker: Broker) -> Iterator[Site]:
    """A service whose token reads a Hub, and which does not allow all sources there."""
    folder, port = tmp_path_factory.mktemp("hub"), free_port()
    tokens = {"act": add_token(folder / "tokens", "acter", Scope.act)}
    with HubProcess(users=["them:hf_them", "us:hf_us"]) as hub:
        for name in ("them/m0", "closed/m2"):
            hub.admin.create_repo(name)
            hub.admin.put_files(name, {"model.safetensors": b"x" * 1000}, lfs=["model.safetensors"])
        hub.admin.create_repo("them/weights")
        hub.admin.put_files("them/weights", {"model.safetensors": save({"w": np.zeros(9, np.float32)})})
        named = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": "hf_us", "RESHARD_ALLOWED_SOURCES": "them"}
        with Machine(folder, broker.url, **named) as machine:
            yield Site(machine, start(machine, folder / "tokens", port), f"http://127.0.0.1:{port}", tokens)


def test_a_catalog_is_tried_before_it_is_submitted(before_a_hub: Site, store: JobStore) -> None:
    text = CATALOG + "- repo: closed/m2\n"
    with signed_in(before_a_hub) as client:
        tried = client.post("/new/catalogs", data={"text": text})
        assert tried.status_code == 200, tried.text
        rows = re.findall(r'<td class="places">(.*?)</tr>', tried.text)
        told = {row.partition(" ")[0]: re.sub("<[^>]+>", "", row.partition("</td>")[2]) for row in rows}
        assert told["them/m0"] == "new job1.0 kB" and told["them/m1"].startswith("Repository not found on ")
        assert "not allowed to read closed/m2 (allowed sources: them)" in told["closed/m2"]
        assert "kB" not in told["closed/m2"], "of what is not allowed nothing is told"
        assert form(tried)["text"] == text
        scheduled = client.post("/new/schedules", data={"name": "x", "cron": "@daily", "text": text})
        assert "The catalog would be submitted." in scheduled.text and "Repository not found on " in scheduled.text
        assert list(told)[:2] == ["them/m1", "closed/m2"], "what cannot work comes first"
        assert "<dt>Invalid</dt><dd>2</dd>" in tried.text
    found = before_a_hub.post("/api/v1/catalogs/check", {"text": text})
    assert (found["models"], found["ready"], found["calls"] > 0) == (3, 1, True)
    assert Cursor(store).names() == [] and Schedules(store).all() == []


@pytest.mark.parametrize(
    ("target", "told"), [("them/x", "a run will fail: "), ("us/x", "will create us/x as a public repository")]
)
def test_a_plan_promises_no_more_than_a_run_may(before_a_hub: Site, target: str, told: str) -> None:
    with signed_in(before_a_hub) as client:
        shown = client.post("/plan", data={"source": "them/weights", "target": target, "size": "9kB", "manifest": "on"})
    assert shown.status_code == 200 and told in shown.text, shown.text


def test_the_overview_lists_what_fails_until_it_ends_well(site: Site, store: JobStore, leases: Leases) -> None:
    catalogs, schedules = Cursor(store), Schedules(store)
    schedules.add(nightly("well", Request(source=Hub(repo="c/d"), target=Hub(repo="us/d"))))
    schedules.add(nightly())
    job = schedules.run("nightly").job or ""

    def seen() -> str:
        followed(store)
        with signed_in(site, "read") as client:
            return client.get("/").text.partition('id="failing"')[2].partition("</section>")[0]

    assert seen() == ""
    fail(leases, job)
    begin(catalogs, definition(1))
    fail(leases, jobs(catalogs)[0])
    text = seen()
    assert f'<a href="/jobs/{job}">' in text and text.count("source.no_weights") == 2 and text.count("never") == 2
    assert 'href="/schedules?name=nightly"' in text and 'href="/catalogs/mirror"' in text and "1 of 1 model" in text
    (failing,) = site.get("/api/v1/schedules?failing=true")["schedules"]
    assert failing["name"] == "nightly" and failing["trouble"] is not None
    assert [one["name"] for one in site.get("/api/v1/catalogs?failing=true")["catalogs"]] == ["mirror"]
    assert {one["name"] for one in site.get("/api/v1/schedules")["schedules"]} == {"well", "nightly"}
    finish(leases, schedules.run("nightly").job or "")
    begin(catalogs, definition(1))
    finish(leases, jobs(catalogs)[0])
    assert seen() == ""
