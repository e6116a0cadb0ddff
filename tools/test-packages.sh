#!/bin/sh
# The tests use real services: PostgreSQL, Redis, a browser, network namespaces, bubblewrap, a C
# compiler; Apptainer and Slurm where they can be had. Root installs what is missing; anybody
# else is told its name. Without Slurm its tests are skipped with one line that says so.
set -eu
PATH=$PATH:/usr/sbin:/sbin
slurm() {
    command -v slurmctld >/dev/null 2>&1 && command -v slurmd >/dev/null 2>&1 &&
        command -v munged >/dev/null 2>&1 && return
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        echo "installing slurmctld slurmd slurm-client munge"
        export DEBIAN_FRONTEND=noninteractive
        # RUNLEVEL=1: no service of the distribution's own; the tests start private ones.
        (apt-get -q -o DPkg::Lock::Timeout=500 update &&
            RUNLEVEL=1 apt-get -q -y -o DPkg::Lock::Timeout=500 install \
                --no-install-recommends slurmctld slurmd slurm-client munge) >/dev/null 2>&1 &&
            return
    fi
    echo "no real Slurm here: its tests will be skipped (Debian: slurmctld slurmd munge, as root)"
}
slurm
missing=""
ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || missing="$missing postgresql"
command -v gcc >/dev/null 2>&1 || missing="$missing gcc libc6-dev"
command -v redis-server >/dev/null 2>&1 || missing="$missing redis-server"
command -v chromium >/dev/null 2>&1 || missing="$missing chromium"
command -v bwrap >/dev/null 2>&1 || missing="$missing bubblewrap"
# For Apptainer: images, users, and its C library (tools/get-apptainer.sh).
command -v patchelf >/dev/null 2>&1 || missing="$missing patchelf"
command -v mksquashfs >/dev/null 2>&1 || missing="$missing squashfs-tools squashfuse"
command -v newuidmap >/dev/null 2>&1 || missing="$missing uidmap"
# For other machines on cables of their own.
command -v ip >/dev/null 2>&1 || missing="$missing iproute2"
python3 -c 'import ensurepip, venv' >/dev/null 2>&1 || missing="$missing python3-venv"
here=$(dirname "$0")
if [ -z "$missing" ]; then
    exec sh "$here/get-apptainer.sh" "$here/../var/apptainer"
fi
if [ "$(id -u)" != 0 ]; then
    echo "make test needs packages that are not installed. As root: apt-get install$missing" >&2
    exit 1
fi
if ! command -v apt-get >/dev/null 2>&1; then
    echo "make test needs these packages (Debian's names):$missing" >&2
    exit 1
fi
echo "installing$missing"
export DEBIAN_FRONTEND=noninteractive
apt-get -q -o DPkg::Lock::Timeout=500 update >/dev/null
# No cluster of the distribution's own: the tests start private ones.
mkdir -p /etc/postgresql-common
[ -e /etc/postgresql-common/createcluster.conf ] ||
    echo "create_main_cluster = false" >/etc/postgresql-common/createcluster.conf
# shellcheck disable=SC2086 # a list of names
apt-get -q -y -o DPkg::Lock::Timeout=500 install --no-install-recommends $missing >/dev/null
exec sh "$here/get-apptainer.sh" "$here/../var/apptainer"
