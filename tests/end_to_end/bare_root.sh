#!/bin/bash
# bare_root.sh ROOT PYTHON COMMAND...: run a command in the clone of a root file system of its own, as on a
# machine that somebody has just got: no variables but those that reach a package index, an empty HOME, no caches.
# PYTHON is an interpreter of this machine, shown there under its path, or python3: the root's own.
set -euo pipefail
if [ "${MAECT_UNSHARED:-}" != yes ]; then
    export MAECT_UNSHARED=yes
    exec unshare --mount --pid --fork --kill-child --propagation private bash "$0" "$@"
fi
root=$1 python=$2
shift 2
for file in resolv.conf hosts; do
    cp --dereference "/etc/$file" "$root/etc/$file"
done
mkdir -p "$root/home/newcomer"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --rbind /sys "$root/sys"
mount --bind /etc/ssl "$root/etc/ssl"
if [ "$python" != python3 ]; then
    prefix=$("$python" -c 'import sys; print(sys.base_prefix)')
    mkdir -p "$root$prefix"
    mount --bind -o ro "$prefix" "$root$prefix"
fi
kept=$(env | grep -E '^(SSL_CERT_FILE|SSL_CERT_DIR|PIP_CERT|PIP_INDEX_URL|UV_DEFAULT_INDEX|(http|https|no)_proxy)=' || true)
mapfile -t kept <<< "${kept:-NONE=}"
exec chroot "$root" env -i "${kept[@]}" HOME=/home/newcomer PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin \
    bash -c 'cd /home/newcomer/maect && exec "$@"' bash "$@"
