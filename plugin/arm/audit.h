// SPDX-License-Identifier: GPL-2.0-or-later
//
// The audit file: one JSON line (report.h) per arm, disarm and refusal, only ever appended to.
// Threading: any. The file is opened for each line, so that it can be rotated by renaming it.
#pragma once

#include <string>

#include "netdriver/error.h"
#include "plugin/arm/report.h"

namespace agentgate::arm {

class Audit {
 public:
  // An empty path: no audit file.
  explicit Audit(std::string path) : path_(std::move(path)) {}
  // Whether a line could be written now. Step 1 asks before anything is opened.
  Status writable();
  Status write(const Report& report);

 private:
  Result<int> open();
  std::string path_;
};

}  // namespace agentgate::arm
