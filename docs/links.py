"""Where the links of our Markdown lead when it is read elsewhere: on the page of the package, and on the site.

python docs/links.py FOLDER URL    lets the package that is built of FOLDER tell of the repository at URL
mkdocs.yml                         calls on_files and on_page_markdown
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import Any

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s]+)(?P<fragment>#[^)\s]*)?\)")
# The pages of the site that are not in docs/.
SITE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "reporting.md",
}

# From a path in the repository, and whether it is an image, to what to link to.
Lead = Callable[[str, bool], str | None]


def relinked(markdown: str, page: str, lead: Lead) -> str:
    """``markdown`` of ``page`` with its links into the repository as ``lead`` has them; without one, their text."""

    def leading(link: re.Match[str]) -> str:
        if "://" in link["target"]:
            return link[0]
        target = lead(normpath(join(dirname(page), link["target"])), bool(link["image"]))
        return link["text"] if target is None else f"{link['image']}[{link['text']}]({target}{link['fragment'] or ''})"

    return LINK.sub(leading, markdown)


# ---------------------------------------------------------------------------------------------- the package's page


def package_page(readme: str, repository: str, ref: str) -> str:
    return relinked(readme, "README.md", lambda path, image: f"{repository}/{'raw' if image else 'blob'}/{ref}/{path}")


def urls(repository: str, ref: str) -> str:
    return f"""
[project.urls]
Source = "{repository}"
Documentation = "{repository}/blob/{ref}/README.md#documentation"
Changelog = "{repository}/blob/{ref}/CHANGELOG.md"
Issues = "{repository}/issues"
"""


def main(folder: Path, repository: str) -> None:
    readme, project = folder / "README.md", folder / "pyproject.toml"
    ref = "v" + tomllib.loads(project.read_text())["project"]["version"]
    readme.write_text(package_page(readme.read_text(), repository, ref))
    project.write_text(project.read_text() + urls(repository, ref))


# -------------------------------------------------------------------------------------------------------- the site


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for path, place in SITE.items():
        files.append(File.generated(config, place, content=(ROOT / path).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    here = page.file.src_uri
    path = {place: path for path, place in SITE.items()}.get(here, f"docs/{here}")

    def lead(path: str, _: bool) -> str | None:
        place = SITE.get(path) or path.removeprefix("docs/")
        if place != path and not path.endswith(".py"):
            return relpath(place, dirname(here) or ".")
        return f"{config.repo_url}/blob/main/{path}" if config.repo_url else None

    return relinked(markdown, path, lead)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
