"""What errors and notes say on a page: fields, buttons and links where a command has options, commands to be copied."""

from __future__ import annotations

import re

from markupsafe import Markup, escape

from reshard.client.facts import chosen
from reshard.pipeline.arguments import retold
from reshard.pipeline.errors import BadBody, by_code, shortened
from reshard.pipeline.errors.base import PROSE
from reshard.pipeline.request import Request
from reshard.pipeline.text import printable

# What fields are called whose names do not say it.
LABELS = {
    "size": "Maximum file size", "to": "Target", "pr": "Pull request", "text": "Catalog",
    "cron": "When", "tz": "Time zone", "missed": "Missed times", "at_once": "Jobs at once",
    "max_failures": "Stop after failures", "max_bytes": "Stop after bytes read",
}  # fmt: skip
FLAGS = {"--public": "“Visibility” public", "--private": "“Visibility” private"}
SENTENCES = {
    "run the same command again": "try again",
    "run the same command with --overwrite": "select “Overwrite” and try again",
    r"a run will fail \(exit code [0-9]+\) unless you use --overwrite": "a job will fail unless you select “Overwrite”",
    "run `hf auth login` or set HF_TOKEN": "set HF_TOKEN or RESHARD_CREDENTIALS for the service",
    "see `reshard --help`": "",
    "^not found: [A-Z]+ /.*": "page not found",
    "see /api/v1/openapi.json for every path": "go to `reshard status`",
    "see /api/v1/openapi.json for the format of this request": "correct it and send it again",
    r", and [A-Z]+ \S+ requires the scope `act`": "",
    r"--cron '0 3 \* \* \*' --tz ": "0 3 * * *` in `",
    "skip the manifest with --no-manifest": "clear “Manifest”",
    r"\(--revision, or the part after @\)": "(the part after @)",
}
ANY = "JOB"  # what hints of a catalog say in place of a job's id, for all that failed alike
_JOB = f"([0-9a-z]{{10}}|{ANY})"
# Commands that a page does itself, or whose answer it shows: where, and how the sentence goes on.
PLACES = {
    rf"reshard (?:status|watch) {_JOB}(?: --report)?": (r"/jobs/\1", r"the page of job \1"),
    rf"reshard retry {_JOB}": (r"/jobs/\1#do-retry", "Retry"),
    rf"reshard retry {_JOB} --anew": (r"/jobs/\1#do-retry", "Retry with “Plan again” selected"),
    rf"reshard retry {_JOB} --overwrite": (r"/jobs/\1#do-retry", "Retry with “Also replace files” selected"),
    rf"reshard (cancel|delete) {_JOB}": (r"/jobs/\2#do-\1", r"\1"),
    rf"reshard rollback {_JOB}": (r"/jobs/\1#do-rollback", "Roll back"),
    "reshard list --all": ("/jobs", "the list of jobs"),
    "reshard (?:fleet )?status": ("/", "the overview"),
    "reshard fleet resume": ("/#service", "Resume"),
    r"reshard fleet undrain \S+": ("/#workers", "Undrain"),
    "reshard catalog status": ("/catalogs", "the list of catalogs"),
    r"reshard catalog (?:status|failures) (\S+)": (r"/catalogs/\1", r"the page of catalog \1"),
    r"reshard catalog (retry|resume|cancel) (\S+)": (r"/catalogs/\2", r"\1"),
    r"reshard schedule (?:list|show \S+)": ("/schedules", "the list of schedules"),
    r"reshard schedule (remove) \S+": ("/schedules", r"\1"),
    r"reshard plan(?: \S+)?": ("/plan", "Plan"),
}
# What people may copy to a shell: our own commands, and those of our hints; a name from outside may look like another.
_WORDS = r"[^;|&$<>()\n]"
_COMMAND = re.compile(
    rf"reshard {_WORDS}+|(?:uvx?|pipx?|[\w./-]+/python[0-9.]* -m pip) {_WORDS}*\breshard\b{_WORDS}*"
    rf"|--build-arg EXTRAS={_WORDS}+|hf auth login|git lfs \w+|kill -\w+ [0-9]+",
    re.ASCII,
)
COPY = Markup(' <button type="button" class="copy">Copy</button>')  # what stands before it; see live.js
_OF_FIELD = re.compile(r"(?:[a-z]+\.)*([a-z_]+)(?:\.\d+)*(?=: )")


def label(name: str) -> str:
    """``strict_dtype`` as forms call it."""
    return LABELS.get(name) or name.replace("_", " ").capitalize()


def options_text(request: Request) -> str:
    """The options that were given, as forms call them: ``“Dtype” bfloat16, “Manifest” off``."""
    return ", ".join(f"“{label(name)}” {_value(value)}".strip() for name, value in chosen(request).items())


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "" if value else "off"
    return shortened(", ".join(map(str, value)) if isinstance(value, tuple) else str(value))


def told(text: str) -> Markup:
    """A note of a plan, or why something waits."""
    return _marked(retold(text, SENTENCES, _field))


def _marked(text: str) -> Markup:
    parts = re.split("`([^`]+)`", text)
    return Markup().join(
        _code(part, first=number == 1 and not parts[0]) if number % 2 else escape(printable(part))
        for number, part in enumerate(parts)
    )


def sentence(text: str, code: str = "") -> Markup:
    """A hint, or with its ``code`` the message of an error, as a sentence; empty where there is nothing to say."""
    if code == BadBody.code:
        text = _OF_FIELD.sub(lambda found: f"“{label(found[1])}”", text, count=1)
    text = retold(text, SENTENCES, _field)
    if (not _named(code) or text.startswith("the ")) and re.match("[a-z]+,?( |$)", text):
        text = text[0].upper() + text[1:]
    shown = _marked(text)
    return shown if not shown or shown.endswith((".", "?", "!", COPY)) else shown + "."


def _named(code: str) -> bool:
    """Whether an error's message begins with a name, which stays as it is written."""
    kind = by_code().get(code)
    begins = re.match(r"\{(\w+)\}", kind.message) if kind else None
    return bool(kind and begins and begins[1] not in PROSE | kind.defaults.keys())


def _field(option: str, value: str | None) -> str:
    named = FLAGS.get(option) or f"“{label(option[2:].replace('-', '_'))}”"
    return f"{named} {value}" if value else named


def _code(text: str, first: bool) -> Markup:
    """A link, or the text itself; one that is the ``first`` begins a sentence, and a button begins with a capital."""
    for pattern, (href, words) in PLACES.items():
        if found := re.fullmatch(pattern, text):
            begins = str.upper if first or words == r"\1" else str
            words = found.expand(words)
            shown = escape(begins(words[0]) + words[1:])
            return shown if ANY in found.groups() else Markup('<a href="{}">{}</a>').format(found.expand(href), shown)
    return Markup("<code>{}</code>{}").format(printable(text), COPY if _COMMAND.fullmatch(text) else "")
