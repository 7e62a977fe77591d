"""Decides who may read the page: token, name of the host, headers that fence model text in.

Every answer but a refusal needs the token, in a cookie or in the address that was printed. The name
in Host is looked at because a page of elsewhere could have its own name resolved to this machine
(DNS rebinding): an address, or a name that the user gave, is what it must be.
"""

from __future__ import annotations

import ipaddress
import logging
import secrets
from dataclasses import dataclass, field

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from sglang_bridge.refusals import Refusals

logger = logging.getLogger(__name__)

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""No inline script or style, nothing from elsewhere, and no string ever becomes HTML."""
TOKEN = "token"


@dataclass(frozen=True, slots=True)
class Access:
    """Holds the secret of one server.

    names: host names besides addresses that may be asked. refusals: counts who is not served.
    """

    token: str
    names: frozenset[str]
    refusals: Refusals = field(default_factory=lambda: Refusals(logger, "by opd watch"))

    def knows(self, given: str | None) -> bool:
        """Return whether a token is the right one, in constant time."""
        return given is not None and secrets.compare_digest(
            given.encode(errors="replace"), self.token.encode()
        )

    def serves(self, host: str) -> bool:
        """Return whether the Host header names this machine: by address, or by a known name."""
        name = host_name(host)
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name.lower() in self.names
        return True


def host_name(host: str) -> str:
    """Return the name or address in a Host header, without port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def cookie_name(port: int) -> str:
    """Return the cookie's name: a browser does not tell ports apart."""
    return f"opd_watch_{port}"


def guard(access: Access, port: int) -> Middleware:
    """Make the middleware that answers 403 unless the request may be answered, and counts those."""
    cookie, refusals = cookie_name(port), access.refusals

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not access.serves(request.host):
            refusals.add("a request for another host")
            return refusal("this name is not this server's: open the address that was printed")
        if access.knows(request.query.get(TOKEN)):
            return let_in(request, access, cookie)
        if not access.knows(request.cookies.get(cookie)):
            refusals.add("a request without the token")
            return refusal("the token is missing or wrong: open the address that was printed")
        try:
            response = await handler(request)
        except web.HTTPException as error:
            response = web.Response(status=error.status, text=f"{error.reason}\n")
        response.headers.update(HEADERS)
        return response

    return check


def let_in(request: web.Request, access: Access, cookie: str) -> web.Response:
    """Keep the token in a cookie and leave it out of the address, which histories keep."""
    rest = {key: value for key, value in request.query.items() if key != TOKEN}
    response = web.Response(status=303, headers=HEADERS)
    response.headers["Location"] = str(request.rel_url.with_query(rest))
    # Lax, not Strict: the address may be clicked on a page of elsewhere, and nothing here changes
    # anything
    response.set_cookie(cookie, access.token, httponly=True, samesite="Lax", path="/")
    return response


def refusal(why: str) -> web.Response:
    """Answer 403 with one line."""
    return web.Response(status=403, text=f"403: {why}\n", headers=HEADERS)
