#!/usr/bin/env bash
# Plan, train, stop, resume: a small language model on Python's own sources. GPUs are used where there are any.
set -euo pipefail
cd "$(dirname "$0")/.."
rm -rf runs/demo
say() { printf '\n\033[1m$ %s\033[0m\n' "$*"; "$@"; }

here=(--config launch/demo/frugal.toml)
if gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l) && [ "$gpus" -gt 0 ]; then
  here+=(--device cuda --gpus "$gpus" --mem 2G --precision bf16)
fi

say frugal plan "${here[@]}"
say frugal train "${here[@]}" --steps 40
say frugal train "${here[@]}" --resume --steps 80
