#!/usr/bin/env bash
# The paper's main language experiment: experts of all five methods, merged by all five mergers, one table.
#
#   MODEL=meta-llama/Llama-3.2-1B DATA=yanggangu/SMAT-TRACE OUT=runs/llama-1b bash examples/llama_main.sh
#
# PRESET sets every number (llama-3.1-8b for the larger backbone); STEPS and ROWS make a quick run of it.
# The paper's numbers are means over three seeds: SEEDS="0 1 2".
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python}
PRESET=${PRESET:-llama-3.2-1b}
OUT=${OUT:-runs/$PRESET}
METHODS=${METHODS:-"ft asam mergopt orthoreg smat"}
SEEDS=${SEEDS:-0}

options=(--preset "$PRESET")
[ -n "${MODEL:-}" ] && options+=(--model "$MODEL")
[ -n "${DATA:-}" ] && options+=(--data "$DATA")
[ -n "${STEPS:-}" ] && options+=(--steps "$STEPS")
[ -n "${ROWS:-}" ] && options+=(--rows "$ROWS")
read -r -a more <<< "${MORE:-}" # further options of train.py

runs=()
for seed in $SEEDS; do
  for method in $METHODS; do
    run=$OUT/seed$seed/$method
    runs+=("$run")
    # what stands already is not made again
    [ -f "$run/done" ] || "$PYTHON" train.py "$method" --out "$run" --overwrite --seed "$seed" --suite-seed 0 \
      "${options[@]}" ${more[@]+"${more[@]}"}
    touch "$run/done"
    [ -f "$run/merged/done" ] || "$PYTHON" merge.py all --preset "$PRESET" --run "$run" --search --overwrite \
      --out "$run/merged"
    touch "$run/merged/done"
  done
done
"$PYTHON" eval.py "${runs[@]}" --out "$OUT" --plot "$OUT/merging.png"
