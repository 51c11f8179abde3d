# SPDX-License-Identifier: GPL-2.0-or-later
# The root file system of the managed plugin (docs/managed-plugin.md). `scripts/plugin build` makes
# build/plugin from it; `docker build .` alone shows that it builds.
#
# BASE is a Debian 12, with or without what scripts/deps installs: with it, no network is needed.
ARG BASE=debian:bookworm-slim

FROM ${BASE} AS build
WORKDIR /src
COPY scripts/deps scripts/deps
RUN scripts/deps plugin
COPY CMakeLists.txt CMakePresets.json ./
COPY netdriver netdriver
COPY plugin plugin
RUN cmake --preset release -DAGENTGATE_PACKAGING=OFF && cmake --build --preset release --target agentgated -- --quiet
# The daemon, the iptables it runs, and the libraries they load. No shell and no package manager.
RUN set -eu; \
    root=/rootfs; lib=usr/lib/$(gcc -print-multiarch); \
    mkdir -p $root/usr/sbin $root/usr/lib64 $root/$lib $root/etc $root/var $root/host $root/run $root/tmp; \
    ln -s usr/sbin $root/sbin; ln -s usr/lib $root/lib; ln -s usr/lib64 $root/lib64; ln -s /run $root/var/run; \
    strip -o $root/usr/sbin/agentgated build/release/plugin/daemon/agentgated; \
    for kind in nft legacy; do \
      cp /usr/sbin/xtables-$kind-multi $root/usr/sbin/; \
      for name in iptables ip6tables; do ln -s xtables-$kind-multi $root/usr/sbin/$name-$kind; done; \
    done; \
    ln -s iptables-nft $root/usr/sbin/iptables; \
    cp -a /$lib/xtables $root/$lib/; \
    ldd $root/usr/sbin/agentgated $root/usr/sbin/xtables-*-multi $root/$lib/xtables/*.so \
      | sed -En 's,^[^/]*(/[^ ]+) \(0x.*,\1,p' | sort -u \
      | while read -r library; do cp -L "$library" "$root/usr/${library#/usr/}"; done; \
    printf 'root:x:0:0:root:/:/usr/sbin/nologin\n' > $root/etc/passwd; \
    printf 'root:x:0:\n' > $root/etc/group; \
    chroot $root /usr/sbin/agentgated --version; \
    chroot $root /usr/sbin/iptables-nft --version; \
    chroot $root /usr/sbin/iptables-legacy --version

FROM scratch
COPY --from=build /rootfs /
ENTRYPOINT ["/usr/sbin/agentgated"]
