"""`penstock serve MODEL --prefill-replicas 1 --decode-replicas 1`: one address, two engine processes."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from pair_server import LIMIT_S, PAIR, SERVED, alike, gone, key_file, prompts, said, serving
from pipeline_engine import checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return checkpoint(tmp_path_factory.mktemp("pair"))


@pytest.mark.parametrize("place", SERVED)
def test_one_address_and_two_engines_say_what_one_engine_says(model, tmp_path, place):
    with serving(model, tmp_path, *SERVED[place]) as one:
        want = [said(one.ask(prompt)) for prompt in prompts()]
    with serving(model, tmp_path, *SERVED[place], *PAIR) as pair:
        answers = [pair.ask(prompt) for prompt in prompts()]
        assert list(map(said, answers)) == list(map(alike, want))
        usage = [a["usage"]["prompt_tokens_details"] for a in answers]
        assert [u["remote_tokens"] + u["cached_tokens"] for u in usage] == [150, 150, 177, 128]
        assert usage[0]["cached_tokens"] == 0 and usage[1]["cached_tokens"] >= 128
        info = pair.info()
        assert info["prefill"]["model"] == info["model"] and info["prefill"]["missing"] == ""
        assert info["stats"]["pair_delivered_total"] == 4
        assert pair.http.get("/health").json() == {"status": "ok"}
        with openai.OpenAI(base_url=f"{pair.url}/v1", api_key="none") as client:
            stream = client.completions.create(
                model="tiny", prompt=prompts()[2], max_tokens=16, temperature=0, stream=True,
                extra_body={"return_token_ids": True, "ignore_eos": True})
            ids = [i for event in stream for choice in event.choices for i in choice.token_ids or ()]
        assert ids == want[2][0]


@pytest.mark.sweep
def test_a_prefill_engine_that_is_killed_comes_back_and_nobody_hears_a_wrong_token(model, tmp_path):
    with serving(model, tmp_path, *SERVED["resident"]) as one:
        want = [said(one.ask(prompt))[0] for prompt in prompts()]
    with serving(model, tmp_path, *SERVED["resident"], *PAIR) as pair:
        for n in range(3):
            victim = pair.info()["prefill"]["pid"]
            with ThreadPoolExecutor(4) as pool:
                waiting = [pool.submit(pair.ask, prompt, cache_salt=f"{n}") for prompt in prompts()]
                os.kill(victim, signal.SIGKILL)
                assert [said(w.result())[0] for w in waiting] == want
            health = pair.http.get("/health")
            assert health.status_code == 200
            pair.until(lambda n=n: pair.info()["prefill"]["restarts"] == n + 1
                       and not pair.info()["prefill"]["missing"])
        victim = pair.info()["prefill"]["pid"]
        os.kill(victim, signal.SIGSTOP)                 # it does not hear that its server is going
        os.kill(pair.info()["pid"], signal.SIGKILL)
        assert pair.process.wait(30) != 0 and gone(victim)


@pytest.mark.sweep
def test_what_one_engine_refuses_is_one_line_and_leaves_nothing_behind(model, tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", "serve", model, "--port", "0", "--kv-cache-memory-bytes", "1",
         *PAIR],
        capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environment)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert not list(tmp_path.glob("penstock-pair-*"))


@pytest.mark.sweep
def test_two_ends_of_their_own_over_tcp_and_tls(model, tmp_path):
    """The prefill instance shows its health, and nothing to ask; without it the decode instance does as it was told."""
    flags, secret = SERVED["resident"], key_file(tmp_path)
    certificate = Path(__file__).parents[1] / "data" / "pair_tls.pem"
    with serving(model, tmp_path, *flags) as one:
        want = said(one.ask(prompts()[0]))
    with serving(model, tmp_path, *flags, *secret, "--disaggregation-mode", "prefill", "--disaggregation-listen",
                 "127.0.0.1:0", "--cluster-tls-cert", str(certificate)) as prefill:
        address = prefill.info()["pair_address"]
        assert prefill.ask(prompts()[0])["status"] == 404
        assert "decode engine" in prefill.http.get("/health").json()["missing"]
        with serving(model, tmp_path, *flags, *secret, "--disaggregation-mode", "decode", "--disaggregation-connect",
                     address, "--cluster-tls", "--disaggregation-fallback", "refuse") as decode:
            decode.until(lambda: not decode.info()["prefill"]["missing"])
            answer = decode.ask(prompts()[0])
            assert said(answer) == want
            assert answer["usage"]["prompt_tokens_details"]["remote_tokens"] == 150
            assert prefill.http.get("/health").json() == {"status": "ok"}
            assert "pair_pushed_bytes_total" in prefill.http.get("/metrics").text
            prefill.process.kill()
            decode.until(lambda: decode.info()["prefill"]["missing"])
            refused = decode.ask(prompts()[0])
            assert (refused["status"], refused["error"]["code"]) == (503, "prefill_unavailable")
            assert decode.http.get("/health").status_code == 200
