"""Pages that outlive the engine: over HTTP with restarts, between engines of another shape."""
from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import agents
import pytest
from killing import disk, kill_and_kill
from pair_server import PAIR, SERVED, said, serving
from pipeline_engine import GLM, checkpoint

from penstock.memory.stores.files import Folder
from penstock.memory.stores.objects import Verdict

PROMPT = [(7 * i) % 96 + 1 for i in range(150)]
PAGES = 9 * 16              # of its 150 tokens, whole pages
ALL = 10                    # objects of a cache group, with an answer of 16 tokens
BOSS = {"Authorization": "Bearer boss"}
ONE = {"Authorization": "Bearer one"}
COMPLETE = "--kv-storage-policy", "wait_complete"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return checkpoint(tmp_path_factory.mktemp("stored"))


def ids(answer: dict) -> list[int]:
    return said(answer)[0]


def metric(server, name: str) -> float:
    text = server.http.get("/metrics", headers=BOSS).text
    found = re.search(rf"^penstock:{re.escape(name)} (\S+)$", text, re.MULTILINE)
    return float(found[1])


def stored(server) -> float:
    return metric(server, "storage_written_objects_total")


def settle(server, pages: int) -> None:
    """Until so many objects are written, or were there: it is done behind the answers."""
    server.until(lambda: stored(server) + metric(server, "storage_known_objects_total") >= pages)


def keys(tmp_path: Path) -> tuple[str, ...]:
    flags = []
    for flag, text in (("--api-key-file", "one\ntwo\n"), ("--admin-key-file", "boss\n")):
        path = tmp_path / flag
        path.write_text(text)
        path.chmod(0o600)
        flags += [flag, str(path)]
    return tuple(flags)


@pytest.mark.covers(kind={"resident": "ordinary", "hosted": "selecting"}, feature="stored")
@pytest.mark.parametrize("place", SERVED)
def test_a_restarted_server_hits_what_the_one_before_it_has_stored(model, tmp_path, place):
    """Of a tenant and a salt; what is not stored is computed, and all say the same."""
    url = f"file://{tmp_path}/a%20store"
    flags = *SERVED[place], "--kv-storage", url, *COMPLETE, *keys(tmp_path), "--debug-check"
    flags = *flags, "--debug-event-log", str(tmp_path / "events")
    host = () if place == "hosted" else ("--kv-offloading-size", "4M")

    def ask(server, tenant: str, **more):
        server.http.headers["Authorization"] = f"Bearer {tenant}"
        return server.ask(PROMPT, **more)

    groups = 1 if place == "resident" else 2
    with serving(model, tmp_path, *flags, *host) as first:
        want = ask(first, "one")
        assert disk(want) == 0
        settle(first, ALL * groups)
        first.process.send_signal(signal.SIGKILL)
    with serving(model, tmp_path, *flags, *host) as second:
        again = ask(second, "one")
        assert (ids(again), disk(again)) == (ids(want), PAGES)
        assert disk(ask(second, "one", cache_salt="s")) == 0
        other = ask(second, "two")
        assert (ids(other), disk(other)) == (ids(want), 0), "another tenant's"
        assert metric(second, 'prefix_cache_hits_total{tier="disk"}') == PAGES
        assert metric(second, "storage_up") == 1
        settle(second, 2 * ALL * groups)
        second.http.post("/flush_cache", headers=BOSS)
        assert disk(ask(second, "two")) == PAGES, "a flush forgets, and deletes nothing"
        assert stored(second) == 2 * ALL * groups
    log, events = (tmp_path / "log").read_text(), (tmp_path / "events").read_text()
    assert "Traceback" not in log and '"kind": "Lookup"' in events
    names = [p.parent.name + p.name.partition(".")[0] for p in (tmp_path / "a store" / "v1").rglob("*.0")]
    assert len(names) == 3 * ALL and not any(name in log + events for name in names)


@pytest.mark.covers(feature="stored", across="one pp tp")
def test_pages_of_any_ranks_are_read_by_any_other(model, tmp_path):
    host = ("--kv-cache-memory-bytes", "4M", "--kv-offloading-size", "4M", "--kv-storage", f"file://{tmp_path}/store",
            *COMPLETE)
    with serving(model, tmp_path, *host, "--pp", "2") as two:
        want = two.ask(PROMPT)
        settle(two, ALL)
    with serving(model, tmp_path, *host) as one:
        again = one.ask(PROMPT)
        assert (ids(again), disk(again)) == (ids(want), PAGES)
        longer = one.ask([*PROMPT, *range(1, 60)])
        settle(one, 4)
    with serving(model, tmp_path, *host, "--tp", "2") as two:
        again = two.ask([*PROMPT, *range(1, 60)])
        assert (ids(again), disk(again)) == (ids(longer), 13 * 16)
        assert stored(two) == 0


@pytest.mark.covers(feature="stored", across="nodes")
@pytest.mark.sweep
@pytest.mark.parametrize("layout", [{"pp": 2}, {"tp": 2}], ids=str)
def test_pages_of_several_machines_are_those_of_one(model, tmp_path, layout):
    """Written whole by way of node 0, read back to the layers or heads of each."""
    options = {"kv_cache_memory_bytes": "4M", "kv_offloading_size": "4M", "kv_storage": f"file://{tmp_path}/store",
               "kv_storage_policy": "wait_complete"}
    with serving(model, tmp_path, *agents.flags(options)) as one:
        want = one.ask(PROMPT)
        settle(one, ALL)
    ours, others = agents.started(model, {**options, **layout, "nnodes": 2, "step_tokens": 48})
    with serving(model, tmp_path, *agents.flags(ours)) as two:
        again = two.ask(PROMPT)
        assert (ids(again), disk(again)) == (ids(want), PAGES)
        longer = two.ask([*PROMPT, *range(1, 60)])
        settle(two, 4)
    agents.ended(others)
    with serving(model, tmp_path, *agents.flags(options)) as one:
        again = one.ask([*PROMPT, *range(1, 60)])
        assert (ids(again), disk(again)) == (ids(longer), 13 * 16)


@pytest.mark.covers(kind={"resident": "ordinary", "hosted": "selecting"}, feature="stored", across="pair")
@pytest.mark.parametrize("place", SERVED)
def test_either_end_of_a_pair_stores_what_the_other_and_a_single_engine_find(model, tmp_path, place):
    flags = *SERVED[place], "--kv-storage", f"file://{tmp_path}/store", *COMPLETE, *keys(tmp_path), "--debug-check"
    flags = *flags, *(() if place == "hosted" else ("--kv-offloading-size", "4M"))
    with serving(model, tmp_path, *flags, *PAIR) as pair:
        pair.http.headers.update(ONE)
        want = pair.ask(PROMPT)
        settle(pair, ALL)
    with serving(model, tmp_path, *flags) as one:
        one.http.headers.update(ONE)
        again = one.ask(PROMPT)
        assert (ids(again), disk(again)) == (ids(want), PAGES)
        longer = one.ask([*PROMPT, *range(1, 60)])
        settle(one, 4)
    with serving(model, tmp_path, *flags, *PAIR) as pair:
        pair.http.headers.update(ONE)
        again = pair.ask([*PROMPT, *range(1, 60)])
        assert ids(again) == ids(longer) and disk(again) == 13 * 16
        assert ids(pair.ask(PROMPT)) == ids(want)


def test_two_engines_on_one_folder_and_one_that_only_reads(model, tmp_path):
    host = ("--kv-cache-memory-bytes", "4M", "--kv-offloading-size", "4M", "--kv-storage", f"file://{tmp_path}/store",
            *COMPLETE)
    (tmp_path / "b").mkdir()
    with serving(model, tmp_path, *host) as one, serving(model, tmp_path / "b", *host,
                                                         "--kv-storage-write-policy", "none") as two:
        want = one.ask(PROMPT)
        settle(one, ALL)
        again = two.ask(PROMPT)
        assert (ids(again), disk(again)) == (ids(want), PAGES)
        assert disk(two.ask([9, *PROMPT])) == 0 and stored(two) == 0
        assert disk(one.ask([9, *PROMPT])) == 0
        # Another kind of engine shares nothing.
    with serving(model, tmp_path, *host, "--page-size", "8") as other:
        assert disk(other.ask(PROMPT)) == 0


def test_damage_and_loss_cost_hits_and_no_answer(model, tmp_path):
    host = ("--kv-cache-memory-bytes", "4M", "--kv-offloading-size", "4M", "--kv-storage", f"file://{tmp_path}/store",
            *COMPLETE)
    with serving(model, tmp_path, *host) as first:
        want = first.ask(PROMPT)
        settle(first, ALL)
    objects = sorted((tmp_path / "store" / "v1").rglob("*.0"), key=lambda p: p.stat().st_mtime_ns)
    assert len(objects) == ALL
    data = bytearray(objects[5].read_bytes())
    data[100] ^= 4
    objects[5].write_bytes(data)
    with serving(model, tmp_path, *host) as second:
        again = second.ask(PROMPT)
        assert ids(again) == ids(want) and disk(again) <= 8 * 16
        assert metric(second, "storage_bad_total") == 1
        settle(second, 1)                             # it was deleted, and is stored again
        assert second.http.get("/health").status_code == 200
        for path in (tmp_path / "store" / "v1").rglob("*.0"):
            path.unlink()
        second.http.post("/flush_cache")
        again = second.ask(PROMPT)
        assert (ids(again), disk(again)) == (ids(want), 0)
    run = subprocess.run([sys.executable, "-m", "penstock.cli.main", "store", "verify",
                          f"file://{tmp_path}/store"], capture_output=True, text=True)
    assert run.returncode == 0 and ", 0 are damaged" in run.stdout, run.stdout + run.stderr


@pytest.mark.parametrize("kills", [pytest.param(8, marks=pytest.mark.sweep),
                                   pytest.param(100, marks=pytest.mark.soak)])
def test_engines_that_are_killed_while_they_write_leave_nothing_wrong(model, tmp_path, kills):
    """Two on one folder, under load; one of them is killed at any moment, again and again."""
    def after(stays) -> None:
        assert metric(stays, "storage_bad_total") == metric(stays, "storage_gone_total") == 0

    host = "--kv-cache-memory-bytes", "4M", "--kv-offloading-size", "2M", "--kv-storage", f"file://{tmp_path}/store"
    asked, hits = kill_and_kill(model, tmp_path, host, kills, after)
    assert hits
    folder = Folder(tmp_path / "store")
    left = [o for o in folder.objects() if not o.temporary]
    print(f"{kills} kills, {asked} answers, {hits} with hits; {len(left)} objects read again")
    assert len(left) >= 20 and all(folder.examine(o) is Verdict.GOOD for o in left)
    for o in folder.objects():
        if o.temporary:
            os.utime(tmp_path / "store" / o.name, (1, 1))
    folder.sweep(None)
    assert not any(o.temporary for o in folder.objects())


@pytest.mark.covers(kind="latent", feature="stored")
def test_rows_of_latent_models_are_stored_too(tmp_path):
    model = checkpoint(tmp_path / "latent", GLM)
    host = ("--kv-cache-memory-bytes", "4M", "--kv-offloading-size", "4M", "--kv-storage", f"file://{tmp_path}/store",
            *COMPLETE)
    with serving(model, tmp_path, *host) as first:
        want = first.ask(PROMPT)
        settle(first, ALL)
    with serving(model, tmp_path, *host) as second:
        again = second.ask(PROMPT)
        assert (ids(again), disk(again)) == (ids(want), PAGES)


def test_a_folder_that_is_not_one_of_ours_is_refused_before_it_serves(model, tmp_path):
    (tmp_path / "photos" / "x").mkdir(parents=True)
    run = subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", "serve", model, "--port", "0", "--kv-storage",
         f"file://{tmp_path}/photos"], capture_output=True, text=True)
    assert run.returncode == 2 and "give an empty folder" in run.stderr
    assert os.listdir(tmp_path / "photos") == ["x"], "nothing was made in it"
