// SPDX-License-Identifier: GPL-2.0-or-later
#include "plugin/arm/engine_files.h"

#include <fcntl.h>
#include <linux/openat2.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <sstream>

namespace agentgate::arm {

using netdriver::UniqueFd;

EngineFiles::EngineFiles(std::int64_t pid, const System& system)
    : process_(system.proc + "/" + std::to_string(pid)),
      root_(::open((process_ + "/root").c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC)),
      failed_(root_.valid() ? 0 : errno) {}

Result<UniqueFd> EngineFiles::open(const std::string& path, int flags) const {
  if (failed_ != 0) return fail("root directory of the engine", process_ + "/root", failed_);
  open_how how{};
  // A pipe must not hold us up; O_PATH opens none, and openat2 refuses what O_PATH ignores.
  const int never_wait = (flags & O_PATH) != 0 ? 0 : O_NONBLOCK;
  how.flags = static_cast<std::uint64_t>(flags | O_CLOEXEC | never_wait);
  how.resolve = RESOLVE_IN_ROOT;
  const long fd = ::syscall(SYS_openat2, root_.get(), path.c_str(), &how, sizeof how);
  if (fd < 0) return fail_errno("open " + path);
  return UniqueFd(static_cast<int>(fd));
}

Result<UniqueFd> EngineFiles::open_program(const std::string& program, std::string& path) const {
  path = program;
  if (failed_ != 0 || program.find('/') != std::string::npos) return open(program, O_RDONLY);
  std::istringstream folders(search_path());
  for (std::string folder; std::getline(folders, folder, ':');) {
    if (folder.empty()) continue;
    path = folder;
    path.append("/").append(program);
    auto file = open(path, O_RDONLY);
    // The others are about that one file; the search goes on as execvp's would.
    if (file || file.error().code == ENOSYS || file.error().code == EPERM) return file;
  }
  return fail("", "not in the engine's PATH", ENOENT);
}

std::string EngineFiles::search_path() const {
  std::ifstream variables(process_ + "/environ");
  for (std::string variable; std::getline(variables, variable, '\0');) {
    if (variable.rfind("PATH=", 0) == 0) return variable.substr(5);
  }
  return "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
}

}  // namespace agentgate::arm
