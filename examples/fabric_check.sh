#!/usr/bin/env bash
# Do processes share GPU memory by FABRIC handles? Creates, exports, imports, maps, reads and copies; one table.
#
#   examples/fabric_check.sh          two processes of this machine
#   examples/fabric_check.sh HOST     one here and one on HOST, over ssh, where this folder has the same path
#
# PYTHON  the Python that has dwdp's dependencies, here and there (default: .venv/bin/python of this folder)
# ADDRESS how HOST reaches this machine (default: hostname -f);  PORT  of the meeting point (default: 29577)
# SSH     the command that runs a line on HOST (default: ssh)
# Exit code 0: FABRIC works; 1: it does not; 2: this machine cannot ask (no GPU, say).
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
export PYTHONPATH="$root/src${PYTHONPATH:+:$PYTHONPATH}"
if [[ $# -gt 1 || ${1:-} == -* ]]; then
    echo "usage: examples/fabric_check.sh [HOST]" >&2
    exit 2
fi
if [[ ! -x $(command -v "$python") ]]; then
    echo "fabric_check: no Python at $python: run make setup, or set PYTHON" >&2
    exit 2
fi
if [[ $# -eq 0 ]]; then
    exec "$python" -m dwdp.tools.fabric_check
fi

"$python" -m dwdp.tools.fabric_check --look || exit
address=${ADDRESS:-$(hostname -f)}
port=${PORT:-29577}
place="DWDP_MASTER_ADDR=$(printf %q "$address") DWDP_MASTER_PORT=$(printf %q "$port")"
token=$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')
# The token goes through stdin: arguments can be seen by everybody on HOST.
there="cd $(printf %q "$root") && read -r DWDP_GROUP_TOKEN && export DWDP_GROUP_TOKEN PYTHONPATH=src && "
there+="DWDP_RANK=1 $place exec $(printf %q "$python") -m dwdp.tools.fabric_check"
${SSH:-ssh} "$1" "$there" <<<"$token" &
other=$!
trap 'kill "$other" 2>/dev/null || true' EXIT
status=0
DWDP_GROUP_TOKEN="$token" DWDP_RANK=0 DWDP_MASTER_ADDR="$address" DWDP_MASTER_PORT="$port" \
    "$python" -m dwdp.tools.fabric_check || status=$?
if [[ $status -ne 2 ]]; then
    wait "$other" || true
fi
exit "$status"
