"""`reshard provenance`: what a publication was made from."""

from __future__ import annotations

import json
from typing import Annotated

from reshard.cli.arguments import PLACE, argument, takes, value
from reshard.cli.output import Output
from reshard.client.models.jobs import Provenance
from reshard.pipeline.publishing.exports import Format


@takes()
def provenance(
    place: Annotated[str, argument("REPO_OR_DIR", f"A published checkpoint: {PLACE}")],
    output: Output,
    format_: Annotated[Format, value(None, "Output format (default: slsa).", "--format")] = "slsa",
) -> None:
    """Show what a published checkpoint was made from.

    Reads the published statement or the manifest. To check signatures as well, run `reshard verify --signed-by KEY`.

    Example: reshard provenance you/gpt2-200MB --format cyclonedx
    """
    from reshard.pipeline.places import parse_place
    from reshard.pipeline.publishing.exports import provenance as exported
    from reshard.pipeline.stores.connect import Context, open_source

    source = open_source(parse_place(place), Context.from_env())
    found = exported(source, format_)
    document = Provenance(place=str(source.place), commit=source.pin.commit, format=format_, provenance=found)
    output.result(document, json.dumps(found, indent=2), json.dumps(found))
