#!/bin/sh
# The tests use real services: PostgreSQL, Redis, a browser, network namespaces, a C compiler.
# Root installs what is missing; anybody else is told its name.
set -eu
missing=""
ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || missing="$missing postgresql"
command -v gcc >/dev/null 2>&1 || missing="$missing gcc libc6-dev"
command -v redis-server >/dev/null 2>&1 || missing="$missing redis-server"
command -v ip >/dev/null 2>&1 || missing="$missing iproute2"
python3 -c 'import ensurepip, venv' >/dev/null 2>&1 || missing="$missing python3-venv"
command -v chromium >/dev/null 2>&1 || missing="$missing chromium"
[ -z "$missing" ] && exit 0
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
