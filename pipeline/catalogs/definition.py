"""A catalog: one YAML file that says which models are kept in which cut, and where.

    name: nightly
    defaults: {to: "acme/{name}-{size}", size: 200MB}
    entries:
      - repo: them/model
        size: 1GB
      - query: {author: them, tags: [text-generation], limit: 100}

Reading one is pure: it makes no request. What a query finds is a matter of `reshard.pipeline.catalogs.expand`.
"""

from __future__ import annotations

import difflib
import string
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import date
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, Field, ValidationError, create_model, field_validator, model_validator

from reshard.pipeline import guarded_yaml
from reshard.pipeline.errors import BadCatalog, BadPlace, BadSize, shortened
from reshard.pipeline.limits import CATALOG_MAX, REPO_MAX, SEARCH_MAX, URL_MAX
from reshard.pipeline.places import CredentialName, Endpoint, Hub, Revision, parse_place, repository
from reshard.pipeline.request import Options, Request
from reshard.pipeline.sizes import parse_size
from reshard.pipeline.validation import Matching, Strict, first_problem

ENTRIES_MAX = 100_000  # of one file; its expansion is kept in the broker's memory, about a kilobyte each
SIZE_MAX = 50  # characters of a size as it is typed
TAGS_MAX = 50  # of one query
FILLED_MAX = 250  # characters of a template that is filled in; the Hub's longest repository has 193
# Of a catalog or a schedule.
NAME = Matching(
    "[a-z0-9][a-z0-9._-]{0,62}",
    "use at most 63 lowercase letters, digits, dots, - or _, starting with a letter or digit",
)
WORDS = {"too_short": "the list is empty"}  # for what pydantic says of a length, which only entries have
SIZES = {"size", "min_size", "max_size"}  # the keys that are sizes
PLACEHOLDERS = ("owner", "name", "size", "revision")


def _with_unit(value: str) -> str:
    try:
        parse_size(value)
    except BadSize as error:
        raise ValueError(f"{shortened(value)}: {error.facts['why']}; use a number with a unit, such as 200MB") from None
    return value


Size = Annotated[
    str,
    AfterValidator(_with_unit),
    Field(max_length=SIZE_MAX, examples=["200MB", "5GB"], description="A size with a unit: 200MB is 200,000,000."),
]
Word = Annotated[str, Field(max_length=SEARCH_MAX)]

if TYPE_CHECKING:

    class _Chosen(Strict):
        branch: Revision = None
        pr: bool | None = None
else:
    # The options of a request, each of which may be left out; a catalog names no folder and is its own --force.
    _Chosen = create_model(
        "_Chosen",
        __base__=Strict,
        **{
            name: (Annotated[(field.annotation, *field.metadata)] | None, Field(None, description=field.description))
            for name, field in Options.model_fields.items()
            if name not in {"size", "config_from", "force"}
        },
    )


class Cut(_Chosen):
    """How to split the weights and where to publish; an entry overrides the defaults."""

    to: str | None = Field(
        default=None,
        max_length=FILLED_MAX,
        description="acme/{name}-{size}; can contain {owner}, {name}, {size} and {revision}.",
    )
    endpoint: Endpoint = Field(default=None, description="The source's Hub (default: the worker's HF_ENDPOINT).")
    to_endpoint: Endpoint = Field(default=None, description="The target's Hub (default: the worker's HF_ENDPOINT).")
    credential: CredentialName | None = Field(
        default=None, description="Name of the credential in the worker's RESHARD_CREDENTIALS that reads the source."
    )
    to_credential: CredentialName | None = Field(
        default=None, description="Name of the credential in the worker's RESHARD_CREDENTIALS that writes the target."
    )
    revision: Revision = Field(default=None, description="Branch, tag or commit of the source.")
    size: Size | None = Field(default=None, description=Options.model_fields["size"].description)

    @field_validator("to")
    @classmethod
    def _templated(cls, value: str | None) -> str | None:
        if value is not None:
            fill(value, dict.fromkeys(PLACEHOLDERS, "x"))
        return value

    @model_validator(mode="after")
    def _one_ref(self) -> Cut:
        if self.branch and self.pr:
            raise ValueError("branch and pr cannot be used together")
        return self


class Query(Strict):
    """A query for models on a Hub; all fields must match."""

    author: str | None = Field(default=None, max_length=REPO_MAX, description="A user or an organization.")
    search: Word | None = Field(default=None, description="Part of the repository's ID.")
    tags: tuple[Word, ...] = Field(default=(), max_length=TAGS_MAX)
    library: Word | None = None
    name: Word | None = Field(default=None, description="A glob for the name without its owner, such as llama-*.")
    min_downloads: int | None = Field(default=None, ge=0, le=2**53)
    min_size: Size | None = Field(default=None, description="Minimum size of everything that the repository stores.")
    max_size: Size | None = Field(default=None, description="Maximum size of everything that the repository stores.")
    limit: int | None = Field(
        default=None,
        ge=1,
        le=ENTRIES_MAX,
        description="Maximum number of models; those with the most downloads come first.",
    )
    collection: Word | None = Field(
        default=None, description="A collection's slug; can be combined only with name and limit."
    )

    @model_validator(mode="after")
    def _bounded(self) -> Query:
        if self.collection is not None:
            if more := sorted(self.model_fields_set - {"collection", "name", "limit"}):
                raise ValueError(f"collection works only with name and limit, not with {more[0]}")
        elif not (self.author or self.search or self.tags or self.library or self.limit):
            raise ValueError("the query matches every model on the Hub; add author, search, tags, library or limit")
        return self


class CatalogEntry(Cut):
    """One model by its id, or all models that match a query."""

    repo: str | None = Field(default=None, max_length=URL_MAX, description="A model, such as them/model.")
    query: Query | None = None

    @field_validator("repo")
    @classmethod
    def _placed(cls, value: str | None) -> str | None:
        try:
            if value is not None:
                _hub(value)
        except BadPlace as error:
            raise ValueError(f"{shortened(str(value))}: {error.facts['why']}") from None
        return value

    @model_validator(mode="after")
    def _either(self) -> CatalogEntry:
        if (self.repo is None) == (self.query is None):
            raise ValueError("an entry needs either repo or query")
        return self


class Catalog(Strict):
    """The whole file."""

    version: Literal[1] = 1
    name: Annotated[str, NAME] = Field(description="Lowercase letters, digits, dots, - and _.")
    defaults: Cut = Cut()
    entries: tuple[CatalogEntry, ...] = Field(min_length=1, max_length=ENTRIES_MAX)


LEVELS = (Catalog, Cut, CatalogEntry, Query)  # what a key is of, by how many steps lead to it
HOMES: dict[type[Strict], str] = {  # of a key that two of them know, the last one counts
    Catalog: "at the top level of the file",
    CatalogEntry: "in an entry",
    Cut: "in `defaults` or an entry",
    Query: "in `query: {...}`, used instead of `repo` in an entry",
}


def parse(text: str, file: str) -> Catalog:
    """The catalog that ``text`` is; raises BadCatalog with the line, the key and what to do."""
    if len(text) > CATALOG_MAX:
        why = f"more than {CATALOG_MAX:,} characters"
        raise BadCatalog(file=file, line=1, key="file", why=why, fix="split it into two catalogs")
    try:
        root, data = guarded_yaml.load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        why = getattr(error, "problem", None) or str(error)
        line = mark.line + 1 if mark else 1
        raise BadCatalog(file=file, line=line, key="YAML", why=why, fix="fix the YAML") from None
    if not isinstance(root, yaml.MappingNode):
        raise BadCatalog(file=file, line=1, key="file", why="not a mapping", fix="start with `name:` and `entries:`")
    _refuse_doubles(root, file)
    try:
        catalog = Catalog.model_validate(data)
    except ValidationError as invalid:
        # Pydantic takes wrong entries for none: a list that is empty only then is not counted.
        errors = [error for error in invalid.errors() if error["type"] != "too_short" or not error["input"]]
        first = errors[0]
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        raise BadCatalog(
            file=file, line=_line(root, first["loc"]), key=_dotted(first["loc"]),
            why=(_read_as(first) or WORDS.get(first["type"]) or first_problem(invalid).why) + more, fix=_fix(first),
        ) from None  # fmt: skip
    for number, entry in enumerate(catalog.entries):
        if entry.to is None and catalog.defaults.to is None:
            path, why = ("entries", number), "no target: `to` is missing"
            fix = "add `to: user/repo` to the entry, or a template such as `to: user/{name}-{size}` to `defaults`"
            raise BadCatalog(file=file, line=_line(root, path), key=_dotted(path), why=why, fix=fix)
    return catalog


def schema() -> dict[str, Any]:
    """The JSON Schema of the file, for editors; https://json-schema.org/draft/2020-12"""
    found = Catalog.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found, "title": "A reshard catalog"}


def request_for(catalog: Catalog, entry: CatalogEntry, repo: str) -> Request:
    """What is asked for the model ``repo`` of ``entry``; raises BadPlace when the template gives no repository.

    What ``repo`` and ``to`` name themselves, as `them/m@v2` and URLs do, comes before the defaults.
    """
    cut = merged(catalog.defaults, entry)
    place = _hub(repo)
    owner, _, name = place.repo.partition("/")
    revision = entry.revision or place.revision or cut.revision
    options = {field: value for field in Options.model_fields if (value := getattr(cut, field, None)) is not None}
    size = cut.size or f"{Options().size // 10**9}GB"
    fields = {"owner": owner, "name": name, "size": size, "revision": revision or "main"}
    try:
        target = _hub(fill(cut.to or "", fields))
    except ValueError as error:
        why = str(error).removeprefix(f"{shortened(cut.to or '')}: ")
        raise BadPlace(value=cut.to, why=why) from None
    endpoint = entry.endpoint or place.endpoint or cut.endpoint
    to_endpoint = entry.to_endpoint or target.endpoint or cut.to_endpoint
    source = {"revision": revision, "endpoint": endpoint, "credential": cut.credential}
    return Request(
        source=place.model_copy(update=source),
        target=target.model_copy(update={"endpoint": to_endpoint, "credential": cut.to_credential}),
        options=Options(**options),
        priority="bulk",
    )


def hubs(catalog: Catalog) -> frozenset[str]:
    """The Hubs that the file names, beside the default one."""
    cuts = (catalog.defaults, *catalog.entries)
    named = {endpoint for cut in cuts for endpoint in (cut.endpoint, cut.to_endpoint)}
    named |= {_hub(entry.repo).endpoint for entry in catalog.entries if entry.repo and "://" in entry.repo}
    for template in {cut.to for cut in cuts if cut.to and "://" in cut.to}:
        with suppress(BadPlace, ValueError):  # which its expansion tells, of each entry
            named.add(_hub(fill(template, dict.fromkeys(PLACEHOLDERS, "x"))).endpoint)
    return frozenset(endpoint.rstrip("/") for endpoint in named if endpoint)


def merged(defaults: Cut, entry: CatalogEntry) -> Cut:
    """What is asked for an entry, its own before the defaults'."""
    own = {name: value for name in Cut.model_fields if (value := getattr(entry, name)) is not None}
    if "pr" in own or "branch" in own:  # an entry that says where it goes takes nothing of it from the defaults
        own = {"pr": None, "branch": None} | own
    return defaults.model_copy(update=own)


def _hub(value: str) -> Hub:
    return repository(parse_place(value), value)


def fill(template: str, values: dict[str, str]) -> str:
    """``template`` with its fields filled in, and nothing of the rest that Python's templates can do.

    A width alone would take any memory: `{name:>60000000}`. Raises ValueError.
    """
    shown, filled = shortened(template), ""
    try:
        for text, name, form, conversion in string.Formatter().parse(template):
            if form or conversion or (name and not name.isidentifier()):
                raise ValueError("use only plain fields such as {name}, without format, attribute or index")
            if name is not None and name not in values:
                there = ", ".join(f"{{{known}}}" for known in values)
                raise ValueError(f"unknown field {{{shortened(name)}}}; use {there}")
            filled += text + values.get(name or "", "")
    except ValueError as error:
        raise ValueError(f"{shown}: {error}") from None
    if len(filled) > FILLED_MAX:
        raise ValueError(f"{shown}: longer than {FILLED_MAX} characters once filled in")
    return filled


# ------------------------------------------------------------------------------------------------- where it is wrong


def _refuse_doubles(node: yaml.Node, file: str) -> None:
    """A key that stands twice would silently win over the first."""
    seen: dict[str, int] = {}
    for child in node.value if isinstance(node, yaml.CollectionNode) else ():
        if isinstance(node, yaml.MappingNode):
            key, child = child
            name, line = str(key.value), key.start_mark.line + 1
            if name in seen:
                why = f"duplicate key, first set on line {seen[name]}"
                raise BadCatalog(file=file, line=line, key=name, why=why, fix="keep one of them")
            seen[name] = line
        _refuse_doubles(child, file)


def _line(root: yaml.Node, path: Sequence[int | str]) -> int:
    """The line of the node that ``path`` leads to, as far as it leads."""
    node, line = root, root.start_mark.line
    for step in path:
        children: dict[Any, tuple[yaml.Node, yaml.Node]] = {}
        if isinstance(node, yaml.MappingNode):
            children = {key.value: (key, value) for key, value in node.value}
        elif isinstance(node, yaml.SequenceNode):
            children = {number: (value, value) for number, value in enumerate(node.value)}
        if step not in children:
            break
        start, node = children[step]
        line = start.start_mark.line
    return line + 1


def _dotted(path: Sequence[int | str]) -> str:
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".") or "file"


def _read_as(error: Any) -> str:
    """What YAML takes a value for that should be text and stands without quotes; empty for any other mistake."""
    value = error["input"]
    if error["type"] != "string_type" or not isinstance(value, bool | int | float | date):
        return ""
    kind = "true or false" if isinstance(value, bool) else "a date" if isinstance(value, date) else "a number"
    return f"must be text, but YAML reads this as {kind}"


def _fix(error: Any) -> str:
    """What to do about one of pydantic's errors."""
    path = error["loc"]
    match error["type"]:
        case "extra_forbidden":
            return _meant(str(path[-1]), LEVELS[len(path) - 1])
        case "missing":
            return f"add `{path[-1]}:`"
        case Matching.__name__ if path == ("name",):
            return "for example `name: nightly-200mb`"
        case "too_short":
            return "add an entry: `- repo: user/repo`"
        case "string_type" if _read_as(error):
            return "use a unit, such as 200MB or 4kB" if path[-1] in SIZES else "put it in quotes"
        case "literal_error":
            return f"choose one of {error['ctx']['expected']}"
    return f"change {_dotted(path)}; see docs/guides/catalogs.md for valid values"


def _meant(typed: str, level: type[Strict]) -> str:
    """What to do about a key that ``level`` does not know: it is misspelt, or belongs elsewhere."""
    homes = {key: home for other, home in HOMES.items() for key in other.model_fields}
    close = partial(difflib.get_close_matches, typed, n=1)
    near = [typed] if typed in homes else close(level.model_fields) or close(homes)
    if not near:
        return "remove it; docs/guides/catalogs.md lists every key"
    key = near[0]
    return f"did you mean `{key}`?" if key in level.model_fields else f"`{key}` belongs {homes[key]}"


def named(catalog: Catalog) -> Iterator[tuple[str, CatalogEntry]]:
    """The repositories that entries name; no query finds them again."""
    for entry in catalog.entries:
        if entry.repo is not None:
            yield _hub(entry.repo).repo, entry
