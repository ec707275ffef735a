"""`reshard plan`: what would be written, without writing it."""

from __future__ import annotations

from reshard.cli.arguments import read_in_place, read_output, takes
from reshard.cli.output import Output
from reshard.pipeline.request import Request


@takes(request=read_in_place, output=read_output)
def plan(request: Request, output: Output) -> None:
    """Show what a job would write, carry and delete, and change nothing."""
    from reshard.cli.describe import plan_facts, plan_text
    from reshard.pipeline.reshard import draft, source_of
    from reshard.pipeline.stores.open import Context, open_target

    context = Context.from_env()
    source = source_of(request, context)
    target = open_target(request.target, request.options, context)
    facts = plan_facts(request, draft(request, source, target))
    output.result(facts, plan_text(facts), "\n".join(file["path"] for file in facts["files"]))
