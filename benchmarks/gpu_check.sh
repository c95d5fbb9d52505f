#!/usr/bin/env bash
# With a GPU at hand, in under four minutes: the smoke sizes of the four benchmarks on it, GPU results against CPU
# results, and the time of a step with and without COST, with the hours that the papers' tables would take.
#
#   bash benchmarks/gpu_check.sh              # from the repository root, in the environment with cost_mtl[examples]
#   bash benchmarks/gpu_check.sh cpu --quick  # what of it can be tried without a GPU
set -euo pipefail
cd "$(dirname "$0")/.."
device="${1:-cuda}"
python="${PYTHON:-python}"
out="$(mktemp -d)"
trap 'rm -rf "$out"' EXIT
started=$SECONDS

"$python" benchmarks/gpu_check.py --device "$device" "${@:2}"

smoke() { # script, options
    local begin=$SECONDS
    "$python" "examples/$1" "${@:2}" --smoke --teleporter lora --device "$device" --preset fairgrad fairgrad+cost \
        --cache "$out/data" --out "$out/$1" >"$out/log" 2>&1 || { tail -n 20 "$out/log" >&2; exit 1; }
    echo "examples/$1 --smoke on $device: $((SECONDS - begin)) s"
    grep '^| FairGrad' "$out/$1/table.md" | head -n 2
}
echo
smoke nyuv2.py --data synthetic --model mtan
smoke cityscapes.py --data synthetic --model mtan
smoke celeba.py --data synthetic
smoke qm9_graph.py
if [ "$device" != cpu ]; then
    smoke nyuv2.py --data synthetic --amp bf16
    smoke nyuv2.py --data synthetic --amp fp16
fi
echo "all done in $((SECONDS - started)) s"
