"""What an operator may set of `reshard web`, by variables that start with ``RESHARD_WEB_``."""

from __future__ import annotations

from ipaddress import IPv4Network, IPv6Network, ip_address
from pathlib import Path
from typing import Annotated

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

PORT = 8474  # no well-known service has it
TOKENS = "web-tokens"  # the file in the data folder, unless another is set
USER_HEADER = "X-Forwarded-User"  # as oauth2-proxy and most others call it

Network = IPv4Network | IPv6Network


class WebSettings(BaseSettings):
    """Where it listens, and who may do what. Lists are separated by commas."""

    model_config = SettingsConfigDict(env_prefix="RESHARD_WEB_", env_ignore_empty=True, extra="ignore", frozen=True)

    address: str = "127.0.0.1"
    port: int = Field(default=PORT, ge=1, le=65535)
    hosts: Annotated[tuple[str, ...], NoDecode] = ()  # names that browsers reach it by, beside its address
    tokens: Path  # left out, TOKENS in the data folder of this machine

    # A proxy that signs people in, and says in a header who asks. Whoever else sends the header is not believed.
    proxy: Annotated[tuple[Network, ...], NoDecode] = ()  # addresses or networks
    user_header: str = USER_HEADER
    actors: Annotated[tuple[str, ...], NoDecode] = ()  # whom of them may act; * is everyone

    hook_secret: SecretStr | None = None  # of the Hub's webhooks; without one they are refused

    @field_validator("hosts", "proxy", "actors", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def is_local(address: str) -> bool:
    """Whether only this machine's users reach it there."""
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
