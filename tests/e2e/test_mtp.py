"""A layer of the model drafts in engines of their own: over a pair, and behind what storage brings."""
from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import where
from pair_engines import End, PairOfEnds
from pipeline_engine import GLM, checkpoint

from penstock.exec.drafts.drafter import DraftQuery

pytestmark = pytest.mark.skipif(where.DEVICE == "cuda", reason="it watches what a host proposes")
PROMPT = tuple((i * i * 7 + 3 * i) % 97 for i in range(150))
PROMPTS = (PROMPT, PROMPT, PROMPT + (5, 6, 7) * 9, PROMPT[:128], PROMPT[:129])
MTP = {"speculative_method": "mtp", "speculative_tokens": 2}
PLACES = {"resident": {"kv_cache_memory_bytes": "4M", "host_decode": "off"},
          "hosted": {"kv_cache_memory_bytes": "4M", "kv_offloading_size": "8M", "host_decode": "always"}}


# Gated KV heads behind states, of which one is kept every 64 tokens.
STATE = {"model_type": "qwen3_next", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48,
         "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "linear_num_key_heads": 1,
         "linear_num_value_heads": 2, "linear_key_head_dim": 6, "linear_value_head_dim": 4, "num_experts": 0,
         "partial_rotary_factor": 0.5, "max_position_embeddings": 512, "tie_word_embeddings": False}
CONFIGS = {"latent": {**GLM, "num_nextn_predict_layers": 1, "first_k_dense_replace": 5}, "state": STATE}
PLACED = {"resident": ("latent", PLACES["resident"]), "hosted": ("latent", PLACES["hosted"]),
          "state": ("state", {"kv_cache_memory_bytes": "8M", "kv_offloading_size": "8M", "state_interval": 64}),
          "state, hosted": ("state", {"kv_cache_memory_bytes": "8M", "kv_offloading_size": "8M", "state_interval": 64,
                                      "sparse_top_k": 96, "host_decode": "always"})}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("mtp")
    return {name: checkpoint(folder / name, config, drafts=True) for name, config in CONFIGS.items()}


@pytest.fixture
def model(models: dict[str, str]) -> str:
    return models["latent"]


Said = dict[tuple[tuple[int, ...], tuple[int, ...]], Sequence[int]]


def watched(end: End) -> Said:
    """What its layer proposes from now on, by prompt and answer in front."""
    mtp, said = end.built.executor._ranks[0]._drafts.layer, Said()
    propose = mtp.propose

    def heard(asks: Sequence[DraftQuery]) -> Sequence[Sequence[int]]:
        found = propose(asks)
        for ask, tokens in zip(asks, found, strict=True):
            assert said.setdefault((tuple(ask.prompt), tuple(ask.outputs)), tokens) == tokens
        return found
    mtp.propose = heard
    return said


def answered(end: End, prompt: Sequence[int]) -> list[int]:
    """Alone in an engine that has no other side."""
    rid = end.submit(prompt)
    while end.open:
        end.turn()
    return end.got[rid]


@pytest.mark.parametrize("kind", PLACED)
def test_a_layer_drafts_over_a_pair_what_it_drafts_in_one(models: dict[str, str], tmp_path: Path,
                                                          kind: str) -> None:
    """The prefill instance computes its KV of prompts. A miss, hits, one that ends with a page."""
    family, options = PLACED[kind]
    model = models[family]
    plain, one = End(model, **options), End(model, **options, **MTP)
    with PairOfEnds(model, tmp_path, **options, **MTP) as pair:
        alone, paired = watched(one), watched(pair.decode)
        for prompt in PROMPTS:
            want = answered(plain, prompt)
            assert answered(one, prompt) == want
            rid = pair.decode.submit(prompt)
            pair.finish()
            assert pair.decode.got[rid] == want
        # The first token comes with the prompt, and is computed as the last of that.
        assert paired == {at: tokens for at, tokens in alone.items() if len(at[1]) > 1}
        assert len(paired) > 30 and all(paired.values())
        assert all(chunk.peer_tokens for chunk in pair.decode.cached.values())
        pair.settle()


def test_ends_of_which_one_drafts_do_not_pair_and_say_why(model: str, tmp_path: Path) -> None:
    with PairOfEnds(model, tmp_path, **PLACES["resident"], **MTP) as pair:
        pair.prefill.close()
        pair.until(lambda: not pair.decode.peer.epoch)
        other = End(model, "prefill", **PLACES["resident"], pair_key_file=str(tmp_path / "key"),
                    disaggregation_listen=f"unix:{tmp_path / 'socket'}")
        pair.until(lambda: "drafter: " in pair.decode.peer.missing)
        assert "drafter: mtp here" in pair.decode.peer.missing and "nothing there" in pair.decode.peer.missing
        other.close()


def test_a_layer_drafts_behind_what_storage_brings(model: str, tmp_path: Path) -> None:
    """Its KV and the hidden state of the last page are stored, too. Without the layer nothing is found there:
    these are other pages."""
    options = {**PLACES["hosted"], "kv_storage": f"file://{tmp_path / 'stored'}",
               "kv_storage_policy": "wait_complete"}
    first = End(model, **options, **MTP)
    before, want = watched(first), answered(first, PROMPT)
    until = time.monotonic() + 60
    while first.loop.stats()["storage_written_objects_total"] < 4 * 8:         # groups, whole pages in front
        assert time.monotonic() < until
        first.turn()
    first.close()
    second, other = End(model, **options, **MTP), End(model, **options)
    after = watched(second)
    assert answered(second, PROMPT) == want == answered(other, PROMPT) and before == after
    [found], [nothing] = second.cached.values(), other.cached.values()
    assert found.cached_by_tier["disk"] >= 128 and not nothing.cached_tokens
    second.close()
    other.close()
