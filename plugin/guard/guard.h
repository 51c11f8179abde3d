// SPDX-License-Identifier: GPL-2.0-or-later
//
// Guard: listens to the engine for as long as the daemon runs, and has the premises of a release
// judged again when something happened that can break them (a second network, another restart
// policy, a neighbour in its network namespace, an end). It owns the connection to the event
// stream, the order of what is to be judged and its own counters. It may not know what a premise
// is, nor the kernel or the ports: arm::Watched judges, closes and audits.
//
// Events are hints, state decides: each leads to a look at how things are now, so lost, late,
// doubled and invented ones do no harm. While it was blind anything may have happened: after every
// connection all releases are judged, by the kernel first (one look through /proc for all), then
// one by one by the engine. While the engine is away what the kernel shows is judged at each
// attempt to reach it; that it is away closes nothing.
//
// Threading: two threads of its own. One reads the stream and never waits for anything else, since
// the engine drops events for slow readers; one judges. What is waiting is kept once per container,
// and bounded: beyond that everything is judged. Both end in stop(), which interrupts the engine.
// Errors: none come out. A stream that ends is logged once and an incident; see EngineGuardStatus.
#pragma once

#include <chrono>
#include <memory>

#include "plugin/arm/watched.h"
#include "plugin/engine/engine.h"

namespace agentgate::guard {

struct Options {
  std::chrono::milliseconds backoff_least{100};  // between two attempts to connect; doubled
  std::chrono::milliseconds backoff_most{5000};
  std::chrono::milliseconds retry_least{50};  // of what could not be judged; doubled
  std::chrono::milliseconds retry_most{10000};
  std::chrono::seconds look_every{60};  // at everything, for what no event tells
  std::size_t most_waiting = 4096;
};

class Guard {
 public:
  // Both must outlive the guard. The engine is its alone: stop() interrupts it for good.
  static std::unique_ptr<Guard> start(Options options, engine::Api& engine, arm::Watched& watched);
  ~Guard();
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

  void stop();  // ends both threads; may be called again

 private:
  struct Impl;
  explicit Guard(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace agentgate::guard
