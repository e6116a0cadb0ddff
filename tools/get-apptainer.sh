#!/bin/sh
# Put Apptainer into a folder: tools/get-apptainer.sh DEST, then DEST/bin/apptainer.
#
# Debian stable has no package of it; unstable has. Packages are fetched and checked by apt
# with lists of their own, so the system's are not touched, and unpacked, not installed. The
# programs want a newer C library than stable has: it is put beside them. Unstable moves, so
# whatever fails ends with a line in DEST/why and exit 0: the tests then skip with that line.
set -u
dest=$(realpath -m "${1:?usage: get-apptainer.sh DEST}")
mkdir -p "$dest"
rm -f "$dest/why"
[ -x "$dest/bin/apptainer" ] && "$dest/bin/apptainer" --version >/dev/null 2>&1 && exit 0

give_up() {
    echo "$1" >"$dest/why"
    echo "no Apptainer: $1"
    exit 0
}
command -v apptainer >/dev/null 2>&1 && exit 0
for program in apt-get dpkg patchelf; do
    command -v $program >/dev/null 2>&1 || give_up "$program is not installed"
done
[ "$(dpkg --print-architecture)" = amd64 ] || give_up "only amd64 is known to work"
mirror=$(sed -n 's/^URIs:[[:space:]]*//p; s/^deb \(\[[^]]*\] \)\{0,1\}\([^ ]*\) .*/\2/p' \
    /etc/apt/sources.list.d/debian.sources /etc/apt/sources.list 2>/dev/null | head -n 1)
[ -n "$mirror" ] || give_up "apt knows no Debian mirror"
keys=/usr/share/keyrings/debian-archive-keyring.gpg
[ -r $keys ] || give_up "Debian's keys are not here"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/get"
echo "deb [signed-by=$keys] $mirror sid main" >"$work/sources"
apt() {
    timeout 200 apt-get -qq -o Dir::Etc::SourceList="$work/sources" -o Dir::Etc::SourceParts=/dev/null \
        -o Dir::State::Lists="$work/lists" -o Dir::Cache="$work/cache" \
        -o APT::Sandbox::User=root "$@" >"$work/said" 2>&1
}
apt update || give_up "the lists of Debian unstable cannot be read: $(tail -n 1 "$work/said")"
(cd "$work/get" && apt download apptainer libc6) ||
    give_up "Debian unstable has no such package now: $(tail -n 1 "$work/said")"
dpkg -x "$work"/get/apptainer_*.deb "$work/app" || give_up "the package cannot be unpacked"
dpkg -x "$work"/get/libc6_*.deb "$work/libc" || give_up "the C library cannot be unpacked"

rm -rf "$dest/usr" "$dest/bin"
mv "$work/app/usr" "$dest/usr" && mv "$work/app/etc" "$dest/usr/etc" || give_up "unknown layout"
rm -rf "$dest/usr/share"
starter=$(find "$dest/usr/lib" -path '*apptainer/bin/starter' | head -n 1)
[ -n "$starter" ] || give_up "the package has no starter any more"
if ! "$dest/usr/bin/apptainer" --version >/dev/null 2>&1; then
    libs=$dest/usr/lib/own-libc
    mkdir -p "$libs"
    for name in libc.so.6 libm.so.6 libpthread.so.0 libdl.so.2 libresolv.so.2 ld-linux-x86-64.so.2 \
        libnss_files.so.2 libnss_dns.so.2; do
        cp -L "$(find "$work/libc" -name "$name" | head -n 1)" "$libs/" || give_up "no $name"
    done
    for program in "$dest/usr/bin/apptainer" "$starter"; do
        patchelf --force-rpath --set-rpath "$libs" \
            --set-interpreter "$libs/ld-linux-x86-64.so.2" "$program" || give_up "patchelf failed"
    done
fi
# Its prefix is where it lies; the starter looks for the rest one level lower.
mkdir -p "$dest/usr/var/lib/apptainer/mnt/session" "$dest/bin"
ln -sfn ../var "$dest/usr/lib/var"
ln -sfn ../etc "$dest/usr/lib/etc"
ln -sfn ../usr/bin/apptainer "$dest/bin/apptainer"
chmod -R a+rX "$dest"
version=$("$dest/bin/apptainer" --version 2>&1) || give_up "it does not start: $version"
echo "$version in $dest"
