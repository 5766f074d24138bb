"""`POST /v1/sessions/{session}`: a client says that a session has ended, or goes on soon.

A session is what a request names as `session_id` or in the header x-dynamo-session-id, of one API key.
"""
from __future__ import annotations

from penstock.api.completions import OpenAI, Reply
from penstock.api.openai_format import encode
from penstock.api.protocol.body import Body
from penstock.api.protocol.openai import ApiError, parse
from penstock.config.base.errors import RequestError, show


class SessionRequest(Body, kw_only=True, forbid_unknown_fields=True):
    """One of the two, true."""

    end: bool | None = None
    warm: bool | None = None

    def checked(self) -> None:
        if bool(self.end) == bool(self.warm):
            raise RequestError("give end: true, or warm: true", "end")


async def change(api: OpenAI, body: bytes, tenant: bytes, reply: Reply) -> None:
    """Answer at once: what follows in the engine is not waited for."""
    request = parse(body, SessionRequest)
    name = reply.session or ""
    number = api.session(tenant, name)
    if request.warm and not api.engine.ready.info.get("kv_storage"):
        raise RequestError("warm: this server has no storage to read from: start it with --kv-storage, or leave it out",
                           "warm")
    if not api.engine.of_session(number, ends=bool(request.end)):
        raise ApiError(404, f"no session {show(name)} is known: no request of this key has named it as "
                       "session_id, it has ended, its engine was started again, or many were used since",
                       code="session_not_found")
    await reply.whole(200, encode({"object": "session", "id": name,
                                   "status": "ended" if request.end else "warming"}), {})
