// SPDX-License-Identifier: GPL-2.0-or-later
#include "plugin/store/store.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>

#include <nlohmann/json.hpp>

#include "netdriver/unique_fd.h"

namespace agentgate::store {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFolders[] = {"networks", "endpoints", "policies", "released", "damaged"};
constexpr std::size_t kMaxFile = 16 << 20;

Result<std::string> read_file(const fs::path& path) {
  const netdriver::UniqueFd file(::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC));
  if (file.get() < 0) return fail_errno("read " + path.string());
  std::string text;
  char buffer[16384];
  for (;;) {
    const ssize_t length = ::read(file.get(), buffer, sizeof buffer);
    if (length < 0 && errno == EINTR) continue;
    if (length < 0) return fail_errno("read " + path.string());
    if (length == 0) return text;
    text.append(buffer, static_cast<std::size_t>(length));
    if (text.size() > kMaxFile) return fail("read " + path.string(), "too large", EFBIG);
  }
}

Status sync_directory(const fs::path& directory) {
  const netdriver::UniqueFd folder(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder.get() < 0 || ::fsync(folder.get()) < 0)
    return fail_errno("sync " + directory.string());
  return {};
}

// What must outlive the end of the machine, and what only that of the daemon: a rename is whole for
// every process that comes after it, but costs nothing; two journal commits cost milliseconds.
enum class Outlives { machine, daemon };

// Puts the file `temporary` in the place of `path`, whole for whoever looks. By an exchange of the
// two names where the file system can: at a rename over a file ext4 writes the new one's blocks
// out (auto_da_alloc), which takes up to 16 ms. What a crash leaves after the exchange is the old
// file under the temporary name, which the next start removes.
bool replace_file(const fs::path& temporary, const fs::path& path, Outlives what) {
  if (what == Outlives::daemon &&
      ::renameat2(AT_FDCWD, temporary.c_str(), AT_FDCWD, path.c_str(), RENAME_EXCHANGE) == 0) {
    ::unlink(temporary.c_str());
    return true;
  }
  // ENOENT: there is nothing to replace. EINVAL, ENOSYS: no exchange here.
  return ::rename(temporary.c_str(), path.c_str()) == 0;
}

Status write_file(const fs::path& path, const std::string& text, Outlives what) {
  const std::string operation = "write " + path.string();
  constexpr const char* mend = "free space or make the directory writable";
  const fs::path temporary = path.string() + ".new";
  {
    const netdriver::UniqueFd file(
        ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0600));
    if (file.get() < 0) return fail_errno(operation, mend);
    std::size_t at = 0;
    while (at < text.size()) {
      const ssize_t length = ::write(file.get(), text.data() + at, text.size() - at);
      if (length < 0 && errno == EINTR) continue;
      if (length < 0) {
        auto error = fail_errno(operation, mend);
        ::unlink(temporary.c_str());
        return error;
      }
      at += static_cast<std::size_t>(length);
    }
    if (what == Outlives::machine && ::fsync(file.get()) < 0) {
      auto error = fail_errno(operation, mend);
      ::unlink(temporary.c_str());
      return error;
    }
  }
  if (!replace_file(temporary, path, what)) {
    auto error = fail_errno(operation, mend);
    ::unlink(temporary.c_str());
    return error;
  }
  return what == Outlives::machine ? sync_directory(path.parent_path()) : Status();
}

// What is in it decides which ports are open after a start.
Status only_ours_to_write(const fs::path& directory) {
  const std::string operation = "open state directory " + directory.string();
  struct stat status {};
  if (::stat(directory.c_str(), &status) < 0) return fail_errno(operation);
  if (!S_ISDIR(status.st_mode)) return fail(operation, "not a directory", ENOTDIR);
  if (status.st_uid != ::geteuid()) {
    return fail(operation,
                "it belongs to uid " + std::to_string(status.st_uid) + "; run: chown " +
                    std::to_string(::geteuid()) + " " + directory.string(),
                EPERM);
  }
  if ((status.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
    return fail(operation, "others can write it; run: chmod go-w " + directory.string(), EPERM);
  }
  return {};
}

Status make_directory(const fs::path& directory) {
  if (::mkdir(directory.c_str(), 0700) == 0) return sync_directory(directory.parent_path());
  if (errno != EEXIST) {
    return fail_errno("create " + directory.string(),
                      "make its parent writable, or set --state-dir");
  }
  return only_ours_to_write(directory);
}

Status remove_file(const fs::path& path, Outlives what) {
  if (::unlink(path.c_str()) < 0) {
    if (errno == ENOENT) return {};
    return fail_errno("remove " + path.string(), "make the directory writable");
  }
  return what == Outlives::machine ? sync_directory(path.parent_path()) : Status();
}

}  // namespace

struct Store::Impl {
  fs::path directory;
  int lock = -1;
  ~Impl() {
    if (lock >= 0) ::close(lock);
  }

  [[nodiscard]] fs::path file(const char* folder, const std::string& name) const {
    return directory / folder / (name + ".json");
  }

  void set_aside(const fs::path& path, const std::string& why, Contents& out) const {
    const fs::path target =
        directory / "damaged" /
        (path.parent_path().filename().string() + "-" + path.filename().string() + "." + utc_now());
    std::string message = path.string() + ": " + why;
    if (::rename(path.c_str(), target.c_str()) == 0) {
      message += "; moved to " + target.string() + ", what it described counts as gone";
    } else {
      message += std::string("; it cannot be moved away: ") + std::strerror(errno);
    }
    out.damaged.push_back(std::move(message));
  }

  // Hands every file of a folder to use(stem, text), which returns what is wrong with it.
  template <class Use>
  Status each(const char* folder, Contents& out, const Use& use) const {
    std::error_code error;
    std::vector<fs::path> paths;
    for (fs::directory_iterator at(directory / folder, error), end; !error && at != end;
         at.increment(error)) {
      paths.push_back(at->path());
    }
    if (error) return fail("read " + (directory / folder).string(), "", error.value());
    for (const fs::path& path : paths) {
      if (path.extension() == ".new" && ::unlink(path.c_str()) == 0) {
        continue;  // a write that a crash cut short
      }
      if (path.extension() != ".json") {
        set_aside(path, "not a file of agentgate's", out);
        continue;
      }
      auto text = read_file(path);
      if (!text) {
        set_aside(path, text.error().to_string(), out);
        continue;
      }
      const Status good = use(path.stem().string(), *text);
      if (!good) set_aside(path, good.error().to_string(), out);
    }
    return {};
  }
};

Store::Store(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Store::~Store() = default;

Result<std::unique_ptr<Store>> Store::open(const fs::path& directory) {
  auto impl = std::make_unique<Impl>();
  impl->directory = directory;
  std::error_code error;
  fs::path absolute = fs::absolute(directory, error).lexically_normal();
  if (!absolute.has_filename()) absolute = absolute.parent_path();  // "DIR/"
  fs::create_directories(absolute.parent_path(), error);
  if (error)
    return fail("create " + absolute.parent_path().string(), error.message(), error.value());
  if (const Status made = make_directory(absolute); !made) return tl::unexpected(made.error());
  for (const char* folder : kFolders) {
    if (const Status made = make_directory(absolute / folder); !made) {
      return tl::unexpected(made.error());
    }
  }
  const std::string lock = (directory / "lock").string();
  impl->lock = ::open(lock.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (impl->lock < 0) return fail_errno("open " + lock);
  if (::flock(impl->lock, LOCK_EX | LOCK_NB) < 0) {
    return fail_errno("lock " + lock, "another agentgated uses this state directory");
  }
  return std::unique_ptr<Store>(new Store(std::move(impl)));
}

Result<Contents> Store::load() {
  Contents out;
  Status status =
      impl_->each("networks", out, [&](const std::string& stem, const std::string& text) {
        auto record = decode_network(text);
        if (!record) return Status(tl::unexpected(record.error()));
        if (record->id.str() != stem)
          return Status(fail("network file", "its name is not its id", EBADMSG));
        out.networks[record->id] = std::move(*record);
        return Status();
      });
  if (!status) return tl::unexpected(status.error());
  status = impl_->each("endpoints", out, [&](const std::string& stem, const std::string& text) {
    auto record = decode_endpoint(text);
    if (!record) return Status(tl::unexpected(record.error()));
    if (record->id.str() != stem)
      return Status(fail("endpoint file", "its name is not its id", EBADMSG));
    out.endpoints[record->id] = std::move(*record);
    return Status();
  });
  if (!status) return tl::unexpected(status.error());
  status = impl_->each("policies", out, [&](const std::string& stem, const std::string& text) {
    if (Status good = check_policy_name(stem); !good) return good;
    // What is in it is the policy folder's to judge; that it is a whole file of ours is not.
    const auto root = nlohmann::json::parse(text, nullptr, false);
    const auto version = root.is_object() ? root.find("version") : root.end();
    if (!root.is_object() || version == root.end() || *version != 1) {
      return Status(fail("resolution file", "is not a JSON object with \"version\": 1", EBADMSG));
    }
    out.resolutions[stem] = text;
    return Status();
  });
  if (!status) return tl::unexpected(status.error());
  status = impl_->each("released", out, [&](const std::string& stem, const std::string& text) {
    auto record = decode_policy(text);
    if (!record) return Status(tl::unexpected(record.error()));
    if (record->spec.name != stem)
      return Status(fail("released policy file", "its name is not its policy's", EBADMSG));
    out.released[stem] = std::move(*record);
    return Status();
  });
  if (!status) return tl::unexpected(status.error());
  return out;
}

Status Store::save(const NetworkRecord& network) {
  return write_file(impl_->file("networks", network.id.str()), encode(network), Outlives::machine);
}
Status Store::save(const EndpointRecord& endpoint) {
  return write_file(impl_->file("endpoints", endpoint.id.str()), encode(endpoint),
                    Outlives::daemon);
}
Status Store::save(const PolicyRecord& policy) {
  if (Status good = check_policy_name(policy.spec.name); !good) return good;
  return write_file(impl_->file("released", policy.spec.name), encode(policy), Outlives::daemon);
}
Status Store::save_resolution(const std::string& policy, const std::string& json) {
  if (Status good = check_policy_name(policy); !good) return good;
  return write_file(impl_->file("policies", policy), json, Outlives::machine);
}
Status Store::remove(const NetworkId& id) {
  return remove_file(impl_->file("networks", id.str()), Outlives::machine);
}
Status Store::remove(const EndpointId& id) {
  return remove_file(impl_->file("endpoints", id.str()), Outlives::daemon);
}
Status Store::remove_resolution(const std::string& policy) {
  if (Status good = check_policy_name(policy); !good) return good;
  return remove_file(impl_->file("policies", policy), Outlives::machine);
}

Status Store::remove_released(const std::string& policy) {
  if (Status good = check_policy_name(policy); !good) return good;
  return remove_file(impl_->file("released", policy), Outlives::daemon);
}

}  // namespace agentgate::store
