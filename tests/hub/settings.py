"""What can be set at the start, and changed while the Hub runs."""

import typing
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from .errors import bad_request


@dataclass(frozen=True)
class Settings:
    """Sizes in bytes, times in seconds."""

    lfs_multipart_threshold: int = 256 << 20  # larger objects are uploaded in parts
    lfs_part_size: int = 64 << 20
    regular_limit: int = 10 << 20  # larger files go to LFS whatever their name
    tree_page: int = 1000
    commits_page: int = 50
    discussions_page: int = 10
    discussions_by_author: bool = True  # False: the list of discussions takes no notice of its author filter
    models_page: int = 1000
    # What self-hosted Hubs do otherwise:
    short_sha: int = 0  # letters of the commit id that a repo is described with where no revision is named; 0: all
    auth_check_status: int = 0  # with which the auth-check routes are refused, without an error code; 0: they are there
    guards_parents: bool = True  # False: `parentCommit` is ignored
    commit_messages: bool = True  # False: a history has no messages, only titles
    cdn_lifetime: float = 3600  # of a signed download or upload URL
    xet: bool = True  # False: no content store and no xet routes, as a Hub without Xet
    xet_token_lifetime: int = 900
    xet_store: str = (
        ""  # another Hub's content store, which tokens lead to, as those that a mirror passes on; "": its own
    )
    # class ("api" or "resolvers") -> {"quota": requests, "window": seconds}, per token; none: no limit
    rate_limits: dict[str, dict[str, int]] = field(default_factory=dict)
    # namespaces or repos whose uploads are refused because their storage is full
    storage_full: list[str] = field(default_factory=list)

    def changed(self, changes: dict[str, Any]) -> "Settings":
        known = {f.name: f.type for f in fields(self)}
        for name, value in changes.items():
            if name not in known:
                raise bad_request(f"no setting {name}; there are {', '.join(known)}")
            kind: Any = typing.get_origin(known[name]) or known[name]
            if not isinstance(value, (int, float) if kind is float else kind):
                raise bad_request(f"{name} must be {known[name]}, not {value!r}")
        return replace(self, **changes)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
