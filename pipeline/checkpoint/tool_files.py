"""Files that lie in a repository or a folder and are not part of a model, however deep they lie.

What a folder does not list, nobody may write to one, or it would not be found there again. So both ask here.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from posixpath import basename

# git's data, the marks that huggingface_hub leaves in a download, the record of a folder that we published to.
# huggingface_hub uploads nothing of the first two either (its DEFAULT_IGNORE_PATTERNS), at any depth.
FOLDERS = (".git", ".cache/huggingface", ".reshard")
# What git is told about the repository that these are in; a target has its own.
FILES = (".gitattributes", ".gitignore")
# What a signature leaves to tools: model-signing reads none of git's or GitHub's files unless it is told to.
UNSIGNED = (*FILES, *FOLDERS, ".github")


def is_tool_folder(path: str) -> bool:
    return any(f"/{path}".endswith(f"/{folder}") for folder in FOLDERS)


def is_tool_file(path: str) -> bool:
    """Whether the file ``path`` is git's, or lies in a tool's folder."""
    return basename(path) in FILES or any(f"/{folder}/" in f"/{path}" for folder in FOLDERS)


def passed_over(path: str) -> bool:
    """Whether a signature leaves ``path`` to tools: paths from the top of UNSIGNED, and no others of the same name.

    >>> passed_over(".git/config"), passed_over("code/.git/config")
    (True, False)
    """
    return any(f"{path}/".startswith(f"{tools}/") for tools in UNSIGNED)


# May hold passwords, tokens or keys, which a copy must not publish. Also left out of a Hub repository: its readers may
# be fewer than the copy's.
_SECRETS = (".env", ".env.*", ".envrc", ".netrc", ".git-credentials", ".pypirc", ".npmrc", ".ssh", ".aws", "id_rsa",
            "id_ed25519")  # fmt: skip
# Written by the system, an editor, version control, Python or DeepSpeed: files, and folders with all that is in them.
_LEFTOVERS = (
    ".DS_Store", "._*", "__MACOSX", "Thumbs.db", "desktop.ini", "*~", ".*.sw[op]", ".#*", ".idea", ".vscode",
    ".git", ".gitmodules", ".svn", ".hg", "__pycache__", "*.py[co]", ".ipynb_checkpoints", ".venv", ".*_cache",
    "zero_to_fp32.py", "zero_to_torch.py",
)  # fmt: skip


def leftover(path: str) -> str | None:
    """Why a copy leaves ``path`` out unless asked to include it; None for everything else.

    >>> leftover("scripts/.env.local")
    'could contain secrets'
    >>> leftover("__pycache__/modeling.cpython-312.pyc")
    'left over from a tool'
    >>> leftover("modeling.py")
    """
    if _has_part(path, _SECRETS):
        return "could contain secrets"
    return "left over from a tool" if _has_part(path, _LEFTOVERS) else None


def _has_part(path: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(part.lower(), pattern.lower()) for part in path.split("/") for pattern in patterns)
