"""The document of an audit: every model with what was found, the worst first."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from reshard.client.models.records import Checked, Document, Newer

Severity = Annotated[Literal["critical", "error", "warning"], Newer]


class AuditFinding(Document):
    """All findings of one kind for a model."""

    kind: str = Field(description="the kind, such as `tensors-lost`; the guide lists all kinds")
    severity: Severity = Field(
        description="`critical`: wrong or lost bytes; `error`: loads incorrectly; `warning`: not provable from headers"
    )
    count: int
    first: str = Field(description="the first finding")
    next: str = Field(description="the next command to run, or what to do instead")


class AuditedModel(Document):
    place: str
    commit: str | None
    source: str | None
    source_commit: str | None
    source_by: Annotated[Literal["map", "manifest"], Newer] | None = Field(
        description="where the source is named; `manifest` is only the publisher's claim"
    )
    deep: bool = Field(description="whether every byte was read")
    severity: Severity | None = Field(description="severity of the worst finding; null if there is none")
    findings: list[AuditFinding]


class Audit(Document):
    audited: str
    against: str | None
    result: Checked = Field(description="`failed` if a finding is critical or an error")
    models: int
    critical: int = Field(description="number of models whose worst finding is critical")
    errors: int
    warnings: int
    calls: int = Field(description="requests to Hubs, not counting redirect targets")
    without_weights: list[str]
    entries: list[AuditedModel]
