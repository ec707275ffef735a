"""Users, organisations and tokens, and who may do what."""

from dataclasses import dataclass, field
from typing import Any

from .errors import bad_credentials, sign_in
from .journal import Event

WRITING_ROLES = ("write", "admin", "contributor")


@dataclass
class Account:
    """A namespace: a user, or an organisation with its members' roles."""

    name: str
    type: str  # "user" or "org"
    members: dict[str, str] = field(default_factory=dict)  # user -> read, contributor, write, admin


@dataclass(frozen=True)
class Token:
    """``scopes`` of a fine-grained token: namespace or repo id -> "read" or "write"; all else it sees as a stranger."""

    user: str
    role: str  # "read", "write" or "fineGrained"
    scopes: dict[str, str] = field(default_factory=dict)

    def allows(self, repo_id: str, write: bool) -> bool:
        """What the token itself permits, whatever its user may do."""
        if self.role != "fineGrained":
            return self.role == "write" or not write
        granted = self.scopes.get(repo_id) or self.scopes.get(repo_id.split("/")[0])
        return granted == "write" or (granted == "read" and not write)


class Accounts:
    """Replayed from the Hub's journal, like all state."""

    def __init__(self) -> None:
        self.by_name: dict[str, Account] = {}
        self.tokens: dict[str, Token] = {}

    def apply(self, event: Event) -> None:
        match event["event"]:
            case "account":
                known = self.by_name.setdefault(event["name"], Account(event["name"], event["type"]))
                known.members.update(event.get("members", {}))
            case "token":
                self.tokens[event["token"]] = Token(event["user"], event["role"], event.get("scopes", {}))
            case "token_revoked":
                self.tokens.pop(event["token"], None)

    def identify(self, authorization: str | None) -> Token | None:
        """The token of an Authorization header; None for a caller who has not signed in."""
        if not authorization:
            return None
        scheme, _, secret = authorization.partition(" ")
        token = self.tokens.get(secret) if scheme.lower() == "bearer" else None
        if token is None:
            raise bad_credentials()
        return token

    def role_in(self, user: str, namespace: str) -> str | None:
        if user == namespace:
            return "admin"
        account = self.by_name.get(namespace)
        return account.members.get(user) if account else None

    def may_read(self, token: Token | None, repo_id: str) -> bool:
        """For a private repo: the namespace's user or members, through a token that covers it."""
        if token is None or self.role_in(token.user, repo_id.split("/")[0]) is None:
            return False
        return token.allows(repo_id, write=False)

    def may_write(self, token: Token | None, repo_id: str) -> bool:
        if token is None or self.role_in(token.user, repo_id.split("/")[0]) not in WRITING_ROLES:
            return False
        return token.allows(repo_id, write=True)

    def whoami(self, token: Token | None) -> dict[str, Any]:
        if token is None:
            raise sign_in()
        orgs = [
            {"type": "org", "name": org.name, "fullname": org.name, "roleInOrg": org.members[token.user]}
            for org in list(self.by_name.values())
            if token.user in org.members
        ]
        access: dict[str, Any] = {
            "displayName": "test",
            "role": token.role,
            "createdAt": "2024-01-01T00:00:00.000Z",
        }
        if token.role == "fineGrained":
            access["fineGrained"] = {
                "global": [],
                "scoped": [
                    {
                        "entity": {"type": "model" if "/" in name else "user", "name": name, "_id": name},
                        "permissions": ["repo.content.read"] + (["repo.write"] if right == "write" else []),
                    }
                    for name, right in token.scopes.items()
                ],
            }
        return {
            "type": "user", "id": token.user, "name": token.user, "fullname": token.user, "isPro": False,
            "email": f"{token.user}@example.org", "orgs": orgs, "auth": {"type": "access_token", "accessToken": access},
        }  # fmt: skip
