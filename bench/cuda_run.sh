#!/usr/bin/env bash
# Measures the 11B shapes with random weights on a CUDA machine: bash bench/cuda_run.sh RESULTS
#
# Writes one JSON file a measurement, its messages beside it as .log, and machine.txt into the folder RESULTS. A measurement
# that fails or takes too long is named at the end, the others still run. Needs a Python in which vcpipe and mlx with CUDA
# can be imported, and mlx-vlm 0.7.10 for what is measured beside it.
#
# PYTHON  the interpreter (python3)            SHAPE   11b, mini or tiny (11b)
# LIMIT_S seconds for everything (580)         FRAMES, ROUNDS, PROMPT_TOKENS   of the pipeline (80, 2, 200)
set -uo pipefail
results=${1:?usage: bash bench/cuda_run.sh RESULTS}
python=${PYTHON:-python3} shape=${SHAPE:-11b} limit=${LIMIT_S:-580}
frames=${FRAMES:-80} rounds=${ROUNDS:-2} prompt=${PROMPT_TOKENS:-200}
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

# with_mps COMMAND...: under a Multi-Process Service of its own, which lets kernels of several processes run at once.
with_mps() {
  local folder
  folder=$(mktemp -d)
  export CUDA_MPS_PIPE_DIRECTORY=$folder CUDA_MPS_LOG_DIRECTORY=$folder
  if nvidia-cuda-mps-control -d; then
    "$@"
    echo quit | timeout 20 nvidia-cuda-mps-control
  fi
  unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
  rm -rf "$folder"
}

pipeline=(pipeline --shape "$shape" --frames "$frames" --rounds "$rounds" --prompt-tokens "$prompt")
# The first has kernels to build, which take more than a minute.
step pipeline_4bit 300 "${pipeline[@]}" --bits 4 --peer
if command -v nvidia-cuda-mps-control >/dev/null; then
  with_mps step pipeline_4bit_mps 240 "${pipeline[@]}" --bits 4 --peer
fi
step pipeline_8bit 200 "${pipeline[@]}" --bits 8 --peer
step hops 30 hops
step language_4bit 60 language --shape "$shape" --bits 4
step tts 60 tts --shape "$shape"
for stage in perception rnnt codec; do
  step "$stage" 40 "$stage" --shape "$shape"
done
step language_8bit 60 language --shape "$shape" --bits 8

if ((${#failed[@]})); then
  printf 'failed: %s\n' "${failed[@]}"
  exit 1
fi
