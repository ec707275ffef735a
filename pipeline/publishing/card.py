"""The model card: reshard writes one marked block in it and, with ``--lineage``, one line of its front matter.

Everything here works on bytes, so that the rest of a README stays byte for byte what its owner wrote. A card that
cannot be edited exactly is published as it is, and a note says why.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from reshard.pipeline.errors import SourceChanged, TargetConflict
from reshard.pipeline.limits import CONFIG_MAX
from reshard.pipeline.planning.beside import excluded
from reshard.pipeline.planning.front_matter import front_matter
from reshard.pipeline.planning.model import CARD, Plan, files_told, weight_files
from reshard.pipeline.protocols import Source, Target
from reshard.pipeline.publishing.history import Publication
from reshard.pipeline.sizes import SINGLE
from reshard.pipeline.tensors import StoredFile, same_by_hash

_BEGIN, _END = b"<!-- reshard:begin -->", b"<!-- reshard:end -->"
# Lines of a YAML mapping in block style, after which a line with another key changes none of the others.
_KEY = re.compile(rb"""["']?[\w.][\w.-]*["']?[ \t]*:(?:[ \t].*)?""")
_BELOW_A_KEY = re.compile(rb"[ \t].*|-[ \t].*|-")
_BASE_MODEL = re.compile(rb"""^["']?base_model["']?[ \t]*:""", re.MULTILINE)


class CannotEdit(Exception):
    """The card has something that cannot be changed without a risk to the rest; its text says what."""


def block(plan: Plan) -> bytes:
    """The marked block: where the weights come from and how they are cut; the same for the same plan anywhere."""
    files = weight_files(plan)
    alone = " each\n> (a larger tensor has its own file)" if files > 1 and plan.options.size != SINGLE else ""
    what = f"the weights of {plan.pin.linked()} in {files_told(plan, files)}{alone}"
    text = f"> These are {what}.\n> {plan.options.told(plan.altered)}\n"
    return _BEGIN + b"\n" + text.encode() + _END + b"\n"


def without_block(card: bytes) -> bytes:
    """The card as its owner wrote it, but for line ends at its end."""
    kept, at = b"", 0
    while found := _find_block(card, at):
        kept, at = kept + card[at : found.start], found.stop
    return (kept + card[at:]).rstrip(b"\r\n")


def _find_block(card: bytes, at: int = 0) -> slice | None:
    """The first of our blocks behind ``at``, with the end of its last line."""
    if (begin := card.find(_BEGIN, at)) < 0 or (end := card.find(_END, begin)) < 0:
        return None
    stop = end + len(_END)
    after = card[stop : stop + 2]
    return slice(begin, stop + (2 if after == b"\r\n" else after[:1] == b"\n"))


def with_block(card: bytes, text: bytes) -> bytes:
    r"""``card`` with our block in its place: where it stood before, else at the end, with the card's own line ends.

    Raises CannotEdit unless the card has exactly one pair of our markers, or none.

    >>> with_block(b"# Title\n", b"<!-- reshard:begin -->\n> ours\n<!-- reshard:end -->\n")
    b'# Title\n\n<!-- reshard:begin -->\n> ours\n<!-- reshard:end -->\n'
    """
    before = _find_block(card)
    if not card.count(_BEGIN) == card.count(_END) == (before is not None):
        raise CannotEdit("it does not have exactly one pair of reshard markers")
    end = _line_end(card[before] if before else card)
    text = text.replace(b"\n", end)
    if before:
        return card[: before.start] + text + card[before.stop :]
    between = b"" if not card else end * (1 if card.endswith(b"\n") else 2)
    return card + between + text


def with_lineage(card: bytes, base_model: str) -> bytes:
    r"""``card`` with ``base_model`` in its front matter; a card that names one already stays as it is.

    Raises CannotEdit where the front matter is not closed or not a plain YAML mapping.

    >>> with_lineage(b"---\r\nlicense: mit\r\n---\r\n# A\r\n", "a/b")
    b'---\r\nlicense: mit\r\nbase_model: a/b\r\n---\r\n# A\r\n'
    """
    end = _line_end(card)
    line = b"base_model: " + base_model.encode() + end
    front = front_matter(card)
    if front is None:
        mark = b"\xef\xbb\xbf" if card.startswith(b"\xef\xbb\xbf") else b""
        return mark + b"---" + end + line + b"---" + end + card[len(mark) :]
    if front.stop is None:
        raise CannotEdit("its front matter is not closed")
    if _BASE_MODEL.search(front.yaml):
        return card
    if not _is_plain_mapping(front.yaml):
        raise CannotEdit("its front matter is not a plain YAML mapping")
    return card[: front.stop] + line + card[front.stop :]


def _is_plain_mapping(yaml: bytes) -> bool:
    lines = [line.removesuffix(b"\r") for line in yaml.split(b"\n")]
    lines = [line for line in lines if line and not line.startswith(b"#")]
    return all(map(_KEY.fullmatch, lines[:1])) and all(
        _KEY.fullmatch(one) or _BELOW_A_KEY.fullmatch(one) for one in lines
    )


def _line_end(card: bytes) -> bytes:
    first = card.find(b"\n")
    return b"\r\n" if first > 0 and card[first - 1] == ord("\r") else b"\n"


class Card(NamedTuple):
    """The card to publish: ``content``, or, where that is None, ``file`` of the source or the target as it is."""

    content: bytes | None
    file: StoredFile | None
    of_source: bool
    notes: tuple[str, ...]


def card_for(plan: Plan, source: Source, target: Target, head: str, last: Callable[[], Publication | None]) -> Card:
    """The card on top of ``head``: the owner's as soon as there is one, and the source's while ours is unedited.

    ``last`` finds our last publication before ``head``.
    """
    there = target.at(head) if head else None
    given, theirs = source.files().get(CARD), there.files().get(CARD) if there else None
    ours = None if excluded(plan.options, CARD) else given
    home, file = source, ours
    if there is not None and theirs is not None:
        refresh = last() if given is not None and plan.pin.repo != str(target.place) else None
        if refresh is None or not _as_left(target, refresh.commit, there):
            home, file = there, theirs
    card = b"" if file is None else _read(home, file)
    content, notes = _edited(plan, card)
    if content is not None and home is not source and without_block(card or b""):
        notes = (f"{CARD} keeps its text and gets a reshard section", *notes)
    return Card(content, file, home is source, notes)


def _edited(plan: Plan, card: bytes | None) -> tuple[bytes | None, tuple[str, ...]]:
    """The card with what is ours in it, None where it is published as it is; and notes."""
    notes: tuple[str, ...] = ()
    try:
        if card is None:
            raise CannotEdit(f"it is larger than {CONFIG_MAX:,} bytes")
        if card.decode(errors="replace").encode() != card:
            raise CannotEdit("it is not UTF-8")
        try:
            card = with_lineage(card, name) if plan.options.lineage and (name := plan.pin.named) else card
        except CannotEdit as why:
            notes = (f"base_model is not added to {CARD}: {why}",)
        return with_block(card, block(plan)), notes
    except CannotEdit as why:
        return None, (f"{CARD} is published unchanged, without a reshard section: {why}",)


def _as_left(target: Target, commit: str, now: Source) -> bool:
    """Whether the card that we published is still there, whatever the owner did to our block in it."""
    try:
        then = target.at(commit)
        before, after = then.files().get(CARD), now.files().get(CARD)
        if before is None or after is None:
            return False
        if same_by_hash(before, after):
            return True
        texts = [_read(then, before), _read(now, after)]
    except (TargetConflict, SourceChanged):
        return False  # of what it was a folder keeps no more than small texts, and nothing once it was rolled back
    return None not in texts and len({without_block(text) for text in texts if text is not None}) == 1


def _read(source: Source, file: StoredFile) -> bytes | None:
    """The content of a card; None for one that is too large to be edited."""
    return b"".join(source.read(file, 0, file.size)) if file.size <= CONFIG_MAX else None
