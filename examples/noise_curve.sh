#!/usr/bin/env bash
# Perturb alone: the mean of five mergers over the RMS of uniform, Gaussian and Laplace noise, beside FT.
#
#   MODEL=meta-llama/Llama-3.2-1B-Instruct DATA=yanggangu/SMAT-TRACE bash examples/noise_curve.sh
#
# SIGMAS and NOISES are the points of the curve; other variables: examples/common.sh.
. "$(dirname "$0")/common.sh"
SIGMAS=${SIGMAS:-"0.0005 0.001 0.002 0.004"}
NOISES=${NOISES:-"uniform gaussian laplace"}

for seed in $SEEDS; do
  merged "$seed" ft ft
  for noise in $NOISES; do
    for sigma in $SIGMAS; do
      merged "$seed" "perturb-$noise-$sigma" smat --alpha-min 1 --drop-prob 0 --noise "$noise" --sigma "$sigma" \
        --label "Perturb $noise $sigma"
    done
  done
done
tabulated noise "$PRESET: noise alone"
