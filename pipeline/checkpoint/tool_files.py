"""What lies in a repository or a folder and belongs to a tool: never to a model, however deep it lies.

What a folder does not list, nobody may write to one, or it would not be found there again. So both ask here.
"""

from __future__ import annotations

from posixpath import basename

# git's data, the marks that huggingface_hub leaves in a download, the record of a folder that we published to.
# huggingface_hub uploads nothing of the first two either (its DEFAULT_IGNORE_PATTERNS), at any depth.
FOLDERS = (".git", ".cache/huggingface", ".reshard")
# What git is told about the repository that these are in; a target has its own.
FILES = (".gitattributes", ".gitignore")


def is_tool_folder(path: str) -> bool:
    """Whether the folder ``path`` is a tool's own."""
    return any(f"/{path}".endswith(f"/{folder}") for folder in FOLDERS)


def is_tool_file(path: str) -> bool:
    """Whether the file ``path`` is git's, or lies in a tool's folder."""
    return basename(path) in FILES or any(f"/{folder}/" in f"/{path}" for folder in FOLDERS)
