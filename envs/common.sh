# Sourced by the script of each site, on login and compute nodes.
venv="$(dirname "${BASH_SOURCE[0]}")/../.venv"
if [ -e "$venv/bin/activate" ]; then # not yet there before `make install`
    . "$venv/bin/activate"
fi
# NCCL and gloo look for each other over InfiniBand where there is one.
if [ -e /sys/class/net/ib0 ]; then
    export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
fi
# Compute nodes have no internet: nothing may try.
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
