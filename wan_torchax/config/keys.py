"""A server's API keys: the lines of a file, and WAN_TORCHAX_KEYS, separated by commas. No JAX, no torch."""
import ipaddress
import os
from collections.abc import Iterator
from pathlib import Path

from wan_torchax.config.schema import ConfigError

VARIABLE = "WAN_TORCHAX_KEYS"


def read_keys(path: str | None) -> list[str]:
    """All keys. A source of keys without any is an error: the server must not be open by mistake."""
    variable = os.environ.get(VARIABLE, "")
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines() if path is not None else []
    except (OSError, ValueError) as error:
        raise ConfigError(f"serve.keys_file={path}: cannot be read as text ({error})") from error
    keys = [key.strip() for key in (*lines, *variable.split(",")) if key.strip()]
    if not keys and (path is not None or variable):
        raise ConfigError(f"{VARIABLE if path is None else f'serve.keys_file={path}'}: holds no key; write one a line")
    return keys


def key_problems(host: str, path: str | None) -> Iterator[str]:
    """A server that others can reach needs a key."""
    try:
        if not read_keys(path) and not is_loopback(host):
            remedy = "serve.keys_file=<file with a key a line>, or serve.host=127.0.0.1"
            yield f"serve.host={host}: others can reach it, and there are no keys; give {remedy}"
    except ConfigError as error:
        yield str(error)


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
