"""What a router puts into a body for the two ends of a pair, and what it wants to find in an answer.

SGLang's dialect: both ends get the same body, with an address and a room. vLLM's: the prefill instance gets a body
first, and answers with both, which the router puts into the body of the decode instance. Knows no transfer: what a
room is for, the engine knows.
"""
from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from penstock.api.protocol.openai import ChatRequest, CompletionRequest
from penstock.config.base.errors import RequestError, show
from penstock.config.settings.tree import Config
from penstock.engine.wire import BootstrapRoom, EngineReady

BOOTSTRAP = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
PARAMS = "kv_transfer_params"
ROOM_BITS = 62
Body = TypeVar("Body", ChatRequest, CompletionRequest)
_HOST = re.compile(r"[A-Za-z0-9._-]+|\[?[0-9A-Fa-f:.]+\]?")      # a name, or an address


@dataclass(frozen=True, slots=True)
class Routed:
    """Which part a server has in pairs that a router makes.

    dialect   sglang, vllm, or off
    mode      prefill or decode; None: no disaggregation
    listens   of a prefill instance: HOST:PORT, where decode instances connect
    """

    dialect: str = "off"
    mode: str | None = None
    listens: str = ""

    @property
    def prefills(self) -> bool:
        """Whether its answers are for a router only."""
        return self.mode == "prefill"

    def whole(self, request: Body) -> Body:
        """Restore a body that vLLM's dialect has cut to one token for the prefill instance: with as many again as
        `min_tokens` asks for, by which both instances choose the first one by."""
        least = request.min_tokens or 0
        cut = [name for name in ("max_tokens", "max_completion_tokens")
               if getattr(request, name, None) == 1 < least]
        if self.dialect != "vllm" or not self.prefills or not cut:
            return request
        return msgspec.structs.replace(request, **dict.fromkeys(cut, least))

    def room(self, request: ChatRequest | CompletionRequest) -> BootstrapRoom | None:
        """Where this request meets the other end; None if it does not. Raises RequestError."""
        part = "" if self.dialect == "off" or self.mode is None else f"{self.dialect} {self.mode}"
        fields = {"sglang": BOOTSTRAP, "vllm": (PARAMS,)}.get(self.dialect, ()) if part else ()
        for name in (*BOOTSTRAP, PARAMS):
            if name not in fields and getattr(request, name) is not None:
                raise RequestError(f"{name} is for a prefill or decode instance behind a router: start the server with "
                                   "--disaggregation-mode and the --router-dialect of that router", name)
        match part:
            case "sglang prefill":
                return self._bootstrap_here(request)
            case "vllm prefill":
                return BootstrapRoom(secrets.randbits(ROOM_BITS), holds=True)
            case "sglang decode" if request.bootstrap_room is not None:
                return room_at(BOOTSTRAP, [getattr(request, name) for name in BOOTSTRAP])
            case "vllm decode" if request.kv_transfer_params is not None:
                given = request.kv_transfer_params
                return room_at(tuple(f"{PARAMS}.{name}" for name in ("host", "port", "room")),
                              [given.get(name) for name in ("host", "port", "room")])
        return None

    def _bootstrap_here(self, request: ChatRequest | CompletionRequest) -> BootstrapRoom:
        port = self.listens.rpartition(":")[2]
        if request.bootstrap_room is None:
            raise RequestError("this server computes prompts for others: a router names the bootstrap_room "
                               "in which a decode instance will ask for this one", "bootstrap_room")
        if request.bootstrap_port is not None and str(request.bootstrap_port) != port:
            raise RequestError(f"bootstrap_port is {request.bootstrap_port}, and this server listens at "
                               f"{port}: tell the router so, behind --prefill URL", "bootstrap_port")
        return BootstrapRoom(room_number(request.bootstrap_room, "bootstrap_room"))

    def answer(self, room: BootstrapRoom, model: str, count: int) -> dict[str, Any]:
        """Answer a router from a prefill instance: so many choices of whatever kind, without text."""
        choices = [{"index": n, "text": "", "message": {"role": "assistant", "content": ""}, "logprobs": None,
                    "finish_reason": "length"} for n in range(count)]
        answer = {"id": f"room-{room.number}", "object": "prefill", "created": 0, "model": model,
                "choices": choices}
        if not room.holds:
            return answer
        host, _, port = self.listens.rpartition(":")
        return answer | {PARAMS: {"host": host, "port": int(port), "room": room.number}}


ALONE = Routed()


def routed_of(config: Config, ready: EngineReady) -> Routed:
    """Return the router dialect of a server whose engine is ready."""
    if not config.is_routed:
        return ALONE
    return Routed(config.server.router_dialect, config.pair.disaggregation_mode,
                  str(ready.info.get("pair_address") or ""))


def room_at(names: tuple[str, ...], given: list[Any]) -> BootstrapRoom:
    """A room at the prefill instance: host, port and number. Raises RequestError."""
    host, port, number = given
    # What is dialled is a host and a port, nothing that an address of a pair could be beside that.
    if not isinstance(host, str) or _HOST.fullmatch(host) is None or host == "unix":
        raise RequestError(f"{names[0]} is {show(host)}: the name or address of a prefill instance", names[0])
    if not isinstance(port, int) or not 0 < port < 1 << 16:
        raise RequestError(f"{names[1]} is {show(port)}: the port at which the prefill instance listens", names[1])
    bare = host.strip("[]")
    return BootstrapRoom(room_number(number, names[2]), address=f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}")


def room_number(given: Any, name: str) -> int:
    if not isinstance(given, int) or not 0 <= given < 1 << 63:
        raise RequestError(f"{name} is {show(given)}: 0 to {(1 << 63) - 1}", name)
    return given
