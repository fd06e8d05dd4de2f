#!/usr/bin/env bash
# Measures the 11B shapes with random weights on a CUDA machine: bash bench/cuda_run.sh RESULTS
#
# Writes one JSON file a measurement, its messages beside it as .log, and machine.txt into the folder RESULTS. A measurement
# that fails or takes too long is named at the end, the others still run. Needs a Python in which vcpipe and mlx with CUDA
# can be imported, and mlx-vlm 0.7.10 for what is measured beside it.
#
# PYTHON  the interpreter (python3)            SHAPE   11b, mini or tiny (11b)
# LIMIT_S seconds for everything (480)         FRAMES, ROUNDS, PROMPT_TOKENS   of the pipeline (80, 3, 200)
set -uo pipefail
results=${1:?usage: bash bench/cuda_run.sh RESULTS}
python=${PYTHON:-python3} shape=${SHAPE:-11b} limit=${LIMIT_S:-480}
frames=${FRAMES:-80} rounds=${ROUNDS:-3} prompt=${PROMPT_TOKENS:-200}
mkdir -p "$results" || exit 2
failed=()

# step NAME SECONDS ARGUMENTS...: one measurement, within its own bound and what is left of the whole.
step() {
  local name=$1 bound=$2 left=$((limit - SECONDS)) began=$SECONDS code=0
  shift 2
  if ((left < 10)); then
    failed+=("$name (no time left)")
    return
  fi
  timeout --kill-after=10 "$((bound < left ? bound : left))" "$python" -m vcpipe.bench "$@" --json \
    >"$results/$name.json" 2>"$results/$name.log" || code=$?
  echo "$name: exit code $code after $((SECONDS - began)) s"
  if ((code != 0)); then
    failed+=("$name")
    tail -n 3 "$results/$name.log"
  fi
}

{
  date -u +"%Y-%m-%d %H:%M UTC"
  uname -srm
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null || echo "no NVIDIA card"
  "$python" --version
  echo "shape $shape, frames $frames, rounds $rounds, prompt tokens $prompt"
} >"$results/machine.txt" 2>&1

pipeline=(pipeline --shape "$shape" --frames "$frames" --rounds "$rounds" --prompt-tokens "$prompt")
step hops 60 hops
step pipeline_4bit 200 "${pipeline[@]}" --bits 4 --peer
step pipeline_8bit 200 "${pipeline[@]}" --bits 8 --peer
step language_4bit 60 language --shape "$shape" --bits 4
step language_8bit 60 language --shape "$shape" --bits 8
for stage in tts perception rnnt codec; do
  step "$stage" 60 "$stage" --shape "$shape"
done

if ((${#failed[@]})); then
  printf 'failed: %s\n' "${failed[@]}"
  exit 1
fi
