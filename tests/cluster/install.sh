#!/bin/sh
# Debian packages of the SLURM test cluster. Needs root.
set -eu
apt-get update
DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
    slurm-wlm munge slurmdbd mariadb-server
