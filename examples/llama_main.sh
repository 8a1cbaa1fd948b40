#!/usr/bin/env bash
# The paper's main language experiment: experts of all five methods, merged by all five mergers, one table.
#
#   MODEL=meta-llama/Llama-3.2-1B-Instruct DATA=yanggangu/SMAT-TRACE bash examples/llama_main.sh
#
# PRESET=llama-3.1-8b is the larger backbone: MORE="--suite-options device_map balanced" splits its blocks over two GPUs,
# as the paper does; --gradient-checkpointing, which the paper does not mention, needs less memory there, with
# bit-identical results. examples/common.sh has the other variables.
. "$(dirname "$0")/common.sh"
METHODS=${METHODS:-"ft asam mergopt orthoreg smat"}

for seed in $SEEDS; do
  for method in $METHODS; do
    merged "$seed" "$method" "$method"
  done
done
tabulated . "$PRESET: all methods"
