# Sourced by the experiments of this folder: options from the environment, one trained and merged run, one report.
#
# MODEL, DATA   base model and data, instead of the preset's: folders, or names on the hub
# TASKS         some of the tasks of DATA (default: all)
# PRESET        preset of train.py, which has all settings
# SEEDS         training seeds, whose results are averaged
# OUT           output folder; finished runs in it, of any experiment, are not repeated
# STEPS, ROWS   fewer steps and rows, for a quick run
# MORE          further options of train.py
# EVAL          further options of merge.py --search and eval.py
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python}
PRESET=${PRESET:-llama-3.2-1b}
OUT=${OUT:-runs/$PRESET}
SEEDS=${SEEDS:-"0 1 2"}

options=(--preset "$PRESET" --suite-seed 0)
[ -n "${MODEL:-}" ] && options+=(--model "$MODEL")
[ -n "${DATA:-}" ] && options+=(--data "$DATA")
[ -n "${STEPS:-}" ] && options+=(--steps "$STEPS")
[ -n "${ROWS:-}" ] && options+=(--rows "$ROWS")
read -r -a tasks <<< "${TASKS:-}"
[ -n "${TASKS:-}" ] && options+=(--tasks "${tasks[@]}")
read -r -a more <<< "${MORE:-}"
read -r -a evaluation <<< "${EVAL:-}"

# trained SEED NAME METHOD [OPTION...]: sets run to the folder of these experts, which are trained unless they exist
trained() {
  local seed=$1 name=$2 method=$3
  run=$OUT/seed$seed/$name
  "$PYTHON" train.py "$method" --out "$run" --resume --seed "$seed" "${options[@]}" "${@:4}" ${more[@]+"${more[@]}"}
}

# merged SEED NAME METHOD [OPTION...]: trained, then merged by all five mergers; the run is added to runs
merged() {
  trained "$@"
  [ -f "$run/merged/done" ] || "$PYTHON" merge.py all --run "$run" --search \
    --out "$run/merged" ${evaluation[@]+"${evaluation[@]}"}
  touch "$run/merged/done"
  runs+=("$run")
}

# tabulated NAME TITLE: scores of runs in the folder NAME of OUT, and a report on them
tabulated() {
  "$PYTHON" eval.py "${runs[@]}" --out "$OUT/$1" --plot "$OUT/$1/merging.png" ${evaluation[@]+"${evaluation[@]}"}
  "$PYTHON" eval.py report "$OUT/$1/results.jsonl" --out "$OUT/$1/report" --title "$2" --overwrite
}

runs=()
