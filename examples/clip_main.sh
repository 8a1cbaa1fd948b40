#!/usr/bin/env bash
# The paper's main vision experiment: experts of all five methods, merged by all five mergers, one table.
#
#   MODEL=openai/clip-vit-base-patch32 DATA=yanggangu/SMAT-CLIP8 bash examples/clip_main.sh
#
# PRESET=clip-vit-l14 is the larger backbone; examples/common.sh has the other variables.
PRESET=${PRESET:-clip-vit-b32}
. "$(dirname "$0")/common.sh"
METHODS=${METHODS:-"ft asam mergopt orthoreg smat"}

for seed in $SEEDS; do
  for method in $METHODS; do
    merged "$seed" "$method" "$method"
  done
done
tabulated . "$PRESET: all methods"
