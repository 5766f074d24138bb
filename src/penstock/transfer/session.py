"""One connection of a pair, which is one epoch: a thread that receives, and one that sends beside it.

The engine calls it: `grant` registers memory that the other end may write, `push` writes into what it was granted
there, and the end of the connection, or of `revoke`, is the fence after which nothing is written. Owns what is to
be sent and in which order: messages before page frames that wait, never inside one. Holds one frame at either
side; pages are read when it is their turn. Two processes of one machine put pages into a memory of both, if they
can, rather than into the stream.
"""
from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from penstock.config.streams.frames import ProtocolError
from penstock.config.streams.heartbeat import Beat
from penstock.core.pair.messages import Drained, End, Reason
from penstock.core.plan import Move, Tier
from penstock.memory.pinned import NotPinned
from penstock.transfer.codec import PAYLOAD_MAX, PageFrame, PageHead, checksum
from penstock.transfer.events import Down, Events, PeerMessage, Pushed, Up
from penstock.transfer.facts import Facts
from penstock.transfer.handshake import PeerSession
from penstock.transfer.landing import Counts, GrantTable, place
from penstock.transfer.layout import PageSlice, common_layer_spans, pieces, whole_units
from penstock.transfer.messages import Greeting, Memory, Offer, Said, Taken
from penstock.transfer.pages import PageBytes
from penstock.transfer.remote.carrier import SLOT_BYTES, SLOTS, Carrier, CarrierFault
from penstock.transfer.remote.shared import SharedBuffer
from penstock.transfer.streams import Connection


class _Push:
    def __init__(self, move: Move, todo: Iterator[PageSlice], nbytes: int) -> None:
        self.move, self.todo, self.unsent = move, todo, nbytes
        self.sent, self.seconds, self.stopped = 0, 0.0, False

    def ended(self, ok: bool) -> Pushed:
        return Pushed(self.move.id, ok, self.sent, self.seconds)


class Session:
    """An `Opened`. `run` in a thread of its own; everything else from any thread."""

    def __init__(self, stream: Connection, paired: PeerSession, facts: Facts, pages: PageBytes, events: Events,
                 counts: Counts, silence_s: float, open_carrier: Callable[[], Carrier] | None = None,
                 ) -> None:
        """open_carrier: where the decode instance READs pages; None: they come in the stream, or by memory of both
        ends where that can be handed over."""
        self._open_carrier = open_carrier
        self._carrier: Carrier | None = None
        self._reads: Carrier | None = None                  # the same, once it knows what to read
        self._offers: Carrier | None = None                 # the same, once the other end can
        self._free = deque(range(SLOTS))                    # of the buffer, where this end offers pieces
        self.epoch, self.engine = paired.epoch, paired.engine
        self._stream, self._paired, self._facts, self._pages = stream, paired, facts, pages
        self._events, self._counts, self._silence_s = events, counts, silence_s
        self._landings = GrantTable(facts, paired.theirs, pages, counts)
        self.info = paired.theirs.info                      # of the other engine
        self._layers = [common_layer_spans(a, b) for a, b in zip(facts.stages, paired.theirs.stages, strict=True)]
        self._staging = memoryview(bytearray(SLOT_BYTES))
        self._news = threading.Condition()
        self._messages: deque[Said] = deque()
        self._pushes: deque[_Push] = deque()
        self._cause: tuple[str, str] | None = None          # in a word, in words
        self._over = False

    # ------------------------------------------------------------ any thread
    def say(self, message: Said) -> None:
        with self._news:
            self._messages.append(message)
            self._news.notify()

    def grant(self, move: Move) -> None:
        self._landings.grant(move)

    def revoke(self, transfer: int, generation: int) -> None:
        self._landings.revoke(transfer, generation)

    def push(self, move: Move) -> None:
        assert move.dst is Tier.PEER
        group = self._facts.groups[move.group]
        units = whole_units(move.first, move.tokens, group.unit, states=group.is_state)
        there = self._paired.theirs.groups[move.group]
        push = _Push(move, pieces(units, (group.page_units, there.page_units), self._layers[move.group],
                                  group.cell_bytes, PAYLOAD_MAX if self._offers is None else SLOT_BYTES,
                                  group.num_kv_heads),
                     len(units) * group.num_layers * group.cell_bytes)
        with self._news:
            over = self._over
            if not over:
                self._pushes.append(push)
                self._news.notify()
        if over:
            self._events.put(push.ended(False))

    def stop(self, transfer: int, generation: int) -> None:
        with self._news:
            for push in self._pushes:
                if (push.move.transfer, push.move.generation) == (transfer, generation):
                    push.stopped = True
            self._news.notify()

    def unsent(self, transfer: int) -> int:
        with self._news:
            return sum(push.unsent for push in self._pushes if push.move.transfer == transfer)

    def cut(self, cause: str = "cut", words: str = "cut here") -> None:
        """End it; `run` returns soon, and its Down follows. The first cause counts."""
        with self._news:
            self._cause = self._cause or (cause, words)
            self._news.notify()
        self._stream.cut()
        self._events.stir()

    # ------------------------------------------------------------ its threads
    def run(self) -> None:
        """From Up to Down."""
        self._counts.connections += 1
        self._stream.limit(self._silence_s)
        self._guard(self._meet, ends=False)
        self._events.put(Up(self))
        sender = threading.Thread(target=self._guard, args=(self._send,), daemon=True,
                                  name="penstock-pair-send")
        sender.start()
        self._guard(self._receive)
        sender.join()
        self._stream.close()
        self._landings.end()
        if self._carrier is not None:
            self._carrier.close()
        with self._news:
            self._over = True
            left, self._pushes = self._pushes, deque()
        for push in left:
            self._events.put(push.ended(False))
        assert self._cause is not None
        cause, words = self._cause
        self._counts.failed(cause)
        self._events.put(Down(self.epoch, words))

    def _meet(self) -> None:
        """Before anything else, where pages are read."""
        prefill = self._facts.role == "prefill"
        if self._open_carrier is None:
            if prefill and self._stream.hands and (shared := self._share()) is not None:
                self._carrier = shared
                first, *more = self._paired.writer.message(Memory(shared.here))
                self._stream.hand(first, shared.fd)
                assert not more, "a name in one frame"
        else:
            try:
                self._carrier = self._open_carrier()
            except (CarrierFault, OSError):
                raise
            except Exception as e:      # a transport's errors have no base of their own
                raise CarrierFault(f"the transport does not start: {type(e).__name__}") from None
            if prefill:
                self._offers = self._carrier
                with self._news:
                    self._messages.appendleft(Memory(self._carrier.here))

    def _share(self, fd: int | None = None) -> SharedBuffer | None:
        """Memory of both ends, or what was handed over; None: pages come in the stream."""
        try:
            return SharedBuffer(self._pages, fd)
        except (CarrierFault, NotPinned):
            self._counts.failed("memory")
            return None

    def _joined(self, here: bytes) -> None:
        """What the other end must know to read, or to be read, has come."""
        if self._facts.role == "prefill":
            if not isinstance(self._carrier, SharedBuffer) or self._offers is not None:
                raise ProtocolError("Memory where none may come")
            self._carrier.meet(here)
            self._offers = self._carrier
            return
        if self._reads is not None:
            raise ProtocolError("Memory twice")
        if self._open_carrier is None and (fd := self._stream.take_fd()) >= 0:
            self._carrier = self._share(fd)
        if self._carrier is not None:
            self._carrier.meet(here)
            self._reads = self._carrier
            if self._open_carrier is None:
                self.say(Memory(here))
        elif not self._stream.hands:
            raise ProtocolError("Memory where none may come")

    def _guard(self, what: object, *, ends: bool = True) -> None:
        """Whatever ends one of the two ends both. ends: also when it is done."""
        assert callable(what)
        try:
            what()
        except ProtocolError as e:
            self.cut("protocol", f"not what this pair sends: {e}")
        except TimeoutError:
            sends = what == self._send
            self.cut("slow" if sends else "silent",
                     f"{'took' if sends else 'said'} nothing for {self._silence_s:g} s")
        except CarrierFault as e:
            self.cut("transport", str(e))
        except OSError as e:
            self.cut("network", str(e))
        except BaseException as e:      # our bug: handed over, not handled
            self.cut("bug", f"{type(e).__name__} in the link")
            self._events.fail(e)
        else:
            if ends:
                self.cut("closed", "closed by the other end")

    def _receive(self) -> None:
        while self._cause is None and (frame := self._paired.reader.next()) is not None:
            self._counts.frames_received += 1
            match frame:
                case PageFrame():
                    self._landings.land(frame)
                    self._counts.bytes_received += len(frame.payload)
                case Beat():
                    pass
                case Memory(here):
                    self._joined(here)
                case Offer() if self._reads is not None:
                    self._take(self._reads, frame)
                case Taken(slot) if slot < SLOTS and slot not in self._free:
                    with self._news:
                        self._free.append(slot)
                        self._news.notify()
                case Greeting() | Offer() | Taken():
                    raise ProtocolError(f"{type(frame).__name__} where none may come")
                case _:
                    self._hear(frame)

    def _take(self, carrier: Carrier, offer: Offer) -> None:
        """READ a piece into a buffer where no page is. It lands from a copy that no transport writes into, by
        this thread, as if it had come in the stream, unless its grant has been revoked meanwhile."""
        if offer.slot >= SLOTS or offer.length > SLOT_BYTES:
            raise ProtocolError(f"an offer of {offer.length} bytes in slot {offer.slot}")
        payload, sound = self._staging[:offer.length], None
        try:
            found = carrier.read(offer.slot * SLOT_BYTES, offer.length, self._silence_s)
            if carrier.shared:
                payload, sound = found, True
            else:
                payload[:] = found
        except CarrierFault:
            sound = False
        head = PageHead(offer.transfer, offer.generation, offer.group, PageSlice(*offer.piece),
                        int.from_bytes(offer.digest))
        self._landings.land(PageFrame(head, payload), sound=sound)
        self._counts.bytes_received += offer.length
        self.say(Taken(offer.slot))

    def _hear(self, message: Said) -> None:
        heard = PeerMessage(message)
        if isinstance(message, End):
            landed = self._landings.landed(message.transfer, message.generation)
            if landed is not None and landed.ok:
                heard = PeerMessage(message, landed.bytes)
            elif landed is not None:
                # Nothing will be written any more, which is what Drained says; it has not worked.
                self._counts.failed("damaged")
                heard = PeerMessage(Drained(message.transfer, message.generation, Reason.BROKEN))
        self._events.put_when_there_is_room(heard, lambda: self._cause is not None)

    def _send(self) -> None:
        writer = self._paired.writer
        while self._cause is None:
            with self._news:
                ready = self._pushes and (self._free or self._offers is None)
                if not (self._messages or ready or self._cause):
                    self._news.wait(self._paired.beats.interval_s)
                said = list(self._messages)
                self._messages.clear()
                ready = self._pushes and (self._free or self._offers is None)
                push = self._pushes[0] if ready else None
            for message in said if said or push else [Beat()]:
                for frame in writer.message(message):
                    self._stream.sendall(frame)
                    self._counts.frames_sent += 1
            if push is not None and self._cause is None:
                self._send_piece(push)

    def _send_piece(self, push: _Push) -> None:
        piece = None if push.stopped else next(push.todo, None)
        if piece is None:
            with self._news:
                self._pushes.popleft()
            self._events.put(push.ended(not push.stopped))
            return
        began = time.monotonic()
        move, group = push.move, self._facts.groups[push.move.group]
        carrier = self._offers
        slot = -1 if carrier is None else self._free.popleft()
        whole = self._staging if carrier is None else carrier.buffer[slot * SLOT_BYTES:]
        payload = whole[:group.bytes_of(piece)]
        spans = place(group, self._paired.theirs.groups[move.group], move.first, move.src_pages, piece)
        self._pages.read(move.src, move.group, piece.of_layers, spans, payload, piece.of_heads)
        digest = 0 if carrier is not None and carrier.shared else checksum(payload)
        if slot < 0:
            head = PageHead(move.transfer, move.generation, move.group, piece, digest)
            self._stream.sendall(self._paired.writer.page(head, len(payload)))
            self._stream.sendall(payload)
        else:
            at = piece.layer, piece.layers, piece.unit, piece.units, piece.head, piece.heads
            for frame in self._paired.writer.message(Offer(
                    move.transfer, move.generation, move.group, at, digest.to_bytes(8), slot, len(payload))):
                self._stream.sendall(frame)
        took = time.monotonic() - began
        push.sent += len(payload)
        push.unsent -= len(payload)
        push.seconds += took
        self._counts.frames_sent += 1
        self._counts.bytes_sent += len(payload)
        self._counts.send_seconds += took
