"""The modules of sentence-transformers' models: a folder each, which `modules.json` or a router's config lists."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from posixpath import basename, dirname, join, normpath
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from reshard.pipeline.checkpoint.indexes import load_json
from reshard.pipeline.checkpoint.small_files import read_file
from reshard.pipeline.errors import BadIndex
from reshard.pipeline.limits import CONFIG_MAX
from reshard.pipeline.protocols import Source
from reshard.pipeline.tensors import StoredFile
from reshard.pipeline.validation import first_problem

LIST = "modules.json"
_ROUTES = "router_config.json"

# By the ends of their types: those that are transformers' models, whose loader knows indexes; the others' knows none.
_TRANSFORMERS = ("Transformer", "CLIPModel")
_STATIC = "StaticEmbedding"  # such a module that is the whole model
_ROUTER = "Router"  # has modules of its own


class _Module(BaseModel):
    path: str
    type: str


class _Router(BaseModel):
    types: dict[str, str]  # path -> type


_MODULES = TypeAdapter(list[_Module])


@dataclass(frozen=True, slots=True)
class Modules:
    """What the lists of one repository say."""

    types: Mapping[str, str]  # folder -> type of the module in it
    homes: Set[str]  # the folders of such models; a module in one of them is the model

    @property
    def carried(self) -> set[str]:
        """The folders whose weights are never cut; a model's own folder is that of the module which is cut, if any."""
        return {folder for folder, kind in self.types.items() if not kind.endswith(_TRANSFORMERS)} - self.homes

    @property
    def single(self) -> set[str]:
        """The folders whose weights are a model, and stay in one file."""
        return {folder for folder in self.homes if self.types.get(folder, "").endswith(_STATIC)}


def find_modules(source: Source, listing: Mapping[str, StoredFile]) -> Modules:
    """The modules of the files in ``listing``.

    Raises BadIndex for a list of modules at the root that is spoiled; below it, others may call a file of theirs so.
    """
    types, homes = dict[str, str](), set[str]()
    for path in sorted(path for path in listing if basename(path) == LIST):
        try:
            listed = _listed(load_json(read_file(source, listing[path], CONFIG_MAX)))
        except (BadIndex, ValueError) as error:
            if path == LIST:
                problem = first_problem(error) if isinstance(error, ValidationError) else None
                why = f"{problem.where}: {problem.why}" if problem else error
                raise BadIndex(file=path, why=f"not a list of modules ({why})") from None
            continue
        if listed:
            homes.add(dirname(path))
            types |= _within(dirname(path), ((module.path, module.type) for module in listed))
    for folder in [folder for folder, kind in types.items() if kind.endswith(_ROUTER)]:
        if config := listing.get(join(folder, _ROUTES)):
            with suppress(BadIndex, ValueError):
                content = load_json(read_file(source, config, CONFIG_MAX))
                types |= _within(folder, _Router.model_validate(content, strict=True).types.items())
    return Modules(types, homes)


def _listed(content: Any) -> list[_Module]:
    """The modules that a list has; none where it is another tool's. Raises ValidationError for one that is spoiled."""
    ours = isinstance(content, list) and any(isinstance(m, dict) and {"path", "type"} <= m.keys() for m in content)
    return _MODULES.validate_python(content, strict=True) if ours else []


def _within(home: str, listed: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The folders of modules in ``home``, by their paths from there."""
    named = {normpath(join(home, path)).removesuffix("."): kind for path, kind in listed}
    return {folder: kind for folder, kind in named.items() if folder == home or folder.startswith(join(home, ""))}
