"""Which models an audit is about, and what each should equal: by a catalog, a template, or their own manifests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from reshard.pipeline.auditing.examine import Subject
from reshard.pipeline.catalogs.definition import Catalog, fill
from reshard.pipeline.catalogs.expand import HubModel, Wanted, expand, look_up, models_of
from reshard.pipeline.checkpoint.discover import SOUGHT_STEMS, is_weights, set_name
from reshard.pipeline.errors import BadPlace, FolderNotFound, TargetsCollide, UsageError
from reshard.pipeline.places import AnyPlace, Folder, Hub, check_repo, parse_place, repository
from reshard.pipeline.stores.connect import Context
from reshard.pipeline.text import printable


def of_catalog(catalog: Catalog, context: Context) -> list[Subject]:
    """Every target of a catalog against its entry's source; raises UsageError, and what `expand` does."""
    found = list(_by_target(catalog, context).values())
    if not found:
        raise UsageError(what=f"catalog {catalog.name} matches no models")
    return found


def of_owner(owner: str, against: Catalog | str | None, context: Context) -> list[Subject]:
    """Every model of a user or an organization, against the source that a catalog or a template names for it.

    Targets that a catalog names and the owner does not have are among them. Raises UsageError for an owner without
    models or that the catalog names none of, BadPlace, and what listing them does.
    """
    try:
        check_repo(f"{owner}/any")
    except BadPlace as error:
        raise UsageError(what=f"{owner}: use an owner, a catalog file or a folder of models") from error
    default = context.credentials.default_endpoint
    models = {Hub(repo=model.repo).slot(default, None): model for model in models_of(owner, context)}
    if not models:
        raise UsageError(what=f"{owner} has no models on {default} that the token can read")
    if not isinstance(against, Catalog):
        return _by_template(models.values(), against, context)
    of_all = _by_target(against, context)
    mapped = {slot: one for slot, one in of_all.items() if slot.startswith(f"{default.rstrip('/')}/{owner.lower()}/")}
    if not mapped:
        raise UsageError(what=f"no entry in catalog {against.name} has a target that {owner} owns")
    return [*mapped.values(), *(Subject(Hub(repo=m.repo), m) for slot, m in models.items() if slot not in mapped)]


def of_folder(folder: Path, against: str | None) -> list[Subject]:
    """Every folder in ``folder``, against the source that a template names for it; raises FolderNotFound."""
    try:
        inside = sorted(folder.iterdir())
        folders = [path for path in inside if path.is_dir() and not path.name.startswith(".")]
    except OSError as error:
        raise FolderNotFound(path=str(folder), why=error.strerror or str(error)) from error
    if any(is_weights(path.name) and set_name(path.name).stem in SOUGHT_STEMS for path in inside):
        cure = f"pass the folder that it is in: {folder.absolute().parent}"
        raise FolderNotFound(path=str(folder), why="it is a model, and audit looks for folders of models", cure=cure)
    if not folders:
        raise FolderNotFound(path=str(folder), why="it has no folders of models", cure="pass a folder of models")
    return [_inside(path.absolute(), against) for path in folders]


def _inside(folder: Path, against: str | None) -> Subject:
    try:
        place = parse_place(folder)
    except BadPlace as error:
        return Subject(Folder(path=printable(str(folder))), error=error)
    return Subject(place, source=_filled(against, place) if against else None)


def _by_template(models: Iterable[HubModel], template: str | None, context: Context) -> list[Subject]:
    pairs = [(Hub(repo=model.repo), model) for model in models]
    if template is None:
        return [Subject(place, model) for place, model in pairs]
    try:
        sources = [repository(_filled(template, place)) for place, _ in pairs]
    except ValueError as error:
        raise UsageError(what=f"--against {error}") from None
    now = look_up(sources, context, "read")  # what is not there says so when it is opened
    known = [found if isinstance(found := now[source], HubModel) else None for source in sources]
    return [Subject(*pair, source, at) for pair, source, at in zip(pairs, sources, known, strict=True)]


def _filled(template: str, place: AnyPlace) -> AnyPlace:
    """The source that ``template`` names for the model at ``place``; raises UsageError, BadPlace."""
    owner, _, name = str(place).rpartition("/")
    try:
        return parse_place(fill(template, {"owner": owner, "name": name}))
    except ValueError as error:
        raise UsageError(what=f"--against {error}") from None


def _by_target(catalog: Catalog, context: Context) -> Mapping[str, Subject]:
    """By the target, with its Hub and its branch."""
    default = context.credentials.default_endpoint
    found = [_subject(one) for one in expand(catalog, context, use="read").models]
    return {one.place.slot(default, None): one for one in found}


def _subject(wanted: Wanted) -> Subject:
    request = wanted.request
    if request is None or isinstance(wanted.error, TargetsCollide):
        return Subject(request.target if request else Hub(repo=wanted.repo), error=wanted.error)
    branch = request.options.branch
    place = request.target.at(branch) if branch else request.target
    return Subject(place, None if branch else wanted.target, request.source, wanted.source, request.options)
