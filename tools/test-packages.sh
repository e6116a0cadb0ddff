#!/bin/sh
# The tests use real services: PostgreSQL, Redis, a browser, network namespaces, bubblewrap, a C
# compiler, and Apptainer where it can be had. Root installs what is missing; anybody else is
# told its name.
set -eu
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
