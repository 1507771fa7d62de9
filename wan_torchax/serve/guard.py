"""Middleware for every request: authentication, origin checks, size and time limits, and latency metrics."""
import asyncio
import hashlib
import hmac
import time
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from wan_torchax.config.keys import is_loopback
from wan_torchax.serve.errors import Refused, answer

OPEN = ("/", "/login", "/healthz", "/readyz")  # no key required; like /static/, these expose no user data
COOKIE = "wan_key"
CLOSE = {"Connection": "close"}  # do not read the rest of a rejected request
HEADERS = {
    b"content-security-policy": b"default-src 'self'; img-src 'self' blob: data:; media-src 'self' blob:; "
    b"frame-ancestors 'none'",
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
}


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def is_good(given: str, keys: list[bytes]) -> bool:
    """Compare with all keys in constant time."""
    return sum(hmac.compare_digest(digest(given), key) for key in keys) > 0


class Guard:
    def __init__(self, app, front):
        self.app, self.front, self.open = app, front, 0

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        began, status = time.perf_counter(), 500

        async def send_on(message):
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                given = {name for name, _ in message["headers"]}
                message["headers"] += [pair for pair in HEADERS.items() if pair[0] not in given]
            await send(message)

        self.open += 1
        try:
            if (refusal := self.refusal(scope)) is not None:
                return await answer(*refusal)(scope, receive, send_on)
            await self.app(scope, self.limited(receive), send_on)
        finally:
            self.open -= 1
            seconds = time.perf_counter() - began
            self.front.measures.answered(template_of(scope), scope["method"], status, seconds)

    def refusal(self, scope) -> tuple | None:
        """Why a request is rejected before routing; None if it is not."""
        headers, path = Headers(scope=scope), scope["path"]
        if self.open > self.front.serve.connections and path != "/healthz":  # liveness does not depend on load
            return 503, "too many open requests; try again in a moment", "too_many", {"Retry-After": "5"} | CLOSE
        if not 0 <= whole_number(headers.get("content-length", "0")) <= self.most_bytes:
            return 413, self.too_large, "too_large", CLOSE
        if not self.is_from_here(headers):
            reason = "a page of another site may not call this server; its owner can allow it with serve.origins"
            return 403, reason, "other_site", CLOSE
        if path in OPEN or path.startswith("/static/") or not self.front.keys:
            return None
        if not is_good(given_key(headers), self.front.keys):
            headers = {"WWW-Authenticate": "Bearer"} | CLOSE
            return 401, "give a key of this server: Authorization: Bearer <key>", "invalid_api_key", headers
        return None

    @property
    def too_large(self) -> str:
        return f"a request may have {self.front.serve.upload_mb} MB"

    @property
    def most_bytes(self) -> int:
        return int(self.front.serve.upload_mb * 1e6)

    def is_from_here(self, headers: Headers) -> bool:
        """Whether the request is not cross-site (CSRF).

        Without keys, the Host must also be a loopback name, against DNS rebinding.
        """
        host, origin = headers.get("host", ""), headers.get("origin")
        try:
            if not self.front.keys and not is_loopback(urlsplit(f"//{host}").hostname or ""):
                return False
            return origin is None or origin in self.front.serve.origins or urlsplit(origin).netloc == host
        except ValueError:  # a malformed address, such as http://[
            return False

    def limited(self, receive):
        """`receive` with limits on bytes and time."""
        left, deadline = self.most_bytes, time.monotonic() + self.front.serve.upload_seconds
        whole = False

        async def receive_some():
            nonlocal left, whole
            if whole:  # only a disconnect can follow
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), deadline - time.monotonic())
            except TimeoutError:
                most = self.front.serve.upload_seconds
                raise Refused(408, f"a request may take {most} s to arrive", "too_slow", CLOSE) from None
            left -= len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if left < 0:
                raise Refused(413, self.too_large, "too_large", CLOSE)
            return message

        return receive_some


def whole_number(text: str) -> int:
    """Parse a non-negative integer of at most 18 digits, since parsing thousands is slow; -1 if invalid."""
    return int(text) if len(text) <= 18 and text.isascii() and text.isdecimal() else -1


def given_key(headers: Headers) -> str:
    """The key from the Authorization header or the page's cookie."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    try:
        cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return cookie.value if cookie else ""


def template_of(scope) -> str:
    """The route's template, `/v1/videos/{id}`, to bound the number of metric labels."""
    for route in scope["app"].routes:
        if scope.get("endpoint") is getattr(route, "endpoint", route.app):  # set by the router
            return route.path
    return "other"
