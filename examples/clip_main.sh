#!/usr/bin/env bash
# The paper's main vision experiment: experts of all five methods, merged by all five mergers, one table.
#
#   MODEL=openai/clip-vit-base-patch32 DATA=yanggangu/SMAT-CLIP8 OUT=runs/vit-b32 bash examples/clip_main.sh
#
# PRESET sets every number (clip-vit-l14 for the larger backbone); TASKS, STEPS and ROWS make a quick run of it.
# The paper's numbers are means over three seeds: SEEDS="0 1 2".
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python}
PRESET=${PRESET:-clip-vit-b32}
OUT=${OUT:-runs/$PRESET}
METHODS=${METHODS:-"ft asam mergopt orthoreg smat"}
SEEDS=${SEEDS:-0}

options=(--preset "$PRESET")
[ -n "${MODEL:-}" ] && options+=(--model "$MODEL")
[ -n "${DATA:-}" ] && options+=(--data "$DATA")
[ -n "${STEPS:-}" ] && options+=(--steps "$STEPS")
[ -n "${ROWS:-}" ] && options+=(--rows "$ROWS")
read -r -a tasks <<< "${TASKS:-}"
[ -n "${TASKS:-}" ] && options+=(--tasks "${tasks[@]}")
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
