"""What can be done or asked, each as one function: ``table.py`` has how one is declared, each noun its own module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reshard.client.operations.table import Operation


def operations() -> list[Operation[..., Any]]:
    """The table, in the order of its modules and of their lines."""
    from reshard.client.operations import catalogs, fleet, jobs, schedules
    from reshard.client.operations.table import Operation

    rows = (one for module in (catalogs, fleet, jobs, schedules) for one in vars(module).values())
    return [*dict.fromkeys(one for one in rows if isinstance(one, Operation))]
