#!/usr/bin/env bash
# SMAT without Scale, without Mask and without Perturb, beside FT and SMAT with all its parts; budget and coefficients
# of mergers stay those of SMAT.
#
#   MODEL=meta-llama/Llama-3.2-1B-Instruct DATA=yanggangu/SMAT-TRACE bash examples/ablations.sh
#
# Variables: examples/common.sh.
. "$(dirname "$0")/common.sh"

# without SEED NAME OPTION...: trained, then merged with the coefficients that were chosen for SMAT with all its parts
without() {
  trained "$1" "$2" smat "${@:3}"
  for merger in wa ta ties dare della; do
    coef=$(grep -m1 -o '"coef": [0-9.]*' "$OUT/seed$1/smat/merged/$merger/manifest.json" | cut -d ' ' -f 2 || true)
    "$PYTHON" merge.py "$merger" --run "$run" --out "$run/merged" ${coef:+--coef "$coef"}
  done
  runs+=("$run")
}

for seed in $SEEDS; do
  merged "$seed" ft ft
  merged "$seed" smat smat
  without "$seed" smat-no-scale --alpha-min 1 --label "SMAT without Scale"
  without "$seed" smat-no-mask --drop-prob 0 --label "SMAT without Mask"
  without "$seed" smat-no-perturb --sigma 0 --label "SMAT without Perturb"
done
tabulated ablations "$PRESET: parts of SMAT"
