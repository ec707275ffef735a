"""What a user asks for: from where, to where, cut how. A request is data and travels in the job."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypedDict, Unpack

from pydantic import BeforeValidator, Field, ValidationError, WithJsonSchema
from pydantic.fields import FieldInfo

from reshard.pipeline.arguments import ACCESS, FILES, FLAGS, PUBLISHING, WEIGHTS, as_option, in_python
from reshard.pipeline.errors import BadBody, RequestTooLarge, SignKeyNotAllowed, UsageError, shortened
from reshard.pipeline.limits import (
    ASKED_BY_MAX,
    DEFAULT_SIZE,
    GLOB_MAX,
    GLOBS_MAX,
    RENAME_RULES_MAX,
    RENAME_TEXT_MAX,
    REQUEST_MAX,
)
from reshard.pipeline.places import NOWHERE, AnyPlace, Place, Revision, parse_place
from reshard.pipeline.renaming import Rules
from reshard.pipeline.sizes import SINGLE, parse_size
from reshard.pipeline.validation import Matching, Strict, first_problem

# Changes only when the same request would give other bytes; a new release alone republishes nothing.
LAYOUT = 2  # 1: indexes without `total_parameters`

RANKS = r"(ep|pp)([2-9]|[1-9][0-9]{1,3})"  # planning/readers.py says what they are
AT_ONCE = 1000  # entries of an object whose JSON is made at once


def _parsed(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("must be a size, such as 200MB")
    return parse_size(value) if isinstance(value, str) else value


Bytes = Annotated[int, Field(gt=0, le=SINGLE)]
# A size as it is typed; the others that ``parse_size`` takes are too long or too small to be one.
TypedSize = Annotated[
    str,
    WithJsonSchema(
        {
            "type": "string",
            "pattern": r"^(?:[1-9][0-9]{0,17} ?B|[1-9][0-9]{6,17}"
            r"|(?:[1-9][0-9]{0,5}(?:\.[0-9]{1,9})?|0\.[0-9]{0,2}[1-9][0-9]{0,6}) ?[KMGTkmgt]i?B)$",
            "maxLength": 50,
        }
    ),
]
DType = Literal["keep", "float16", "bfloat16", "float32"]
Experts = Literal["keep", "fused", "separate", "separate-mixtral"]
Ties = Literal["keep", "source"]
Priority = Literal["interactive", "bulk"]
Transport = Literal["auto", "xet", "http"]
Prefix = Annotated[str, Field(max_length=RENAME_TEXT_MAX)]
Glob = Annotated[str, Field(max_length=GLOB_MAX)]
Globs = Annotated[tuple[Glob, ...], Field(max_length=GLOBS_MAX)]
# The error about another text does not repeat it: it may be a key.
SignKey = Annotated[
    str, Matching(r"(?!-)[^\x00-\x1f\x7f]{1,1000}", "use the path or the name of a PEM file, never the key itself")
]


@dataclass(frozen=True)
class Declared:
    """What there is to say of an option beside its type, default and description."""

    section: str | None = None  # of help; None: among the first
    value: str | None = None  # what stands for its value in help; None: its choices or its type
    # What of a key it changes: the bytes of the weights, or what else a commit holds; None: neither.
    decides: Literal["weights", "content"] | None = None
    alters: Collection[Literal["values", "names", "set"]] = ()  # of tensors; set: which there are
    late: bool = False  # a key names it only where it is not the default, so that those of before it stay as they are
    told: Callable[[Any], str] | None = None  # of the options: what those who find the result are told of it
    expect: str = ""  # help of `reshard verify --against`, which then expects it
    claimed: bool = False  # where only the output's manifest says it, verify compares by it and tells of the claim


def _option(default: Any, description: str, *shown: Any, **declared: Any) -> Any:
    info: FieldInfo = Field(default=default, description=description)
    info.metadata.append(Declared(*shown, **declared))
    return info


class Options(Strict):
    """How to split the weights, which other files to copy, and how to publish."""

    # Commands and catalogs take names, choices, defaults and descriptions from here. A stored request holds only what
    # differs from the defaults, so that a release can read those of a newer one that use nothing new. Defaults
    # therefore never change; a new default needs a new option.

    size: Annotated[Bytes, BeforeValidator(_parsed, json_schema_input_type=Bytes | TypedSize)] = _option(
        DEFAULT_SIZE, "Maximum file size: 200MB is 200,000,000 bytes, 200MiB is 209,715,200.", decides="weights"
    )
    oversize: Literal["own-shard", "fail"] = _option(
        "own-shard", "For a tensor larger than SIZE: give it its own file, or fail.", WEIGHTS, decides="weights"
    )
    pack: Literal["greedy", "balanced", "layers"] = _option(
        "greedy",
        "How to group tensors into files: greedy fills each file in source order, balanced makes files of similar"
        " size, layers keeps each block of the model in one file.",
        WEIGHTS,
        decides="weights",
    )
    ranks: Annotated[str, Matching(f"({RANKS})?", "use ep or pp and a number from 2 to 9999, such as ep8")] = _option(
        "",
        "Group tensors by the rank that reads them: ep8 for 8 expert ranks, pp4 for 4 pipeline stages.",
        WEIGHTS,
        "RANKS",
        decides="weights",
        late=True,
    )
    align: Annotated[
        Literal[8, 512, 4096], BeforeValidator(lambda typed: int(typed) if str(typed).isdecimal() else typed)
    ] = _option(
        8,
        "Align tensors to multiples of this many bytes where their sizes allow. Loaders that bypass the page cache or"
        " map pages to a GPU have to make an extra copy of unaligned tensors.",
        WEIGHTS,
        decides="weights",
        late=True,
    )
    dtype: DType = _option(
        "keep",
        "Cast wider floating-point tensors to this type. Narrower, fp8, packed and integer tensors are unchanged.",
        decides="weights",
        alters=("values",),
        told=lambda o: "" if o.dequantize else f"wider floating-point tensors were cast to {o.dtype}",
        expect="Expect the result of `reshard run --dtype` (default: the one in the manifest).",
        claimed=True,
    )
    dequantize: bool = _option(
        False,
        "Convert quantized weights to --dtype and drop their scales; other tensors are unchanged.",
        WEIGHTS,
        decides="weights",
        alters=("values", "set"),
        late=True,
        told=lambda o: f"quantized weights were converted to {o.dtype} using their scales",
        expect="Expect the result of `reshard run --dequantize` (default: as in the manifest).",
        claimed=True,
    )
    strict_dtype: bool = _option(
        False, "Fail if a cast turns a finite value into infinity.", WEIGHTS, decides="weights"
    )
    ties: Ties = _option(
        "keep",
        "For tied weights in .bin files: keep every name, or only the one that the others are tied to.",
        WEIGHTS,
        decides="weights",
        alters=("set",),
        told=lambda _: "only one of each set of tied tensors was kept",
        expect="Expect the result of `reshard run --ties`.",
    )
    strip_prefix: Prefix | None = _option(
        None,
        "Remove this prefix from tensor names; auto removes the prefixes of known wrappers.",
        WEIGHTS,
        "PREFIX",
        decides="weights",
        alters=("names",),
        told=lambda _: "wrapper prefixes were removed from names",
        expect="Expect tensor names without this prefix (default: the one in the manifest).",
        claimed=True,
    )
    experts: Experts = _option(
        "keep",
        "MoE experts: fused (two tensors per layer, as in transformers 5) or separate (three per expert).",
        WEIGHTS,
        decides="weights",
        alters=("names",),
        late=True,
        told=lambda o: "experts were fused" if o.experts == "fused" else "fused experts were separated",
        expect="Expect this layout of MoE experts (default: the one in the manifest).",
        claimed=True,
    )
    rename: Annotated[Rules, Field(max_length=RENAME_RULES_MAX)] = _option(
        (),
        "Rename tensors with a YAML list of regular expressions and replacements.",
        WEIGHTS,
        "RULES",
        decides="weights",
        alters=("names",),
        late=True,
        told=lambda _: "tensors were renamed by rules",
        expect="Expect tensors renamed by these rules (default: those in the manifest).",
        claimed=True,
    )
    config_from: Place | None = _option(
        None,
        "Where to copy the config and tokenizer from if SRC lacks them.",
        FILES,
        "PLACE",
        decides="content",
        expect="Expect the result of `reshard run --config-from`.",
    )
    include: Globs = _option((), "Also copy files that match this glob.", FILES, "GLOB", decides="content")
    exclude: Globs = _option(
        (),
        "Skip files that match this glob.",
        FILES,
        "GLOB",
        decides="content",
        expect="Expect the result of `reshard run --exclude`.",
    )
    branch: Revision = _option(None, "Commit to this branch of the target.", PUBLISHING, "BRANCH")
    pr: bool = _option(False, "Open a pull request on the target instead of committing to it.", PUBLISHING)
    visibility: Literal["as-source", "public", "private"] = _option(
        "as-source", "Visibility of the target; as-source makes a new target private unless SRC is public."
    )
    prune: bool = _option(
        False, "Also delete files in the target that are not in the source.", FILES, decides="content"
    )
    overwrite: bool = _option(False, "Replace files in the target that others added or changed.")
    lineage: bool = _option(False, "Set base_model in the model card to the source.", FILES, decides="content")
    # It decides the weights' files for their index, which holds its root.
    manifest: bool = _option(
        True, "Publish a manifest, so that the result can be verified without its source.", decides="weights"
    )
    sign: SignKey | None = _option(
        None,
        "Sign the result with this key: a path to a PEM file, or the name of a file in RESHARD_SIGN_KEYS.",
        PUBLISHING,
        "KEY",
        decides="content",
        late=True,
    )
    tensor_hashes: bool = _option(
        False,
        "With --sign, also sign the sha256 of every tensor and where in SRC it came from.",
        PUBLISHING,
        decides="weights",
        late=True,
    )
    force: bool = _option(False, "Copy and publish again even if the same result was published before.", PUBLISHING)
    require: Literal["any", "model"] = _option(
        "any", "Check level required to publish: any, or model (a check with the model's own class).", PUBLISHING
    )
    transport: Transport = _option("auto", "How to transfer weights; auto uses Xet where the Hub offers it.", ACCESS)

    @classmethod
    def of(cls, **options: Any) -> Options:
        """Those that are given; raises BadSize, and UsageError for others that make no sense."""
        with in_python():
            return cls.called(str, options)

    @classmethod
    def called(cls, naming: Callable[[str], str], options: Mapping[str, Any]) -> Options:
        """As ``of``, with errors that call an option what ``naming`` makes of its name."""
        try:
            return cls(**options)
        except ValidationError as error:
            first = first_problem(error)
            where = ".".join([naming(str(first.loc[0])), *(part for part in first.loc[1:] if isinstance(part, str))])
            given = shortened(repr(first.given))
            given = f", not {given}" if first.why.startswith(("must ", "use ")) else f" (got {given})"
            if first.unknown or first.loc[0] == "sign" or isinstance(first.given, dict):
                given = ""
            raise UsageError(what=f"{where}: {first.why}{given}") from error

    @classmethod
    def declared(cls, name: str) -> Declared:
        (declared,) = (one for one in cls.model_fields[name].metadata if isinstance(one, Declared))
        return declared

    def require_named_key(self) -> None:
        """Raises SignKeyNotAllowed for a key that is named by its path, which no worker opens."""
        if "/" in (key := self.sign or ""):
            raise SignKeyNotAllowed(key=key)

    def weights(self) -> dict[str, object]:
        """The options that decide the bytes of the weights, normalised: part of every key and digest."""
        return self._deciding("weights")

    def content(self) -> dict[str, object]:
        """The options that decide what the commit holds: ``weights()`` and what is carried."""
        config_from = self.config_from.spelled if self.config_from else None
        return self.weights() | self._deciding("content") | {"config_from": config_from}

    def _deciding(self, what: Literal["weights", "content"]) -> dict[str, object]:
        found = {}
        for name, field in type(self).model_fields.items():
            declared, value = self.declared(name), getattr(self, name)
            if declared.decides == what and not (declared.late and value == field.default):
                found[name] = value
        return found

    def changed(self) -> dict[str, object]:
        """Those that are not the default."""
        fields = type(self).model_fields.items()
        return {name: value for name, field in fields if (value := getattr(self, name)) != field.default}

    def altering(self, *what: Literal["values", "names", "set"]) -> list[str]:
        """Those of ``changed()`` that alter any of these of tensors."""
        return [name for name in self.changed() if not set(what).isdisjoint(self.declared(name).alters)]

    def told(self, altered: Collection[str] | None) -> str:
        """What was changed, in one sentence for those who find the result: by those ``altered``; None: not known."""
        given = [self.declared(name) for name in self.changed() if altered is None or name in altered]
        changes = [text for one in given if one.told and (text := one.told(self))]
        if not changes:
            return "Only the split into files changed: every tensor is identical to the source, bit for bit."
        most = ", at most" if altered is None else ""
        return f"Besides the split into files{most}: {', '.join(changes)}. Nothing else changed."


FLAGS |= {
    as_option(name): f"{name}=True"
    for name, field in Options.model_fields.items()
    if field.annotation is bool and field.default is False
}


class Given(TypedDict, total=False):
    """The fields of ``Options`` as Python gives them; a test holds the two equal."""

    size: int | str
    oversize: Literal["own-shard", "fail"]
    pack: Literal["greedy", "balanced", "layers"]
    ranks: str
    align: Literal[8, 512, 4096]
    dtype: DType
    dequantize: bool
    strict_dtype: bool
    ties: Ties
    strip_prefix: Prefix | None
    experts: Experts
    rename: Sequence[Mapping[str, str] | tuple[str, str]]
    config_from: str | os.PathLike[str] | AnyPlace | None
    include: Sequence[str]
    exclude: Sequence[str]
    branch: Revision
    pr: bool
    visibility: Literal["as-source", "public", "private"]
    prune: bool
    overwrite: bool
    lineage: bool
    manifest: bool
    sign: SignKey | None
    tensor_hashes: bool
    force: bool
    require: Literal["any", "model"]
    transport: Transport


class Request(Strict):
    """A job's source, target and options. It holds no token: the process that runs it has its own credentials."""

    source: Place
    target: Place
    options: Options = Options()
    priority: Priority = "interactive"
    asked_by: str = Field(default="", max_length=ASKED_BY_MAX)  # who submitted it, for the record
    recurring: bool = False  # nobody looks each time: `overwrite` lasts until the target is this source's

    @classmethod
    def of(
        cls,
        source: str | os.PathLike[str] | AnyPlace,
        target: str | os.PathLike[str] | AnyPlace | None = None,
        **options: Unpack[Given],
    ) -> Request:
        """The request of two places and the fields of ``Options``; a size may be ``"200MB"``. A plan needs no target.

        A string is a place as it is typed, a path object a folder. Raises BadPlace, BadSize, and UsageError for other
        options that make no sense.
        """
        with in_python():
            goal = NOWHERE if target is None else parse_place(target)
            return cls(source=parse_place(source), target=goal, options=Options.of(**options))

    def with_one_ref(self) -> Request:
        """Itself; raises BadBody where a body names a branch in the target, or beside a pull request."""
        if self.target != self.target.at(None):
            raise BadBody(where="target", why="a target cannot have a revision; use the option branch for a branch")
        if self.options.branch and self.options.pr:
            raise BadBody(where="options.branch", why="branch and pr cannot be used together")
        return self

    def submitted_for(self, what: str) -> Request:
        """This, as ``what``, a schedule or a catalog, submits it again and again."""
        # Said only where it matters, as a worker of an older release refuses what it does not know.
        return self.model_copy(update={"asked_by": what, "recurring": self.options.overwrite})

    def key(self) -> str:
        """The same for requests that come to the same commit.

        Who asks does not matter, nor by which credentials: the bytes that a pinned commit holds are the same for
        everyone who may read it, and what is published does not name who wrote it. Defaults are not part of it, so that
        a release with another option makes the same keys.
        """
        place = {"credential"}
        return key_of(
            self.model_dump(
                mode="json",
                exclude={"priority": True, "asked_by": True, "recurring": True, "source": place, "target": place},
                exclude_defaults=True,
            )
        )

    def stored(self) -> str:
        """The JSON that a job keeps, without defaults (``Options`` says why); raises RequestTooLarge."""
        text = self.model_dump_json(exclude_defaults=True)
        if (size := len(text.encode())) > REQUEST_MAX:
            raise RequestTooLarge(size=size, most=REQUEST_MAX)
        return text

    def slot(self, default_endpoint: str) -> str:
        """What one job at a time may write to: a folder, or a branch of a repository. Each pull request is its own."""
        return self.target.slot(default_endpoint, f"pr:{self.key()}" if self.options.pr else self.options.branch)


def key_of(value: object) -> str:
    """A sha256 over the canonical JSON of ``value``: sorted keys, no blanks. Every digest of data is made here."""
    found = hashlib.sha256()
    for part in _canonical_parts(value):
        found.update(part)
    return found.hexdigest()


def _canonical_parts(value: object) -> Iterator[bytes]:
    """``canonical``, an object's entries some at a time: of 500,000 digests it would take 100 MB as a whole."""
    if not isinstance(value, Mapping) or not all(type(name) is str for name in value):
        yield canonical(value)
        return
    names = sorted(value)
    nested = any(isinstance(one, Mapping) for one in value.values())
    yield b"{"
    for start in range(0, len(names), 1 if nested else AT_ONCE):
        if start:
            yield b","
        if nested:
            yield canonical(names[start]) + b":"
            yield from _canonical_parts(value[names[start]])
        else:
            yield canonical({name: value[name] for name in names[start : start + AT_ONCE]})[1:-1]
    yield b"}"


def canonical(value: object) -> bytes:
    """JSON of ``value`` with sorted keys and without blanks."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
