#!/usr/bin/env bash
# FT experts replaced one after the other by another method's, merged by task arithmetic at one coefficient.
#
#   MODEL=meta-llama/Llama-3.2-1B-Instruct DATA=yanggangu/SMAT-TRACE bash examples/replacement.sh
#
# Variables: examples/common.sh.
. "$(dirname "$0")/common.sh"
METHODS=${METHODS:-"mergopt orthoreg smat"}
COEF=${COEF:-0.3}

ft=() others=()
for seed in $SEEDS; do
  trained "$seed" ft ft
  ft+=("$run")
  for method in $METHODS; do
    trained "$seed" "$method" "$method"
    others+=("$run")
  done
done
"$PYTHON" eval.py replacement --ft "${ft[@]}" --other "${others[@]}" --coef "$COEF" --out "$OUT/replacement" \
  ${evaluation[@]+"${evaluation[@]}"}
