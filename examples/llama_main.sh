#!/usr/bin/env bash
# The paper's main language experiment: experts of all five methods, merged by all five mergers, one table.
#
#   MODEL=meta-llama/Llama-3.2-1B-Instruct DATA=yanggangu/SMAT-TRACE bash examples/llama_main.sh
#
# PRESET=llama-3.1-8b is the larger backbone, for it MORE="--suite-options device_map balanced
# gradient_checkpointing True" as in the paper, on two GPUs; examples/common.sh has the other variables.
. "$(dirname "$0")/common.sh"
METHODS=${METHODS:-"ft asam mergopt orthoreg smat"}

for seed in $SEEDS; do
  for method in $METHODS; do
    merged "$seed" "$method" "$method"
  done
done
tabulated . "$PRESET: all methods"
