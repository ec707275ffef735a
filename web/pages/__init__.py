"""The pages of `reshard web`: made on the server, read without scripts, and kept up to date by a small one."""

from reshard.web.pages import catalogs, jobs, overview, planning
from reshard.web.pages.site import failed, routes

__all__ = ["catalogs", "failed", "jobs", "overview", "planning", "routes"]
