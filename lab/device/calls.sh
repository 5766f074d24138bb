#!/bin/bash
# What one call on a machine with GPUs does, from the root of this tree: bash lab/device/calls.sh NAME [ARGUMENT ...]
#   lists [COMMIT]     both lists of `make gpu`, two GPUs: log and cells in OUT
#   again TEST ...     these tests with --device cuda
#   accuracy [ARM ...] answers of /tmp/q.gguf by arms of bench/device/accuracy.py, all on one GPU; .carry/gsm8k.jsonl
#   trees [PROGRAM]    .carry/before.tgz (git archive COMMIT src bench) and this tree in turns on one GPU, twice
# Wheels are in .whl (lab/device/pack.py). OUT: where results go.
set -u
OUT=${OUT:-/tmp/out}
SITE=/tmp/site
mkdir -p "$OUT"
[ -d $SITE ] || python3 -m pip install -q --no-index --no-deps --target $SITE .whl/*/*.whl
nvidia-smi --query-gpu=name --format=csv,noheader

lists() {
    local began=$SECONDS
    timeout -s INT "${LIMIT:-500}" make -i gpu PYTHON=python3 CELLS="$OUT/cells.json" ${1:+COMMIT=$1} \
        ARGS="-n ${WORKERS:-28} --dist worksteal -q --tb=short -rfE --durations=15 -W ignore" > "$OUT/lists.log" 2>&1
    grep -E "^(FAILED|ERROR)|passed|failed" "$OUT/lists.log" | cut -c1-220
    echo "lists: $((SECONDS - began)) s"
}

again() {
    python3 -m pytest -p no:cacheprovider --device cuda -q --tb=short -rfE -W ignore -n "${WORKERS:-16}" --dist worksteal \
        -m "not soak" "$@" 2>&1 | tee "$OUT/again.log" | tail -60
}

program() {                     # a tree, a folder for its results, a program
    local tree=$1 into=/tmp/results/$2
    mkdir -p "$into"
    (cd "$tree" && export PYTHONPATH=$tree/src:$tree/bench/device:$SITE && case $3 in
        resident) python3 bench/device/resident.py "$into" --layers 36 --most 8 ;;
        latent) python3 bench/device/latent.py "$into" --cells W1:resident:8 W1:hosted:8 --steps 72 ;;
        hosted) python3 bench/device/hosted.py "$into" --layers 12 ;;
        drafts) python3 "$HERE/lab/device/drafts.py" "$into" --layers 12 --rows 8 --chances 0.7 ;;
        prompts) python3 bench/device/prompts.py "$into" --tokens 32768 ;;
    esac) > "$into/log" 2>&1
    tail -3 "$into/log" | cut -c1-300
    tar czf "$OUT/results.tgz" -C /tmp results
}

trees() {
    HERE=$PWD
    rm -rf /tmp/before && mkdir /tmp/before && tar xzf .carry/before.tgz -C /tmp/before
    for turn in 1 2; do
        for name in ${1:-latent resident hosted drafts prompts}; do
            for tree in /tmp/before "$HERE"; do
                program "$tree" "$turn-$(basename "$tree")-$name" "$name"
                echo "$turn $name $tree: $SECONDS s"
            done
        done
    done
}

# A machine whose memory grows as it is used tells servers of too little: fills it until ROOM GiB would be free.
grow() {
    python3 - "${ROOM:-72}" <<'END'
import mmap
import re
import sys


def free():
    return int(re.search(r"MemAvailable: *(\d+)", open("/proc/meminfo").read())[1]) >> 20


room, held, before = int(sys.argv[1]), [], free()
while 2 < free() < room - len(held):
    held.append(mmap.mmap(-1, 1 << 30))
    held[-1].write(bytes(1 << 30))
print(f"{before} GiB were free; {len(held)} were filled, {free()} are free beside them", flush=True)
END
}

accuracy() {                    # ends by itself after LIMIT seconds, with what has been measured
    local arms=(dense 1/8 hosted "hosted, tp 2" "hosted, pair, pp 2" "hosted, from storage" "hosted, pp 2"
                "hosted, prefix found" "hosted, pair" "hosted, preempted" "packed weights" "fp8 KV" 1/4 1/16
                "hosted, fp8 KV" "fault: delivered row not admitted" "fault: resumed without a hot buffer")
    [ $# = 0 ] || arms=("$@")
    grow
    PYTHONPATH=$PWD/bench/device:$PYTHONPATH python3 bench/device/accuracy.py "$OUT/accuracy" /tmp/q.gguf \
        --gsm8k .carry/gsm8k.jsonl --problems 400 --contexts 4096,16384,32000 --gate-contexts 4096 --samples 2 \
        --rows 64 --at-once 6 --device-kv 8G --hosted-kv 4G --host-kv 6G --tight-kv 256M \
        --limit 300 --seconds "${LIMIT:-360}" --arms "${arms[@]}"
    echo "accuracy: $SECONDS s"
}

export PYTHONPATH=$PWD/src:$SITE
"$@"
