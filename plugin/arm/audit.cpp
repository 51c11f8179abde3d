// SPDX-License-Identifier: GPL-2.0-or-later
#include "plugin/arm/audit.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <mutex>

namespace agentgate::arm {

Result<int> Audit::open() {
  std::error_code ignored;
  std::filesystem::create_directories(std::filesystem::path(path_).parent_path(), ignored);
  const int fd =
      ::open(path_.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0640);
  if (fd < 0)
    return fail_errno("open audit file " + path_, "make it writable, or set --audit-file");
  return fd;
}

Status Audit::writable() {
  if (path_.empty()) return {};
  const auto fd = open();
  if (!fd) return tl::unexpected(fd.error());
  ::close(*fd);
  return {};
}

Status Audit::write(const Report& report) {
  if (path_.empty()) return {};
  const std::string line = to_json(report) + "\n";
  // One for all writers of the process: a line that was cut short is taken back by its length.
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  const auto fd = open();
  if (!fd) return tl::unexpected(fd.error());
  // One write: O_APPEND keeps lines of several writers apart.
  const ssize_t length = ::write(*fd, line.data(), line.size());
  Status status;
  if (length != static_cast<ssize_t>(line.size())) {
    status = length < 0 ? Status(fail_errno("write audit file " + path_))
                        : Status(fail("write audit file " + path_, "no space", ENOSPC));
    // Half a line would spoil the next one.
    struct stat now {};
    if (length > 0 && ::fstat(*fd, &now) == 0 && ::ftruncate(*fd, now.st_size - length) < 0) {
      status = fail_errno("write audit file " + path_, "its last line is cut short");
    }
  }
  ::close(*fd);
  return status;
}

}  // namespace agentgate::arm
