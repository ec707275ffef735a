"""The document of an audit: every model with what was found, the worst first."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from reshard.client.models.records import Checked, Document, Newer

Severity = Annotated[Literal["critical", "error", "warning"], Newer]


class AuditFinding(Document):
    """All findings of one kind about a model."""

    kind: str = Field(description="a name to search for, such as `tensors-lost`; the guide lists them")
    severity: Severity = Field(description="wrong or lost bytes, loads wrongly, cannot be proven from headers")
    count: int
    first: str = Field(description="the first of them")
    next: str = Field(description="the next command, or what else to do")


class AuditedModel(Document):
    place: str
    commit: str | None
    source: str | None
    source_commit: str | None
    source_by: Annotated[Literal["map", "manifest"], Newer] | None = Field(
        description="what names the source; `manifest` is the word of whoever published it"
    )
    deep: bool = Field(description="whether every byte was read")
    severity: Severity | None = Field(description="of the worst finding; null if there is none")
    findings: list[AuditFinding]


class Audit(Document):
    audited: str
    against: str | None
    result: Checked = Field(description="`failed` if a finding is critical or an error")
    models: int
    critical: int = Field(description="models by their worst finding")
    errors: int
    warnings: int
    calls: int = Field(description="requests to Hubs, without those to where they redirect")
    without_weights: list[str]
    entries: list[AuditedModel]
