#!/usr/bin/env bash
# Loss along an expert's own update and along the FT updates of the other tasks, and sizes of the updates.
#
#   MODEL=meta-llama/Llama-3.2-1B-Instruct DATA=yanggangu/SMAT-TRACE bash examples/landscape.sh
#
# Of the first of SEEDS; LANDSCAPE are further options of eval.py landscape (--points 11 --batches 2), other variables:
# examples/common.sh.
. "$(dirname "$0")/common.sh"
METHODS=${METHODS:-"mergopt smat"}
COEF=${COEF:-0.3}
read -r -a landscape <<< "${LANDSCAPE:-}"

seed=${SEEDS%% *}
trained "$seed" ft ft
ft=$run others=()
for method in $METHODS; do
  trained "$seed" "$method" "$method"
  others+=("$run")
done
"$PYTHON" eval.py landscape --ft "$ft" --methods "${others[@]}" --coef "$COEF" --out "$OUT/landscape" \
  ${landscape[@]+"${landscape[@]}"} ${evaluation[@]+"${evaluation[@]}"}
"$PYTHON" eval.py diagnose "$run" --coef "$COEF" --out "$OUT/landscape" ${evaluation[@]+"${evaluation[@]}"}
