# Sourced by the script of each site, on login and compute nodes.
# That of a clone, not yet there before `make install`; or that in which the wheel is.
here="$(dirname "${BASH_SOURCE[0]}")"
for venv in "$here/../.venv" "$here/../../../../../.."; do
    if [ -e "$venv/bin/activate" ]; then
        . "$venv/bin/activate"
        break
    fi
done
# NCCL and gloo look for each other over InfiniBand where there is one.
if [ -e /sys/class/net/ib0 ]; then
    export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
fi
# Compute nodes have no internet: nothing may try.
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
