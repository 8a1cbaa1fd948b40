#!/usr/bin/env bash
# SMAT without Scale, without Mask and without Perturb, beside FT and SMAT with all its parts.
#
#   MODEL=meta-llama/Llama-3.2-1B-Instruct DATA=yanggangu/SMAT-TRACE bash examples/ablations.sh
#
# Variables: examples/common.sh.
. "$(dirname "$0")/common.sh"

for seed in $SEEDS; do
  merged "$seed" ft ft
  merged "$seed" smat smat
  merged "$seed" smat-no-scale smat --alpha-min 1 --label "SMAT without Scale"
  merged "$seed" smat-no-mask smat --drop-prob 0 --label "SMAT without Mask"
  merged "$seed" smat-no-perturb smat --sigma 0 --label "SMAT without Perturb"
done
tabulated ablations "$PRESET: parts of SMAT"
