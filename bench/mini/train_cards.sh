#!/usr/bin/env bash
# Trains all parts on one or two CUDA cards: bash bench/mini/train_cards.sh CORPUS START OUT [FROM]
#
# Ears and language model are trained on the first card, codec and speech decoder beside them on the second, or on the same one.
# Each part is a run in OUT, what it printed beside it as .log. FROM: a folder with the runs codec, perception, tts and language
# to go on from (an earlier OUT, or what bench/mini/apart.py made of a checkpoint); its codes stay as they are. Every run keeps
# to its share of the time, so that several rounds, each from the one before, make one long training.
#
# PYTHON        the interpreter (python3)          LIMIT_S  seconds for everything (540)
# PERCEPTION_S  seconds of perception (a third; 0: FROM's run stays, which the language model is used to)
# CODEC_OPTIONS, PERCEPTION_OPTIONS, TTS_OPTIONS, LANGUAGE_OPTIONS  further options of the programs in bench/mini/train
set -uo pipefail
usage="usage: bash bench/mini/train_cards.sh CORPUS START OUT [FROM]"
corpus=${1:?$usage} start=${2:?$usage} out=${3:?$usage} from=${4:-}
python=${PYTHON:-python3} limit=${LIMIT_S:-540}
perception_s=${PERCEPTION_S:-$((limit / 3))}
mkdir -p "$out" || exit 2
if [[ -z $from && $perception_s == 0 ]]; then
  echo "PERCEPTION_S=0 needs FROM, whose run would stay"
  exit 2
fi

# run PART NAME CARD SECONDS OPTIONS...: one run of a part; seconds are those of its training.
run() {
  local part=$1 name=$2 card=$3 seconds=$4 began=$SECONDS code=0
  shift 4
  CUDA_VISIBLE_DEVICES=$card "$python" -u -m "vcpipe.bench.mini.train.$part" --corpus "$corpus" --start "$start" \
    --out "$out/$name" --seconds "$seconds" "$@" >"$out/$name.log" 2>&1 || code=$?
  echo "$name: exit code $code after $((SECONDS - began)) s"
  ((code == 0)) || tail -n 5 "$out/$name.log"
  return "$code"
}

# What is left of the time, less so many seconds for what comes after training; at least 1.
left() {
  local seconds=$((limit - SECONDS - $1))
  echo $((seconds > 1 ? seconds : 1))
}

hear_and_answer() {
  local from_language=()
  if ((perception_s == 0)); then
    cp -r "$from/perception" "$out/perception"
  fi
  [[ -n $from ]] && from_language=(--resume "$from/language")
  # It makes its material while perception trains, and waits for that run.
  run language language 0 "$limit" --perception "$out/perception" --until "$(($(date +%s) + limit - SECONDS - 30))" \
    ${from_language[@]+"${from_language[@]}"} ${LANGUAGE_OPTIONS:-} &
  if ((perception_s > 0)); then
    run perception perception 0 "$perception_s" ${from:+--resume "$from/perception"} ${PERCEPTION_OPTIONS:-}
  fi
  wait
}

speak() {
  local card=$1
  if [[ -n $from ]]; then
    run tts tts "$card" $((limit * 4 / 10)) --codec "$from/codec" --resume "$from/tts" ${TTS_OPTIONS:-} || return
    run codec codec "$card" "$(left 75)" --resume "$from/codec" --freeze-codes --tts "$out/tts" ${CODEC_OPTIONS:-}
  else
    run codec codec_first "$card" $((limit * 4 / 10)) ${CODEC_OPTIONS:-} || return
    run tts tts "$card" $((limit * 3 / 10)) --codec "$out/codec_first" ${TTS_OPTIONS:-} || return
    run codec codec "$card" "$(left 75)" --resume "$out/codec_first" --freeze-codes --tts "$out/tts" ${CODEC_OPTIONS:-}
  fi
}

cards=$("$python" -c "import torch; print(torch.cuda.device_count())")
hear_and_answer &
speak $((cards > 1 ? 1 : 0)) &
wait
