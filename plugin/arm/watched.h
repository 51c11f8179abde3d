// SPDX-License-Identifier: GPL-2.0-or-later
//
// What the guard (plugin/guard) needs of the pipeline: the premises of releases, judged again, and
// a place where people see how the guard is. Every method may be called from any thread, never
// throws, and does not wait for an operation that is under way on the same container.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plugin/arm/report.h"
#include "plugin/engine/engine.h"

namespace agentgate::arm {

struct EngineGuardStatus {
  bool connected = false;
  std::string since;         // since when it is as it is, RFC 3339; empty: it was not started
  std::string reason;        // why it is not connected
  std::uint64_t losses = 0;  // of the event stream, since the daemon started
  std::uint64_t closed = 0;  // ports that it closed, since the daemon started
  std::vector<std::string> incidents;  // newest last, bounded; each begins with its time
};

enum class Premises { kernel, engine, all };

struct Rechecked {
  // What was closed: undone, or closed where the container had ended. Inconsistent: it should have
  // been closed and could not be.
  std::vector<Report> closed;
  // Containers that could not be judged or closed now; they are to be asked for again.
  std::vector<std::string> again;
};

class Watched {
 public:
  virtual ~Watched() = default;
  // Ids of the containers that ports are released for. EAGAIN: cannot be said yet.
  virtual Result<std::vector<std::string>> released() = 0;
  // Judges what is released for these containers, and closes and audits where a premise does not
  // hold. Nothing released: nothing happens. `event` says what gave rise to it.
  virtual Rechecked recheck(const std::vector<std::string>& containers, Premises which,
                            engine::Api& engine, const std::string& event) = 0;
  // A container was started: what is released for another one in whose network namespace it runs
  // is closed, and what is released for itself is judged.
  virtual Rechecked started(const std::string& container, engine::Api& engine,
                            const std::string& event) = 0;
  virtual void guard_seen(const EngineGuardStatus& status) = 0;
};

}  // namespace agentgate::arm
