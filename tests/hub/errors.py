"""Refusals, with the status, headers and words that the real client turns into its exception classes."""

from typing import Any

from .wire import Response, json_response


class HubError(Exception):
    """An answer other than success: ``{"error": message}`` and the headers that name the reason."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        headers: dict[str, str] | None = None,
        **fields: Any,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        in_header = " ".join(message.split()).encode("ascii", "replace").decode()
        self.headers = {"X-Error-Message": in_header, **(headers or {})}
        if code:
            self.headers["X-Error-Code"] = code
        self.fields = fields

    def response(self) -> Response:
        return json_response({"error": self.message, **self.fields}, self.status, self.headers)


def repo_not_found(signed_in: bool) -> HubError:
    """Also the answer for a private repo: a stranger must not learn that it exists."""
    if signed_in:
        return HubError(404, "Repository not found", "RepoNotFound")
    return HubError(401, "Invalid username or password.", "RepoNotFound")


def revision_not_found(revision: str) -> HubError:
    return HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")


def entry_not_found(message: str = "Entry not found", commit: str | None = None) -> HubError:
    """``commit`` lets a client remember that this commit has no such file."""
    return HubError(404, message, "EntryNotFound", {"X-Repo-Commit": commit} if commit else {})


def gated(repo_id: str, signed_in: bool) -> HubError:
    if signed_in:
        message = f"Access to model {repo_id} is restricted and you are not in the authorized list."
        return HubError(403, message, "GatedRepo")
    message = f"Access to model {repo_id} is restricted. You must have access to it and be authenticated."
    return HubError(401, message, "GatedRepo")


def bad_credentials() -> HubError:
    return HubError(401, "Invalid credentials in Authorization header")


def sign_in() -> HubError:
    return HubError(401, "Invalid username or password.")


def forbidden(message: str) -> HubError:
    return HubError(403, message)


def storage_full(private: bool) -> HubError:
    if private:
        message = (
            "Private repository storage limit reached, please upgrade your plan to increase your private storage limit."
        )
    else:
        message = (
            "Your storage patterns tripped our internal systems! Please contact us at website@huggingface.co"
            " so we can verify your account and unlock more storage for your use-case."
        )
    return HubError(403, message)


def bad_request(message: str) -> HubError:
    return HubError(400, message)
