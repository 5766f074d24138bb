#!/bin/bash
# What one call on a machine with GPUs does, from the root of this tree: bash lab/device/calls.sh NAME [ARGUMENT ...]
#   lists [COMMIT]     both lists of `make gpu`, two GPUs: log and cells in OUT
#   again TEST ...     these tests with --device cuda
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

export PYTHONPATH=$PWD/src:$SITE
"$@"
