"""Our block in the model card: the one part of a README that is ours to rewrite."""

from __future__ import annotations

import re

from reshard.pipeline.planning.model import Plan

_BEGIN, _END = "<!-- reshard:begin -->", "<!-- reshard:end -->"
_BLOCK = re.compile(re.escape(_BEGIN) + r".*?" + re.escape(_END) + r"\n?", re.DOTALL)
_FRONT_MATTER = re.compile(r"\A---\n(?P<yaml>.*?)^---\n", re.DOTALL | re.MULTILINE)


def block(plan: Plan, files: int) -> str:
    """The marked block: where the weights come from and how they are cut; the same for the same plan anywhere."""
    pin = plan.pin
    source = f"[{pin.repo}]({pin.endpoint}/{pin.repo}/tree/{pin.commit})" if pin.endpoint else "a local checkpoint"
    at = f" at `{pin.commit[:12]}`" if pin.endpoint else ""
    count = "one file" if files == 1 else f"{files} files of at most {plan.options.size:,} bytes each"
    alone = "" if files == 1 else "\n> (a larger tensor has a file of its own)"
    return f"{_BEGIN}\n> These are the weights of {source}{at} in {count}{alone}.\n> {plan.options.told()}\n{_END}\n"


def without_block(card: str) -> str:
    """The card as its owner wrote it."""
    return _BLOCK.sub("", card).rstrip("\n") + "\n"


def with_block(card: str, text: str) -> str:
    """``card`` with our block in its place: where it stood before, else at the end."""
    if _BLOCK.search(card):
        return _BLOCK.sub(lambda _: text, card, count=1)
    return f"{card.rstrip()}\n\n{text}" if card.strip() else text


def with_lineage(card: str, base_model: str) -> str:
    """``card`` with ``base_model`` in its front matter; a card that names one already stays as it is."""
    match = _FRONT_MATTER.match(card)
    if match is None:
        return f"---\nbase_model: {base_model}\n---\n{card}"
    if re.search(r"^base_model\s*:", match["yaml"], re.MULTILINE):
        return card
    return f"---\n{match['yaml']}base_model: {base_model}\n---\n{card[match.end() :]}"


def render(plan: Plan, files: int, theirs: str | None, source: str | None) -> str:
    """The card to publish: the target's own text if it has one, else the source's, with our block in it."""
    card = theirs if theirs is not None else (source or "")
    if plan.options.lineage and plan.pin.endpoint:
        card = with_lineage(card, plan.pin.repo)
    return with_block(card, block(plan, files))
