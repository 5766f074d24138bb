"""How long a plan takes to each rank of a machine: encoded once, written to each, read and decoded there.

`PYTHONPATH=src python lab/bench/plans.py --rows 256 --ranks 2 4`: of steps, the time until the last has it.
"""
from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
import time

from penstock.core.plan import RequestId, Row, StepId, StepPlan
from penstock.exec.pipeline import wire

STEPS, REST_S = 500, 0.002


def rank(sock: socket.socket) -> None:
    channel = wire.Channel(sock)
    while (body := channel.receive()) is not None:
        wire.decode_to_rank(body)
        sock.sendall(time.monotonic_ns().to_bytes(8, "little"))


def plan(step: int, rows: int) -> StepPlan:
    """Each row decodes."""
    every = range(rows)
    return StepPlan(StepId(step), tuple(map(Row, every)), tuple(RequestId(1000 + row) for row in every),
                    tuple(4000 + row for row in every), (1,) * rows, (True,) * rows, (-1,) * rows, (), (), ())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    args = parser.parse_args()
    for num in args.ranks:
        pairs = [socket.socketpair() for _ in range(num)]
        fork = multiprocessing.get_context("fork")
        processes = [fork.Process(target=rank, args=(there,), daemon=True) for _, there in pairs]
        for process in processes:
            process.start()
        channels, took, nbytes = [wire.Channel(here) for here, _ in pairs], [], 0
        for step in range(STEPS):
            made = plan(step, args.rows)
            began = time.monotonic_ns()
            frame = wire.encode(wire.Plan(made))
            for channel in channels:
                channel.send(frame)
            ends = [int.from_bytes(channel.read(8) or b"", "little") for channel in channels]
            took.append((max(ends) - began) / 1e3)
            nbytes = len(frame)
            time.sleep(REST_S)
        centiles = statistics.quantiles(took, n=100)
        p10, p50, p99 = (centiles[n - 1] for n in (10, 50, 99))
        print(f"{args.rows} rows, {nbytes} bytes, {num} ranks: "
              f"p10 {p10:.0f}, p50 {p50:.0f}, p99 {p99:.0f} us", flush=True)
        for process in processes:
            process.kill()


if __name__ == "__main__":
    main()
