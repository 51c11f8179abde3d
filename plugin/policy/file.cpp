// SPDX-License-Identifier: GPL-2.0-or-later
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "netdriver/unique_fd.h"
#include "plugin/model.h"
#include "plugin/policy/keys.h"
#include "plugin/policy/policy.h"

namespace agentgate::policy {
namespace {

// Whoever can write a policy can open a gate.
Status only_root_writes(const struct stat& status, const std::string& path,
                        const std::string& operation) {
  if (status.st_uid != 0) {
    return fail(
        operation,
        path + " belongs to uid " + std::to_string(status.st_uid) + "; run: chown root " + path,
        EPERM);
  }
  if ((status.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
    return fail(operation, path + " can be written by others than root; run: chmod go-w " + path,
                EPERM);
  }
  return {};
}

}  // namespace

Result<Policy> load(const std::filesystem::path& directory, const std::string& name) {
  const std::string operation = "policy " + name;
  if (const Status good = check_policy_name(name); !good) return tl::unexpected(good.error());
  const netdriver::UniqueFd folder{
      ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)};
  const std::string file = name + ".json";
  const std::string path = (directory / file).string();
  if (folder.get() < 0 && (errno == ENOTDIR || errno == ELOOP)) {
    return fail(operation,
                directory.string() +
                    " is a symbolic link or not a directory; put the "
                    "directory itself there",
                ENOTDIR);
  }
  if (folder.get() < 0 && errno == ENOENT && name != "default") {
    return fail(operation, "there is no " + path + "; write it, or name another policy", ENOENT);
  }
  if (folder.get() < 0 && errno != ENOENT)
    return fail_errno(operation, "open " + directory.string());
  if (folder.get() < 0) return builtin();
  struct stat status {};
  if (::fstat(folder.get(), &status) < 0)
    return fail_errno(operation, "stat " + directory.string());
  if (Status good = only_root_writes(status, directory.string(), operation); !good) {
    return tl::unexpected(good.error());
  }
  const netdriver::UniqueFd opened{
      ::openat(folder.get(), file.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC)};
  if (opened.get() < 0 && errno == ENOENT) {
    if (name == "default") return builtin();
    return fail(operation, "there is no " + path + "; write it, or name another policy", ENOENT);
  }
  if (opened.get() < 0 && errno == ELOOP) {
    return fail(operation, path + " is a symbolic link; put the file itself there", ELOOP);
  }
  if (opened.get() < 0) return fail_errno(operation, "open " + path);
  if (::fstat(opened.get(), &status) < 0) return fail_errno(operation, "stat " + path);
  if (!S_ISREG(status.st_mode)) return fail(operation, path + " is not a regular file", EINVAL);
  if (Status good = only_root_writes(status, path, operation); !good) {
    return tl::unexpected(good.error());
  }
  if (static_cast<std::size_t>(status.st_size) > kMaxFileSize)
    return fail(operation, path + " is larger than 4 MiB", EFBIG);
  std::string text;
  char buffer[16384];
  for (;;) {
    const ssize_t length = ::read(opened.get(), buffer, sizeof buffer);
    if (length < 0 && errno == EINTR) continue;
    if (length < 0) return fail_errno(operation, "read " + path);
    if (length == 0) break;
    text.append(buffer, static_cast<std::size_t>(length));
    if (text.size() > kMaxFileSize) {
      return fail(operation, path + " is larger than 4 MiB", EFBIG);
    }
  }
  ParseResult parsed = parse(text, name, path);
  if (!parsed.errors.empty()) {
    std::string all;
    for (const auto& error : parsed.errors) all += (all.empty() ? "" : "\n") + error;
    return fail(operation, all, EINVAL);
  }
  return std::move(parsed.policy);
}

Result<std::vector<std::string>> list(const std::filesystem::path& directory) {
  std::vector<std::string> out;
  std::error_code error;
  for (std::filesystem::directory_iterator at(directory, error), end; !error && at != end;
       at.increment(error)) {
    const std::filesystem::path file = at->path();
    if (file.extension() == ".json" && check_policy_name(file.stem().string())) {
      out.push_back(file.stem().string());
    }
  }
  if (error && error.value() != ENOENT) {
    return fail("list policies", directory.string(), error.value());
  }
  std::sort(out.begin(), out.end());
  return out;
}

}  // namespace agentgate::policy
