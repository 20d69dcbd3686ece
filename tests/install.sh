#!/bin/sh
# Debian packages of the SLURM test cluster, the browser of the pages' tests, and what packs an
# environment into one file, where they may be installed; bounded in time.
set -u
absent=
for program in munged mariadbd slurmdbd slurmctld slurmd sbatch chromium chromedriver mksquashfs; do
    command -v "$program" > /dev/null || absent="$absent $program"
done
[ -z "$absent" ] && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
    echo "no$absent, and no root or apt-get to install them: tests that need them are skipped" >&2
    [ -z "${CI:-}" ]
    exit
fi
export DEBIAN_FRONTEND=noninteractive
options="-o Acquire::Retries=3 -o Acquire::http::Timeout=30 -o DPkg::Lock::Timeout=200"
for attempt in 1 2 3; do
    # Stale lists name packages that the mirror has replaced: fetch them again each time.
    timeout 300 apt-get $options update
    timeout 600 apt-get $options install -y --no-install-recommends \
        slurm-wlm munge slurmdbd mariadb-server chromium chromium-driver fonts-dejavu-core \
        squashfs-tools < /dev/null && exit 0
    echo "attempt $attempt to install the tests' packages failed" >&2
    sleep 10
done
[ -z "${CI:-}" ] # elsewhere than in CI the tests are skipped, saying so
