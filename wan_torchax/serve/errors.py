"""Errors in the format of OpenAI's API."""
import errno
import json
import logging

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from wan_torchax.config.schema import ConfigError

log = logging.getLogger("wan")
KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class Answer(JSONResponse):
    """ASCII-only JSON: a prompt may have lone surrogates, which UTF-8 cannot encode."""

    def render(self, content) -> bytes:
        return json.dumps(content, allow_nan=False).encode()


class Refused(HTTPException):
    """A rejected request, with a message and a machine-readable code."""

    def __init__(self, status: int, message: str, code: str | None = None, headers: dict | None = None):
        super().__init__(status, message, headers)
        self.code = code


def answer(status: int, message: str, code: str | None = None, headers: dict | None = None) -> Answer:
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    content = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return Answer(content, status, headers)


async def refused(request: Request, error: HTTPException) -> Answer:
    return answer(error.status_code, error.detail, getattr(error, "code", None), error.headers)


async def wrong(request: Request, error: ConfigError) -> Answer:
    """Invalid settings, with run.py's message."""
    return answer(400, str(error), "invalid_settings")


async def failed(request: Request, error: Exception) -> Answer:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return answer(507, "the server's disk is full; ask its owner to free space", "disk_full")
    log.error("%s %s: %s", request.method, request.url.path, error, exc_info=error)
    return answer(500, "internal error; see the server's log", "internal_error")


HANDLERS = {HTTPException: refused, ConfigError: wrong, OSError: failed, Exception: failed}
