"""What is said of a plan."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from reshard.client.models.records import Bytes, Document, Forecast, Named, Needs, Seconds, Sized, absent


class Shard(Sized):
    tensors: int
    oversize: str | None = Field(default=None, exclude_if=absent, description="the tensor that is larger than `size`")


class Largest(Document):
    file: Sized
    tensor: Named | None


class Tie(Document):
    names: list[str]
    written: list[str]


class Group(Document):
    files: int
    bytes: Bytes


class LeftOut(Document):
    path: str
    why: str


class Replaced(Sized):
    deleted: bool = Field(description="true: deleted; false: overwritten")


class Transports(Document):
    source: str
    target: str


class Device(Document):
    device: str
    limit: Bytes | None
    bytes: Bytes
    files: list[str]


class Block(Document):
    name: str
    device: str
    bytes: Bytes
    files: list[str]


class RankReads(Document):
    """What one rank reads, such as a rank of `ep8` or `pp4`."""

    rank: int
    files: int
    bytes: Bytes = Field(description="size of the weight files it reads")
    needed: Bytes = Field(description="size of the tensors it needs")
    patterns: list[str] = Field(description="for `hf download --include` and `allow_patterns`; also match small files")


class Layout(Document):
    """What each rank reads from a repository."""

    place: str
    commit: str
    ranks: list[RankReads]
    files: int
    bytes: Bytes = Field(description="size of all weight files")
    command: str | None = Field(
        default=None, description="the command that lets each rank read only its own files; null if not needed"
    )
    notes: list[str]


class Misaligned(Document):
    rule: str = Field(description="the loader, or the boundary in bytes; see docs/layouts.md")
    tensors: int
    bytes: Bytes


class RanksRead(Document):
    ranks: str
    bytes: Bytes = Field(description="bytes read by the rank that reads the most")
    needed: Bytes = Field(description="size of that rank's tensors")


class LayoutFigures(Document):
    files: int
    small_files: int
    misaligned: list[Misaligned]
    spread_layers: int = Field(description="layers in more than one file")
    layers: int
    reads: list[RanksRead]


class LayoutHealth(Document):
    """How a layout affects loaders, and the command that improves it."""

    place: str
    commit: str
    state: Literal["ok", "warning"]
    bytes: Bytes
    tensors: int
    now: LayoutFigures
    index_seeks: int | None = Field(description="seeks of a reader that follows the index; null without an index")
    command: str | None
    then: LayoutFigures | None = Field(description="figures after running the command; null without a command")


class AdvisedLayout(Document):
    """What it costs one reader to download and load a model in this layout."""

    name: str
    command: str | None = Field(description="the command that creates this layout; null for the current one")
    files: int = Field(description="weight files that the reader needs")
    largest: Bytes = Field(description="size of the largest of these files")
    bytes: Bytes = Field(description="bytes to download, including small files")
    requests: int = Field(description="number of requests for the download over HTTP")
    memory: Bytes = Field(description="peak memory while loading, in bytes")
    seconds: Seconds = Field(description="seconds that the download takes")
    recommended: bool = False


class Advice(Document):
    """Which layout suits a loader and its connection."""

    place: str
    commit: str
    loader: str
    ranks: str | None
    link: Bytes = Field(description="download speed in bytes per second")
    layouts: list[AdvisedLayout]


class DeviceMap(Document):
    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)
    checkpoint: str
    result: str
    reason: str
    class_: str | None = Field(default=None, alias="class")
    kept_whole: list[str] | None = None
    devices: list[Device] | None = None
    blocks: list[Block] | None = None
    notes: list[str] | None = None


class Plan(Document):
    """The files that will be written, copied unchanged, deleted and left in place."""

    source: str
    target: str | None = Field(description="null if only the split is planned")
    into: str | None = Field(description="the target as text, with its branch or pull request")
    undo: str | None = Field(description="the target, as passed to `reshard rollback`")
    commit: str | None = Field(description="commit of the source")
    base: str | None = Field(description="the target's commit that the plan was made for")
    digest: str
    published: str | None = Field(description="the existing commit with the same result")
    size: Bytes
    tensors: int
    bytes_read: Bytes
    bytes_written: Bytes
    transports: Transports
    forecast: Forecast
    reads: list[Sized]
    files: list[Shard]
    largest: Largest | None
    ties: list[Tie]
    indexes: list[str]
    manifest: str | None
    groups: list[Group]
    card: str | None
    carried: list[Sized]
    edited: list[str]
    left_out: list[LeftOut]
    replaced: list[Replaced]
    overwrite: bool
    in_place: bool
    may_replace: bool
    deletes: list[str]
    kept: list[str]
    drift: list[str]
    occupied: list[str]
    takes: bool = Field(description="true: others' data is lost, or data that only the source has")
    pruned: list[str] = Field(default_factory=list, description="files of others that `--prune` deletes")
    ranks: list[RankReads] | None = Field(default=None, exclude_if=absent, description="only if split for ranks")
    notes: list[str]

    @property
    def changes_source(self) -> bool:
        """Whether it takes what others put into its own source, or what only that has."""
        return self.in_place and bool(self.replaced) and self.takes


class Planned(Plan):
    """A plan with what the job needs, unless its result is already published."""

    needs: Needs | None = None
    licence: str | None = None
    warnings: list[str] = Field(default_factory=list)
    device_maps: list[DeviceMap] = Field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """Without what was not looked at."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True)
