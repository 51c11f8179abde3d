// SPDX-License-Identifier: GPL-2.0-or-later
//
// Answers of the Engine API in the shapes that its versions give them. Only what decides something
// here is kept; the values are made up.
#pragma once

namespace agentgate::engine::test {

// 20.10: top-level address fields in NetworkSettings, no CgroupnsMode on older hosts, null lists.
inline constexpr const char* kContainer20 = R"({
 "Id": "c1b0aa20b7e5c4e1f0c2d3b4a5968778695a4b3c2d1e0f00112233445566778a",
 "Created": "2026-01-02T03:04:05.123456789Z", "Path": "sleep", "Args": ["inf"],
 "State": {"Status": "paused", "Running": true, "Paused": true, "Restarting": false,
           "OOMKilled": false, "Dead": false, "Pid": 4242, "ExitCode": 0, "Error": "",
           "StartedAt": "2026-01-02T03:04:05.5Z", "FinishedAt": "0001-01-01T00:00:00Z"},
 "Image": "sha256:00", "ResolvConfPath": "/var/lib/docker/containers/c1b0/resolv.conf",
 "Name": "/a1", "RestartCount": 0, "Driver": "overlay2", "Platform": "linux",
 "HostConfig": {"Binds": null, "NetworkMode": "agents", "PortBindings": {},
   "RestartPolicy": {"Name": "no", "MaximumRetryCount": 0}, "CapAdd": null, "CapDrop": null, "Dns": ["192.0.2.53"],
   "CgroupnsMode": "host", "IpcMode": "private", "PidMode": "", "Privileged": false,
   "PublishAllPorts": false, "UTSMode": "", "UsernsMode": "", "Runtime": "runsc"},
 "Config": {"Hostname": "c1b0", "Image": "img:1", "ExposedPorts": {"80/tcp": {}}},
 "NetworkSettings": {"Bridge": "", "SandboxID": "ab", "HairpinMode": false, "Ports": {},
   "SandboxKey": "/var/run/docker/netns/0123456789ab", "SecondaryIPAddresses": null,
   "EndpointID": "", "Gateway": "", "GlobalIPv6Address": "", "IPAddress": "", "MacAddress": "",
   "Networks": {"agents": {"IPAMConfig": null, "Links": null, "Aliases": ["c1b0"],
     "NetworkID": "7e5c4e1f0c2d3b4a5968778695a4b3c2d1e0f00112233445566778a9b0c1d2e3",
     "EndpointID": "e5968778695a4b3c2d1e0f00112233445566778a9b0c1d2e37e5c4e1f0c2d3b4",
     "Gateway": "10.99.0.1", "IPAddress": "10.99.0.2", "IPPrefixLen": 24,
     "IPv6Gateway": "fd99::1", "GlobalIPv6Address": "fd99::2", "GlobalIPv6PrefixLen": 64,
     "MacAddress": "02:42:0a:63:00:02", "DriverOpts": null}}}
})";

// 28/29: no top-level addresses any more, GwPriority, DNSNames; published ports; two networks.
inline constexpr const char* kContainer29 = R"({
 "Id": "d1b0aa20b7e5c4e1f0c2d3b4a5968778695a4b3c2d1e0f00112233445566778a",
 "State": {"Status": "running", "Running": true, "Paused": false, "Restarting": false,
           "Dead": false, "Pid": 99, "StartedAt": "2026-01-02T03:04:06Z"},
 "ResolvConfPath": "/var/lib/docker/containers/d1b0/resolv.conf", "Name": "/web-1",
 "ImageManifestDescriptor": {"digest": "sha256:1"},
 "HostConfig": {"NetworkMode": "container:abc",
   "PortBindings": {"80/tcp": [{"HostIp": "", "HostPort": "8080"}], "90/udp": null, "91/udp": []},
   "RestartPolicy": {"Name": "unless-stopped", "MaximumRetryCount": 0},
   "CapAdd": ["CAP_NET_ADMIN"], "CgroupnsMode": "private", "IpcMode": "shareable",
   "PidMode": "host", "Privileged": true, "PublishAllPorts": true, "UTSMode": "host",
   "UsernsMode": "host", "Runtime": "io.containerd.runsc.v1"},
 "Config": {"Image": "web"},
 "NetworkSettings": {"SandboxID": "cd", "SandboxKey": "/var/run/docker/netns/cd", "Ports": {},
   "Networks": {
    "zeta": {"NetworkID": "n2", "EndpointID": "e2", "MacAddress": "", "IPAddress": "",
             "GlobalIPv6Address": "", "GwPriority": 0, "DNSNames": ["web-1"], "DriverOpts": null},
    "alpha": {"NetworkID": "n1", "EndpointID": "e1", "MacAddress": "02:00:00:00:00:01",
              "IPAddress": "192.0.2.2", "GlobalIPv6Address": "", "GwPriority": 1}}}
})";

// A container that was made and never started, as 26.1 shows it.
inline constexpr const char* kContainerCreated26 = R"({
 "Id": "b1b0aa20b7e5c4e1f0c2d3b4a5968778695a4b3c2d1e0f00112233445566778a", "Name": "/new",
 "State": {"Status": "created", "Running": false, "Paused": false, "Pid": 0, "StartedAt": ""},
 "HostConfig": {"NetworkMode": "agents", "RestartPolicy": {"Name": "", "MaximumRetryCount": 0},
   "PortBindings": null, "Runtime": "runc"},
 "NetworkSettings": {"SandboxKey": "", "Networks": {"agents": {"NetworkID": "", "EndpointID": ""}}}
})";

inline constexpr const char* kInfo20 = R"({
 "ID": "AAAA:BBBB", "ServerVersion": "20.10.24+dfsg1", "DockerRootDir": "/var/lib/docker",
 "Runtimes": {"io.containerd.runc.v2": {"path": "runc"},
   "io.containerd.runtime.v1.linux": {"path": "runc"}, "runc": {"path": "runc"},
   "runsc": {"path": "/usr/bin/runsc", "runtimeArgs": ["--platform=systrap"]}},
 "DefaultRuntime": "runc"
})";

inline constexpr const char* kInfo29 = R"({
 "ID": "f0a1", "ServerVersion": "29.7.2", "DockerRootDir": "/var/lib/docker",
 "Runtimes": {"io.containerd.runc.v2": {"path": "runc", "status": {"org.opencontainers": "{}"}},
   "runc": {"path": "runc", "status": {}},
   "crun": {"runtimeType": "io.containerd.runc.v2", "options": {"BinaryName": "/usr/bin/crun"}},
   "gvisor": {"runtimeType": "io.containerd.runsc.v1",
              "options": {"TypeUrl": "io.containerd.runsc.v1.options", "ConfigPath": "/x"}}},
 "DefaultRuntime": "runc", "FirewallBackend": {"Driver": "nftables"}
})";

}  // namespace agentgate::engine::test
