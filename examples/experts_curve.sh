#!/usr/bin/env bash
# Task arithmetic of K = 2, 3, ... experts, each method at the coefficient that it chose for all of them.
#
#   MODEL=meta-llama/Llama-3.2-1B-Instruct DATA=yanggangu/SMAT-TRACE bash examples/experts_curve.sh
#
# Variables: examples/common.sh.
. "$(dirname "$0")/common.sh"
METHODS=${METHODS:-"ft asam mergopt orthoreg smat"}

for seed in $SEEDS; do
  for method in $METHODS; do
    merged "$seed" "$method" "$method"
  done
done
"$PYTHON" eval.py experts-curve "${runs[@]}" --merger ta --out "$OUT/experts-curve" \
  ${evaluation[@]+"${evaluation[@]}"}
"$PYTHON" eval.py gains "${runs[@]}" --out "$OUT/experts-curve" ${evaluation[@]+"${evaluation[@]}"}
