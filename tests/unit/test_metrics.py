"""The text that Prometheus reads: names, labels, and no word of any request."""
from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace

from prometheus_client.parser import text_string_to_metric_families

from penstock.config.request.params import SamplingParams
from penstock.config.request.selection import Selection, selection_of
from penstock.config.settings.tree import KVConfig
from penstock.engine.client.generation import Ended, Generation
from penstock.engine.client.metric_help import HELP
from penstock.engine.client.metrics import PREFIX, Metrics, parse_name, published
from penstock.engine.wire import NO_ORIGIN, EngineReady, OutputChunk


def samples(text: bytes) -> dict[tuple, float]:
    return {(s.name.removeprefix(PREFIX), *sorted(s.labels.values())): s.value
            for family in text_string_to_metric_families(text.decode()) for s in family.samples}


def test_engine_numbers_have_the_names_that_dashboards_know():
    got = samples(Metrics().text([{
        "requests_running": 3, "requests_waiting": 1, "pauses": 2, "drops": 4, "prefix_queries": 10,
        "prefix_hbm_hits": 5, "prefix_dram_hits": 1, "hbm_pages": 8, "hbm_pages_in_use": 2,
        "dram_pages": 4, "dram_pages_held": 3, 'moved_bytes_total{src="hbm",dst="dram"}': 99,
        "generation_tokens_total": 1e6}]))
    assert got["num_requests_running",] == 3 and got["num_requests_waiting",] == 1
    assert got["num_preemptions_total", "pause"] == 2 and got["num_preemptions_total", "drop"] == 4
    assert got["prefix_cache_queries_total",] == 10
    assert got["prefix_cache_hits_total", "hbm"] == 5 and got["prefix_cache_hits_total", "dram"] == 1
    assert got["kv_cache_usage_perc", "hbm"] == 0.25 and got["kv_cache_usage_perc", "dram"] == 0.75
    assert got["moved_bytes_total", "dram", "hbm"] == 99
    # And the field's words, under names of their own.
    assert got["prefix_cache_hit_tokens_total", "device"] == 5 and got["prefix_cache_hit_tokens_total", "host"] == 1
    assert got["kv_cache_usage_ratio", "device"] == 0.25 and got["kv_cache_usage_ratio", "host"] == 0.75
    assert got["kv_pages", "device"] == 8 and got["kv_pages_held", "host"] == 3
    assert got["kv_pages_in_use", "device"] == 2
    assert got["kv_moved_bytes_total", "device", "host"] == 99
    assert not {"device", "host"} & {label for name, *labels in got if not name.startswith(("kv_", "prefix_cache_hit_"))
                                     for label in labels}
    assert got["generation_tokens_total",] == 0          # what was sent, counted on this side


def names_in_the_code() -> set[str]:
    """Metrics that engines tell, as they are written there; what is left out is no metric."""
    from penstock.core.core import Core
    from penstock.core.settings import CoreConfig
    return {name.partition("{")[0] for name in Core(CoreConfig(page_size=16, rows=4, hbm_pages=8)).stats()}


def test_each_help_is_a_sentence():
    """Of both sides; what the core tells has its own, not the sentence for those without."""
    stats = {"hbm_pages": 8.0, "hbm_pages_in_use": 1.0, 'moved_bytes_total{src="hbm",dst="dram"}': 1.0,
             **dict.fromkeys(names_in_the_code(), 1.0), 'selected_device_units_total{layer="0"}': 1.0,
             **{f"{name}_total": 1.0 for name in HELP if name.startswith(("executor_", "storage_"))},
             **{f"pair_{name[3:]}_total": 1.0 for name in HELP if name.startswith("pd_")}}
    text = Metrics().text([stats], [stats]).decode()
    told = dict(line.split(" ", 1) for line in re.findall(r"^# HELP (.*)$", text, re.MULTILINE))
    assert len(told) > 80 and told["penstock:hbm_pages"] == "Old name of kv_pages, for one release."
    assert told["penstock:pair_lost_total"].startswith("Old name of pd_lost")
    assert told["penstock:pd_lost_total"] == HELP["pd_lost"]
    for name, sentence in told.items():
        assert len(sentence.split()) >= 4 and sentence.endswith("."), (name, sentence)
        assert "no description yet" not in sentence, name


def test_a_tier_that_is_off_has_no_usage():
    assert "kv_cache_usage_perc" not in str(published({"dram_pages": 0, "dram_pages_held": 0}))


def test_numbers_of_features_that_are_off_are_not_exported():
    from penstock.core.core import Core
    from penstock.core.settings import CoreConfig

    def names(**more: float) -> set[str]:
        told = Core(CoreConfig(page_size=16, rows=4, hbm_pages=8)).stats()
        text = Metrics().text([{**told, "peer_ignored": 0.0, "storage_up": 1.0, **more}]).decode()
        return {line.removeprefix("penstock:").rsplit(" ", 1)[0] for line in text.splitlines()
                if line.startswith("penstock:")}

    plain = names()
    words = ("disk", "dram", "hot", "stor", "peer", "pair", "pause", "fetching", "_host", "decode.host", "to_device",
             "promot", "spill", "recomputed", "receiving", "sending")
    assert not [name for name in plain if any(word in name for word in words)]
    assert {"num_requests_running", "num_requests_waiting", "hbm_pages", 'num_preemptions_total{kind="drop"}',
            'prefix_cache_hits_total{tier="hbm"}', 'requests_in_phase{phase="queued"}'} <= plain
    for on, appears in (
            ({"dram_pages": 4}, {"dram_pages_free", "num_requests_paused",
                                 'num_preemptions_total{kind="pause"}',
                                 'prefix_cache_hits_total{tier="dram"}'}),
            ({"disk_pages": 4}, {"storage_up", "pages_to_store", 'requests_in_phase{phase="fetching"}'}),
            ({'selected_device_units_total{layer="0"}': 0}, {
                "spills_total", "promotions_total", "requests_hosted", "hot_buffer_pages",
                *(f'requests_in_phase{{phase="decode.{place}"}}' for place in ("to_host", "host", "to_device"))}),
            ({"pair_connected": 0}, {"pair_connected", "peer_ignored",
                                     'requests_in_phase{phase="sending"}'})):
        assert appears <= names(**on) and not appears & plain
    # Of several engines each counts for itself.
    text = Metrics().text([{"dram_pages": 0, "spills": 0}, {"dram_pages": 2, "spills": 0}]).decode()
    assert 'penstock:dram_pages{engine="1"} 2.0' in text and 'engine="0"' not in text


def test_names_have_labels():
    assert parse_name('bytes_total{src="hbm",dst="dram"}') == (
        "bytes_total", {"src": "hbm", "dst": "dram"})
    assert parse_name("steps") == ("steps", {})


class OneChoice:
    """Engine and stream in one: answers with the chunks it was made with."""

    def __init__(self, *chunks: OutputChunk, selection: Selection | None = None) -> None:
        self.rid, self.chunks, self.closed, self.stopped = 1, list(chunks), 0, 0
        self.ready = EngineReady(pid=1, vocab_size=256, max_model_len=99, info={}, selection=selection)

    def here(self):
        return None

    def stop_at(self, count: int) -> None:
        self.stopped = count

    def submit(self, prompt, params, *, eos_ids, namespace, room=None, origin=NO_ORIGIN):
        return [self]

    def __aiter__(self):
        return self

    async def __anext__(self):
        await asyncio.sleep(0)
        if not self.chunks:
            raise StopAsyncIteration
        return self.chunks.pop(0)

    async def aclose(self):
        self.closed += 1


def consume(engine: OneChoice, metrics: Metrics, tokenizer=None, **params):
    async def go():
        generation = Generation(engine, tokenizer, metrics)
        generation.submit([1, 2, 3], SamplingParams(**params), eos_ids=(), namespace=0)
        try:
            return [p async for batch in generation.batches() for p in batch], generation.usage
        finally:
            await generation.close()
    return asyncio.run(go())


def test_a_finished_request_is_counted_once():
    metrics = Metrics()
    engine = OneChoice(OutputChunk(1, [], 0, cached_tokens=2, cached_by_tier={"hbm": 2}),
                       OutputChunk(1, [7, 8], 0), OutputChunk(1, [9], 2, finish="length"))
    pieces, usage = consume(engine, metrics)
    assert [p.tokens for p in pieces] == [[7, 8], [9]] and usage.cached_tokens == 2
    got = samples(metrics.text([{}]))
    assert got["prompt_tokens_total",] == 3 and got["generation_tokens_total",] == 3
    assert got["cached_prompt_tokens_total",] == 2
    assert got["request_success_total", "length"] == 1
    for name, count in (("time_to_first_token_seconds", 1), ("inter_token_latency_seconds", 1),
                        ("e2e_request_latency_seconds", 1), ("request_queue_time_seconds", 1),
                        ("request_prefill_time_seconds", 1), ("request_decode_time_seconds", 1),
                        ("request_prompt_tokens", 1), ("request_generation_tokens", 1)):
        assert got[name + "_count",] == count
    assert (got["request_prompt_tokens_sum",], got["request_generation_tokens_sum",]) == (3, 3)
    assert got["time_to_first_token_seconds_sum",] >= got["request_queue_time_seconds_sum",] >= 0
    assert engine.closed == 0                    # it had ended by itself


def test_a_stop_string_leaves_what_was_read_in_the_usage():
    """The engine tells it with the last chunk, which comes behind the end of the text."""
    letters = SimpleNamespace(byte_level=True, special_ids=frozenset(),
                              token_bytes=lambda token: bytes([token]))
    engine = OneChoice(OutputChunk(1, [97], 0), OutputChunk(1, [98], 1), OutputChunk(1, [99], 2),
                       OutputChunk(1, [], 3, finish="stop", kv_reads={"hot_hits": 5}),
                       selection=selection_of(KVConfig(sparse_top_k=512)))
    pieces, usage = consume(engine, Metrics(), letters, stop=("b",))
    assert "".join(p.text for p in pieces) == "a" and pieces[-1].finish == "stop"
    assert engine.stopped == 2 and usage.completion_tokens == 2 and usage.kv_reads == {"hot_hits": 5}


def test_an_aborted_request_is_counted_as_such():
    metrics = Metrics()
    engine = OneChoice(OutputChunk(1, [7], 0), OutputChunk(1, [], 1, finish="abort", reason="why"))
    try:
        consume(engine, metrics)
        raise AssertionError("Ended was expected")
    except Ended as e:
        assert (e.outcome, str(e)) == ("abort", "why")
    got = samples(metrics.text([{}]))
    assert got["request_success_total", "abort"] == 1
    assert got["e2e_request_latency_seconds_count",] == 0


def test_gaps_between_tokens_are_a_histogram_of_plain_numbers():
    metrics = Metrics()
    for seconds in (.001, .002, .0021, .2, 11.0):
        metrics.tokens.gap(seconds)
    metrics.tokens.count += 5
    got = samples(metrics.text([{}]))
    name = "inter_token_latency_seconds"
    assert [got[f"{name}_bucket", le] for le in ("0.002", "0.005", "0.15", "0.2", "10.0", "+Inf")] == [
        2, 3, 3, 4, 4, 5]
    assert got[f"{name}_count",] == 5 and abs(got[f"{name}_sum",] - 11.2051) < 1e-9
    assert got["generation_tokens_total",] == 5


def test_what_has_come_at_once_is_told_at_once():
    class AtOnce(OneChoice):
        def here(self):
            return self.chunks.pop(0) if self.chunks else None

    def told(*chunks):
        async def go():
            found = []
            generation = Generation(AtOnce(*chunks), None, Metrics())
            generation.submit([1, 2, 3], SamplingParams(), eos_ids=(), namespace=0)
            try:
                async for batch in generation.batches():
                    found.append([p.tokens for p in batch])
            except Ended:
                found.append("ended")
            await generation.close()
            return found
        return asyncio.run(go())

    chunks = OutputChunk(1, [], 0, cached_tokens=2), OutputChunk(1, [7, 8], 0), OutputChunk(1, [9], 2)
    assert told(*chunks, OutputChunk(1, [4], 3, finish="length")) == [[[7, 8], [9], [4]]]
    assert told(*chunks, OutputChunk(1, [], 3, finish="abort", reason="why")) == [[[7, 8], [9]], "ended"]
