"""Which test proves which combinations. `combos.py` asks the refusals; this says what is shown to work.

A row names a test and what of each dimension it covers, in words of `DIMENSIONS`. A cell is turned by adding
a row, or by deleting the refusal that it names. Tests of the sweep count.
"""
from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

DIMENSIONS: dict[str, dict[str, str]] = {
    "kind": {"ordinary": "full attention", "selecting": "sparse decode (`--sparse-top-k`)",
             "latent": "MLA with an indexer (DSA)", "experts": "MoE",
             "states": "hybrid with recurrent states"},
    "place": {"resident": "device", "hosted": "host memory"},          # where decode reads KV from
    "feature": {"plain": "-", "tier": "host tier", "cache": "prefix cache", "paused": "preemption by swap",
                "stored": "storage in files"},
    "across": {"one": "one process", "pp": "`--pp`", "tp": "`--tp`", "nodes": "`--nnodes`", "pair": "prefill/decode",
               "both": "prefill/decode, `--pp` to `--tp`"},
    "device": {"cpu": "CPU", "gpu": "GPU"},
    "weights": {"float32": "float32", "bfloat16": "bfloat16", "fp8": "fp8 in blocks", "gguf": "GGUF",
                "packed": "GGUF, `--dtype gguf`"},
}


class Cell(NamedTuple):
    """One combination, a word of each dimension."""

    kind: str
    place: str
    feature: str
    across: str
    device: str
    weights: str


def cells() -> Iterator[Cell]:
    """All of them, in the order of `DIMENSIONS`."""
    return map(Cell._make, itertools.product(*DIMENSIONS.values()))


@dataclass(frozen=True, slots=True)
class Proof:
    """`test` is path::name; each other field one word of its dimension, or several."""

    test: str
    kind: str
    place: str = "resident"
    feature: str = "plain"
    across: str = "one"
    device: str = "cpu"
    weights: str = "float32"

    def covers(self) -> Iterator[Cell]:
        return map(Cell._make, itertools.product(*(getattr(self, name).split() for name in DIMENSIONS)))


_CORE = "tests/conformance/test_executor_core.py::test_"
_HOSTED = "tests/conformance/test_executor_hosted.py::test_"
_LATENT = "tests/conformance/test_executor_latent.py::test_"
_PIPELINE = "tests/e2e/test_pipeline.py::test_"
_STORAGE = "tests/e2e/test_storage.py::test_"
_PAIR = "tests/e2e/test_pair.py::test_"
_EXPERTS = "tests/e2e/test_experts.py::test_"
_LANES = "tests/e2e/test_lanes.py::test_"
_CELLS = "tests/e2e/test_cells.py::test_with_every_tier_it_says_what_one_rank_says_from_its_device"
EVERY = "plain tier cache paused stored"
_DEMO = "tests/parity/test_demo_greedy.py::test_"
BOTH = "cpu gpu"            # `make gpu` runs it, too: of its first list, cases that are not of the sweep

PROOFS: tuple[Proof, ...] = (
    Proof(_CORE + "any_chunk_size_in_mixed_batches", "ordinary latent", device=BOTH),
    Proof(_CORE + "a_device_pool_that_is_too_small", "ordinary latent", feature="tier", device=BOTH),
    Proof(_CORE + "a_prefix_hit_in_either_tier_changes_no_token", "ordinary", feature="cache", device=BOTH),
    Proof(_CORE + "pause_or_drop_of_anyone_at_any_moment", "ordinary latent", feature="paused", device=BOTH),
    Proof("tests/conformance/test_executor_plans.py::"
          "test_rows_whose_tokens_visit_experts_decode_together_as_each_does_alone", "experts", device=BOTH),
    Proof(_CORE + "experts_on_a_device_that_is_too_small", "experts", feature="tier cache paused",
          device=BOTH),
    Proof("tests/parity/test_family_parity.py::test_bf16_follows_transformers", "ordinary experts",
          weights="bfloat16"),
    Proof("tests/parity/test_latent_parity.py::test_bf16_follows_transformers", "latent", weights="bfloat16"),
    Proof("tests/unit/test_fp8_checkpoint.py::"
          "test_blocks_equal_their_dequantised_twin_with_scales_in_another_shard", "ordinary", weights="fp8"),
    Proof(_CORE + "any_chunk_size_in_mixed_batches", "states", device=BOTH),
    Proof(_CORE + "a_device_pool_that_is_too_small", "states", feature="tier", device=BOTH),
    Proof(_CORE + "pause_or_drop_of_anyone_at_any_moment", "states", feature="paused", device=BOTH),
    Proof("tests/conformance/test_executor_states.py::test_a_prefix_is_found_where_a_state_is_kept", "states",
          feature="tier cache", device=BOTH),
    # Decode that selects.
    Proof(_HOSTED + "budgets_differ_by_request", "selecting", "resident hosted", device=BOTH),
    Proof(_HOSTED + "prompts_longer_than_the_device_in_any_chunks", "selecting", "hosted", device=BOTH),
    Proof(_HOSTED + "rows_that_outgrow_the_device_spill", "selecting", "resident hosted", "tier",
          device=BOTH),
    Proof(_HOSTED + "a_prefix_found_in_either_tier_is_shared", "selecting", "resident hosted", "cache",
          device=BOTH),
    Proof(_HOSTED + "a_prefix_found_in_either_tier_is_shared", "latent", "resident hosted", "cache"),
    Proof(_HOSTED + "pauses_drops_and_moves_of_anyone_every_few_steps", "selecting", "resident hosted",
          "paused", device=BOTH),
    Proof(_LATENT + "prompts_longer_than_the_device_select_at_each_position", "latent", "hosted",
          device=BOTH),
    Proof(_LATENT + "rows_on_both_tiers_and_pauses", "latent", "resident hosted", "tier paused",
          device=BOTH),
    Proof("tests/parity/test_recall_model.py::"
          "test_in_bfloat16_it_answers_from_the_host_as_from_the_device", "latent", "hosted", "tier paused",
          device=BOTH, weights="bfloat16"),
    # All tiers at once, on every layout.
    Proof(_CELLS, "ordinary", "resident", EVERY, "one pp tp nodes pair both"),
    Proof(_CELLS, "selecting latent experts", "resident hosted", EVERY, "one pp tp nodes pair both"),
    Proof(_CELLS, "states", "resident hosted", EVERY, "one pp pair"),
    # GGUF.
    Proof(_DEMO + "all_chats_in_one_batch", "ordinary", weights="gguf"),
    Proof(_DEMO + "one_after_another_then_again_from_the_cache", "ordinary", feature="cache", weights="gguf"),
    Proof(_DEMO + "pauses_every_other_step_with_copies_as_late_as_allowed", "ordinary", feature="tier paused",
          weights="gguf"),
    Proof("tests/e2e/test_gguf_codes.py::test_codes_answer_as_floats_do", "ordinary", weights="packed"),
    Proof(_PIPELINE + "codes_of_a_gguf_file_on_two_stages", "ordinary", across="pp", weights="packed"),
    Proof(_PIPELINE + "the_demo_model_on_two_stages_decodes_from_host_pages_as_one_rank_does", "selecting",
          "hosted", "plain tier paused", "pp", weights="gguf"),
    # Storage.
    Proof(_STORAGE + "a_restarted_server_hits_what_the_one_before_it_has_stored", "ordinary",
          feature="stored"),
    Proof(_STORAGE + "a_restarted_server_hits_what_the_one_before_it_has_stored", "selecting", "hosted",
          "stored"),
    Proof(_STORAGE + "pages_of_any_ranks_are_read_by_any_other", "ordinary", feature="stored",
          across="pp"),
    Proof(_STORAGE + "either_end_of_a_pair_stores_what_the_other_and_a_single_engine_find", "ordinary",
          feature="stored", across="pair"),
    Proof(_STORAGE + "either_end_of_a_pair_stores_what_the_other_and_a_single_engine_find", "selecting",
          "hosted", "stored", "pair"),
    Proof(_STORAGE + "rows_of_latent_models_are_stored_too", "latent", feature="stored"),
    # Stages.
    Proof(_PIPELINE + "any_stages_overlap_and_tiers_say_the_same", "ordinary selecting", "resident",
          across="one pp"),
    Proof(_PIPELINE + "three_uneven_stages_with_overlap_and_a_host_tier", "ordinary", "resident",
          "tier paused", "pp", device=BOTH),
    Proof(_PIPELINE + "hosted_decode_on_two_stages_with_pauses", "selecting", "hosted", "plain tier paused",
          "pp", device=BOTH),
    Proof("tests/e2e/test_pipeline_recall.py::test_recall_on_two_stages_from_host_pages_with_pauses",
          "latent", "hosted", "plain tier paused", "pp"),
    Proof(_EXPERTS + "two_stages_with_a_host_tier_and_pauses", "experts", feature="plain tier paused",
          across="pp"),
    Proof(_EXPERTS + "a_selection_out_of_host_memory_on_one_rank_and_on_two_stages", "experts", "hosted",
          "plain tier paused", "one pp"),
    # TP ranks.
    Proof(_LANES + "lanes_and_stages_say_what_one_rank_says", "ordinary", "resident",
          "plain tier cache paused", "tp", BOTH),
    Proof(_LANES + "lanes_and_stages_say_what_one_rank_says", "selecting", "hosted",
          "plain tier cache paused", "tp", BOTH),
    Proof(_LANES + "lanes_and_stages_say_what_one_rank_says", "experts latent", "resident hosted",
          "plain tier cache paused", "tp"),
    Proof(_LANES + "lanes_and_stages_say_what_one_rank_says", "experts", "resident hosted",
          "plain tier cache paused", "tp", "gpu"),
    Proof(_LANES + "experts_in_ranges_over_the_lanes", "experts latent", "hosted",
          "plain tier cache paused", "tp", BOTH),
    Proof(_LANES + "several_machines_say_what_one_rank_says", "latent", "hosted",
          "plain tier cache paused", "nodes", "gpu"),
    Proof(_CELLS, "selecting", "hosted", EVERY, "nodes both", "gpu"),
    Proof(_CELLS, "latent", "hosted", EVERY, "both", "gpu"),
    Proof(_LANES + "weights_in_blocks_of_fp8", "ordinary experts", feature="plain tier cache paused",
          across="tp", device=BOTH, weights="fp8"),
    Proof(_LANES + "codes_of_a_gguf_file", "ordinary", feature="plain tier cache paused", across="tp",
          weights="packed"),
    Proof(_STORAGE + "pages_of_any_ranks_are_read_by_any_other", "ordinary", feature="stored", across="tp"),
    # Several machines.
    Proof(_LANES + "several_machines_say_what_one_rank_says", "ordinary latent", "resident",
          "plain tier cache paused", "nodes"),
    Proof(_LANES + "several_machines_say_what_one_rank_says", "selecting experts latent", "hosted",
          "plain tier cache paused", "nodes"),
    Proof(_STORAGE + "pages_of_several_machines_are_those_of_one", "ordinary", feature="stored",
          across="nodes"),
    # Pairs.
    Proof(_EXPERTS + "a_pair", "experts", feature="plain cache", across="pair"),
    Proof(_EXPERTS + "a_pair", "experts", "hosted", "plain tier cache", "pair"),
    Proof(_PAIR + "a_pair_says_what_one_engine_says", "ordinary", feature="plain cache", across="pair",
          device=BOTH),
    Proof(_PAIR + "a_pair_says_what_one_engine_says", "selecting", "hosted", "plain tier cache", "pair",
          device=BOTH),
    Proof(_PAIR + "requests_that_select_and_that_read_all_share_a_pair", "selecting", "resident",
          "plain tier", "pair"),
    Proof(_PAIR + "stages_of_either_engine_say_the_same", "ordinary", feature="plain tier paused",
          across="pair both"),
    Proof(_PAIR + "stages_of_either_engine_say_the_same", "selecting", "hosted", "plain tier paused",
          "pair both"),
    Proof("tests/e2e/test_pair_recall.py::test_what_a_prefill_engine_delivers_is_recalled", "latent",
          "resident", "plain", "pair both"),
    Proof("tests/e2e/test_pair_recall.py::test_what_a_prefill_engine_delivers_is_recalled", "latent",
          "hosted", "plain tier paused", "pair both"),
)
