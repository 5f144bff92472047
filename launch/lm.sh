#!/usr/bin/env bash
# A language model on Python's own sources, one byte a token, split by file; ends with the perplexity on training,
# validation and test text:
#     launch/lm.sh small|medium|large [RANKS] [flags of frugal train]
# RANKS are GPUs where there are any (default: all of them), otherwise CPU processes (default: 2). Without a GPU small is
# trained, medium and large are planned, for the machines named below. CUDA_VISIBLE_DEVICES= (empty) hides all GPUs.
set -euo pipefail
usage() { sed -n 's/^#  *\(launch.*\)/usage: \1/p' "$0" >&2; exit 2; }
cd "$(dirname "$0")/.."
size=${1:-}
case $size in
  small) machine=() ;;
  medium) machine=(--gpus 2 --mem 12G) ;;
  large) machine=(--gpus 8 --mem 16G) ;;
  *) usage ;;
esac
shift
ranks=
if [[ ${1:-} =~ ^[0-9]+$ ]]; then
  ranks=$1
  shift
fi
say() { printf '\n\033[1m$ %s\033[0m\n' "$*"; "$@"; }

config=(--config "launch/lm/$size.toml")
gpus=0
if [ -n "${CUDA_VISIBLE_DEVICES-all}" ]; then
  gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l) || gpus=0
fi
if [ "$gpus" -gt 0 ]; then
  say frugal train "${config[@]}" --gpus "${ranks:-$gpus}" --out "runs/lm-$size" "$@"
elif [ "$size" = small ]; then
  say frugal train "${config[@]}" --device cpu --gpus "${ranks:-2}" --precision fp32 --out "runs/lm-small-${ranks:-2}" "$@"
else
  say frugal plan "${config[@]}" "${machine[@]}"
  printf '\nThere is no GPU here to train it on.\n'
fi
